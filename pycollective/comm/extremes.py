"""Extremes and their indices: `minloc`, `maxloc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike

from pycollective import _core, array_backend
from pycollective.arguments import switch
from pycollective.comm.arrays import Array, as_input
from pycollective.comm.call import Call
from pycollective.comm.reductions import Reductions
from pycollective.comm.signatures import Later, Now, Options
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BEYOND = np.iinfo(np.int64).max


class Located(NamedTuple):
    """Extremes and their indices.

    Attributes
    ----------
    values : ndarray
        The extremes, in the dtype of the arrays.
    indices : ndarray of int64
        The ranks that have them, or the indices given with them.
    """

    values: Array
    indices: Array


class Extremes(Reductions):
    """The calls of a `Communicator` that return extremes and their indices."""

    # fmt: off
    @overload
    def minloc(self, x: ArrayLike, index: ArrayLike | None = None, *,
               async_op: Now = False, **options: Unpack[Options]) -> Located: ...
    @overload
    def minloc(self, x: ArrayLike, index: ArrayLike | None = None, *,
               async_op: Later, **options: Unpack[Options]) -> Work[Located]: ...
    # fmt: on
    def minloc(
        self,
        x: ArrayLike,
        index: ArrayLike | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Located | Work[Located]:
        """Give every rank the least elements of the ranks' arrays, and the ranks that have them.

        If several ranks have the least value, the lowest index wins. As in NumPy's ``argmin``, a NaN is
        the extreme: the value is NaN, and the index is the lowest index of a NaN.

        Parameters
        ----------
        x : array_like
            This rank's values, on the host: bools, ints or floats.
        index : array_like of int, optional
            The index of each value, from -2**63 to 2**63 - 2, of a shape that broadcasts to that of
            ``x``. By default this rank's number.
        async_op, timeout
            As in `all_reduce`; so are the other errors. The timeout applies to each of two all-reduces.

        Returns
        -------
        Located or Work
            A tuple of ``values`` and ``indices``, both in the shape of ``x``.

        Raises
        ------
        TypeError
            ``x`` has no order or is on a GPU, or ``index`` has other elements than whole numbers.
        ValueError
            An index is above 2**63 - 2, or the shape of ``index`` does not broadcast to that of ``x``.
        """
        return self._located(x, "min", index, async_op, timeout)

    # fmt: off
    @overload
    def maxloc(self, x: ArrayLike, index: ArrayLike | None = None, *,
               async_op: Now = False, **options: Unpack[Options]) -> Located: ...
    @overload
    def maxloc(self, x: ArrayLike, index: ArrayLike | None = None, *,
               async_op: Later, **options: Unpack[Options]) -> Work[Located]: ...
    # fmt: on
    def maxloc(
        self,
        x: ArrayLike,
        index: ArrayLike | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Located | Work[Located]:
        """Give every rank the greatest elements of the ranks' arrays, and the ranks that have them.

        Parameters, result and errors are those of `minloc`.
        """
        return self._located(x, "max", index, async_op, timeout)

    def _located(
        self,
        x: ArrayLike,
        op: Literal["min", "max"],
        index: ArrayLike | None,
        async_op: bool,
        timeout: float | None,
    ) -> Located | Work[Located]:
        """Make an all-reduce of the values, and one of the candidates' indices."""
        source = as_input(x)
        if not array_backend.on_host(source):
            raise TypeError(f"{op}loc takes host arrays: copy x to the host first")
        # Refuse invalid arguments here: an error within an asynchronous call would abort the group.
        nothing = np.empty(0, source.dtype)
        _core.reduce_arrays(op, [nothing], [nothing], 1)
        own = as_input(self.rank if index is None else index)
        if not array_backend.on_host(own):
            raise TypeError(f"{op}loc takes host arrays: copy index to the host first")
        if own.dtype.kind not in "iu" and (own.size or not isinstance(index, (list, tuple))):
            raise TypeError(f"index must be whole numbers, not {own.dtype}")
        if own.size and int(own.max()) >= _BEYOND:
            raise ValueError(f"index must be at most {_BEYOND - 1}, not {own.max()}")
        own = np.broadcast_to(own.astype(np.int64), source.shape)
        seconds = self._seconds(timeout)

        def call() -> Located:
            values = self._labelled(source, op, f"{op}loc {source.dtype}", seconds)
            # A NaN is the extreme wherever there is one.
            has = (source == values) | ((source != source) & (values != values))
            indices = self._labelled(np.where(has, own, _BEYOND), "min", f"{op}loc", seconds)
            return Located(values, indices)

        return self._run_later(call) if switch("async_op", async_op) else call()

    def _labelled(self, x: Array, op: str, label: str, seconds: float) -> Array:
        """Return an all-reduce that no other call can be mistaken for, because it has a label."""
        out = self._result(x.shape, x)
        given = np.ascontiguousarray(x).reshape(x.shape)
        self._run(Call("all_reduce", given, out, seconds, op=op, count=x.size, label=label))
        return out
