"""Cartesian grids: coordinates of ranks, neighbours, and exchange with neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from pycollective.arguments import rank_number, sizes, switch, whole
from pycollective.comm.arrays import Array, as_input, as_output, disjoint
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from pycollective.comm import Communicator


class Cart:
    """The ranks of a group in a grid; the last coordinate varies fastest, as in MPI and NumPy.

    Grids are made by `Communicator.cart`.

    Attributes
    ----------
    comm : Communicator
        This rank in its group.
    dims : tuple of int
        The number of ranks along each axis.
    periods : tuple of bool
        True for an axis whose ends are neighbours.
    neighbors : tuple of int or None
        The neighbours of this rank before and after it along axis 0, then along axis 1, and so on. None
        beyond an open border.
    """

    def __init__(
        self, comm: Communicator, dims: Sequence[int], periods: bool | Sequence[bool]
    ) -> None:
        self.comm = comm
        self.dims = dims_create(comm.size, dims)
        each = list(periods) if np.iterable(periods) else [periods] * len(self.dims)
        if len(each) != len(self.dims):
            raise ValueError(f"periods has {len(each)} values for {len(self.dims)} axes")
        self.periods = tuple(switch("a value of periods", value) for value in each)
        shifts = [self.shift(axis) for axis in range(len(self.dims))]
        self.neighbors = tuple(peer for shift in shifts for peer in shift)

    def __repr__(self) -> str:
        return f"<Cart {' x '.join(map(str, self.dims))}, rank {self.comm.rank}>"

    def coords(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the coordinates of a rank, by default of this one."""
        number = rank_number("rank", self.comm.rank if rank is None else rank, self.comm.size)
        return tuple(int(c) for c in np.unravel_index(number, self.dims))

    def rank(self, coords: Sequence[int]) -> int | None:
        """Return the rank at these coordinates, which wrap around along periodic axes.

        The result is None beyond an open border. Raise ValueError unless there is one coordinate
        for each axis.
        """
        given = [whole("a coordinate", c) for c in coords]
        if len(given) != len(self.dims):
            raise ValueError(f"{len(given)} coordinates for {len(self.dims)} axes")
        number = 0
        for c, length, periodic in zip(given, self.dims, self.periods, strict=True):
            if not periodic and not 0 <= c < length:
                return None
            number = number * length + c % length
        return number

    def shift(self, axis: int, displacement: int = 1) -> tuple[int | None, int | None]:
        """Return the source and the destination of a shift along an axis, for `sendrecv`.

        Parameters
        ----------
        axis : int
            0 to ``len(dims) - 1``.
        displacement : int
            The distance to the destination; the source has the same distance on the other side.

        Returns
        -------
        source, dest : int or None
            Ranks; None beyond an open border.

        Raises
        ------
        ValueError
            The grid has no such axis.

        Examples
        --------
        >>> source, dest = grid.shift(0)
        >>> comm.sendrecv(x, dest, out, source)
        """
        axis, displacement = whole("axis", axis), whole("displacement", displacement)
        if not 0 <= axis < len(self.dims):
            raise ValueError(f"axis {axis} is not among the {len(self.dims)} axes")
        here = self.coords()

        def at(distance: int) -> int | None:
            return self.rank((*here[:axis], here[axis] + distance, *here[axis + 1 :]))

        return at(-displacement), at(displacement)

    # Blocks may be arrays of any library, in an array or a sequence: ``out`` and results are Any.

    def neighbor_all_to_all(
        self, x: ArrayLike | Sequence[ArrayLike], *, out: Any = None, tag: int = 0,
        async_op: bool = False, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Exchange blocks with all neighbours; other ranks take no part.

        Parameters
        ----------
        x : array_like, or sequence of array_like
            A block for each of `neighbors`, in that order. The blocks of a sequence may differ in shape.
        out : array, or sequence of arrays, optional
            An array for the block of each of `neighbors`; unchanged beyond an open border. By default
            new arrays like ``x``, with zeros beyond an open border; the two blocks of an axis then
            need one shape. ``out=x`` works in place.
        tag, async_op, timeout
            As in `Communicator.send`; so are the other errors. The timeout applies to each neighbour.

        Returns
        -------
        ndarray, sequence of ndarray or Work
            The neighbours' blocks: ``out`` if that was given.

        Raises
        ------
        ValueError
            The number of blocks in ``x`` or ``out`` is not the number of neighbours.

        Examples
        --------
        The halo of a two-dimensional field, with borders of one row or column:

        >>> inner, border = [u[1], u[-2], u[:, 1], u[:, -2]], [u[0], u[-1], u[:, 0], u[:, -1]]
        >>> grid.neighbor_all_to_all(inner, out=border)
        """
        given: Any = x
        is_many = isinstance(given, (list, tuple))
        source: Any = [as_input(b) for b in given] if is_many else as_input(given)
        blocks = self._sides("x", source)
        if out is None:
            out = [np.zeros_like(b) for b in blocks] if is_many else np.zeros_like(source)
        places = self._sides("out", out if isinstance(out, (list, tuple)) else as_output(out))
        for place, peer in zip(places, self.neighbors, strict=True):
            if peer is not None:  # its block may arrive before all blocks of ``x`` are sent
                target = as_output(place)
                blocks = [disjoint(block, target, None) for block in blocks]
        works = []
        for i, dest in enumerate(self.neighbors):
            # Receive from the opposite side, so that all ranks send in one direction at a time.
            opposite = i ^ 1
            work = self.comm.sendrecv(  # type: ignore[call-overload]  # async_op is not a literal
                blocks[i], dest, places[opposite], self.neighbors[opposite], tag,
                async_op=async_op, timeout=timeout,
            )  # fmt: skip
            works.append(work)
        return Work.joined(works, lambda: out) if async_op else out

    def _sides(self, name: str, given: Any) -> list[Any]:
        """Return a list of the blocks for all neighbours."""
        if not isinstance(given, (list, tuple)):
            given = [given[i, ...] for i in range(len(given) if np.ndim(given) else 0)]
        if len(given) != len(self.neighbors):
            raise ValueError(
                f"{name} must have a block for each of the {len(self.neighbors)} neighbours, not "
                f"{len(given)} blocks"
            )
        return list(given)

    def neighbor_all_gather(
        self, x: ArrayLike, *, out: Any = None, tag: int = 0, async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Send each neighbour the array ``x``, and return the neighbours' arrays.

        The result has the shape ``(len(neighbors), *x.shape)``. Parameters and errors are those of
        `neighbor_all_to_all`.
        """
        block: Array = as_input(x)
        same = np.broadcast_to(block, (len(self.neighbors), *block.shape))
        return self.neighbor_all_to_all(same, out=out, tag=tag, async_op=async_op, timeout=timeout)


def dims_create(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of a grid of ``size`` ranks, in which 0 stands for a length to choose.

    Chosen lengths are as equal as the divisors of ``size`` allow, in descending order.

    Source: ``MPI_Dims_create``.
    """
    found = sizes(dims, "dims")
    if not found:
        raise ValueError("dims must have a length for each axis, not none at all")
    left, remainder = divmod(size, math.prod(d for d in found if d))
    open_axes = [axis for axis, length in enumerate(found) if length == 0]
    if remainder or (left != 1 and not open_axes):
        raise ValueError(f"no grid of the lengths {found} has {size} ranks")
    chosen = []
    for n in range(len(open_axes), 0, -1):
        # The least divisor d of the remaining ranks with d**n >= left.
        chosen.append(next(d for d in range(1, left + 1) if left % d == 0 and d**n >= left))
        left //= chosen[-1]
    for axis, length in zip(open_axes, sorted(chosen, reverse=True), strict=True):
        found[axis] = length
    return tuple(found)
