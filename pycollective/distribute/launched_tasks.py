"""The tasks of a cluster with parameter servers among the processes that a launcher has started."""

from __future__ import annotations

import os

import numpy as np

from pycollective.cluster.membership import membership_of_environment
from pycollective.cluster.ports import reserved_address
from pycollective.cluster.spec import ClusterSpec
from pycollective.distribute.multi_worker import join_workers
from pycollective.distribute.task_links import JOIN_SECONDS

_BYTES = 64
"""The bytes of an address."""


def cluster_of_launcher(servers: int) -> tuple[ClusterSpec, str, int] | None:
    """Return the cluster of all ranks, and this process's task in it; None for a single process.

    Rank 0 is the chief, the next ranks are the parameter servers, and the others are workers. The ranks
    exchange their addresses in a group, which ends before this function returns.
    """
    member = membership_of_environment(os.environ)
    if member is None or member.size == 1:
        return None
    if member.size < servers + 2:
        raise ValueError(
            f"{member.source} has started {member.size} processes, and a cluster needs a chief, "
            f"{servers} parameter servers and a worker: start at least {servers + 2}, or set num_ps"
        )
    with join_workers(member, JOIN_SECONDS) as group:
        seen = np.array([group._group.address(rank) for rank in range(member.size)], f"S{_BYTES}")
        every = group.all_gather(seen.view(np.uint8)).view(f"S{_BYTES}")
        # A rank of another host sees this one's address. Without such a rank all are on one host.
        others = [text.decode() for text in every.reshape(-1, member.size)[:, member.rank] if text]
        host = others[0].rpartition(":")[0] or others[0] if others else "127.0.0.1"
        address = np.array([reserved_address(host)], f"S{_BYTES}")
        all_addresses = group.all_gather(address.view(np.uint8)).view(f"S{_BYTES}")
        addresses = [text.decode() for text in all_addresses.ravel()]
    jobs = {"ps": addresses[1 : 1 + servers], "worker": addresses[1 + servers :]}
    if member.rank == 0:
        return ClusterSpec(jobs), "chief", 0
    number = member.rank - 1
    job = ("ps", number) if number < servers else ("worker", number - servers)
    return ClusterSpec(jobs), *job
