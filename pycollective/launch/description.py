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
    """Rank 0 was lost during the rendezvous, or went on without this rank: a new one may succeed."""


@dataclass
class Description:
    """The group, and this process in it, as the environment describes them."""

    rank: int
    size: int
    host: str
    port: int
    secret: bytes  # empty: none
    insecure: bool = False
    interface: str = ""
    streams: int = 1  # for messages, of every pair of ranks; rank 0's word counts
    listener: int = -1  # the descriptor of rank 0's listening socket, if the launcher made it
    host_id: str = ""  # what equals on ranks that may share memory; empty: TCP only
    one_host: bool = False  # whether it is an error if not all ranks share memory
    choices: tuning.Tables = field(default_factory=dict)  # for algorithm="auto"; rank 0's count
    own: tuple[str, int] | None = None  # where this rank listens for its peers; None: any port
    least: int = 0  # ranks that are enough when `patience` is over, renumbered; 0: all must come
    patience: float = 0.0  # seconds
    roster: Roster | None = None  # rank 0's, where `least` is set
    tls: Tls | None = None  # for the connections of the meeting, and control
    ended: Ended | None = None  # the ranks of which the launcher knows that they have ended
    known_as: tuple[int, ...] = ()  # of a split, the ranks' numbers in the split group

    def title(self, rank: int) -> str:
        """Return the rank's name in texts."""
        return f"rank {self.known_as[rank] if self.known_as else rank}"

    def titles(self, ranks: Sequence[int]) -> str:
        """Return the names of some ranks in texts."""
        if len(ranks) == 1:
            return self.title(ranks[0])
        numbers = [self.known_as[r] if self.known_as else r for r in ranks[:20]]
        return "ranks " + ", ".join(map(str, numbers)) + (", …" if len(ranks) > 20 else "")
