"""Reductions with NumPy functions for which the core has no operation.

The ranks exchange parts. Each rank combines its part of all contributions in rank order, and sends the
result. One rank computes each element, so that all ranks get the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from pycollective.arguments import op_name, own_ufunc
from pycollective.comm.arrays import Array
from pycollective.comm.call import About, Call, Engine, present
from pycollective.comm.member import Member
from pycollective.comm.work import DONE, Work


def operation(op: object, dtype: np.dtype[Any]) -> tuple[str, np.ufunc | None]:
    """Return the name of an operation and None; or "" and a function that the core does not have."""
    function = own_ufunc(op, dtype)
    return "" if function else op_name(op, dtype), function


class ByFunction(Engine):
    """The engine for reductions with a NumPy function; other engines move the parts."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def about(self, call: Call) -> About:
        return About("")

    def submit(self, call: Call) -> Work[None]:
        member, source, function = self._member, present(call.source), call.function
        assert function is not None
        if type(source) is not np.ndarray:
            raise TypeError(f"{function} takes host arrays: copy x to the host first")
        if call.algorithm != "auto" and not call.reproducible:
            raise ValueError(f"algorithm= needs an op by name, not {function}: leave it out")
        if call.collective == "exscan" and function.identity is None:
            raise TypeError(f"exscan needs an op with an identity, for rank 0; {function} has none")
        parts = _Parts(member, call.collective, function, source, call.timeout)

        def execute() -> None:
            received = parts.exchange()
            with member._between(f"{call.collective} with {function}"):
                parts.reduce(received, call.target, call.root)

        if call.async_op:
            return member._run_later(execute)
        execute()
        return DONE


class _Parts:
    """An array in parts of equal length, and the calls that move the parts."""

    def __init__(
        self, member: Member, name: str, function: np.ufunc, source: Array, seconds: float
    ) -> None:
        self._member, self._name, self._function = member, name, function
        self._source, self._seconds = source, seconds
        self._count = -(-source.size // member.size)
        # The core compares shapes and shortened labels. The shape has a checksum of the whole label.
        self._label = f"{function.__name__} {source.dtype}"
        number = zlib.crc32(f"{name} {self._label}".encode())
        self._agreed = [*source.shape, -2, number]

    def exchange(self) -> Array:
        """Return this rank's part of all contributions."""
        shape = (self._member.size, self._count)
        # Pad with the array's own elements: other values could raise errors in the function.
        return self._moved("all_to_all", np.resize(self._source.reshape(-1), shape), shape)

    def reduce(self, received: Array, target: Array | None, root: int) -> None:
        """Run the reduction of the contributions into ``target``."""
        if self._name in ("scan", "exscan"):
            results = self._moved("all_to_all", self._prefixes(received), received.shape)
        else:
            *_, total = self._totals(received)
            if self._name == "reduce_scatter":
                results = total
            elif self._name == "reduce":
                shape = None if target is None else received.shape
                results = self._moved("gather", total, shape, root)
            else:
                results = self._moved("all_gather", total, received.shape)
        if target is not None:
            target[...] = results.reshape(-1)[: target.size].reshape(target.shape)

    def _totals(self, contributions: Array) -> Iterator[Array]:
        """Yield the reduction of the contributions up to each rank."""
        total = contributions[0]
        yield total
        for other in contributions[1:]:
            with np.errstate(all="ignore"):  # no warnings about infinities, as in the core
                total = self._in_dtype(np.asarray(self._function(total, other)), total.dtype)
            yield total

    def _in_dtype(self, found: Array, dtype: np.dtype[Any]) -> Array:
        """Return a result in the arrays' dtype; refuse objects of another kind, and lost values."""
        if found.dtype == object and found.size:
            found = np.asarray(found.tolist())
        kinds = {found.dtype.kind, dtype.kind}
        if kinds <= {"i", "u"} or kinds in ({"U"}, {"S"}):  # results may be too long, or too large
            made = found.astype(dtype, copy=False)
            if made is not found and (made != found).any():
                raise TypeError(
                    f"{self._function} makes values that do not fit into {dtype}: convert x first"
                )
            return made
        if found.size and not np.can_cast(found.dtype, dtype, "same_kind"):
            raise TypeError(f"{self._function} makes {found.dtype} of {dtype}: convert x first")
        return found.astype(dtype, copy=False)

    def _prefixes(self, contributions: Array) -> Array:
        """Return each rank's result of a scan."""
        found = np.stack(list(self._totals(contributions)))
        if self._name == "exscan":
            found[1:] = found[:-1].copy()
            found[0] = self._function.identity
        return found

    def _moved(
        self, collective: str, given: Array, shape: tuple[int, ...] | None, root: int = 0
    ) -> Array:
        target = None if shape is None else np.empty(shape, given.dtype)
        call = Call(
            collective, np.ascontiguousarray(given), target, self._seconds,
            root=root, count=self._count, shape=self._agreed, label=self._label,
        )  # fmt: skip
        self._member._submit(call)
        return given if target is None else target
