"""Groups of real processes over every transport."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import hangs
import pytest
from fast_cases import some_fast
from ports import free_port

SECRET = "0123456789abcdef0123456789abcdef"
PREAMBLE = "from in_ranks import *\ncomm = pc.init(timeout=20)\n"

TRANSPORTS = {
    "shm": "shared memory",  # of `pycollective run`
    "host": "shared memory",  # of ranks without a launcher
    "tcp": "TCP",
    "mixed": "shared memory and TCP",
}


def fast_on(transport):
    """Parametrize `run_on` over both transports; only the case of ``transport`` is fast."""
    return pytest.mark.parametrize("run_on", some_fast(["shm", "tcp"], [transport]), indirect=True)


# `pycollective run` with a longer time for the remaining ranks after a failure, and a shorter time
# for processes that a rank has left behind.
_RUN = """
import sys
from pycollective.cli import main
from pycollective.launch import launcher
launcher.GRACE, launcher._ORPHAN_SECONDS = 60.0, 0.5
sys.exit(main(["run", *sys.argv[1:]]))
"""


@dataclass
class Ended:
    """Exit codes and output of the ranks."""

    codes: list[int]
    """Exit codes; of `pycollective run`, only its own."""
    outputs: list[str]
    """Standard output of each rank."""
    errors: str


def surroundings(**more):
    """Return an environment with the tested package and the tests' scripts."""
    return {**os.environ, **hangs.STACKS, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def addresses(count=8):
    """Return the variable with the addresses of later rendezvous, one for each."""
    return {"ADDRESSES": " ".join(f"127.0.0.1:{free_port()}" for _ in range(count))}


def environments(hosts, **more):
    """Return the variables of each rank; hosts[r] is the name of its host, "" for the real host."""
    port = free_port()
    later = addresses()
    return [
        {
            "PYCOLLECTIVE_RANK": str(rank),
            "PYCOLLECTIVE_SIZE": str(len(hosts)),
            "PYCOLLECTIVE_ADDRESS": f"127.0.0.1:{port}",
            "PYCOLLECTIVE_SECRET": SECRET,
            **later,
            **({"PYCOLLECTIVE_HOST_ID": host} if host else {}),
            **more,
        }
        for rank, host in enumerate(hosts)
    ]


def write(tmp_path, body, preamble=PREAMBLE):
    script = tmp_path / "script.py"
    script.write_text(preamble + body)
    return script


def launch(tmp_path, transport, ranks, body, *options, preamble=PREAMBLE, **more):
    """Start `pycollective run` with a script, and return the process."""
    script = write(tmp_path, body, preamble)
    how = ["--transport", transport, "-n", str(ranks), *options, str(script)]
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, *how],
        cwd=tmp_path,
        env=surroundings(**addresses(), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, seconds=hangs.SECONDS):
    """Wait for `pycollective run`; return status, output, errors."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends the ranks
        out, err = process.communicate()
        raise AssertionError(f"ranks hang\n{out}\n{err}") from None
    return process.returncode, out, err


def run_on_hosts(tmp_path, hosts, body, preamble=PREAMBLE, seconds=hangs.SECONDS, **more):
    """Run a process for each rank without a launcher; arguments as for `environments`."""
    script = write(tmp_path, body, preamble)
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            cwd=tmp_path,
            env=surroundings(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments(hosts, **more)
    ]
    said = []
    try:
        for p in processes:
            said.append(p.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        for p in processes[len(said) :]:
            said.append(hangs.end(p))
        raise AssertionError(f"ranks hang\n{said}") from None
    outputs, errors = zip(*said, strict=True)
    return Ended([p.returncode for p in processes], list(outputs), "".join(errors))


def run(tmp_path, transport, ranks, body, preamble=PREAMBLE, seconds=hangs.SECONDS, **more):
    """Run a script on n ranks over one of TRANSPORTS."""
    if transport in ("host", "mixed"):
        hosts = ["a" if transport == "host" or 2 * r < ranks else "b" for r in range(ranks)]
        return run_on_hosts(tmp_path, hosts, body, preamble, seconds, **more)
    options = ["--prefix", "always"]
    process = launch(tmp_path, transport, ranks, body, *options, preamble=preamble, **more)
    status, out, err = ended(process, seconds)
    lines = [re.findall(rf"^\[{r}\] (.*\n)", out, re.MULTILINE) for r in range(ranks)]
    return Ended([status], ["".join(own) for own in lines], err)
