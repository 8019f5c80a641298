"""A worker that is killed, stopped, cut off or ends: the others name it in time, and none hangs.

Three workers make several groups, and are in another call in each of them, when the fault hits worker
1. All time limits are the defaults, except that of the rendezvous. All faults run at the same time,
each among its own processes, because the tests mostly wait.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from network import SECRET, network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]

IN_TIME = 10.0 + 5.0
"""Seconds after which all workers know the lost worker: the promised 10, and 5 for a busy machine."""
ENDS_IN = 6.0
"""Seconds in which an interpreter ends on a busy machine. A wait for the lost worker takes 10."""
DOINGS = ["steps", "idle", "barrier", "save", "close", "open", "join"]

_WORKER = """
import json, logging, os, sys, threading, time
import numpy as np
import pycollective as tf
from pycollective.cluster import ClusterSpec, SimpleClusterResolver
from pycollective.launch import leader

me, clusters = int(os.environ["ME"]), json.loads(os.environ["CLUSTERS"])
replicas = int(os.environ["REPLICAS"])
leader.LOG_EVERY = 2.0
said = {word: threading.Event() for word in ("join", "close", "go", "return")}
lock = threading.Lock()

def tell(doing, kind, text=""):
    with lock:
        print(json.dumps([doing, time.monotonic(), kind, str(text)]), flush=True)

class Teller(logging.Handler):
    def emit(self, record):
        tell("log", record.levelname, record.getMessage())

logging.getLogger("pycollective").addHandler(Teller())

def step():
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(np.ones(1000)))

def do(doing):
    if doing == "join":
        said["close" if me == 2 else "join"].wait()
        tell(doing, "ready")
    resolver = SimpleClusterResolver(ClusterSpec({"worker": clusters[doing]}), "", "worker", me)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        resolver, devices=[f"cpu:{i}" for i in range(replicas)],
        rendezvous_timeout=8 if doing == "join" else 60)
    kept.append(strategy)
    for _ in range(3):
        strategy.run(step)
    tell(doing, "ready")
    if me == 1 and doing != "steps":
        said["return"].wait()
    elif doing == "steps":
        while not said["return"].is_set():
            strategy.run(step)
            time.sleep(0.02)
    elif doing == "idle":
        said["go"].wait()
        strategy.run(step)
    elif doing == "barrier":
        strategy.extended.workers.barrier()
    elif doing == "save":
        with strategy.scope():
            tf.train.Checkpoint(v=tf.Variable(0.0)).write("saved")
    elif doing == "close":
        said["close"].wait()
        strategy.close()

def tried(doing):
    try:
        do(doing)
        tell(doing, "done")
    except Exception as error:
        tell(doing, type(error).__name__, error)

kept = []  # the group that no thread closes is open when the interpreter ends
threads = [threading.Thread(target=tried, args=(d,), daemon=True) for d in clusters]
for thread in threads:
    thread.start()
for line in sys.stdin:
    if line == "exit\\n":
        sys.exit(0)
    said[line.strip()].set()
for thread in threads:
    thread.join()
tell("end", "")
"""


@dataclass
class Fault:
    """A fault of worker 1."""

    what: str
    hosts: bool
    """True if each worker has its own host, with a network between them."""
    silent: bool = False
    """True if the other workers can only notice the missing heartbeat."""
    replicas: int = 1
    doings: list[str] = field(default_factory=lambda: [d for d in DOINGS if d != "join"])

    def __str__(self) -> str:
        ends = "-ends at once" if self.what == "stop" and not self.silent else ""
        return f"{self.what}-{'hosts' if self.hosts else 'host'}{ends}"


FAULTS = [
    Fault("cut", True, True, doings=DOINGS),
    Fault("sends nothing", True, True),
    Fault("receives nothing", True, True),
    Fault("stop", True, True, doings=DOINGS),
    Fault("stop", True, doings=["open", "close"]),
    Fault("kill", True, doings=DOINGS),
    Fault("exit", True),
    Fault("return", True),
    Fault("stop", False, True),
    Fault("kill", False, replicas=2),
    Fault("exit", False, doings=DOINGS),
    Fault("return", False),
]


@dataclass
class Result:
    """The result of a fault, by rank."""

    said: dict[int, list[tuple[str, float, str, str]]]
    """Reports: (doing, seconds after the fault, kind, text)."""
    codes: dict[int, int]
    errors: dict[int, str]
    over: dict[int, float]
    addresses: dict[str, list[str]]


def run_fault(fault, folder):
    """Start three workers, cause the fault, and return the result."""
    folder.mkdir()
    with ExitStack() as cleanup:
        net = cleanup.enter_context(network(3)) if fault.hosts else None
        # On one host, each fault has its own addresses. The kernel gives such ports to no client.
        here = f"127.{1 + os.getpid() % 250}.{1 + FAULTS.index(fault)}"
        hosts = net.addresses if net else [f"{here}.{i}" for i in range(1, 4)]
        addresses = {
            doing: [f"{host}:{9000 + k}" for host in hosts] for k, doing in enumerate(fault.doings)
        }
        processes = []
        for i in range(3):
            process = subprocess.Popen(
                [*(net.on(i) if net else ()), sys.executable, "-c", _WORKER],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "ME": str(i),
                    "CLUSTERS": json.dumps(addresses),
                    "REPLICAS": str(fault.replicas),
                    "OPENBLAS_NUM_THREADS": "1",
                    **({"PYCOLLECTIVE_SECRET": SECRET, "PYCOLLECTIVE_HOST_ID": str(i)} if net else {}),
                },
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            processes.append(process)
            cleanup.callback(process.communicate)
            cleanup.callback(process.kill)
        return _observed(fault, processes, net, addresses)


def _observed(fault, processes, net, addresses):
    said = {i: [] for i in range(3)}
    over, codes = {}, {}
    changed = threading.Condition()

    def read(i):
        for line in processes[i].stdout:
            with changed:
                said[i].append(json.loads(line))
                changed.notify_all()
        codes[i] = processes[i].wait()
        over[i] = time.monotonic()

    readers = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for reader in readers:
        reader.start()

    def ready():
        return sum(kind == "ready" for lines in said.values() for _, _, kind, _ in lines)

    def order(word, whom):
        for i in whom:
            processes[i].stdin.write(word + "\n")
            processes[i].stdin.flush()

    joins = "join" in fault.doings
    with changed:
        expected = 3 * (len(fault.doings) - joins)
        assert changed.wait_for(lambda: ready() == expected, 60), said
        if joins:
            order("join", (0, 1))
            assert changed.wait_for(lambda: ready() == expected + 2, 10), said
    time.sleep(0.5)  # all workers are in their calls then
    at = time.monotonic()
    if fault.what in ("kill", "stop"):
        processes[1].send_signal(signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
    elif fault.what in ("exit", "return"):
        order(fault.what, [1])
        if fault.what == "return":
            processes[1].stdin.close()
    else:
        net.cut(1, sends=fault.what != "receives nothing", receives=fault.what != "sends nothing")
    if joins and not fault.silent:  # rank 2 joins on "close": rank 1 must be gone by then
        processes[1].wait(IN_TIME)
    time.sleep(0.5)
    order("close", (0, 2))
    time.sleep(max(0.0, at + (9.0 if fault.silent else 1.0) - time.monotonic()))
    order("go", (0, 2))
    for i in (0, 2):
        processes[i].stdin.close()
        readers[i].join(max(0.0, at + 25 - time.monotonic()))
    processes[1].kill()
    hung = [i for i in (0, 2) if readers[i].is_alive()]
    for i in hung:
        processes[i].kill()
    for reader in readers:
        reader.join()
    for process in processes:
        if process.stdin.closed:
            process.stdin = None
    return Result(
        {i: [(doing, t - at, kind, text) for doing, t, kind, text in said[i]] for i in said},
        {i: codes[i] for i in said if i not in hung},
        {i: processes[i].stderr.read() for i in said},
        {i: over[i] - at for i in said},
        addresses,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the futures of the results of all faults, by name; all faults run at the same time."""
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        yield {str(f): pool.submit(run_fault, f, folder / str(f)) for f in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_lost_worker_is_named_in_time(results, fault):
    done = results[str(fault)].result()
    for rank in (0, 2):
        said, errors = done.said[rank], done.errors[rank]
        ends = {doing: (t, kind, text) for doing, t, kind, text in said if kind != "ready"}
        assert set(ends) >= {*fault.doings, "end"}, (ends, errors)
        assert done.codes.get(rank) == 0, (done.codes, said, errors)
        assert errors == ""
        for doing in ("open", "close"):
            seconds, kind, _ = ends[doing]
            assert (kind, seconds < IN_TIME) == ("done", True), ends
        for doing in set(fault.doings) & {"steps", "idle", "barrier", "save"}:
            seconds, kind, text = ends[doing]
            assert kind == "PeerLostError", ends
            assert seconds < IN_TIME, ends
            lost = re.escape(f"rank 1 (worker 1 at {done.addresses[doing][1]})")
            begins = r"Checkpoint\.write\(.*\) needs every worker: " if doing == "save" else ""
            assert re.match(begins + lost, text), text
            did = (
                r" (is in|ha[sd] finished|sent its last message in) (all_reduce|all_gather) #\d+ \("
            )
            left = r" has left the group (after \d+ calls|in all_reduce #\d+ \()"
            assert re.search(f"{lost}({did}|{left})", text), text
        # The interpreter ends, with a strategy that is open.
        assert done.over[rank] - ends["end"][0] < ENDS_IN, (done.over, ends)
    if fault.what in ("exit", "return"):  # with calls that are under way in other threads
        assert (done.codes[1], done.over[1] < IN_TIME, done.errors[1]) == (0, True, "")
    if fault.what == "cut":  # worker 1 has lost the others
        (text,) = [text for doing, *_, text in done.said[1] if doing == "steps" and text]
        both = [re.escape(f"rank {r} (worker {r} at {done.addresses['steps'][r]})") for r in (0, 2)]
        assert re.match(f"{both[0]}, {both[1]} are lost to rank 1 ", text), text


@pytest.mark.parametrize("fault", [f for f in FAULTS if "join" in f.doings], ids=str)
def test_worker_lost_during_the_rendezvous_is_named(results, fault):
    """The error at the deadline names the worker, and so does the log every few seconds."""
    done = results[str(fault)].result()
    for rank in (0, 2):
        said = [(t, kind, text) for doing, t, kind, text in done.said[rank] if doing == "join"]
        seconds, kind, text = said[-1]
        assert (kind, seconds < 8 + 4) == ("RendezvousError", True), said
        assert re.search(r"\brank 1\b( of 3 to (connect|join)| at | was lost)", text), text
    if not fault.silent:  # the loss may be known at once
        return
    # Only rank 0 logs that it waits: rank 2 tries to connect all the time.
    logged = [text for doing, _, _, text in done.said[0] if doing == "log"]
    assert [x for x in logged if re.match("rank 0 waits for rank 1 of 3 to (connect|come)", x)], (
        logged
    )
