"""``pycollective bench``: time collectives, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from pycollective import __version__, array_backend, dtypes, init, local_group, spawn, tuning
from pycollective.algorithms import Algorithm, Collective
from pycollective.benchmark import load, report
from pycollective.benchmark.cases import (
    COLLECTIVES,
    REDUCING,
    Case,
    algorithms_of,
    dtype_of,
    has_choice,
    takes,
)  # fmt: skip
from pycollective.benchmark.measure import Row, measure_all
from pycollective.benchmark.tune import choose, fastest, past_cache_from
from pycollective.cli import options
from pycollective.cluster.membership import membership_of_environment
from pycollective.comm import Communicator
from pycollective.launch import launcher
from pycollective.launch.description import RANK, forced
from pycollective.plots import size_text

_DESCRIPTION = """\
Time collectives of growing arrays among threads of this process, or among processes that are started on
this host. In a group of several processes, which pycollective run, mpirun, srun, torchrun or TF_CONFIG
describes, the ranks of that group are timed, and rank 0 prints.

Every result is checked before it is timed. The columns:
  bytes, count   of the whole array, as in nccl-tests: of all_gather's result, of reduce_scatter's input.
                 In ragged parts, rank r has r + 1 shares; all_reduce_many has the array in 16 pieces;
                 in send_recv every rank sends to the next one.
  p50, p99       of the Python call's time on the slowest rank of each iteration
  algbw          bytes / p50
  busbw          algbw × a factor: 2(n-1)/n for all_reduce, (n-1)/n for collectives of parts, 1 for the
                 others. It is the load of the slowest link, comparable between numbers of ranks.
  limit          percent of the memory's speed, from 64 KiB on. The least traffic reads every
                 contribution once and writes every result once (all_reduce: n·bytes each). The
                 memory's speed is measured in the same run: all ranks at once copy an array of
                 this size or change it in place, the faster of the two. Arrays that fit into caches
                 are compared with the caches' speed, which ranks that share a cache may exceed.
  errors         number of wrong items in all ranks' results

With --device gpu a call's time ends when the GPU is done (nccl-tests divides the time of many calls);
there is no limit. "auto" is NCCL if each rank has a GPU of its own. NCCL refuses ranks that share a GPU:
for these, and for other algorithms, the core's kernels run among threads. Without CUDA the data
goes over the host.

The last lines give the number of wrong results, and whether other programs kept the machine busy.
"""

_EPILOG = """\
examples:
  pycollective bench                                       all_reduce, 8 B to 16 MiB, 2 threads
  pycollective bench --transport shm -n 4 -a all           every algorithm, among 4 processes
  pycollective bench --transport tcp -c all -b 64K -e 4M   every collective, over TCP
  pycollective bench -c broadcast -a tree chain -f 2       two algorithms side by side
  pycollective bench -a ring mine.py:line                  an algorithm that a file of yours defines
  pycollective bench -d float64 -o max --no-in-place
  pycollective bench --transport shm --registered -b 1M    memory that other ranks reach without a copy
  pycollective bench --device gpu -n 2 -b 1M -e 1G         NCCL between two GPUs; also --registered
  pycollective bench --device gpu -n 4 -a all              every algorithm among four threads on GPUs
  pycollective bench --json out.json --plot out.svg
  pycollective bench --tune --transport shm -n 4           find and store the best for 4 processes here

--tune times every algorithm in three turns, and writes the fastest one for each size into a table.
algorithm="auto" then uses the table for groups of that transport and number of ranks on this machine,
and of fewer ranks if those are not tuned. Tune while nothing else runs. The table is the file in
PYCOLLECTIVE_TUNING ("none": no table), by default pycollective/tuning.json in the user's cache.
"""


_TUNING_TURNS = 3
_TRANSPORTS = {"shared memory": "shm", "TCP": "tcp"}


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands, "bench", run, help="time collectives", description=_DESCRIPTION, epilog=_EPILOG
    )
    add = p.add_argument
    add("-n", "--ranks", type=options.ranks, metavar="N",
        help="number of ranks (2, or those of the group of this process)")  # fmt: skip
    add("-c", "--collective", **options.several(options.one_of([*COLLECTIVES, "all"])),
        metavar="NAME", help=f"one or several of {', '.join(COLLECTIVES)}, all (all_reduce)",
    )  # fmt: skip
    add("-a", "--algorithm", **options.several(options.algorithm), default=["auto"],
        metavar="NAME", help="one or several, timed side by side; FILE.py:NAME for one of your own; "
        "all; a wrong name shows a list (auto)")  # fmt: skip
    options.add_sizes(p, 8, 16 << 20, 4)
    add("--transport", choices=["thread", "shm", "tcp"],
        help="kind of ranks and transport: threads, processes with shared memory, processes "
        "with TCP (default: the group of this process, else PYCOLLECTIVE_TRANSPORT, else "
        "thread)")  # fmt: skip
    add("-d", "--dtype", default="float32", metavar="TYPE",
        help="element type, also bfloat16 (float32)")  # fmt: skip
    add("-o", "--op", default="sum",
        choices=["sum", "prod", "min", "max", "mean", "and", "or", "xor"],
        help="operation of reductions (sum)")  # fmt: skip
    add("--device", choices=["cpu", "gpu"], default="cpu",
        help="device of the arrays (cpu)")  # fmt: skip
    add("--in-place", action=argparse.BooleanOptionalAction, default=True,
        help="let the result replace the input, if the collective can (yes)")  # fmt: skip
    add("--registered", action="store_true",
        help="time memory of Communicator.empty, if all ranks' arrays have one length")  # fmt: skip
    add("-i", "--iterations", type=options.positive, metavar="N",
        help="timed calls (default: as many as fit into --seconds, at least 5)")  # fmt: skip
    add("--seconds", type=options.real(1e-3, 1e6), default=0.3, metavar="S",
        help="approximate time of each line (0.3)")  # fmt: skip
    add("-w", "--warmup", type=options.positive, default=5, metavar="N",
        help="calls before the timed ones (5)")  # fmt: skip
    options.add_json(p)
    options.add_plot(p)
    add("--tune", action="store_true",
        help="time all algorithms, and let 'auto' mean the fastest in future")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the table; return 1 if a result was wrong."""
    try:
        launched = _is_launched(args.transport)
        transport = args.transport or ("group" if launched else forced(os.environ) or "thread")
        ranks = args.ranks or 2
        _check(args, ranks if transport != "group" else None)
        if launched and transport == "thread":
            raise ValueError("--transport thread: leave out the launcher, or time its group")
        if transport in ("shm", "tcp") and not launched:
            return launcher.run(options.this_program(*args.words), ranks, "never", transport)
        comm = None if transport == "thread" else init()
        if comm is not None:
            _check_group(args, comm)
    except (TypeError, ValueError) as error:
        raise options.WrongOptionError(error) from None
    try:
        if comm is None:
            return _bench(args, ranks, "threads", True, None)
        with comm, contextlib.suppress(BrokenPipeError):  # of all ranks: the group has not failed
            return _bench(args, comm.size, comm.transport, comm.rank == 0, comm)
        raise BrokenPipeError
    except MemoryError as error:
        text = f"there is too little memory ({error}): give a smaller --end, or fewer --iterations"
        raise options.WrongOptionError(text) from None


def _check_group(args: argparse.Namespace, comm: Communicator) -> None:
    """Raise ValueError if the launcher's group is not the one that the options describe."""
    if args.ranks not in (None, comm.size):
        raise ValueError(f"--ranks {args.ranks}: the launcher started {comm.size} ranks")
    if args.transport and comm.size > 1 and _TRANSPORTS.get(comm.transport) != args.transport:
        raise ValueError(
            f"--transport {args.transport}: the launcher's group uses {comm.transport}: start it with "
            f"pycollective run --transport {args.transport}"
        )


def _is_launched(transport: str | None) -> bool:
    """Return True if this process is a rank of a launcher's group, as for `pycollective.init`."""
    if RANK in os.environ:
        return True
    if "thread" in (transport, forced(os.environ)):
        return False
    try:
        member = membership_of_environment(os.environ)
    except ValueError as error:
        raise ValueError(f"{error}. To time threads, give --transport thread") from None
    return member is not None and member.size > 1


def _check(args: argparse.Namespace, ranks: int | None) -> None:
    """Raise ValueError, TypeError or the library's error if a request cannot be timed."""
    if args.device == "gpu":
        count, why = array_backend.gpu_count()
        if not count:
            raise ValueError(f"--device gpu: there is no GPU ({why})")
        if args.tune:
            raise ValueError("--tune does not work with --device gpu, because NCCL chooses there")
    dtype = dtype_of(args.dtype)
    if dtype.kind not in "biufc" and dtype != dtypes.bfloat16:
        raise TypeError(f"--dtype {args.dtype}: only arrays of numbers and bools are timed")
    options.sizes(args, dtype.itemsize)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if args.device == "cpu" and args.end > memory:
        raise ValueError(
            f"arrays of {args.end} bytes are larger than the memory of this machine ({memory} bytes): "
            "give a smaller --end"
        )
    if not _collectives(args):
        raise ValueError(
            "nothing to tune: none of these collectives has several algorithms of its own"
        )
    if args.tune:
        if args.algorithm != ["auto"]:
            raise ValueError("--tune times every algorithm: leave out --algorithm")
        file = tuning.path()
        if file is None:
            raise ValueError(
                f"--tune has no file to write: {tuning.TUNING} is 'none', or there is no home folder"
            )
        try:
            tuning.prepare(file, __version__)
        except OSError as error:
            raise ValueError(f"--tune cannot write to {tuning.TUNING}, {file}: {error}") from None
    if any(collective in REDUCING for collective in _collectives(args)):
        (alone,) = local_group(1)
        alone.all_reduce(np.zeros(1, dtype_of(args.dtype)), args.op)
    _algorithms(args)
    for algorithm in args.algorithm:
        if ranks and isinstance(algorithm, Algorithm):
            algorithm.verify(ranks)


def _collectives(args: argparse.Namespace) -> list[str]:
    if args.tune:
        asked = args.collective or ["all"]
        return [
            collective
            for collective in COLLECTIVES
            if (collective in asked or "all" in asked)
            and collective in Collective.__members__
            and len(algorithms_of(collective)) > 1
        ]
    if args.collective is None:
        return ["all_reduce"]
    return list(COLLECTIVES) if "all" in args.collective else list(dict.fromkeys(args.collective))


def _algorithms(args: argparse.Namespace, transport: str = "") -> dict[str, list[str | Algorithm]]:
    """Return the algorithms to time for each collective; ``transport`` is that of the group."""
    known = {collective: algorithms_of(collective) for collective in _collectives(args)}
    if "hierarchical" in args.algorithm or transport == "shared memory and TCP":
        for collective in known.keys() & {"all_reduce"}:
            known[collective] = tuning.candidates(collective)
    for asked in args.algorithm:
        if isinstance(asked, Algorithm):
            if not any(takes(collective, asked) for collective in known):
                raise ValueError(
                    f"{asked.name} is an algorithm of {asked.collective}: add -c {asked.collective}"
                )
        elif asked not in ("auto", "all") and not any(asked in names for names in known.values()):
            lists = "; ".join(
                f"{collective}: {', '.join(names)}" for collective, names in known.items()
            )
            raise ValueError(f"no algorithm is called {asked!r} here ({lists}; auto; all)")
    chosen: dict[str, list[str | Algorithm]] = {}
    for collective, names in known.items():
        wanted: list[str | Algorithm] = []
        for asked in ["all"] if args.tune else args.algorithm:
            if isinstance(asked, Algorithm):
                wanted += [asked] if takes(collective, asked) else []
            elif has_choice(collective) and len(names) > 1:
                wanted += names if asked == "all" else [asked] if asked in [*names, "auto"] else []
        if not has_choice(collective) or len(names) == 1:
            wanted = wanted or [names[0]]
        if wanted:
            chosen[collective] = list(dict.fromkeys(wanted))
    missing = set(args.collective or ()) - {"all"} - chosen.keys()
    if missing and not args.tune:
        options.refuse_collectives(missing, args.algorithm)
    return chosen


def _cases(args: argparse.Namespace, ranks: int, transport: str) -> list[Case]:
    return [
        Case(
            collective,
            size,
            ranks,
            args.dtype,
            args.op,
            algorithm,
            args.in_place,
            args.registered,
            args.device,
        )
        for collective, names in _algorithms(args, transport).items()
        for size in (options.sizes(args) if collective != "barrier" else [0])
        for algorithm in names
    ]


def _bench(args: argparse.Namespace, ranks: int, transport: str, prints: bool, comm: Any) -> int:
    """Time all cases as one rank (``comm``) or as the threads of a new group (None)."""
    cases = _cases(args, ranks, transport)
    many = len({case.collective for case in cases}) > 1
    place = "in place" if args.in_place else "out of place"
    title = ", ".join(_collectives(args))
    if args.registered:
        place += ", memory of comm.empty"
    if args.device == "gpu":
        place += ", GPU arrays"
    title = f"pycollective {__version__} {title}: {ranks} ranks ({transport}), {place}"
    turns = _TUNING_TURNS if args.tune else 1

    def on_wait(text: str) -> None:
        print(f"# {text}", file=sys.stderr, flush=True)

    def timed(comm: Communicator, turn: int) -> tuple[list[Row], float | None]:
        """Time all cases as one rank; return the rows, and the cores that other programs used."""
        if turn == 0:
            header = report.bench_table(many).header()
            _show(comm, f"# {title}, {turns * len(cases)} lines\n{header}")
        other_load = load.OtherLoad(comm)
        found = []
        for row in measure_all(comm, cases, **how, on_wait=on_wait):
            found.append(row)
            _show(comm, report.line(row, many))
        return found, other_load.cores()

    how = {"iterations": args.iterations, "seconds": args.seconds, "warmup": args.warmup}
    rows: list[Row] = []
    others: list[float] = []
    for turn in range(turns):
        found, busy = (
            spawn(timed, ranks, turn, threads=True)[0] if comm is None else timed(comm, turn)
        )
        rows += found
        others += [] if busy is None else [busy]
    wrong = sum(row.wrong for row in rows)
    copies = None
    if args.tune and transport in ("threads", "shared memory"):
        copies = past_cache_from(comm) if comm else spawn(past_cache_from, ranks, threads=True)[0]
    if not prints:
        return 1 if wrong else 0
    most = max(others, default=None)
    print(f"# errors: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    if text := load.warning(most):
        print(f"# WARNING: {text}")
    if args.tune:
        _remember(rows, transport, ranks, wrong, copies)
    if args.json:
        about = {
            "transport": transport,
            "ranks": ranks,
            "in_place": args.in_place,
            "registered": args.registered,
            "device": args.device,
            "cores_of_other_programs": most,
        }
        results = [{**asdict(row), "turn": i // (len(rows) // turns)} for i, row in enumerate(rows)]
        report.write(args.json, "bench", about, results)
    if args.plot:
        report.draw(args.plot, fastest(rows), title)
    return 1 if wrong else 0


def _show(comm: Communicator, text: str) -> None:
    """Print lines as rank 0; raise BrokenPipeError on all ranks if nobody reads them."""
    is_read = True
    if comm.rank == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            is_read = False
    if not comm.broadcast(np.array(is_read), 0):
        raise BrokenPipeError


def _remember(rows: list[Row], transport: str, ranks: int, wrong: int, copies: int | None) -> None:
    """Write the tuning table, and print its rows."""
    file = tuning.path()
    if wrong or file is None:
        print("# no table is written, because results were wrong")
        return
    found = choose(rows)
    tuning.save(file, transport, ranks, found, __version__, copies)
    for collective, most_bytes, name in found:
        limit = "above" if most_bytes > 1 << 60 else f"to {size_text(most_bytes)}"
        print(f"# auto: {collective.name} {limit}: {name}")
    if copies is not None:
        never = copies > 1 << 60
        print(f"# copies past the caches: {'never' if never else f'from {size_text(copies)} on'}")
    print(f"# for groups of {ranks} ranks ({transport}) on this machine: {file}")
