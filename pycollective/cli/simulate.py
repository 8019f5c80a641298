"""``pycollective simulate``: time algorithms on a simulated cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from pycollective import __version__, algorithms, tuning
from pycollective.algorithms import CLUSTERS, Algorithm, Cluster, Simulation
from pycollective.algorithms.simulation import ROOTED, draw_times
from pycollective.algorithms.writing import PROVED_RANKS
from pycollective.benchmark.report import COLLECTIVE, Table, write
from pycollective.cli import options

_DESCRIPTION = """\
Simulate the time of algorithms on a described cluster, for growing arrays and numbers of ranks.

Nothing is run: each rank's clock advances with the steps of its schedule. A message costs an overhead at
both ends, a latency, and its bytes over the bandwidth of the ports that it passes; the ranks of a host
share the host's port. docs/explanation/simulator.md describes the model and its limits.
"""

_EPILOG = """\
clusters:
  ethernet-10g        CPU hosts on 10 Gb/s Ethernet, 25 µs
  infiniband-nvlink   hosts of 8 GPUs: NVLink 3 within, one 100 Gb/s InfiniBand adapter each
  this-machine        threads on this machine, measured now (at most 64)
  or your own: --latency, --bandwidth and so on replace the numbers between hosts

examples:
  pycollective simulate                                     every all-reduce among 16 hosts
  pycollective simulate --cluster infiniband-nvlink -n 64 256 1024 --plot scaling.png
  pycollective simulate -n 64 --ranks-per-host 8 -a hierarchical ring
  pycollective simulate -n 10000 -a ring -b 1G -e 1G --verify
  pycollective simulate -c broadcast --latency 1e-6 --bandwidth 12.5e9
  pycollective simulate -n 8 -a ring mine.py:line           an algorithm that a file of yours defines
"""

_COLUMNS = (
    ("ranks", "", 8), ("bytes", "", 12), ("algorithm", "", 17), ("time", "µs", 14),
    ("algbw", "GB/s", 9), ("busbw", "GB/s", 9), ("messages", "", 12),
)  # fmt: skip
_COLLECTIVES = list(algorithms.Collective.__members__)
_CHANGES = ("latency", "bandwidth", "overhead", "reduce_rate", "copy_rate")
_MOST_RANKS = 1_000_000
_MOST_THREADS = 64


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands,
        "simulate",
        run,
        help="time algorithms on a described cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = p.add_argument
    seconds, rate = options.real(0, 1e6), options.real(1)
    add("-n", "--ranks", **options.several(options.whole(1, _MOST_RANKS)), default=[16],
        metavar="N", help="one or several numbers of ranks (16)")  # fmt: skip
    add("-c", "--collective", **options.several(options.one_of(_COLLECTIVES)),
        default=["all_reduce"], metavar="NAME",
        help=f"one or several of {', '.join(_COLLECTIVES)} (all_reduce)")  # fmt: skip
    add("-a", "--algorithm", **options.several(options.algorithm), default=["all"], metavar="NAME",
        help="one or several; FILE.py:NAME for one of your own; 'all' has "
        "'hierarchical' only with several ranks on a host (all)")  # fmt: skip
    options.add_sizes(p, 1 << 10, 64 << 20, 16)
    add("--root", type=options.whole(0, _MOST_RANKS), default=0, metavar="RANK",
        help="root of rooted collectives (0)")  # fmt: skip
    add("--cluster", default="ethernet-10g", choices=[*CLUSTERS, "this-machine"],
        help="the cluster (ethernet-10g)")  # fmt: skip
    add(
        "--ranks-per-host",
        type=options.positive,
        metavar="N",
        help="ranks per host (the cluster's)",
    )
    add("--latency", type=seconds, metavar="S", help="seconds between hosts")
    add("--bandwidth", type=rate, metavar="RATE", help="bytes per second between hosts")
    add("--overhead", type=seconds, metavar="S", help="seconds of a message at each end")
    add("--reduce-rate", type=rate, metavar="RATE", help="bytes per second that a rank reduces")
    add("--copy-rate", type=rate, metavar="RATE", help="bytes per second that a rank copies")
    add("--verify", action="store_true", help="prove the schedules first")
    options.add_json(p)
    options.add_plot(p)


def run(args: argparse.Namespace) -> int:
    """Print the table; raise WrongOptionError for options that cannot be simulated."""
    try:
        curves = _run(args)
    except (TypeError, ValueError, MemoryError) as error:
        raise options.WrongOptionError(error) from None
    if args.json:
        results = [result for curve in curves for result in curve]
        results.sort(key=lambda result: (result.cluster.ranks, result.bytes))
        about = {"cluster": args.cluster, "changes": _changes(args), "root": args.root}
        write(args.json, "simulate", about, [_row(result) for result in results])
    if args.plot:
        draw_times(curves, args.plot)
        print(f"# drawn to {args.plot}")
    return 0


def _run(args: argparse.Namespace) -> list[list[Simulation]]:
    """Simulate all points, and return a list of results for each algorithm."""
    sizes, counts = options.sizes(args), sorted(args.ranks)
    if args.root >= counts[0]:
        raise ValueError(f"root {args.root} is not among the {counts[0]} ranks")
    if args.root and not any(collective in ROOTED for collective in args.collective):
        raise ValueError(f"{', '.join(args.collective)} has no root")
    clusters = {ranks: _cluster(args, ranks, sizes[-1]) for ranks in counts}
    chosen = _algorithms(args, list(clusters.values()))
    for cluster in clusters.values():
        for collective, algorithm in chosen:
            if args.verify:
                _verify(collective, algorithm, cluster)
            elif isinstance(algorithm, Algorithm) and cluster.ranks <= PROVED_RANKS:
                algorithm.verify(cluster.ranks)  # as before a call
    many = len(args.collective) > 1
    table = Table(*([COLLECTIVE] if many else []), *_COLUMNS)
    names = ", ".join(args.collective)
    where = clusters[counts[0]].name
    print(f"# pycollective {__version__} {names}, simulated on {where}\n{table.header()}")
    curves: dict[tuple[str, str | Algorithm], list[Simulation]] = {each: [] for each in chosen}
    for ranks, cluster in clusters.items():
        for size in sizes:
            for collective, algorithm in chosen:
                if collective == "barrier" and size > sizes[0]:  # a barrier has no size
                    continue
                root = args.root if collective in ROOTED else 0
                result = algorithms.simulate(algorithm, cluster, size, collective, root=root)
                curves[collective, algorithm].append(result)
                cells = [
                    ranks, result.bytes, result.algorithm, f"{result.seconds * 1e6:.2f}",
                    f"{result.algorithm_bandwidth / 1e9:.3f}", f"{result.bus_bandwidth / 1e9:.3f}",
                    result.messages,
                ]  # fmt: skip
                print(table.line([collective, *cells] if many else cells), flush=True)
    return [*curves.values()]


def _algorithms(
    args: argparse.Namespace, clusters: list[Cluster]
) -> list[tuple[str, str | Algorithm]]:
    """Return all pairs of a collective and an algorithm that are simulated."""
    levels = any(1 < len(set(cluster.hosts)) < cluster.ranks for cluster in clusters)
    chosen: list[tuple[str, str | Algorithm]] = []
    missing = set(args.collective)
    for asked in args.algorithm:
        found: list[tuple[str, str | Algorithm]] = []
        lists = []
        for collective in args.collective:
            named = "hierarchical" in args.algorithm
            names = (
                tuning.candidates(collective) if levels or named else algorithms.names(collective)
            )
            lists.append(f"{collective}: {', '.join(names)}")
            if isinstance(asked, Algorithm):
                found += [(collective, asked)] if asked.collective == collective else []
            else:
                found += [(collective, name) for name in names if asked in (name, "all")]
        if not found and isinstance(asked, Algorithm):
            raise ValueError(
                f"{asked.name} is an algorithm of {asked.collective}: add -c {asked.collective}"
            )
        if not found:
            raise ValueError(f"no algorithm is called {asked!r} here ({'; '.join(lists)}; all)")
        chosen += found
        missing -= {collective for collective, _ in found}
    if missing:
        options.refuse_collectives(missing, args.algorithm)
    return list(dict.fromkeys(chosen))


def _verify(collective: str, algorithm: str | Algorithm, cluster: Cluster) -> None:
    """Prove an algorithm for the ranks of a cluster."""
    name = algorithm if isinstance(algorithm, str) else algorithm.name
    if (collective, algorithm) == ("all_reduce", "hierarchical"):
        algorithms.verify(algorithms.hierarchical(cluster.hosts))
    else:
        algorithms.verify(algorithm, cluster.ranks, collective)
    how = "exactly" if cluster.ranks <= PROVED_RANKS else "by fingerprints"
    print(f"# verified {how}: {name}, {cluster.ranks} ranks")


def _row(result: Simulation) -> dict[str, Any]:
    return {
        "collective": result.collective,
        "ranks": result.cluster.ranks,
        "size": result.bytes,
        "algorithm": result.algorithm,
        "time_us": result.seconds * 1e6,
        "algbw_gb_s": result.algorithm_bandwidth / 1e9,
        "busbw_gb_s": result.bus_bandwidth / 1e9,
        "messages": list(result.link_messages),
        "bytes": list(result.link_bytes),
    }


def _cluster(args: argparse.Namespace, ranks: int, most_bytes: int) -> Cluster:
    """Return the cluster that the options describe."""
    if args.cluster == "this-machine":
        if args.ranks_per_host:
            raise ValueError("--ranks-per-host describes other clusters, not this machine")
        if ranks > _MOST_THREADS:
            raise ValueError(
                f"this machine is measured with at most {_MOST_THREADS} threads, not {ranks}"
            )
        made = Cluster.this_machine(ranks, most_bytes)
    elif args.ranks_per_host:
        made = CLUSTERS[args.cluster](ranks, args.ranks_per_host)
    else:
        made = CLUSTERS[args.cluster](ranks)
    changes = _changes(args)
    rates = {name: changes[name] for name in _CHANGES if name in changes}
    said = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in changes.items())
    return replace(made.changed(**rates), name=f"{made.name}{f' with {said}' * bool(said)}")


def _changes(args: argparse.Namespace) -> dict[str, float]:
    """Return the numbers that replace those of the cluster."""
    given = {name: getattr(args, name) for name in ("ranks_per_host", *_CHANGES)}
    return {name: value for name, value in given.items() if value is not None}
