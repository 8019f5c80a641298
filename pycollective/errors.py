"""The errors of the package: one small hierarchy for collectives, two for files."""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DataError",
    "MismatchError",
    "PeerLostError",
    "RendezvousError",
]


class CollectiveError(RuntimeError):
    """A collective call failed; its communicator is dead, and a new one can be made."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A rank waited until its deadline; the message says for whom and what each was doing."""


class MismatchError(CollectiveError):
    """Ranks made calls that do not belong together; the message names both calls."""


class PeerLostError(CollectiveError):
    """A rank ended, failed or cannot be reached any more."""


class AbortedError(CollectiveError):
    """The group was aborted by another rank or by its owner."""


class DataError(ValueError):
    """A data file is missing, truncated or not what it should be."""


class RendezvousError(CollectiveError):
    """The group cannot be made as the environment describes it."""


class CheckpointError(ValueError):
    """A checkpoint is missing, truncated, corrupt or does not fit."""
