"""Which part of the global batch a replica has: what every example weighing the same rests on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pycollective.distribute.context import get_strategy
from pycollective.tensor import Tensor, ops


class StepShare(NamedTuple):
    """A replica's part of a step: its own examples, perhaps none, and those of all replicas.

    The total counts all batches that make the step.
    """

    rows: int
    total: int


class _Thread(threading.local):
    share: StepShare | None = None
    reports: bool = True


_thread = _Thread()


def current_share() -> StepShare | None:
    """Return this replica's part of the step that `Model.fit` makes, or None outside of one."""
    return _thread.share


def reports() -> bool:
    """Whether this thread's step has to say what its metrics have."""
    return _thread.reports


@contextmanager
def held(share: StepShare, reports: bool = True) -> Iterator[None]:
    """Let a share be this thread's for the length of a block; and whether its step reports."""
    before = _thread.share, _thread.reports
    _thread.share, _thread.reports = share, reports
    try:
        yield
    finally:
        _thread.share, _thread.reports = before


def share_of(mean: Tensor) -> Tensor:
    """Return a replica's summand of a global mean, from the mean over its own examples.

    Summed over the replicas it is the mean over all examples, however they are shared out, and so
    are the gradients. A replica without examples gives 0, whatever the mean of nothing was. Outside
    of `Model.fit` the replicas are taken to have equally many examples.
    """
    share = _thread.share
    if share is None:
        replicas = int(get_strategy().num_replicas_in_sync)
        return mean if replicas == 1 else mean / float(replicas)
    if share.rows == share.total:
        return mean
    return mean * (share.rows / share.total) if share.rows else ops.where(False, mean, 0.0)
