"""The description of a group that a process has before the rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pycollective import tuning
from pycollective.environment import MAX_RANKS
from pycollective.errors import RendezvousError

if TYPE_CHECKING:
    from pycollective.launch.ended import Ended
    from pycollective.launch.members import Roster
    from pycollective.launch.tls import Tls

__all__ = ["MAX_RANKS", "MAX_STREAMS", "Description", "FirstRankLostError"]

MAX_STREAMS = 8


class FirstRankLostError(RendezvousError):
    """Rank 0 was lost during the rendezvous, or made the group without this rank.

    A new rendezvous may succeed.
    """


@dataclass
class Description:
    """The group, and this process in it, as the environment describes them.

    Attributes
    ----------
    rank, size : int
        This process's rank, and the number of ranks.
    host, port : str, int
        Rank 0's address.
    secret : bytes
        The group's secret; empty for none.
    insecure : bool
        True: the group trusts everybody on the network and needs no secret.
    interface : str
        The pattern of the network interfaces to use; empty for any.
    streams : int
        Connections for collectives between every two ranks. All ranks use rank 0's value.
    listener : int
        The descriptor of rank 0's listening socket if the launcher created it, else -1.
    host_id : str
        A text that is equal on ranks that may share memory; empty to use TCP only.
    one_host : bool
        True: report an error if not all ranks share memory.
    choices : tuning.Tables
        The tables for ``algorithm="auto"``. All ranks use rank 0's.
    own : tuple or None
        The host and port where this rank listens for its peers; None for any port.
    least, patience : int, float
        After ``patience`` seconds ``least`` ranks are enough, and are renumbered. 0: all must join.
    roster : Roster or None
        Rank 0's, if ``least`` is not 0.
    tls : Tls or None
        TLS for the connections of the rendezvous and for control connections.
    ended : Ended or None
        The ranks that have ended, as the launcher reports them.
    known_as : tuple of int
        In a split, the ranks' numbers in the group that was split.
    """

    rank: int
    size: int
    host: str
    port: int
    secret: bytes
    insecure: bool = False
    interface: str = ""
    streams: int = 1
    listener: int = -1
    host_id: str = ""
    one_host: bool = False
    choices: tuning.Tables = field(default_factory=dict)
    own: tuple[str, int] | None = None
    least: int = 0
    patience: float = 0.0
    roster: Roster | None = None
    tls: Tls | None = None
    ended: Ended | None = None
    known_as: tuple[int, ...] = ()

    def title(self, rank: int) -> str:
        """Return the rank's name in messages."""
        return f"rank {self.known_as[rank] if self.known_as else rank}"

    def titles(self, ranks: Sequence[int]) -> str:
        """Return the names of some ranks in messages."""
        if len(ranks) == 1:
            return self.title(ranks[0])
        numbers = [self.known_as[r] if self.known_as else r for r in ranks[:20]]
        return "ranks " + ", ".join(map(str, numbers)) + (", …" if len(ranks) > 20 else "")
