"""``pycollective doctor``: show and check the cluster of this process, and measure its links."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective import _core, array_backend, nccl, observe
from pycollective.atomic_files import write_atomically
from pycollective.cli import options
from pycollective.cli.version import facts, versions
from pycollective.cluster import ClusterResolver
from pycollective.cluster.examined import are_errors
from pycollective.cluster.membership import Membership, examine, source_of
from pycollective.cluster.ports import has_port
from pycollective.cluster.sources import sources_of_environment
from pycollective.comm import Communicator, on_device
from pycollective.distribute.multi_worker import join_workers
from pycollective.distribute.workers import heartbeat_timeout
from pycollective.errors import CollectiveError, NcclNotFoundError, RendezvousError
from pycollective.launch.description import LISTENER, RANK, forced, host_and_port, protection
from pycollective.launch.links import Findings, probe
from pycollective.nccl.loading import require_cuda
from pycollective.nn import cudnn

_DESCRIPTION = """\
Show what pycollective.init(), MultiWorkerMirroredStrategy() and ParameterServerStrategy() would use
here: the source of the cluster's description, the number of this worker, the protection of the
connections, and all errors at once. With several workers, run the command on each of them, with the
environment of the training program. In a cluster with parameter servers, also run it on these and on
the chief. The workers try every link that they need. Each worker reports the links that do not
work, what it saw (a refused port, dropped packets, a missing route), and where to look. If all links
work, they are measured.
"""

_EPILOG = """\
examples:
  pycollective doctor
  pycollective doctor --json report.json
  pycollective run -n 2 -m pycollective doctor
  TF_CONFIG='{"cluster": {"worker": ["a:9000", "b:9000"]}, "task": {"type": "worker", "index": 0}}' \\
      pycollective doctor --timeout 60
"""

_PINGS = 200
_BULK = 4 << 20
_BULKS = 5
_PART_SECONDS = 1.0
"""Seconds of each part of a measurement, unless a single message takes longer."""
_RENDEZVOUS_SECONDS = 10.0


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands,
        "doctor",
        run,
        help="show the cluster of this process, and test its links",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    p.add_argument("--timeout", type=options.real(1e-3, 1e6), default=30.0, metavar="SECONDS",
        help="time to wait for the other workers (30)")  # fmt: skip
    p.add_argument("--json", type=options.file, metavar="FILE",
        help="also write versions, extras and findings as JSON to FILE, in a launcher's group to "
        "FILE with .rank0, .rank1, … before the suffix")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if something is wrong."""
    report: dict[str, Any] = {"versions": versions(), "wrong": [], "doubtful": []}
    status = _examine(args.timeout, report)
    if args.json is not None:
        path = args.json
        if rank := os.environ.get(RANK):
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        write_atomically(str(path), (json.dumps(report, indent=1) + "\n").encode())
    return status


def _examine(timeout: float, report: dict[str, Any]) -> int:
    """Print the findings and add them to the report; return 1 if something is wrong."""
    gpus, _ = array_backend.gpu_count()
    cuda = "with CUDA" if _core.cuda.runtime_version() else "without CUDA"
    print(f"host: {platform.node()}\n{facts(report['versions'])}")
    report |= {"cores": _core.usable_cores(), "gpus": gpus, "core": cuda}
    for line in _gpus(gpus) if gpus else ():
        print(line)
    try:
        sources = sources_of_environment()
        resolver = sources[0].resolver(os.environ) if sources else None
    except (RuntimeError, ValueError, TypeError) as error:
        print(f"cluster: WRONG: {sources[0]}: {error}")
        report["wrong"] = [f"{sources[0]}: {error}"]
        return 1
    member, wrong, doubtful = examine(
        resolver, servers=True, listens=LISTENER in os.environ, environ=os.environ
    )
    for check in (observe.settings, heartbeat_timeout, lambda: forced(os.environ)):
        try:
            check()
        except (ValueError, RendezvousError) as error:
            wrong = [*wrong, str(error)]
    if resolver is None:
        print("cluster: none: no variable describes one; this process is alone")
        report["wrong"] = wrong
        for line in wrong:
            print(f"  WRONG: {line}")
        return 1 if wrong else 0
    task = _task(resolver)
    if member is not None and member.size > 1:
        kind = "tasks with parameter servers" if _has_servers(member) else "workers"
        task = f"{member.size} {kind}, this is {member.names[member.rank]}"
    elif not wrong:
        task += " trains alone"
    print(f"cluster: {source_of(resolver)}: {task}")
    for source in sources[1:]:
        print(f"  ignored, because the first source is used: {source}")
    if member is not None and member.size > 1:
        for rank, address in enumerate(member.addresses):
            print(f"  {member.names[rank]}: {address}{', this process' * (rank == member.rank)}")
    try:
        if are_errors(os.environ):
            wrong, doubtful = [*wrong, *doubtful], []
        protected = protection()
    except (ValueError, RendezvousError) as error:
        wrong, protected = [*wrong, str(error)], ""
    report |= {"cluster": source_of(resolver), "wrong": wrong, "doubtful": doubtful}
    if member is not None:
        report["workers"] = dict(zip(member.names, member.addresses, strict=False))
    for line in doubtful:
        print(f"  DOUBTFUL: {line}")
    for line in wrong:
        print(f"  WRONG: {line}")
    if wrong:
        return 1
    if member is None or member.size == 1:
        return 0
    print(f"  {protected}")
    later = [
        name
        for name, address in zip(member.names, member.addresses, strict=False)
        if not has_port(address)
    ]
    if later:
        names = ", ".join(later)
        print(
            f"the links are not tested, because tasks choose their ports when they begin: {names}"
        )
        return 0
    return _test_links(member, timeout, report)


def _has_servers(member: Membership) -> bool:
    return any(name.startswith("ps") for name in member.names)


def _task(resolver: ClusterResolver) -> str:
    try:
        return f"{resolver.task_type} {resolver.task_id}"
    except (RuntimeError, ValueError, TypeError):
        return "a task that cannot be determined"


def _test_links(member: Membership, seconds: float, report: dict[str, Any]) -> int:
    """Try all links, then join the group and measure them; return 1 if something is wrong.

    The findings are also added to the report.
    """
    print(
        f"waiting up to {seconds:g} s for the others, which must run this command too", flush=True
    )
    begin = time.monotonic()
    try:
        if member.addresses and not _is_one_host(member):
            findings = probe(member.rank, member.size, member.addresses, seconds)
            report["wrong"] = diagnosis(findings, member, seconds)
            for line in report["wrong"]:
                print(f"  WRONG: {line}", flush=True)
            if report["wrong"]:
                return 1
            print(f"each of the {member.size * (member.size - 1) // 2} links can be connected")
        left = seconds - (time.monotonic() - begin)
        communicator = join_workers(member, max(left, min(seconds, _RENDEZVOUS_SECONDS)))
    except RendezvousError as error:
        print(f"WRONG: {error}")
        report["wrong"] = [str(error)]
        return 1
    try:
        print(f"joined: {communicator}, hosts by worker: {communicator.hosts}")
        table = _measured_links(communicator)
        report["links"] = _as_rows(table, member.names)
        for line in _lines(table, communicator.rank, member.names):
            print(line)
    except CollectiveError as error:
        print(f"WRONG: while links were measured: {error}")
        report["wrong"] = [f"while links were measured: {error}"]
        return 1
    finally:
        communicator.close()
    return 0


def _is_one_host(member: Membership) -> bool:
    """Return True if all workers use worker 0's loopback address, so that there are no links to try."""
    host, _ = host_and_port(member.addresses[0])
    return len(member.addresses) < member.size and host in ("127.0.0.1", "::1", "localhost")


def _gpus(count: int) -> list[str]:
    """Return lines about the GPUs, and the libraries that train and communicate on them."""
    version = nccl.device.driver_version()
    lines = [f"  GPU {i}: {nccl.device.description(i)}" for i in range(count)]
    lines.append(
        f"on GPUs: CuPy {nccl.device.library_version()}, a driver for CUDA {version // 1000}."
        f"{version % 1000 // 10} and older"
    )
    found = cudnn.library_version()
    lines.append(
        f"convolution on GPUs: cuDNN {found}"
        if found
        else "convolution on GPUs: by patches and cuBLAS; faster with cuDNN: "
        "pip install nvidia-cudnn-frontend, and nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
    )
    lines.append(f"between GPUs: {_nccl()}")
    return lines


def _nccl() -> str:
    try:
        found = nccl.library()
        require_cuda(found, nccl.device.driver_version())
    except NcclNotFoundError as error:
        way = "over the host" if on_device.runtime() is None else "threads by the core's kernels"
        return f"no NCCL, so {way}: {error}"
    return f"NCCL {found.version_text}, {found.path}"


def diagnosis(findings: Findings, member: Membership, seconds: float) -> list[str]:
    """Return a line for each worker and link that does not work, with places to look at."""
    lines = []
    for rank, addresses in sorted(findings.others.items()):
        lines.append(
            f"{member.names[rank]} has another description: its cluster is {', '.join(addresses)}"
        )
    for rank in findings.missing(member.size):
        name = _placed(findings, member, rank)
        told = [
            f"{member.names[a]}: {_SEEN[kind]}{f' ({text})' * bool(text)}"
            for (a, b), (kind, text) in sorted(findings.links.items())
            if b == rank
        ]
        told += [
            f"{member.names[a]}: its own host sends nothing there ({text}): {_ROUTE.format(host)}"
            for (a, b), text in sorted(findings.routes.items())
            if b == rank
            for host in [findings.places[b][0]]
        ]
        lines.append(
            f"{name}: no sign of it within {seconds:g} s: is this command running there, "
            f"with this description and this secret?{' Seen by ' * bool(told)}{'; '.join(told)}"
        )
    for a, b in findings.broken():
        kind, text = findings.links[a, b]
        host, port = findings.places[b]
        back = findings.routes.get((b, a), "")
        others = [
            member.names[r]
            for r in range(member.size)
            if findings.links.get((r, b)) == ("works", "")
        ]
        also = f", and {', '.join(others)} reached it" * bool(others)
        look = _LOOK[kind].format(a=member.names[a], b=member.names[b], host=host, port=port)
        if b and len(member.addresses) < member.size:
            look += f". {_ANY_PORT}"
        if kind == "silent" and back:
            asked = findings.places.get(a, ("that host", 0))[0]
            look = (
                f"{member.names[b]}'s own host sends nothing back ({back}): {_ROUTE.format(asked)}"
            )
        lines.append(
            f"{member.names[a]} -> {_placed(findings, member, b)}: "
            f"{_SEEN[kind]}{f' ({text})' * bool(text)}, though {member.names[b]} runs{also}. {look}"
        )
    if not lines and not findings.all_work(member.size):
        lines.append(f"not all links could be tried within {seconds:g} s: give a longer --timeout")
    return lines


_ANY_PORT = (
    "The description names worker 0's port only: the others listen at ports that the system chooses, "
    "all of which must be open between the hosts"
)
_ROUTE = "ask its routing table with `ip route get {}`"
_SEEN = {
    "works": "it can be connected to",
    "refused": "the host answers, but no process listens at the port",
    "silent": "no answer, packets are dropped",
    "here": "its own host sends nothing there",
    "unreachable": "there is no route to the host",
    "turned away": "a worker there refuses",
    "other": "no connection",
}
_LOOK = {
    "refused": "Look for a firewall that rejects port {port} on {b}'s host or on the way. Check that "
    "{a} resolves {host} to that host (`ip route get {host}`, `ip neigh`)",
    "silent": "Look for a firewall or a security group that drops port {port} on {b}'s host or on the "
    "way. Look also for routes that end on the way (`ip route get` on both hosts)",
    "here": "Look at the routes (`ip route get {host}`) and the firewall of {a}'s own host",
    "unreachable": "Look at the routes of {a}'s host (`ip route get {host}`), and at routers between",
    "turned away": "All workers need the same secret, and TLS or none",
    "other": "Look at the error above",
    "works": "",
}


def _placed(findings: Findings, member: Membership, rank: int) -> str:
    place = findings.places.get(rank)
    if place is None:
        return member.names[rank]
    host = f"[{place[0]}]" if ":" in place[0] else place[0]
    return f"{member.names[rank]} at {host}:{place[1]}"


def _measured_links(communicator: Communicator) -> Any:
    """Measure every link in turn.

    Returns
    -------
    array
        Three tables: seconds, and bytes per second from the row's worker to the column's, and back. Rows
        are lower than columns.
    """
    size, rank = communicator.size, communicator.rank
    table = np.full((3, size, size), np.nan)
    for a in range(size):
        for b in range(a + 1, size):
            communicator.barrier()
            numbers = np.zeros(3)
            if rank in (a, b):
                numbers[:] = _measured(communicator, a + b - rank)
            table[:, a, b] = communicator.broadcast(numbers, root=a)
    return table


def _lines(table: Any, rank: int, names: Sequence[str]) -> list[str]:
    """Return lines for this worker's links, on worker 0 also for all links."""
    size = table.shape[1]
    lines = [
        _line(names[a], names[b], *table[:, a, b])
        for a in range(size)
        for b in range(a + 1, size)
        if rank in (a, b)
    ]
    return lines + (_table(table) if rank == 0 and size > 2 else [])


def _as_rows(table: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the numbers of all links for the report."""
    return [
        {
            "workers": [names[a], names[b]],
            "one_way_us": round(float(table[0, a, b]) * 1e6, 3),
            "there_mb_s": round(float(table[1, a, b]) / 1e6, 1),
            "back_mb_s": round(float(table[2, a, b]) / 1e6, 1),
        }
        for a in range(table.shape[1])
        for b in range(a + 1, table.shape[1])
    ]


def _line(a: str, b: str, latency: float, there: float, back: float) -> str:
    return (
        f"  {a} - {b}: {latency * 1e6:.1f} µs one way, {there / 1e6:.0f} MB/s there, "
        f"{back / 1e6:.0f} MB/s back"
    )


def _table(numbers: Any) -> list[str]:
    """Return a table of all links: rows send, columns receive."""
    size = numbers.shape[1]
    both = np.where(np.isnan(numbers[0]), numbers[0].T, numbers[0]) * 1e6
    speed = np.where(np.isnan(numbers[1]), numbers[2].T, numbers[1]) / 1e6
    lines = []
    for title, values, form in (
        ("µs one way", both, "10.1f"),
        ("MB/s, from the row's worker to the column's", speed, "10.0f"),
    ):
        lines.append(f"{title}:")
        lines.append("  worker" + "".join(f"{b:>10}" for b in range(size)))
        for a in range(size):
            cells = [f"{'-':>10}" if a == b else f"{values[a, b]:{form}}" for b in range(size)]
            lines.append(f"  {a:>6}" + "".join(cells))
    slow = np.unravel_index(np.nanargmin(speed), speed.shape)
    late = np.unravel_index(np.nanargmax(both), both.shape)
    lines.append(
        f"slowest: {slow[0]} -> {slow[1]}, {speed[slow]:.0f} MB/s; longest latency: "
        f"{min(late)} - {max(late)}, {both[late]:.1f} µs"
    )
    return lines


def _measured(communicator: Communicator, peer: int) -> tuple[float, float, float]:
    """Measure the link to a peer, which makes the same call; the lower rank leads.

    Returns
    -------
    tuple
        Seconds of a small message, bytes per second to the peer, and from the peer. Only the leader's
        numbers are valid.
    """
    leads = communicator.rank < peer
    small, large = np.zeros(1), np.zeros(_BULK, np.uint8)

    def exchange(there: Any, back: Any, rounds: int) -> float:
        """Return the seconds of a round; the first byte of the leader's message marks the last."""
        last = there.view(np.uint8)
        taken: list[float] = []
        until = time.perf_counter() + _PART_SECONDS
        while not taken or not last[0]:
            begin = time.perf_counter()
            if leads:
                last[0] = begin > until or len(taken) == rounds - 1
                communicator.send(there, peer)
                communicator.recv(back, peer)
            else:
                communicator.recv(there, peer)
                communicator.send(back, peer)
            taken.append(time.perf_counter() - begin)
        return float(np.median(taken))

    way = exchange(small, small.copy(), _PINGS) / 2
    there, back = exchange(large, small, _BULKS), exchange(small, large, _BULKS)
    return way, _speed(there, way), _speed(back, way)


def _speed(seconds: float, way: float) -> float:
    """Return the bytes per second of a round in which one message is large and the other small.

    The large message takes at least half of the round, because it takes at least as long as the
    small one. ``way``, the time of a small message, may be longer than half of the round if it was
    measured at a busier moment.
    """
    return _BULK / max(seconds - way, seconds / 2)
