"""Descriptions of clusters for the simulation: the ranks' hosts, and the cost of a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pycollective import _core


@dataclass(frozen=True)
class Link:
    """Cost of a message between two ranks.

    Parameters
    ----------
    latency : float
        Seconds that a message travels from the sender to the receiver.
    bandwidth : float
        Bytes per second of a rank's port, in each direction; infinite if only the ranks' copying takes
        time.
    overhead : float
        Seconds that a message keeps the sender busy, and again the receiver.
    sender_copies : bool
        The sender copies every message, into shared memory or into a socket, at ``copy_rate``.
    receiver_copies : bool
        The receiver copies each message that it does not reduce at once, at ``copy_rate``.
    shared : bool
        All ranks of a place (a host) share one port to the other places.
    """

    latency: float
    bandwidth: float = math.inf
    overhead: float = 0.0
    sender_copies: bool = False
    receiver_copies: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Cluster:
    """Ranks in places within places (sockets, hosts, racks), and the links between them.

    `grid` and `of_hosts` describe hosts with several ranks each; `CLUSTERS` has presets.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    places : sequence of sequences of int
        One sequence for each level, the innermost level first: the number of each rank's place.
    links : sequence of Link
        ``links[i]`` joins ranks that share a place on level i and on no inner level. The last link
        joins ranks that share no place, so there is one more link than levels.
    reduce_rate, copy_rate : float
        Bytes per second of results that a rank reduces, and that it copies.
    call_overhead : float
        Seconds before a rank's first step.
    cores : int
        Cores of each innermost place (of the whole cluster if there are no places), shared by its
        ranks. 0 means one core for each rank.
    name : str
        Name of the cluster in tables.
    """

    ranks: int
    places: Sequence[Sequence[int]]
    links: Sequence[Link]
    reduce_rate: float = math.inf
    copy_rate: float = math.inf
    call_overhead: float = 0.0
    cores: int = 0
    name: str = field(default="cluster", compare=False)

    @classmethod
    def flat(
        cls,
        ranks: int,
        link: Link,
        *,
        reduce_rate: float = math.inf,
        copy_rate: float = math.inf,
        name: str = "cluster",
    ) -> Cluster:
        """Return a cluster whose ranks are all joined by the same kind of link."""
        return cls(ranks, (), (link,), reduce_rate, copy_rate, name=name)

    @classmethod
    def of_hosts(
        cls,
        hosts: Sequence[Hashable],
        within: Link,
        between: Link,
        *,
        reduce_rate: float = math.inf,
        copy_rate: float = math.inf,
        name: str = "cluster",
    ) -> Cluster:
        """Return a cluster of ranks on hosts.

        Parameters
        ----------
        hosts : sequence
            The host of each rank, as a number or a name.
        within, between : Link
            The link between ranks of one host, and between ranks of different hosts.
        reduce_rate, copy_rate, name
            As in `Cluster`.
        """
        numbers: dict[Hashable, int] = {}
        place = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        return cls(len(place), (place,), (within, between), reduce_rate, copy_rate, name=name)

    @classmethod
    def grid(
        cls,
        hosts: int,
        ranks_per_host: int,
        within: Link,
        between: Link,
        *,
        reduce_rate: float = math.inf,
        copy_rate: float = math.inf,
        name: str = "cluster",
    ) -> Cluster:
        """Return a cluster of hosts with equally many ranks, in rank order; see `of_hosts`."""
        if hosts < 1 or ranks_per_host < 1:
            raise ValueError(
                f"a cluster needs at least 1 host and 1 rank per host, not {hosts} and {ranks_per_host}"
            )
        place = [host for host in range(hosts) for _ in range(ranks_per_host)]
        return cls.of_hosts(
            place, within, between, reduce_rate=reduce_rate, copy_rate=copy_rate, name=name
        )

    @property
    def hosts(self) -> list[int]:
        """Each rank's host, numbered from 0: the rank's innermost place."""
        numbers: dict[int, int] = {}
        places = self.places[0] if self.places else range(self.ranks)
        return [numbers.setdefault(place, len(numbers)) for place in places]

    def changed(
        self,
        *,
        latency: float | None = None,
        bandwidth: float | None = None,
        overhead: float | None = None,
        reduce_rate: float | None = None,
        copy_rate: float | None = None,
    ) -> Cluster:
        """Return a copy with another outermost link and other rates; None keeps a value."""
        link: dict[str, Any] = {"latency": latency, "bandwidth": bandwidth, "overhead": overhead}
        rates: dict[str, Any] = {"reduce_rate": reduce_rate, "copy_rate": copy_rate}
        link, rates = ({k: v for k, v in new.items() if v is not None} for new in (link, rates))
        return replace(self, links=(*self.links[:-1], replace(self.links[-1], **link)), **rates)

    @classmethod
    def this_machine(cls, ranks: int, bytes: int = 1 << 20) -> Cluster:
        """Measure this machine and return a cluster of ranks that are threads of one process.

        Copying and reducing are measured on all cores that the ranks use, each with one rank's share of
        ``bytes``. The cost of a message follows from two all-reduces with messages of 64 bytes:
        ``ring``, a chain of messages, and ``reduce_to_one``, a fan. The measurement takes a second
        or two. Other programs on the machine distort the result.

        Parameters
        ----------
        ranks : int
            Number of threads.
        bytes : int
            Size of the arrays to be simulated; arrays that fit into a cache move faster.

        Raises
        ------
        ValueError
            ``ranks`` or ``bytes`` is below 1.
        """

        def seconds(algorithm: str, size: int) -> float:
            turns = [_core.measure_all_reduce(algorithm, ranks, size, 200) for _ in range(3)]
            return float(min(np.median(turn) for turn in turns))

        return cls.fitted(ranks, bytes, seconds, Link(0.0, receiver_copies=True))

    @classmethod
    def fitted(
        cls,
        ranks: int,
        bytes: int,
        seconds: Callable[[str, int], float],
        link: Link,
        call_overhead: float = 0.0,
    ) -> Cluster:
        """Return a cluster of ranks on this machine; two all-reduces give the cost of a message.

        `this_machine` does the same for ranks that are threads.

        Parameters
        ----------
        ranks, bytes : int
            As in `this_machine`.
        seconds : callable
            ``seconds(algorithm, bytes)`` returns the seconds that a float32 all-reduce takes.
        link : Link
            Copies and bandwidth of the link; latency and overhead are replaced by the measured ones.
        call_overhead : float
            Seconds of each call that do not belong to a message.

        Raises
        ------
        ValueError
            ``ranks`` or ``bytes`` is below 1.
        """
        if ranks < 1 or bytes < 1:
            raise ValueError(f"cannot measure {ranks} ranks with {bytes} bytes")
        cores = _core.usable_cores()
        part = max(-(-bytes // ranks), 8 << 10)
        iterations = max(5, min(100, (32 << 20) // part))
        turns = [_core.measure_rates(min(ranks, cores), part, iterations) for _ in range(3)]
        copy_rate, reduce_rate = (float(np.median(rates)) for rates in zip(*turns, strict=True))
        if ranks > 1:
            # The chain takes 2(n-1) (latency + 2 overhead), the fan 2 latency + 2n overhead.
            chain, fan = seconds("ring", 64 * ranks), seconds("reduce_to_one", 64)
            one = max(chain - call_overhead, 0.0) / (2 * (ranks - 1))
            fan = max(fan - call_overhead, 0.0) / 2
            if ranks == 2:  # chain and fan are the same: latency and overhead cannot be told apart
                overhead = one / 4
            else:
                overhead = min(max((fan - one) / (ranks - 2), 0.0), one / 2)
            link = replace(link, latency=one - 2 * overhead, overhead=overhead)
        made = cls.flat(
            ranks, link, reduce_rate=reduce_rate, copy_rate=copy_rate, name="this-machine"
        )
        return replace(made, cores=cores, call_overhead=call_overhead)

    @classmethod
    def ethernet_10g(cls, ranks: int, ranks_per_host: int = 1) -> Cluster:
        """Return CPU hosts on 10 Gb/s Ethernet.

        1.25 GB/s is the standard's rate (IEEE 802.3ae), shared by the ranks of a host. The other
        numbers are typical, not measured: 25 µs through both TCP stacks and a switch, and 5 µs of a
        core for a message. Within a host, shared memory copies 10 GB/s with a latency of 0.5 µs.
        """
        return cls.of_hosts(
            _places(ranks, ranks_per_host),
            Link(0.5e-6, overhead=0.1e-6, sender_copies=True, receiver_copies=True),
            Link(25e-6, 1.25e9, 5e-6, sender_copies=True, receiver_copies=True, shared=True),
            reduce_rate=10e9,
            copy_rate=10e9,
            name="ethernet-10g",
        )

    @classmethod
    def infiniband_nvlink(cls, ranks: int, ranks_per_host: int = 8) -> Cluster:
        """Return hosts of GPUs: NVLink within, one 100 Gb/s InfiniBand adapter for each host.

        The latencies are 3.4 µs over NVLink and 9.6 µs over the network. Both are those of NCCL's
        own model of 2020 (``hwLat`` in ``src/graph/tuning.cc``, ring, simple protocol). NVLink 3
        carries 300 GB/s in each direction (NVIDIA A100 data sheet: 600 GB/s both ways), EDR
        InfiniBand 12.5 GB/s. A reduction reads two operands and writes one at the A100's memory
        rate of 1,555 GB/s.
        """
        return cls.of_hosts(
            _places(ranks, ranks_per_host),
            Link(3.4e-6, 300e9),
            Link(9.6e-6, 12.5e9, shared=True),
            reduce_rate=1555e9 / 3,
            copy_rate=1555e9 / 2,
            name="infiniband-nvlink",
        )


def _places(ranks: int, ranks_per_host: int) -> list[int]:
    """Return the number of each rank's host."""
    if ranks_per_host < 1:
        raise ValueError(f"a cluster needs at least 1 rank per host, not {ranks_per_host}")
    return [rank // ranks_per_host for rank in range(ranks)]


#: Presets by name: functions of the number of ranks and, optionally, of the ranks on each host.
CLUSTERS = {
    "ethernet-10g": Cluster.ethernet_10g,
    "infiniband-nvlink": Cluster.infiniband_nvlink,
}
