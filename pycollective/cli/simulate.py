"""``pycollective simulate``: time algorithms on a cluster that need not be there."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pycollective import __version__, algorithms
from pycollective.algorithms import CLUSTERS, Cluster, Simulation
from pycollective.benchmark import report
from pycollective.cli import options

__all__ = ["add_parser"]

_DESCRIPTION = """\
Work out how long algorithms take on a described cluster, for growing arrays and numbers of ranks.

Nothing is run: each rank's clock goes through the steps of its schedule. A message costs an overhead at
both ends, a latency, and its bytes over the bandwidth of the ports that it passes; the ranks of a host
share the host's port. docs/algorithms.md says what is in the model and what is not.
"""

_CLUSTERS = """\
clusters:
  ethernet-10g        CPU hosts on 10 Gb/s Ethernet, 25 µs
  infiniband-nvlink   hosts of 8 GPUs: NVLink 3 within, one 100 Gb/s InfiniBand adapter each
  this-machine        threads on this machine, measured now (at most 64)
  or numbers of one's own: --latency, --bandwidth and so on, in place of those between hosts

examples:
  pycollective simulate                                     every all-reduce among 16 hosts
  pycollective simulate --cluster infiniband-nvlink --ranks 64,256,1024 --plot scaling.png
  pycollective simulate --ranks 10000 --algorithm ring -b 1G -e 1G --verify
  pycollective simulate --collective broadcast --latency 1e-6 --bandwidth 12.5e9
"""


_number_of_ranks = options.whole(1, 1_000_000)


def _numbers(text: str) -> list[int]:
    return [_number_of_ranks(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"not 0 or more seconds: {text!r}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not value > 0:
        raise argparse.ArgumentTypeError(f"not a rate in bytes a second: {text!r}")
    return value


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = commands.add_parser(
        "simulate",
        help="time algorithms on a described cluster",
        description=_DESCRIPTION,
        epilog=_CLUSTERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = {"type": options.size, "metavar": "SIZE"}
    p.add_argument("-b", "--min-bytes", default=1 << 10, help="first size (1K)", **size)
    p.add_argument("-e", "--max-bytes", default=64 << 20, help="last size (64M)", **size)
    p.add_argument(
        "-f", "--factor", type=options.positive, default=16, metavar="N", help="to the next (16)"
    )
    p.add_argument(
        "--ranks", type=_numbers, default=[16], metavar="N,…", help="numbers of ranks (16)"
    )
    p.add_argument("--collective", default="all_reduce", help="which collective (all_reduce)")
    p.add_argument(
        "--root",
        type=options.whole(0, 1_000_000),
        default=0,
        metavar="RANK",
        help="where there is one (0)",
    )
    p.add_argument("--algorithm", default="all", metavar="NAME,…", help="which schedules (all)")
    p.add_argument(
        "--cluster",
        default="ethernet-10g",
        choices=[*CLUSTERS, "this-machine"],
        help="where (ethernet-10g)",
    )
    p.add_argument(
        "--ranks-per-host", type=options.positive, metavar="N", help="as the cluster has them"
    )
    p.add_argument("--latency", type=_seconds, metavar="S", help="seconds between hosts")
    p.add_argument("--bandwidth", type=_rate, metavar="RATE", help="bytes a second between hosts")
    p.add_argument("--overhead", type=_seconds, metavar="S", help="seconds a message at each end")
    p.add_argument("--reduce-rate", type=_rate, metavar="RATE", help="bytes a second of a rank")
    p.add_argument("--copy-rate", type=_rate, metavar="RATE", help="bytes a second of a rank")
    p.add_argument("--verify", action="store_true", help="prove the schedules first")
    p.add_argument("--plot", type=options.picture, metavar="FILE", help="draw .png, .svg or .pdf")
    p.add_argument("--json", type=options.file, metavar="FILE", help="write the results there too")
    p.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; what makes no sense is said in a line."""
    if args.factor < 2:
        raise SystemExit("pycollective simulate: -f must be at least 2")
    if args.max_bytes < args.min_bytes or args.min_bytes < 1:
        raise SystemExit(
            f"pycollective simulate: sizes must grow, not from {args.min_bytes} to {args.max_bytes}"
        )
    try:
        return _run(args)
    except (ValueError, MemoryError) as error:
        raise SystemExit(f"pycollective simulate: {error}") from None


def _run(args: argparse.Namespace) -> int:
    known = algorithms.names(args.collective)
    chosen = known if args.algorithm == "all" else args.algorithm.split(",")
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"no {args.collective} algorithm is called {name!r}; there are {', '.join(known)}"
            )
    sizes = [args.min_bytes]
    while sizes[-1] * args.factor <= args.max_bytes:
        sizes.append(sizes[-1] * args.factor)
    if args.collective == "barrier":  # it has no size
        del sizes[1:]
    counts = sorted(set(args.ranks))
    if args.root >= counts[0]:
        raise ValueError(f"root {args.root} is not among the {counts[0]} ranks")
    if args.plot:
        report.need_plot()
    if args.verify:
        for ranks in counts:
            for name in chosen:
                algorithms.verify(name, ranks, args.collective)
                how = "exactly" if ranks <= 64 else "by fingerprints"
                print(f"# verified {how}: {name}, {ranks} ranks")
    made = {ranks: _cluster(args, ranks, sizes[-1]) for ranks in counts}
    print(f"# pycollective {__version__} {args.collective}, simulated on {args.cluster}")
    print(
        f"# {'ranks':>8} {'size':>12} {'algorithm':>17} {'time':>14} {'algbw':>9} {'busbw':>9} "
        f"{'messages':>12}"
    )
    print(f"# {'':>8} {'(B)':>12} {'':>17} {'(us)':>14} {'(GB/s)':>9} {'(GB/s)':>9} {'':>12}")
    rows = []
    for ranks in counts:
        for size in sizes:
            for name in chosen:
                result = algorithms.simulate(
                    name, made[ranks], size, args.collective, root=args.root
                )
                rows.append(_row(result))
                print(
                    f"  {ranks:>8} {result.bytes:>12} {name:>17} {result.seconds * 1e6:>14.2f} "
                    f"{result.algorithm_bandwidth / 1e9:>9.3f} {result.bus_bandwidth / 1e9:>9.3f} "
                    f"{result.messages:>12}",
                    flush=True,
                )
    if args.json:
        written = {
            "command": "pycollective simulate",
            "version": __version__,
            "cluster": args.cluster,
            "results": rows,
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")
        print(f"# written to {args.json}")
    if args.plot:
        algorithms.plot(
            chosen,
            made.__getitem__,
            ranks=counts,
            sizes=sizes,
            collective=args.collective,
            file=args.plot,
        )
        print(f"# drawn in {args.plot}")
    return 0


def _row(result: Simulation) -> dict[str, Any]:
    return {
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
    """What the options describe."""
    if args.cluster == "this-machine":
        if ranks > 64:
            raise ValueError(f"this machine is measured with at most 64 threads, not {ranks}")
        made = Cluster.this_machine(ranks, most_bytes)
    elif args.ranks_per_host:
        made = CLUSTERS[args.cluster](ranks, args.ranks_per_host)
    else:
        made = CLUSTERS[args.cluster](ranks)
    return made.changed(
        latency=args.latency,
        bandwidth=args.bandwidth,
        overhead=args.overhead,
        reduce_rate=args.reduce_rate,
        copy_rate=args.copy_rate,
    )
