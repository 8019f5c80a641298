"""The prefix reductions: `scan`, `exscan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import _core, array_backend
from pycollective.algorithms import Algorithm
from pycollective.arguments import switch
from pycollective.comm.arrays import Array, deliver, input_and_output
from pycollective.comm.call import Call
from pycollective.comm.member import Member
from pycollective.comm.signatures import Later, MoveOptions, Now, O, Op, S
from pycollective.comm.ufuncs import operation
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Prefixes(Member):
    """The calls of a `Communicator` that reduce the arrays of the ranks up to this one."""

    # fmt: off
    @overload
    def scan(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Now = False,
             **options: Unpack[MoveOptions]) -> NDArray[S]: ...
    @overload
    def scan(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Now = False,
             **options: Unpack[MoveOptions]) -> Array: ...
    @overload
    def scan(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Now = False,
             **options: Unpack[MoveOptions]) -> O: ...
    @overload
    def scan(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Later,
             **options: Unpack[MoveOptions]) -> Work[NDArray[S]]: ...
    @overload
    def scan(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Later,
             **options: Unpack[MoveOptions]) -> Work[Array]: ...
    @overload
    def scan(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Later,
             **options: Unpack[MoveOptions]) -> Work[O]: ...
    # fmt: on
    def scan(
        self,
        x: ArrayLike,
        op: Op = "sum",
        *,
        out: object = None,
        algorithm: str | Algorithm = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give rank i the element-wise reduction of the arrays of ranks 0 to i.

        Parameters
        ----------
        x : array_like
            This rank's contribution, as in `all_reduce`. A GPU array is copied through host memory.
        op
            As in `all_reduce`; rank i's mean is the sum divided by i + 1. float16 and bfloat16 are
            rounded after each step.
        out : array, optional
            The array for the result; ``out=x`` works in place.
        algorithm : {"auto", "chain"} or Algorithm
            See `pycollective.algorithms`. "chain" combines in rank order.
        async_op, timeout
            As in `all_reduce`; so are the errors.

        Returns
        -------
        ndarray or Work
            The result, in the shape and dtype of ``x``: ``out`` if that was given.
        """
        return self._prefix(x, op, False, out, algorithm, async_op, timeout)

    # fmt: off
    @overload
    def exscan(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Now = False,
             **options: Unpack[MoveOptions]) -> NDArray[S]: ...
    @overload
    def exscan(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Now = False,
             **options: Unpack[MoveOptions]) -> Array: ...
    @overload
    def exscan(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Now = False,
             **options: Unpack[MoveOptions]) -> O: ...
    @overload
    def exscan(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Later,
             **options: Unpack[MoveOptions]) -> Work[NDArray[S]]: ...
    @overload
    def exscan(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Later,
             **options: Unpack[MoveOptions]) -> Work[Array]: ...
    @overload
    def exscan(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Later,
             **options: Unpack[MoveOptions]) -> Work[O]: ...
    # fmt: on
    def exscan(
        self,
        x: ArrayLike,
        op: Op = "sum",
        *,
        out: object = None,
        algorithm: str | Algorithm = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give rank i the element-wise reduction of the arrays of ranks 0 to i - 1.

        Rank 0 gets the identity of the operation. The identity is 0 for "sum", "or" and "xor", 1 for
        "prod", and a value with all bits set for "and". For "min" it is the greatest value of the
        dtype (infinity, True), for "max" the least. The "mean" of rank 0 is 0. A NumPy function has
        its ``identity``.

        Parameters
        ----------
        x, out, algorithm, async_op, timeout
            As in `scan`; so are the other errors. The last rank's ``x`` gives only shape and dtype.
        op
            As in `all_reduce`; rank i's mean is the sum divided by i.

        Returns
        -------
        ndarray or Work
            The result, in the shape and dtype of ``x``: ``out`` if that was given.

        Raises
        ------
        TypeError
            A NumPy function has no identity.
        """
        return self._prefix(x, op, True, out, algorithm, async_op, timeout)

    def _prefix(
        self, x: ArrayLike, op: Op, exclusive: bool, out: object, algorithm: str | Algorithm,
        async_op: bool, timeout: float | None,
    ) -> object:  # fmt: skip
        """Make a scan or an exscan; for a mean the core gives the sum, which this rank divides."""
        source, target, place = input_and_output(self._result, x, out)
        name, function = operation(op, source.dtype)
        contributions = self.rank + (not exclusive)
        is_whole = function is not None or (contributions and name != "mean")
        call = Call(
            "exscan" if exclusive else "scan", source,
            target if contributions or is_whole else None, self._seconds(timeout),
            switch("async_op", async_op), op=name, function=function,
            algorithm=self._how(algorithm), count=source.size,
        )  # fmt: skip

        def finish() -> object:
            if not is_whole:
                total = array_backend.to_numpy(target)
                if contributions:
                    _core.reduce_arrays(name, [total], [total], contributions)
                else:
                    total[...] = _identity(name, total.dtype)
                if total is not target:
                    array_backend.assign(target, total)
            return deliver(target, place)

        work = self._submit(call)
        return work.then(finish) if call.async_op else finish()


def _identity(op: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the identity of an operation, as an array of a dtype."""
    value: Any = {"prod": 1, "and": -1}.get(op, 0)
    if op in ("min", "max"):
        value = np.inf if op == "min" else -np.inf
        if dtype.kind == "b":
            value = op == "min"
        elif dtype.kind in "iu":
            value = np.iinfo(dtype).max if op == "min" else np.iinfo(dtype).min
    return np.array(value).astype(dtype)
