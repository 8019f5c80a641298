"""Extremes and where they are: `minloc`, `maxloc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pycollective import array_backend
from pycollective.arguments import switch
from pycollective.communicator.arrays import Array, as_input
from pycollective.communicator.work import Work, in_python

if TYPE_CHECKING:
    from pycollective.communicator import Communicator

__all__ = ["Located", "located"]

_BEYOND = np.iinfo(np.int64).max


class Located(NamedTuple):
    """Values and their places.

    Attributes
    ----------
    values : ndarray
        The extremes, in the dtype of the arrays.
    indices : ndarray of int64
        The ranks that have them, or the indices that were given with them.
    """

    values: Array
    indices: Array


def located(
    comm: Communicator,
    x: ArrayLike,
    op: Literal["min", "max"],
    index: ArrayLike | None,
    async_op: bool,
    timeout: float | None,
) -> Located | Work[Located]:
    """Make a `minloc` or `maxloc`: an all-reduce of the values, and one of the candidates' indices."""
    source = as_input(x)
    if not array_backend.on_host(source):
        raise TypeError(f"{op}loc takes arrays in the host's memory: copy x to the host first")
    own = np.asarray(comm.rank if index is None else index)
    if own.dtype.kind not in "iu":
        raise TypeError(f"index must be whole numbers, not {own.dtype}")
    own = np.broadcast_to(own.astype(np.int64), source.shape)

    def call() -> Located:
        values = comm.all_reduce(source, op, timeout=timeout)
        # A NaN is the extreme wherever there is one.
        has = (source == values) | ((source != source) & (values != values))
        return Located(values, comm.all_reduce(np.where(has, own, _BEYOND), "min", timeout=timeout))

    return in_python(comm, call) if switch("async_op", async_op) else call()
