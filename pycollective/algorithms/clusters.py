"""Clusters that schedules are timed on: who sits where, and what a message costs between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pycollective import _core

__all__ = ["CLUSTERS", "Cluster", "Link"]


@dataclass(frozen=True)
class Link:
    """What a message costs between two ranks.

    Parameters
    ----------
    latency : float
        Seconds from the sender to the receiver.
    bandwidth : float
        Bytes a second of a rank's port, in each direction; infinite where only the ranks' copying
        takes time.
    overhead : float
        Seconds for which the sender is busy with a message, and the receiver.
    sender_copies, receiver_copies : bool
        The sender copies every message (into shared memory, into a socket), the receiver copies what
        it does not reduce at once, each at the cluster's ``copy_rate``.
    shared : bool
        All ranks of a place (a host) have one port together, that to the other places.
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

    `grid` and `of_hosts` make the usual ones of hosts with several ranks, `CLUSTERS` has presets.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    places : sequence of sequences of int
        For each level, the innermost first, the number of each rank's place.
    links : sequence of Link
        ``links[i]`` joins ranks that share a place on level i and none further in; the last one joins
        those that share none. One more than there are levels.
    reduce_rate, copy_rate : float
        Bytes of a result a second that a rank reduces, and copies.
    call_overhead : float
        Seconds before a rank's first step.
    cores : int
        Cores of each innermost place, or of all ranks where there are no places; they are shared by its
        ranks. 0 means one for each rank.
    name : str
        What it is called in tables.
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
        """Return ranks that are all joined by the same kind of link."""
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
        """Return ranks on hosts.

        Parameters
        ----------
        hosts : sequence
            The host of each rank: numbers, names.
        within, between : Link
            What joins ranks of one host, and of different ones.
        reduce_rate, copy_rate, name
            As of `Cluster`.
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
        """Return hosts with the same number of ranks each, in rank order; see `of_hosts`."""
        if hosts < 1 or ranks_per_host < 1:
            raise ValueError(f"{hosts} hosts with {ranks_per_host} ranks each are no cluster")
        place = [host for host in range(hosts) for _ in range(ranks_per_host)]
        return cls.of_hosts(
            place, within, between, reduce_rate=reduce_rate, copy_rate=copy_rate, name=name
        )

    @property
    def hosts(self) -> list[int]:
        """Each rank's host, numbered from 0: its innermost place, or one of its own."""
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
        """Return the cluster with other rates, and with other numbers of its outermost link."""
        link: dict[str, Any] = {"latency": latency, "bandwidth": bandwidth, "overhead": overhead}
        rates: dict[str, Any] = {"reduce_rate": reduce_rate, "copy_rate": copy_rate}
        link, rates = ({k: v for k, v in new.items() if v is not None} for new in (link, rates))
        return replace(self, links=(*self.links[:-1], replace(self.links[-1], **link)), **rates)

    @classmethod
    def this_machine(cls, ranks: int, bytes: int = 1 << 20) -> Cluster:
        """Return ranks that are threads of one process on this machine, measured in a second or two.

        Copying and reducing are measured on as many threads as there are cores and ranks, each with what
        one rank handles of an array of ``bytes``. The time of a message comes from two all-reduces of
        64 bytes a rank, ``ring`` and ``reduce_to_one``, of which one is a chain of messages and
        the other a fan. On a machine that is busy otherwise, so are the numbers.

        Parameters
        ----------
        ranks : int
            Number of threads.
        bytes : int
            Size of the arrays that will be asked about; what fits into a cache moves faster.
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
        """Return ranks on this machine, whose messages cost what two of their all-reduces say.

        What `this_machine` does, for ranks that need not be threads.

        Parameters
        ----------
        ranks, bytes : int
            As of `this_machine`.
        seconds : callable
            ``seconds(algorithm, bytes)`` returns how long a float32 all-reduce takes.
        link : Link
            Who copies, and the bandwidth; latency and overhead are added to it.
        call_overhead : float
            Seconds of each call that are no message's.
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
            if ranks == 2:  # both are the same: nothing tells latency from overhead
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
        numbers are round ones of the usual order, not measured: 25 µs through both TCP stacks and a
        switch, 5 µs of a core for a message; within a host, shared memory at 10 GB/s a copy and
        0.5 µs.
        """
        return cls.of_hosts(
            [rank // ranks_per_host for rank in range(ranks)],
            Link(0.5e-6, overhead=0.1e-6, sender_copies=True, receiver_copies=True),
            Link(25e-6, 1.25e9, 5e-6, sender_copies=True, receiver_copies=True, shared=True),
            reduce_rate=10e9,
            copy_rate=10e9,
            name="ethernet-10g",
        )

    @classmethod
    def infiniband_nvlink(cls, ranks: int, ranks_per_host: int = 8) -> Cluster:
        """Return hosts of GPUs: NVLink within, one 100 Gb/s InfiniBand adapter for each host.

        Latencies are those with which NCCL's own model chooses algorithms (``hwLat`` for a ring with
        the simple protocol in its ``src/graph/tuning.cc`` of 2020: 3.4 µs by NVLink, 9.6 µs by
        network). NVLink 3 carries 300 GB/s in each direction (NVIDIA A100 data sheet: 600 GB/s both
        ways), EDR InfiniBand 12.5 GB/s. Reducing reads two operands and writes one at the A100's
        1,555 GB/s of memory.
        """
        return cls.of_hosts(
            [rank // ranks_per_host for rank in range(ranks)],
            Link(3.4e-6, 300e9),
            Link(9.6e-6, 12.5e9, shared=True),
            reduce_rate=1555e9 / 3,
            copy_rate=1555e9 / 2,
            name="infiniband-nvlink",
        )


#: Presets by name: functions of the number of ranks, and of ranks on each host where there are several.
CLUSTERS = {
    "ethernet-10g": Cluster.ethernet_10g,
    "infiniband-nvlink": Cluster.infiniband_nvlink,
}
