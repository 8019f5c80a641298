"""Processes of one group on this machine, with PYCOLLECTIVE_HOST_ID as if on several hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

SECRET = "0123456789abcdef0123456789abcdef"
PREAMBLE = """
import os, resource, signal, socket, sys, threading, time
import numpy as np
import pycollective as pc
comm = pc.init(timeout=20)
def pid_of(rank):
    return int(comm.all_gather(np.array([os.getpid()]))[rank])
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def environments(hosts, **more):
    """Return the variables of each rank; hosts[r] is its host's name, empty for the real one."""
    port, second = free_port(), free_port()
    return [
        {
            "PYCOLLECTIVE_RANK": str(rank),
            "PYCOLLECTIVE_SIZE": str(len(hosts)),
            "PYCOLLECTIVE_ADDRESS": f"127.0.0.1:{port}",
            "PYCOLLECTIVE_SECRET": SECRET,
            "SECOND_ADDRESS": f"127.0.0.1:{second}",  # of another meeting of the same ranks
            **({"PYCOLLECTIVE_HOST_ID": host} if host else {}),
            **more,
        }
        for rank, host in enumerate(hosts)
    ]


def run(tmp_path, hosts, body, preamble=PREAMBLE, **more):
    """Run a process for each rank; return exit codes, and outputs of each."""
    script = tmp_path / "script.py"
    script.write_text(preamble + body)
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for env in environments(hosts, **more)
    ]
    try:
        outputs = [p.communicate(timeout=60)[0] for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
                p.communicate()
    return [p.returncode for p in processes], outputs
