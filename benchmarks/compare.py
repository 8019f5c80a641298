"""Compare every call of pycollective with MPI, gloo, JAX, TensorFlow and its goals in one run.

    python benchmarks/compare.py --mpi "Open MPI=/envs/openmpi/bin/python" --json results.json
    python benchmarks/compare.py --parts processes2 --calls gather --sizes 16 1M --only pycollective

A part is a kind of group: processes of this host, processes over TCP alone, or replicas (threads) of one
process. All contestants of a part launch a call in turns, then the next call. Our contestants differ in
their memory: ordinary arrays, arrays of comm.empty(), and arrays made under shared_arrays() if this
pycollective has it. Each --mpi names one MPI library, as an environment with mpi4py and openmpi, mpich
or impi-rt. The --peers are interpreters of environments with torch, jax or tensorflow. The report names
contestants that are not installed. The contestant "bare copies" makes only the copies that a call on
ordinary arrays needs, and a handshake of the ranks: class Bare in compare_ranks.py.

Calls
    float32, sum. Calls of all_reduce and broadcast work in place if the contestant can; the others have
    an input and an output array. The size is the whole buffer: broadcast's array, all_gather's result,
    the input of reduce_scatter and all_to_all. Messages (send_recv) count with half a round trip between
    neighbours, all pairs at once. MPI and gloo reduce the eight arrays of all_reduce_many one by one.

Timing
    There are 3 calls to warm up, then repeats of as many calls as fit into --seconds between two
    barriers. A repeat counts with the slowest rank's mean, a launch with the median of 5 repeats, a
    contestant with the median of its launches. Zeros are never timed. Sums in place begin with small
    values, which are restored before they overflow. All contestants keep freed memory from the kernel.
    Open MPI yields if there are more ranks than cores. MPI over TCP may use no shared memory.
    The host of a virtual machine may move its cores, so that they share a cache at one time and none
    a minute later. A handshake of two cores then takes another time. All launches of a call wait until
    it takes as long as before the first one, and are repeated if it changed meanwhile (--patience).

Checks
    Each contestant's result is compared once per size with values computed here. The bare copies
    are not compared, because their ranks do not wait for each other. A wrong result of any
    contestant, or no result of pycollective, ends the comparison with exit status 1.

The --json file is written after each call of a part, and read at the start. A call that is in the file
is not run again unless it failed, for any contestants and sizes. A long comparison can therefore be
stopped and resumed (--again runs all calls). Compare numbers within one call of one part only, because
the machine's speed changes in between.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = str(Path(__file__).with_name("compare_ranks.py"))
KI, MI = 1 << 10, 1 << 20

# Freed memory would go back to the kernel, and the next large message would fault it in again.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

OURS = "pycollective"
BARE = "bare copies"
EMPTY, SHARED = "pycollective, comm.empty()", "pycollective, shared_arrays()"

CALLS = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "send_recv": "send and recv, half a round trip",
    "all_reduce_async": "all_reduce with async_op=True, then wait()",
    "all_reduce_many": "all_reduce_many of eight arrays of 8 bytes",
    "barrier": "barrier",
}
ONE_SIZE = {"all_reduce_many": 64, "barrier": 0}
PARTS_OF_RANKS = ("gather", "scatter", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Part:
    """Contestants of one kind of group.

    Attributes
    ----------
    kinds : dict
        The contestants: name to kind, as compare_ranks.py knows it; "mpi" stands for all of --mpi.
    """

    title: str
    ranks: int
    kinds: dict[str, str]
    sizes: tuple[int, ...]
    calls: tuple[str, ...] = tuple(CALLS)
    transport: str = "shm"


_SIZES = (8, 16, KI, 64 * KI, MI, 16 * MI, 64 * MI)
_OURS = {OURS: "pycollective", EMPTY: "empty", SHARED: "shared"}
_LIMITED = {OURS: "pycollective", BARE: "bare", "mpi": "mpi"}
_PEERS = {**_OURS, **_LIMITED, "torch gloo": "gloo", "JAX gloo": "jax",
          "TensorFlow RING": "tensorflow"}  # fmt: skip
_OVER_TCP = {OURS: "pycollective", "mpi": "mpi", "torch gloo": "gloo", "raw loopback": "raw-tcp"}
_REPLICAS = {OURS: "threads", "TensorFlow function": "tensorflow-function",
             "TensorFlow eager": "tensorflow-eager", "JAX psum": "jax-replicas"}  # fmt: skip
_SUM = ("all_reduce",)

PARTS = {
    "processes2": Part("2 processes", 2, _PEERS, _SIZES),
    "processes4": Part("4 processes", 4, _PEERS, _SIZES),
    "processes8": Part("8 processes", 8, _LIMITED, _SIZES[:-1], _SUM),
    "processes16": Part("16 processes", 16, _LIMITED, _SIZES[:-1], _SUM),
    "tcp2": Part("2 processes, TCP only", 2, _OVER_TCP, _SIZES, transport="tcp"),
    "tcp4": Part("4 processes, TCP only", 4, _OVER_TCP, _SIZES, transport="tcp"),
    "replicas2": Part("2 replicas in one process", 2, _REPLICAS, _SIZES, _SUM),
    "replicas4": Part("4 replicas in one process", 4, _REPLICAS, _SIZES, _SUM),
}  # fmt: skip

NEEDS = {"gloo": "torch", "jax": "jax", "jax-replicas": "jax", "tensorflow": "tensorflow",
         "tensorflow-function": "tensorflow", "tensorflow-eager": "tensorflow",
         "mpi": "mpi4py"}  # fmt: skip
ALL_REDUCE_ONLY = ("jax", "tensorflow", "raw-tcp")


def sizes_of(part: Part, call: str, asked: list[int] | None) -> list[int]:
    """Return the sizes of a call, each at least an item for each rank."""
    if call in ONE_SIZE:
        return [ONE_SIZE[call]]
    least = 4 * part.ranks if call in PARTS_OF_RANKS else 4
    return [size for size in asked or part.sizes if size >= least]


# Starting contestants ---------------------------------------------------------------------------


class WrongResult(Exception):
    """A contestant computed wrong values."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Settings that forbid shared memory; each library reads its own names.
_MPI_OVER_TCP = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_coll": "^sm",
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
    "I_MPI_FABRICS": "ofi",
    "I_MPI_COLL_INTRANODE": "pt2pt",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}


def commands(
    kind: str, python: str, part: Part, words: list[str]
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the processes of a launch: their commands, and additions to their environments."""
    worker = [python, RANKS, kind, *words]
    if kind in (*_OURS.values(), "bare"):
        from pycollective.cli.options import this_program

        run = this_program("run", "-n", str(part.ranks), "--transport", part.transport)
        return [([*run, "--", *worker], {})]
    if kind == "mpi":
        env = _MPI | (_MPI_OVER_TCP if part.transport == "tcp" else {})
        # More ranks than cores must yield to make progress. MPICH and Intel MPI do so by themselves;
        # I_MPI_THREAD_YIELD=3 made Intel MPI ten times slower.
        if part.ranks > cores():
            env |= {"OMPI_MCA_mpi_yield_when_idle": "1"}
        mpiexec = str(Path(python).parent / "mpiexec")
        return [([mpiexec, "-n", str(part.ranks), *worker], env)]
    if kind in ("gloo", "jax", "tensorflow"):
        ports = free_ports(part.ranks)
        hosts = [f"127.0.0.1:{port}" for port in ports]
        found = []
        for rank in range(part.ranks):
            env = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "RANK": str(rank),
                "WORLD_SIZE": str(part.ranks), "TF_CPP_MIN_LOG_LEVEL": "3",
            }  # fmt: skip
            if kind == "tensorflow":
                task = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
                env["TF_CONFIG"] = json.dumps(task)
            found.append((worker, env))
        return found
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={part.ranks}"
    return [([*worker, "--replicas", str(part.ranks)], env)]


def launch(
    kind: str, python: str, part: Part, call: str, sizes: list[int], args: argparse.Namespace
) -> Any:
    """Run one launch; return its results, or a text with the reason why there are none.

    Raises
    ------
    WrongResult
        A rank of the contestant found a wrong value.
    """
    words = ["--call", call, "--sizes", *map(str, sizes), "--seconds", str(args.seconds)]
    processes: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + args.launch_limit
    late = False
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            for command, env in commands(kind, python, part, words):
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **ONE_THREAD, **KEEP_MEMORY, **env},
                        stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                        start_new_session=True,
                    )
                )  # fmt: skip
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        except OSError as error:
            return f"cannot be started: {error}"
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        errors.seek(0)
        said = [line.strip() for line in errors if line.strip()]
        for line in said:
            if "WRONG " in line:
                raise WrongResult(line.split("WRONG ", 1)[1])
        if late:
            return f"did not end within {args.launch_limit:.0f} s"
        output.seek(0)
        for line in output:
            if "RESULT " in line:
                return json.loads(line.split("RESULT ", 1)[1])
        for line in said:
            if "LEFT OUT " in line:
                return line.split("LEFT OUT ", 1)[1]
        return f"gave no result: {said[-1] if said else 'stderr is empty'}"


@functools.cache
def has(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


@functools.cache
def has_shared_arrays() -> bool:
    import pycollective

    return hasattr(pycollective, "shared_arrays")


def contestants(
    part: Part, call: str, args: argparse.Namespace
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Return (kind, interpreter) of the contestants by name, and the reasons for missing ones."""
    found: dict[str, tuple[str, str]] = {}
    missing = {}
    wanted = []
    for name, kind in part.kinds.items():
        if kind == "mpi":
            wanted += [(name, kind, [python]) for name, python in args.mpi.items()]
        elif kind not in ALL_REDUCE_ONLY or call == "all_reduce":
            wanted.append((name, kind, args.peers if kind in NEEDS else [sys.executable]))
    for name, kind, pythons in wanted:
        if args.only and not name.startswith(tuple(args.only)):
            continue
        python = next((p for p in pythons if kind not in NEEDS or has(p, NEEDS[kind])), "")
        if not python:
            missing[name] = "not installed"
        elif kind == "shared" and not has_shared_arrays():
            missing[name] = "this pycollective has none"
        else:
            found[name] = (kind, python)
    if not found and not missing:
        raise SystemExit(f"--only: the contestants are {', '.join(name for name, *_ in wanted)}")
    return found, missing


def handshake() -> float:
    """Return the µs of a handshake between the first two cores; 0 with one core."""
    from pycollective import _core

    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0, 1]
    if len(usable) < 2:
        return 0.0
    lines = [bytearray(128) for _ in range(5)]  # the threads may come to their cores late

    def take_part(rank: int) -> float:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {usable[rank]})  # of this thread
        return 1e6 * min(_core.measure_handshake(x, rank, 2, 2_000, False) for x in lines)

    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(take_part, range(2)))


def alike(one: float, other: float) -> bool:
    return max(one, other) <= 1.6 * min(one, other)


def run_call(part: Part, call: str, sizes: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of all launches of a call."""
    who, notes = contestants(part, call, args)
    launches: dict[str, list[Any]] = {name: [] for name in who}
    moved: set[str] = set()  # contestants that ran between other handshakes
    failed = []
    patience = args.patience
    usual = handshake() if patience else 0.0

    def run(name: str) -> Any:
        """Launch a contestant between usual handshakes if these come in time."""
        nonlocal patience
        if not args.patience:
            return launch(*who[name], part, call, sizes, args)
        while True:
            began = time.monotonic()
            while not alike(before := handshake(), usual) and time.monotonic() - began < patience:
                time.sleep(0.1)
            found = launch(*who[name], part, call, sizes, args)
            is_usual = alike(before, usual) and alike(handshake(), usual)
            if is_usual or isinstance(found, str):
                return found
            patience -= time.monotonic() - began
            if patience <= 0:
                moved.add(name)
                return found

    for turn in range(1, args.launches + 1):
        for name in [n for n in who if n not in notes]:
            print(
                f"# {part.title}, {call}, launch {turn}/{args.launches}: {name}",
                file=sys.stderr,
                flush=True,
            )
            try:
                found = run(name)
                fatal = isinstance(found, str) and name.startswith((OURS, BARE))
            except WrongResult as error:
                found, fatal = str(error), True
            if isinstance(found, str):
                notes[name] = found  # and do not try again
                print(f"# {name}: {found}", file=sys.stderr, flush=True)
            else:
                launches[name].append(found)
            if fatal:
                failed.append(f"{part.title}, {call}: {name}: {found}")
    return {
        "ranks": part.ranks,
        "sizes": sizes,
        "kinds": {name: kind for name, (kind, _) in who.items()},
        "launches": {name: found for name, found in launches.items() if found},
        "handshake_us": usual,
        "moved": sorted(moved),
        "notes": notes,
        "failed": failed,
        "turns": args.launches,
        "seconds": args.seconds,
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


# Numbers ----------------------------------------------------------------------------------------

Results = dict[str, Any]


def median(results: Results, name: str, size: int) -> float | None:
    found = [
        launch[str(size)]["us"]
        for launch in results["launches"].get(name, [])
        if str(size) in launch
    ]
    return statistics.median(found) if found else None


def best_peer(results: Results, size: int, kind: str = "") -> float | None:
    """Return the time of the fastest contestant other than ours, of all kinds or of one."""
    kinds = results["kinds"]
    names = [n for n in kinds if not n.startswith((OURS, BARE)) and kinds[n].startswith(kind)]
    times = [t for n in names if (t := median(results, n, size)) is not None]
    return min(times, default=None)


Value = Callable[[Results, int], float | None]


def ratio(kind: str = "", ours: str = OURS) -> Value:
    def value(results: Results, size: int) -> float | None:
        own, best = median(results, ours, size), best_peer(results, size, kind)
        return own / best if own is not None and best else None

    return value


def of_copies(results: Results, size: int) -> float | None:
    """Return our time divided by that of the bare copies and a handshake."""
    own, bare = median(results, OURS, size), median(results, BARE, size)
    return own / bare if own is not None and bare else None


def microseconds(results: Results, size: int) -> float | None:
    return median(results, OURS, size)


def of_memory(ours: str = OURS) -> Value:
    def value(results: Results, size: int) -> float | None:
        """Return our time divided by that of n·bytes read and written at the memory's rate."""
        found = []
        for launched in results["launches"].get(ours, []):
            row = launched.get(str(size), {})
            if "memory_gb_s" in row:
                found.append(row["us"] * row["memory_gb_s"] * 1e3 / (2 * results["ranks"] * size))
        return statistics.median(found) if found else None

    return value


def of_loopback(results: Results, size: int) -> float | None:
    """Return our time divided by the longer of a blocking one-way message and the raw rate's time."""
    raw = results["launches"].get("raw loopback", [])
    ours = median(results, OURS, size)
    if not raw or ours is None:
        return None
    latency = statistics.median(r["one_way_us_blocking"] for r in raw)
    rate = statistics.median(
        max(r["both_ways_gb_s_threads"], r["both_ways_gb_s_polling"]) for r in raw
    )
    return ours / max(latency, 2 * size / (rate * 1e3))


# Goals ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """Numbers to reach.

    Attributes
    ----------
    most : dict
        The largest allowed `value`, by size.
    value : callable
        A function of the call's results and a size that returns the number, or None if not measured.
    unit : str
        The unit of the number.
    memory : str
        The kind of our arrays, if they are not ordinary ones.
    """

    part: str
    call: str
    most: dict[int, float]
    value: Value
    unit: str = "× best MPI"
    memory: str = ""


_LARGE = (MI, 16 * MI, 64 * MI)
_LIMIT = "× the memory's time"
_OTHERS = [c for c in CALLS if c not in ("all_reduce", "all_reduce_async", *ONE_SIZE)]
GOALS = [
    Goal("processes2", "all_reduce", {8: 0.25, 64 * KI: 0.45, MI: 0.5, 16 * MI: 0.45, 64 * MI: 0.3},
        ratio("mpi")),
    *(
        goal
        for name in (EMPTY, SHARED)
        for memory in [name.removeprefix("pycollective, ")]
        for goal in (
            Goal("processes2", "all_reduce", dict.fromkeys((8, 64 * KI, *_LARGE), 0.25),
                ratio("mpi", name), memory=memory),
            Goal("processes2", "all_reduce", dict.fromkeys(_LARGE, 1 / 0.85), of_memory(name),
                _LIMIT, memory),
        )
    ),
    *(
        Goal("processes2", call, {16: 0.5, 64 * KI: 0.6, MI: 0.6, 16 * MI: 0.7}, ratio("mpi"))
        for call in _OTHERS
    ),
    *(Goal("processes2", call, {size: 0.5}, ratio("mpi")) for call, size in ONE_SIZE.items()),
    Goal("processes2", "all_reduce_async", {8: 1.5, 64 * KI: 8}, microseconds, "µs"),
    Goal("processes4", "all_reduce", dict.fromkeys((8, KI, 64 * KI, *_LARGE), 0.5), ratio("mpi")),
    *(
        Goal("processes4", call, dict.fromkeys((16, KI, 64 * KI, *_LARGE), 0.7), ratio("mpi"))
        for call in [*_OTHERS, "all_reduce_async"]
    ),
    *(Goal("processes4", call, {size: 0.7}, ratio("mpi")) for call, size in ONE_SIZE.items()),
    *(
        Goal(part, "all_reduce", dict.fromkeys((8, KI, 64 * KI, MI, 16 * MI), 0.6), ratio("mpi"))
        for part in ("processes8", "processes16")
    ),
    Goal("tcp2", "all_reduce", {8: 0.4, **dict.fromkeys(_LARGE, 0.6)}, ratio("gloo"), "× gloo"),
    Goal("tcp2", "all_reduce", dict.fromkeys((8, *_LARGE), 1 / 0.8), of_loopback,
        "× the loopback's time"),
    *(
        Goal(f"replicas{n}", "all_reduce", {16 * MI: 1.15, 64 * MI: 1.15}, of_memory(), _LIMIT)
        for n in (2, 4)
    ),
]  # fmt: skip


# Tables -----------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    if size >= MI:
        return f"{size // MI} MiB"
    return f"{size // KI} KiB" if size >= KI else f"{size} B"


def time_text(us: float) -> str:
    if us >= 1e4:
        return f"{us / 1e3:,.3g} ms"
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def ratio_table(part: Part, done: dict[str, Results]) -> list[str]:
    """Return one line for each call and kind of memory: the ratio to the best peer, and both times."""
    sizes = sorted({s for c in done for s in done[c]["sizes"] if c not in ONE_SIZE})
    rows = []
    for call in [c for c in CALLS if c in done]:
        results = done[call]
        columns = results["sizes"] if call in ONE_SIZE else sizes
        padding = [""] * (len(sizes) - len(columns))
        for name in [n for n in results["launches"] if n.startswith(OURS)]:
            cells = []
            for size in columns:
                own, best = median(results, name, size), best_peer(results, size)
                if own is None:
                    cells.append("–")
                elif not best:
                    cells.append(f"({time_text(own)} / –)")
                else:
                    cells.append(f"**{own / best:.2f}** ({time_text(own)} / {time_text(best)})")
            memory = name.removeprefix(OURS).removeprefix(", ")
            title = CALLS[call] if call in ONE_SIZE else call
            rows.append([title, memory, *cells, *padding])
        if BARE in results["launches"]:
            cells = [number(of_copies(results, size)) for size in columns]
            rows.append(["", "of bare copies and a handshake", *cells, *padding])
    if not rows:
        return []
    head = ["ours / best peer (µs of both)", "arrays", *map(size_text, sizes)]
    return [f"## {part.title}", "", *table(head, rows)]


def call_table(part: Part, call: str, results: Results) -> list[str]:
    """Return the times of all contestants."""
    sizes = results["sizes"]
    lines = [f"### {part.title}: {CALLS[call]}", ""]
    rows = []
    for name, launches in results["launches"].items():
        cells = []
        for size in sizes if name != "raw loopback" else ():
            found = [launched[str(size)]["us"] for launched in launches]
            cell = time_text(statistics.median(found))
            if len(found) > 1:
                cell += f" ({time_text(min(found))}–{time_text(max(found))})"
            cells.append(cell)
        if cells:
            rows.append([name, *cells])
    if rows:
        head = "µs, median of launches (range)"
        lines += table([head, *map(size_text, sizes)], rows)
    memory = []
    for size in sizes:
        ours = results["launches"].get(OURS, [])
        found = [row["memory_gb_s"] for o in ours if "memory_gb_s" in (row := o.get(str(size), {}))]
        if found:
            memory.append(f"{statistics.median(found):.0f} at {size_text(size)}")
    if memory:
        who = "threads" if "threads" in part.kinds.values() else "processes"
        lines.append(
            f"Memory, read and written by {part.ranks} {who} at the same time, GB/s: "
            f"{', '.join(memory)}."
        )
    raw = results["launches"].get("raw loopback", [])
    if raw:
        middle = {key: statistics.median(r[key] for r in raw) for key in raw[0]}
        lines.append(
            f"Raw loopback: {middle['one_way_us_blocking']:.1f} µs one way blocking, "
            f"{middle['one_way_us_spinning']:.1f} spinning; both ways together "
            f"{middle['both_ways_gb_s_polling']:.1f} GB/s by one thread on each side, "
            f"{middle['both_ways_gb_s_threads']:.1f} by two."
        )
    for name, why in results["notes"].items():
        lines.append(f"Without {name}: {why}.")
    if results.get("handshake_us"):
        text = f"A handshake of two cores took {results['handshake_us']:.2f} µs"
        other = ", ".join(results["moved"])
        lines.append(f"{text}, but not while these ran: {other}." if other else f"{text}.")
    lines += [f"{results['turns']} launches of each, {results['when']} UTC.", ""]
    return lines


def goal_table(done: dict[str, dict[str, Results]]) -> list[str]:
    rows = []
    for goal in GOALS:
        results = done.get(goal.part, {}).get(goal.call)
        if results is None:
            continue
        values = {size: goal.value(results, size) for size in goal.most}
        missed = [s for s, v in values.items() if v is not None and v > goal.most[s]]
        cells = [
            f"**{number(value)}**" if size in missed else number(value)
            for size, value in values.items()
        ]
        verdict = "**not met**" if missed else "met"
        if all(value is None for value in values.values()):
            verdict = "not measured"
        title = f"{PARTS[goal.part].title}: {goal.call}"
        title += f", {goal.memory}" if goal.memory else ""
        bounds = [*goal.most.values()]
        if len({*bounds}) == 1:
            bounds = bounds[:1]
        rows.append([
            title,
            " / ".join(map(size_text, goal.most)) if goal.call not in ONE_SIZE else "",
            f"≤ {' / '.join(f'{b:.3g}' for b in bounds)} {goal.unit}",
            " / ".join(cells),
            verdict,
            "" if goal.memory else " / ".join(number(of_copies(results, size)) for size in missed),
        ])  # fmt: skip
    head = ["call", "sizes", "to reach", "measured", "", "missed: of bare copies and a handshake"]
    return ["## Goals", "", *table(head, rows)] if rows else []


def tables(done: dict[str, dict[str, Results]]) -> str:
    """Return the ratios of all parts, the goals, and all contestants' times."""
    parts = [(PARTS[name], done[name]) for name in PARTS if name in done]
    lines = [line for part, calls in parts for line in ratio_table(part, calls)]
    lines += goal_table(done)
    lines += ["## All contestants", ""]
    for part, calls in parts:
        lines += [x for c in CALLS if c in calls for x in call_table(part, c, calls[c])]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------


def byte_count(text: str) -> int:
    unit = {"K": KI, "M": MI}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMkm")) * unit


def mpi_library(text: str) -> tuple[str, str]:
    name, sign, python = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON")
    return name, python


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART",
                   help=f"of {' '.join(PARTS)}; without: all, in this order")  # fmt: skip
    p.add_argument("--calls", nargs="+", choices=[*CALLS], default=[*CALLS], metavar="CALL",
                   help=f"of {' '.join(CALLS)}; without: all of each part (8 and 16 processes and "
                   "replicas have all_reduce alone)")  # fmt: skip
    p.add_argument("--sizes", nargs="+", type=byte_count, metavar="BYTES",
                   help="such as 16 64K 16M; without: those of the goals")  # fmt: skip
    p.add_argument("--only", nargs="+", metavar="NAME",
                   help="contestants whose names begin so, such as pycollective")  # fmt: skip
    p.add_argument("--launches", type=int, default=2, help="of each contestant (2)")
    p.add_argument("--patience", type=float, default=60, metavar="S",
                   help="for a call's launches with another handshake of the cores (60); 0: all "
                   "launches count, as they must on a busy machine")  # fmt: skip
    p.add_argument("--seconds", type=float, default=0.15, help="of a repeat (0.15)")
    p.add_argument("--launch-limit", type=float, default=120, metavar="S",
                   help="a launch that takes longer is ended (120)")  # fmt: skip
    p.add_argument("--peers", nargs="*", default=[sys.executable], metavar="PYTHON",
                   help="the first one that has a module is used (this interpreter)")  # fmt: skip
    p.add_argument("--mpi", action="append", default=[], type=mpi_library, metavar="NAME=PYTHON",
                   help="may be given several times")  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="results, also to resume from")
    p.add_argument("--again", action="store_true", help="run calls that the JSON file has, too")
    p.add_argument("--markdown", type=Path, metavar="FILE",
                   help="write the tables there, not to the output")  # fmt: skip
    args = p.parse_args()
    args.mpi = dict(args.mpi)
    for file in (args.json, args.markdown):
        if file and not file.absolute().parent.is_dir():
            p.error(f"{file}: there is no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends a launch, as Ctrl-C does

    report: dict[str, Any] = {"benchmark": "compare", "format": 2, "parts": {}}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text())
        if report.get("format") != 2:
            raise SystemExit(f"{args.json} is of an older compare.py; name another file")
    machine = {"machine": platform.machine(), "cores": cores(), "system": platform.system()}
    if report.setdefault("machine", machine) != machine:
        raise SystemExit(f"{args.json} was measured on another machine: {report['machine']}")
    for name in args.parts:
        part = PARTS[name]
        done = report["parts"].setdefault(name, {})
        for call in [c for c in args.calls if c in part.calls]:
            if call in done and not done[call]["failed"] and not args.again:
                print(f"# {name}, {call}: already in {args.json}", file=sys.stderr)
                continue
            sizes = sizes_of(part, call, args.sizes)
            if not sizes:
                continue
            done[call] = run_call(part, call, sizes, args)
            if args.json:
                temporary = args.json.with_suffix(".part")
                temporary.write_text(json.dumps(report, indent=1) + "\n")
                temporary.replace(args.json)
    text = tables(report["parts"])
    if args.markdown:
        args.markdown.write_text(text)
    else:
        print(text)
    failed = [x for calls in report["parts"].values() for r in calls.values() for x in r["failed"]]
    if failed:
        raise SystemExit("\n".join(["FAILED", *failed]))


if __name__ == "__main__":
    main()
