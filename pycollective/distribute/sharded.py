"""`ShardedVariable`: a variable whose rows are divided among several variables."""

from __future__ import annotations

import bisect
import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import Array, to_numpy
from pycollective.tensor import IndexedSlices, Tensor, TensorShape, Variable, as_tensor, ops


class ShardedVariable(Variable):
    """A variable whose rows are divided among several variables, its shards.

    Parameters
    ----------
    variables : sequence of Variable
        The shards, in the order of their rows.
    name : str
        The name.

    Raises
    ------
    TypeError
        ``variables`` is empty, or holds something else than variables.
    ValueError
        The shards differ in dtype, or in shape along another axis than the first.

    Notes
    -----
    Operations read the concatenated shards. `embedding_lookup` reads only the rows that it returns.
    Tapes watch the shards: ask for the gradients of `variables`, which ``Layer.trainable_variables``
    lists too. A checkpoint holds one value, so that it can be restored with any number of shards.
    """

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        if (
            not isinstance(variables, (list, tuple))
            or not variables
            or not all(isinstance(v, Variable) for v in variables)
        ):
            raise TypeError(
                "Argument `variables` should be a non-empty list of `variables.Variable`s. Received "
                f"{variables!r}"
            )
        first = variables[0]
        if any(v.dtype != first.dtype for v in variables):
            raise ValueError(
                "All elements in argument `variables` must have the same dtype. Received dtypes: "
                f"{[str(v.dtype) for v in variables]}"
            )
        if not first.ndim or any(v.shape[1:] != first.shape[1:] for v in variables):
            raise ValueError(
                "All elements in argument `variables` must have the same shapes except for the first "
                f"axis. Received shapes: {[tuple(v.shape) for v in variables]}"
            )
        self.set_attributes(first.trainable, name, first.synchronization, first.aggregation)
        self._distribute_strategy = first.distribute_strategy
        self._shards: tuple[Variable, ...] = tuple(variables)
        self._ends: list[int] = list(itertools.accumulate(len(v) for v in variables))
        whole = weakref.ref(self)
        for shard in variables:
            shard._distributed_container = whole

    # Shards ----------------------------------------------------------------------------------

    @property
    def variables(self) -> list[Variable]:
        """The shards, in the order of their rows."""
        return list(self._shards)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the shards, as in TensorFlow."""
        return iter(self._shards)

    def _ranges(self) -> Iterator[tuple[Variable, int, int]]:
        """Yield each shard with its first row, and the row after its last one."""
        return zip(self._shards, [0, *self._ends[:-1]], self._ends, strict=True)

    def local(self) -> Variable:
        raise TypeError(
            f"variable {self._name!r} has {len(self._shards)} shards, and only they have gradients and "
            "optimizer slots: use its list `variables`, or Layer.trainable_variables, which lists the "
            "shards"
        )

    # Reading ---------------------------------------------------------------------------------

    def current(self) -> Tensor:
        return Tensor(np.concatenate([shard.current().array for shard in self._shards]))

    def _read(self) -> Tensor:
        return ops.concat([shard._read() for shard in self._shards], 0)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._shards[0].dtype

    @property
    def shape(self) -> TensorShape:
        return TensorShape((self._ends[-1], *self._shards[0].shape[1:]))

    @property
    def ndim(self) -> int:
        return self._shards[0].ndim

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows, or parts of them; integers and slices read only the shards that have them.

        Raises
        ------
        IndexError
            There is no such row.
        TypeError
            The first index is a tensor of numbers. A mask reads the whole variable.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        length = len(self)
        if isinstance(first, (Tensor, Variable)) and first.dtype != bool:
            raise TypeError(
                f"variable {self._name!r} has shards, whose rows a tensor cannot index; use "
                "tf.nn.embedding_lookup(variable, rows)"
            )
        if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
            if not -length <= first < length:
                raise IndexError(
                    f"row {first} is out of bounds: variable {self._name!r} has {length} rows"
                )
            row = int(first) % length
            place = bisect.bisect_right(self._ends, row)
            begin = self._ends[place - 1] if place else 0
            inside: tuple[Any, ...] = (row - begin, *rest)
            return self._shards[place][inside]
        if isinstance(first, slice) and all(map(_is_basic_index, rest)):
            rows = range(*first.indices(length))
            parts = [
                shard[inside]
                for shard, begin, end in self._ranges()
                if (inside := (_rows_between(rows, begin, end), *rest))[0] is not None
            ]
            if rows.step < 0:
                parts.reverse()
            if not parts:
                inside = (slice(0, 0), *rest)
                return self._shards[0][inside]
            return parts[0] if len(parts) == 1 else ops.concat(parts, 0)
        return as_tensor(self)[index]

    def sparse_read(self, indices: Any, name: str | None = None) -> Tensor:
        """Return the rows at some indices, as `embedding_lookup`."""
        return embedding_lookup(self, indices)

    # Writing ---------------------------------------------------------------------------------

    def _write(self, method: str, value: Any) -> Variable:
        tensor = as_tensor(value, like=self._shards[0].current())
        if tensor.shape != self.shape:
            raise ValueError(
                f"{method}: variable {self._name!r} has shape {self.shape}, the value has shape "
                f"{tensor.shape}"
            )
        keeps_dtype = isinstance(value, (Tensor, Variable))
        for shard, begin, end in self._ranges():
            rows = tensor.array[begin:end]
            getattr(shard, method)(Tensor(rows) if keeps_dtype else rows)
        return self

    def _scatter(self, method: str, slices: Any) -> Variable:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"{method}: sparse_delta is not IndexedSlices: {slices!r}")
        index, rows = slices.indices.array, slices.values.array
        _check_rows(method, index, len(self))
        parts = []
        for shard, begin, end in self._ranges():
            here = (index >= begin) & (index < end)
            parts.append((shard, IndexedSlices(rows[here], index[here] - begin)))
        for shard, part in parts:
            shard.checked_rows(part, method)
        for shard, part in parts:
            shard._scatter(method, part)
        return self

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        """Raise TypeError: the rows are in several arrays."""
        self.local()

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """None: a constraint needs all rows at once, and the shards are updated one by one."""
        return None

    @constraint.setter
    def constraint(self, value: Callable[[Any], Any] | None) -> None:
        if value is not None:
            raise ValueError(
                f"variable {self._name!r} has {len(self._shards)} shards, and a constraint needs all of "
                "its rows at once. Leave the constraint out, or let the variable_partitioner return 1 "
                f"shard for the shape {tuple(self.shape)}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        shards = [copy.deepcopy(shard, memo) for shard in self._shards]
        copied = memo[id(self)] = ShardedVariable(shards, self._name)
        return copied

    def __repr__(self) -> str:
        lines = "".join(f"\n  {number}: {shard!r}" for number, shard in enumerate(self._shards))
        return f"ShardedVariable {self._name!r}:{{{lines}\n}}"


def shards_of(variables: Iterable[Variable]) -> list[Variable]:
    """Return variables, with the shards in the place of each `ShardedVariable`."""
    return [part for v in variables for part in (v if isinstance(v, ShardedVariable) else (v,))]


def whole_of(variable: Variable) -> Variable:
    """Return the `ShardedVariable` of a shard, or the variable itself."""
    reference = variable._distributed_container
    whole = None if reference is None else reference()
    return whole if isinstance(whole, ShardedVariable) else variable


def _is_basic_index(index: Any) -> bool:
    """Return True if an index leaves the rows on the first axis, as lists and arrays may not."""
    return index is None or index is Ellipsis or isinstance(index, (int, np.integer, slice))


def _rows_between(rows: range, begin: int, end: int) -> slice | None:
    """Return the rows from ``begin`` to ``end`` as a slice that counts from ``begin``, or None."""
    ascending = rows if rows.step > 0 else rows[::-1]
    part = ascending[bisect.bisect_left(ascending, begin) : bisect.bisect_left(ascending, end)]
    if not part:
        return None
    part = part if rows.step > 0 else part[::-1]
    stop = part.stop - begin
    return slice(part.start - begin, None if stop < 0 else stop, part.step)


def _check_rows(what: str, index: Array, length: int) -> None:
    if index.size and (int(index.min()) < 0 or int(index.max()) >= length):
        raise IndexError(
            f"{what}: indices from {int(index.min())} to {int(index.max())} are not all in 0 to "
            f"{length - 1}"
        )


def embedding_lookup(
    params: Any, ids: Any, max_norm: float | None = None, name: str | None = None
) -> Tensor:
    """Return the rows of a table at some indices, as ``tf.nn.embedding_lookup``.

    Parameters
    ----------
    params : tensor, Variable, ShardedVariable, or list of tensors and variables
        The table. A list holds consecutive parts of it. Only the rows that are asked for are read
        from each part.
    ids : tensor of int
        The indices, of any shape.
    max_norm : float, optional
        The largest Euclidean norm of a row; longer rows are scaled down.
    name : str, optional
        Ignored.

    Returns
    -------
    Tensor
        The rows, of shape ``[*ids.shape, *row shape]``.

    Raises
    ------
    IndexError
        There is no such row.
    TypeError
        ``ids`` are not integers.
    ValueError
        ``params`` is an empty list.
    """
    parts = list(params) if isinstance(params, (list, tuple, ShardedVariable)) else [params]
    if not parts:
        raise ValueError(
            "embedding_lookup: params is an empty list; it must hold the table's parts"
        )
    index = as_tensor(ids).array
    rows = ops.gather(parts[0], index) if len(parts) == 1 else _from_parts(parts, to_numpy(index))
    if max_norm is None:
        return rows
    lengths = ops.reduce_sum(
        ops.square(rows), axis=tuple(range(index.ndim, rows.ndim)), keepdims=True
    )
    limit = float(max_norm)
    return rows * (limit / ops.sqrt(ops.maximum(lengths, limit * limit)))


def _from_parts(parts: Sequence[Any], index: Array) -> Tensor:
    """Return rows of a table that is divided among several tensors or variables."""
    if index.dtype.kind not in "iu":
        raise TypeError(f"embedding_lookup needs integer ids, got {index.dtype}; use cast()")
    ends = list(itertools.accumulate(len(part) for part in parts))
    _check_rows("embedding_lookup", index, ends[-1])
    flat = index.ravel()
    owners = np.searchsorted(ends, flat, side="right")
    begins = [0, *ends[:-1]]
    found = []
    # A part without any of the rows is read, too, so that it has a gradient.
    for number, part in enumerate(parts):
        found.append(ops.gather(part, flat[owners == number] - begins[number]))
    order = np.empty(flat.size, np.int64)
    order[np.argsort(owners, kind="stable")] = np.arange(flat.size)
    joined = ops.gather(ops.concat(found, 0), order)
    return ops.reshape(joined, (*index.shape, *joined.shape[1:]))
