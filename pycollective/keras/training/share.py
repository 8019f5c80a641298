"""A replica's share of the global batch, which gives all examples the same weight."""

from __future__ import annotations

import threading
from typing import NamedTuple

from pycollective.distribute.default import get_strategy
from pycollective.tensor import Tensor, ops


class StepShare(NamedTuple):
    """The numbers of examples that determine the weight of a replica's loss.

    Attributes
    ----------
    rows : int
        The examples of this replica in the current batch; may be 0.
    total : int
        The examples of all replicas, in all batches of the current step of the optimizer.
    """

    rows: int
    total: int


class _Thread(threading.local):
    share: StepShare | None = None
    reports: bool = True


_thread = _Thread()


def current_share() -> StepShare | None:
    """Return this replica's share of the current step of a `Model`, or None outside of a step."""
    return _thread.share


def reports() -> bool:
    """Return True if this thread's step must return the results of its metrics."""
    return _thread.reports


class share_scope:
    """Set this thread's share, and the result of `reports`, for a block."""

    __slots__ = ("_before", "_inside")

    def __init__(self, share: StepShare, reports: bool = True) -> None:
        self._inside = share, reports

    def __enter__(self) -> None:
        self._before = _thread.share, _thread.reports
        _thread.share, _thread.reports = self._inside

    def __exit__(self, *exc_info: object) -> None:
        _thread.share, _thread.reports = self._before


def share_of(mean: Tensor) -> Tensor:
    """Return a replica's share of the global mean, from the mean over its own examples.

    The sum of the shares over the replicas is the mean over all examples, also if the replicas have
    different numbers of examples. The same holds for gradients. A replica without examples
    contributes 0. Outside of a model's steps, all replicas count as equal in size.
    """
    share = _thread.share
    if share is None:
        replicas = int(get_strategy().num_replicas_in_sync)
        return mean if replicas == 1 else mean / float(replicas)
    if share.rows == share.total:
        return mean
    return mean * (share.rows / share.total) if share.rows else ops.where(False, mean, 0.0)
