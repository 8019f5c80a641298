"""Compare training by workers of one replica each with TensorFlow and PyTorch, in one run.

    python benchmarks/compare_workers.py [--workers 1,2,4] [--data DIR] [--rounds 3] [--json FILE]
                                         [--peer-python PYTHON]

The model is the tutorial's CNN, and the loop that of compare_training.py: 64 examples a worker, Adam,
L2, float32, the loss read every step. The MultiWorkerMirroredStrategy of pycollective and of TensorFlow
run the same lines, with TF_CONFIG; PyTorch uses DistributedDataParallel on gloo. All workers are
processes of this machine, which share its cores equally as BLAS threads. The contestants take turns,
round after round. The number is the median over all windows of all rounds, of all workers together.

For pycollective, the report also splits a step of worker 0: waiting for others in collectives, getting
the next batch, and computing. The simulator predicts the same for workers on machines of their own, with
10 and 100 Gbit/s Ethernet. A predicted step is the time that one worker computes and reads, plus the
collectives' time, of which nothing is hidden behind computation.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compare_training import images_of, installed, tutorial_steps
from models_keras import MODELS

WARMUP, WINDOWS, STEPS = 30, 5, 60
BATCH = MODELS["tutorial"].batch
PREDICTED = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def timed(
    step: Callable[[], float], workers: int, begin_now: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run windows of steps, as many on every worker; return samples per second of each window."""
    for _ in range(WARMUP):
        step()
    begin_now()
    rates, losses = [], []
    for _ in range(WINDOWS):
        begin = time.perf_counter()
        losses += [step() for _ in range(STEPS)]
        rates.append(STEPS * BATCH * workers / (time.perf_counter() - begin))
    return {"samples_per_s": rates, "loss": statistics.mean(losses[-50:])}


def run_pycollective(workers: int, data: Any) -> dict[str, Any]:
    import pycollective as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    account = Account(strategy)
    steps = tutorial_steps(tf, strategy, "tutorial", data, compiled=False)
    found = timed(lambda: float(next(steps)), workers, account.begin)
    return {**found, **account.of_a_step()}


class Account:
    """The times of this worker's main thread in its steps, and the sizes of its reductions."""

    def __init__(self, strategy: Any) -> None:
        from pycollective.comm.work import Work

        self._communicating = self._reading = self._from = 0.0
        self._inside = False
        self._sizes: dict[int, int] = {}
        communicator = strategy.extended.workers.communicator
        if communicator is not None:
            kind = type(communicator)
            for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
                setattr(kind, name, self._timed(getattr(kind, name), name, communicator))
            setattr(Work, "wait", self._timed(Work.wait, "", None))  # noqa: B010
        given = strategy.experimental_distribute_dataset
        strategy.experimental_distribute_dataset = lambda dataset: self._read(given(dataset))

    def _timed(self, function: Any, name: str, communicator: Any) -> Any:
        @functools.wraps(function)
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            other_group = communicator is not None and this is not communicator
            in_main_thread = threading.current_thread() is threading.main_thread()
            if self._inside or not in_main_thread or other_group:
                return function(this, *args, **kwargs)
            if name == "all_reduce":
                size = args[0].nbytes
                self._sizes[size] = self._sizes.get(size, 0) + 1
            self._inside = True
            begin = time.perf_counter()
            try:
                return function(this, *args, **kwargs)
            finally:
                self._communicating += time.perf_counter() - begin
                self._inside = False

        return call

    def _read(self, dataset: Any) -> Iterator[Any]:
        batches = iter(dataset)
        while True:
            begin = time.perf_counter() - self._communicating
            batch = next(batches)
            self._reading += time.perf_counter() - self._communicating - begin
            yield batch

    def begin(self) -> None:
        """Delete the measurements so far."""
        self._communicating = self._reading = 0.0
        self._sizes.clear()
        self._from = time.perf_counter()

    def of_a_step(self) -> dict[str, Any]:
        """Return the milliseconds of a step's parts, and its numbers of reductions by bytes."""
        steps = WINDOWS * STEPS
        whole = time.perf_counter() - self._from
        parts = {"communication": self._communicating, "input": self._reading}
        parts["compute"] = whole - sum(parts.values())
        return {
            "ms": {name: 1e3 * seconds / steps for name, seconds in parts.items()},
            "reduces": {str(size): count / steps for size, count in self._sizes.items()},
        }


def predicted(reduces: dict[str, float], workers: int, bits: float) -> float:
    """Return simulated milliseconds of a step's all-reduces among hosts on Ethernet.

    Each all-reduce uses the fastest of the table's algorithms for TCP.
    """
    from pycollective.algorithms import Cluster, simulate

    cluster = Cluster.ethernet_10g(workers).changed(bandwidth=bits / 8)
    total = 0.0
    for size, count in reduces.items():
        fastest = min(
            simulate(name, cluster, int(size), progress=False).seconds
            for name in ("reduce_to_one", "ring", "halving_doubling")
        )
        total += count * fastest
    return 1e3 * total


def prediction(parts: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Print the parts of a step, and its prediction for more machines; return the prediction."""
    print(f"\na step of pycollective, ms {'compute':>10} {'communication':>14} {'input':>8}")
    for workers, found in parts.items():
        ms = found["ms"]
        print(
            f"{workers:>10} workers {ms['compute']:>16.2f} {ms['communication']:>14.2f} "
            f"{ms['input']:>8.2f}"
        )
    several = [found["reduces"] for found in parts.values() if found["reduces"]]
    if 1 not in parts or not several:
        return {}
    alone = parts[1]["ms"]["compute"] + parts[1]["ms"]["input"]
    told = ", ".join(f"{count:.3g} of {int(size):,} bytes" for size, count in several[0].items())
    print(f"\npredicted: {alone:.2f} ms of computing and input, and all-reduces: {told}")
    print(
        f"{'workers':>10} {'10 Gbit/s, ms':>15} {'samples/s':>12} {'100 Gbit/s, ms':>15} samples/s"
    )
    rows = {}
    for workers in PREDICTED:
        times = [predicted(several[0], workers, bits) for bits in (10e9, 100e9)]
        rates = [1e3 * workers * BATCH / (alone + ms) for ms in times]
        print(
            f"{workers:>10} {times[0]:>15.2f} {rates[0]:>12,.0f} {times[1]:>15.2f} {rates[1]:,.0f}"
        )
        rows[str(workers)] = {"10G_ms": times[0], "100G_ms": times[1]}
    return rows


def run_tensorflow(workers: int, data: Any) -> dict[str, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    steps = tutorial_steps(tf, strategy, "tutorial", data, compiled=True)
    return timed(lambda: float(next(steps)), workers)


def run_torch(workers: int, data: Any) -> dict[str, Any]:
    import models_torch
    import torch

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    x, y = data
    images, labels = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y).long()
    plain = models_torch.tutorial()
    model = torch.nn.parallel.DistributedDataParallel(plain) if workers > 1 else plain
    weights = [p for p in plain.parameters() if p.dim() > 1]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(rank))
    position = 0

    def step() -> float:
        nonlocal position
        chosen = order[position : position + BATCH]
        position = (position + BATCH) % (len(order) - BATCH)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss = loss + 1e-5 * sum((w * w).sum() for w in weights)
        loss.backward()
        optimizer.step()
        value = loss.detach()
        if workers > 1:  # the mean over all workers, which the others print too
            torch.distributed.all_reduce(value)
        return value.item() / workers

    return timed(step, workers)


CONTESTANTS = {
    "pycollective": (run_pycollective, "own"),
    "TensorFlow": (run_tensorflow, "tensorflow"),
    "PyTorch DDP": (run_torch, "torch"),
}


def run_workers(command: list[str], workers: int) -> dict[str, Any]:
    """Run a contestant's workers, and return the first worker's measurements."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    processes = []
    for index in range(workers):
        task = {"type": "worker", "index": index}
        cluster = {"cluster": {"worker": addresses}, "task": task}
        more = {
            "TF_CONFIG": json.dumps(cluster),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": addresses[0].split(":")[1]},
            **{"RANK": str(index), "WORLD_SIZE": str(workers)},
            **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), threads),
        }
        out = subprocess.PIPE if index == 0 else subprocess.DEVNULL
        processes.append(
            subprocess.Popen(
                command, env={**os.environ, **more}, stdout=out, stderr=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{command} failed:\n{errors[-2000:]}")
    found: dict[str, Any] = json.loads(said[0][0].strip().splitlines()[-1])
    if not found["loss"] < 1.5:
        raise SystemExit(f"{command} does not learn: its loss is {found['loss']}")
    return found


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--workers", default="1,2,4", help="numbers of workers, one after the other (1,2,4)"
    )
    p.add_argument("--data", help="folder of the MNIST idx.gz files (generated digits)")
    p.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    p.add_argument("--json", type=Path, help="write the results there too")
    p.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers")
    p.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    args = p.parse_args()
    counts = [int(n) for n in args.workers.split(",")]
    if args.contestant:
        run, _ = CONTESTANTS[args.contestant]
        print(json.dumps(run(counts[0], images_of("tutorial", args.data))))
        return
    rates: dict[tuple[str, int], list[float]] = {}
    parts: dict[int, dict[str, Any]] = {}
    for turn in range(args.rounds):
        for name, (_, needs) in CONTESTANTS.items():
            python = sys.executable if needs == "own" else args.peer_python
            if needs != "own" and not installed(python, needs):
                continue
            for workers in counts:
                print(f"# round {turn + 1}: {name} x{workers}", file=sys.stderr, flush=True)
                command = [python, __file__, "--contestant", name, "--workers", str(workers)]
                command += ["--data", args.data] if args.data else []
                found = run_workers(command, workers)
                rates.setdefault((name, workers), []).extend(found["samples_per_s"])
                fastest = sum(parts.get(workers, {}).get("ms", {0: math.inf}).values())
                if sum(found.get("ms", {0: math.inf}).values()) < fastest:
                    parts[workers] = found
    print(f"{'':14} {'workers':>7} {'samples/s':>10} {'range':>17} {'of best peer':>13}")
    median = {key: statistics.median(values) for key, values in rates.items()}
    for (name, workers), value in median.items():
        peers = [v for (n, w), v in median.items() if w == workers and n != "pycollective"]
        windows = rates[name, workers]
        spread = f"{min(windows):,.0f} to {max(windows):,.0f}"
        best = max(peers, default=float("nan"))
        print(f"{name:14} {workers:>7} {value:>10,.0f} {spread:>17} {value / best:>12.2f}x")
    rows = prediction(parts)
    if args.json:
        report = {
            "benchmark": "compare_workers", "machine": platform.machine(), "cores": os.cpu_count(),
            "data": "MNIST" if args.data else "generated", "batch_per_worker": BATCH,
            "samples_per_s": {f"{n} x{w}": median[n, w] for n, w in median},
            "ms_of_a_step": {str(w): found["ms"] for w, found in parts.items()}, "predicted": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
