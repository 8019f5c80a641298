"""Workers as real processes on this host, for the tests of `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import hangs
from ports import free_ports

PREAMBLE = """
import json, os, sys
import numpy as np
import pycollective as tf
from pycollective.cluster import ClusterSpec, SimpleClusterResolver
R = int(os.environ["REPLICAS"])
def strategy_of(**options):
    devices = [f"cpu:{i}" for i in range(R)]
    return tf.distribute.MultiWorkerMirroredStrategy(devices=devices, rendezvous_timeout=30, **options)
def say(**values):
    plain = {k: np.asarray(v).tolist() for k, v in values.items()}
    print("SAID " + json.dumps(plain), flush=True)
"""


@dataclass
class Ended:
    """The exit codes and outputs of workers."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]

    @property
    def said(self):
        """The values that each worker printed, in a dict."""
        found = []
        for code, output, error in zip(self.codes, self.outputs, self.errors, strict=True):
            assert code == 0, f"{output}\n{error}"
            lines = [x[5:] for x in output.splitlines() if x.startswith("SAID ")]
            found.append({k: v for line in lines for k, v in json.loads(line).items()})
        return found


def start(tmp_path, tasks, body, replicas=1, cluster=None, hosts=False, **more):
    """Start a process for each task (type, index), which TF_CONFIG describes.

    With ``hosts`` each worker has its own host, so that they communicate over TCP.
    """
    script = tmp_path / "worker.py"
    new = tmp_path / "worker.new"
    new.write_text(PREAMBLE + body)
    new.replace(script)  # a worker that has just been started may be about to read the file
    if cluster is None:
        jobs = {job for job, _ in tasks if job != "evaluator"}
        cluster = {}
        for job in sorted(jobs):
            numbers = [index for name, index in tasks if name == job]
            cluster[job] = [f"127.0.0.1:{port}" for port in free_ports(len(numbers))]
    return [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                **hangs.STACKS,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": job, "index": index}}
                ),
                "REPLICAS": str(replicas),
                "OPENBLAS_NUM_THREADS": "1",
                **({"PYCOLLECTIVE_HOST_ID": f"{job} {index}"} if hosts else {}),
                **more,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for job, index in tasks
    ]


def ended(processes, seconds=hangs.SECONDS):
    """Wait for the workers; end those that hang, and show their stacks."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        for process in processes[len(said) :]:
            said.append(hangs.end(process))
        raise AssertionError(f"workers hang\n{said}") from None
    outputs, errors = zip(*said, strict=True)
    return Ended([p.returncode for p in processes], list(outputs), list(errors))


def run(tmp_path, workers, body, replicas=1, **more):
    """Run a script on several workers."""
    tasks = [("worker", index) for index in range(workers)]
    return ended(start(tmp_path, tasks, body, replicas, **more))
