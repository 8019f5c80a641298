"""Kill workers of a cluster with parameter servers at random times, and start them again.

    PYTHONPATH=tests python tests/distribute/worker_kills.py KILLS [SEED] [--tcp]

The chief schedules functions that add 1 to a variable: at least 200, and at least as many as kills.
Every function must end. The sum must be at least the number of functions, and larger by at most the
number of kills. A function that was killed between its update and its result runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ports import free_ports

SCRIPT = """
import os
import numpy as np
import pycollective as tf
strategy = tf.distribute.ParameterServerStrategy()
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = tf.Variable(0, name="count")
    table = tf.Variable(np.zeros((4096, 8), np.float32), name="table")

def dataset_fn():
    return tf.data.Dataset.range(4096).shuffle(4096).repeat().batch(16)

@tf.function
def step(iterator):
    rows = next(iterator)
    table.scatter_add(tf.IndexedSlices(np.ones((16, 8), np.float32), rows))
    count.assign_add(1)

iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
done = 0
while True:
    for _ in range(20):
        coordinator.schedule(step, args=(iterator,))  # does not return on a worker
    coordinator.join(timeout=100)
    done += 20
    with open("done.new", "w") as file:
        file.write(str(done))
    os.replace("done.new", "done")
    if os.path.exists("stop") and done >= LEAST:
        break
open("result", "w").write(f"{done} {int(count)} {float(table.numpy().sum()) / 128}")
"""
WORKERS = 3
KILLS_BETWEEN_WAITS = 10
"""The kills between two waits for results."""


def least(kills):
    """Return the least number of functions for a number of kills."""
    return max(200, kills)


def kill_workers(folder, kills, seed=1, limit=3600.0):
    """Return the numbers of functions, of additions to the variable, and of batches in the table."""
    rng = random.Random(seed)
    script = Path(folder) / "script.py"
    script.write_text(SCRIPT.replace("LEAST", str(least(kills))))
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + WORKERS)]
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}

    def errors_of_chief():
        return (Path(folder) / "chief.errors").read_text()[-5000:]

    def config(task, index):
        return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})

    def worker(index):
        """Fork a worker: an import would take longer than the time between two kills."""
        child = os.fork()
        if child:
            return child
        with contextlib.suppress(BaseException):
            os.chdir(folder)
            os.environ["TF_CONFIG"] = config("worker", index)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            runpy.run_path(str(script), run_name="__main__")
        os._exit(1)

    workers = [worker(index) for index in range(WORKERS)]
    tasks = []
    try:
        for task in ("ps", "chief"):
            environment = {**os.environ, "TF_CONFIG": config(task, 0)}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            with open(Path(folder) / f"{task}.errors", "w") as errors:
                command = [sys.executable, str(script)]
                tasks.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=errors))
        deadline = time.monotonic() + limit

        def wait_for_functions():
            """Wait until the chief has more results than now."""
            path = Path(folder) / "done"
            before = path.read_text() if path.exists() else ""
            while not path.exists() or path.read_text() == before:
                assert tasks[1].poll() is None and time.monotonic() < deadline, errors_of_chief()
                time.sleep(0.02)

        wait_for_functions()
        for number in range(1, kills + 1):
            time.sleep(rng.uniform(0.0, 0.1))
            index = rng.randrange(WORKERS)
            os.kill(workers[index], signal.SIGKILL)
            os.waitpid(workers[index], 0)
            workers[index] = worker(index)
            # Without the wait, a busy machine would start no worker before its next kill.
            if number % KILLS_BETWEEN_WAITS == 0:
                wait_for_functions()
        (Path(folder) / "stop").touch()
        assert tasks[1].wait(timeout=120) == 0, errors_of_chief()
        done, count, batches = (Path(folder) / "result").read_text().split()
        return int(done), int(count), float(batches)
    finally:
        for task in tasks:
            task.kill()
            task.wait()
        for child in workers:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def check(found, kills):
    """Raise AssertionError if functions are missing, or more have run than the kills explain."""
    done, count, batches = found
    assert done >= least(kills) and done <= count <= done + kills, found
    assert done <= batches <= done + kills, found


if __name__ == "__main__":
    import pycollective  # noqa: F401  (forked workers need no import)

    if "--tcp" in sys.argv:
        os.environ["PYCOLLECTIVE_TRANSPORT"] = "tcp"
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        result = kill_workers(temporary, *numbers)
    check(result, numbers[0])
    print(f"functions, additions, batches: {result}; {time.monotonic() - begun:.0f} s")
