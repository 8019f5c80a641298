"""Operations that join tensors, or return parts of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from ...array_backend import (
    Array,
    array_module,
    asarray,
    is_array,
    on_host,
    scattered,
    to_numpy,
)
from ...errors import InvalidArgumentError, InvalidIndexError
from ..compiled import contiguous, joined, placed
from ..multiple import Rows
from ..tape import new_key, record, record_many, thread_state
from ..tensor import Tensor, as_tensor, is_plain
from ._define import check_dtypes, differentiable
from .arrays import cast, reshape, shape_of, transpose
from .reductions import axes_of

__all__ = ["concat", "gather", "getitem", "split", "stack", "unstack"]


@differentiable
def concat(values: Any, axis: Any, name: str | None = None) -> Tensor:
    """Return the tensors of a list joined along an existing axis; one tensor is returned as it is."""
    one = not isinstance(values, (list, tuple)) and hasattr(values, "shape")
    tensors = _tensors("concat", [values] if one else values)
    (place,) = axes_of(axis, tensors[0].ndim, "concat")
    for tensor in tensors:
        if _without(tensor.shape, place) != _without(tensors[0].shape, place):
            raise InvalidArgumentError(
                f"concat: shapes {tensors[0].shape} and {tensor.shape} differ besides axis {place}"
            )
    sizes = [tensor.shape[place] for tensor in tensors]

    def vjp(g: Array, need: tuple[bool, ...]) -> list[Array | None]:
        parts = _parts(g, sizes, place)
        return [
            contiguous(part) if needed else None for part, needed in zip(parts, need, strict=True)
        ]

    return record(joined([tensor.array for tensor in tensors], place), tuple(tensors), vjp)


def _parts(array: Array, sizes: Sequence[int], place: int) -> list[Array]:
    """Return views of consecutive parts of an axis."""
    ends = list(accumulate(sizes))
    return [
        array[_along(place, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True)
    ]


def _tensors(name: str, values: Any) -> list[Tensor]:
    """Return a list of tensors of one dtype; scalars in it take the dtype of the first tensor."""
    if not np.iterable(values):
        raise TypeError(f"{name} needs a list of tensors, not {values!r}")
    items = list(values)
    if not items:
        raise InvalidArgumentError(f"{name} needs at least one tensor")
    known = [None if is_plain(item) else as_tensor(item) for item in items]
    first = next((tensor for tensor in known if tensor is not None), None)
    tensors = [
        as_tensor(item, like=first) if tensor is None else tensor
        for item, tensor in zip(items, known, strict=True)
    ]
    check_dtypes(name, *tensors)
    return tensors


def _along(place: int, item: Any) -> tuple[Any, ...]:
    """Return the index with ``item`` for the axis number ``place``."""
    return (*(slice(None),) * place, item)


def _without(sizes: tuple[int, ...], place: int) -> tuple[int, ...]:
    return sizes[:place] + sizes[place + 1 :]


@differentiable
def stack(values: Any, axis: Any = 0, name: str | None = None) -> Tensor:
    """Return the tensors of a list, all of one shape, joined along a new axis."""
    tensors = _tensors("stack", values)
    (place,) = axes_of(axis, tensors[0].ndim + 1, "stack")
    for tensor in tensors:
        if tensor.shape != tensors[0].shape:
            raise InvalidArgumentError(
                f"stack: shapes {tensors[0].shape} and {tensor.shape} differ"
            )

    def vjp(g: Array, need: tuple[bool, ...]) -> list[Array | None]:
        return [
            contiguous(g[_along(place, i)]) if needed else None for i, needed in enumerate(need)
        ]

    whole = joined([np.expand_dims(tensor.array, place) for tensor in tensors], place)
    return record(whole, tuple(tensors), vjp)


@differentiable
def unstack(
    value: Any, num: int | None = None, axis: Any = 0, name: str | None = None
) -> list[Tensor]:
    """Return the slices of a tensor along ``axis``, without that axis."""
    x = as_tensor(value)
    (place,) = axes_of(axis, x.ndim, "unstack")
    if num is not None and num != x.shape[place]:
        raise InvalidArgumentError(
            f"unstack: num is {num}, but axis {place} of shape {x.shape} differs"
        )
    a = x.array

    def vjp(gradients: tuple[Array, ...], _need: tuple[bool, ...]) -> tuple[Array]:
        return (joined([np.expand_dims(g, place) for g in gradients], place),)

    return list(record_many([a[_along(place, i)] for i in range(a.shape[place])], (x,), vjp))


@differentiable
def split(
    value: Any, num_or_size_splits: Any, axis: Any = 0, num: Any = None, name: str | None = None
) -> list[Tensor]:
    """Return a tensor cut along ``axis`` into n equal parts, or into parts of the given lengths.

    ``num`` is ignored: the number of lengths is known.
    """
    x = as_tensor(value)
    (place,) = axes_of(axis, x.ndim, "split")
    length = x.shape[place]
    if not isinstance(num_or_size_splits, (int, list, tuple)) and not np.ndim(num_or_size_splits):
        num_or_size_splits = operator.index(num_or_size_splits)  # a NumPy integer, or a tensor
    if isinstance(num_or_size_splits, int):
        if num_or_size_splits < 1 or length % num_or_size_splits:
            raise InvalidArgumentError(
                f"split: axis {place} of shape {x.shape} cannot be cut into {num_or_size_splits} "
                "equal parts"
            )
        sizes = (length // num_or_size_splits,) * num_or_size_splits
    else:
        sizes = shape_of(num_or_size_splits)
        if sizes.count(-1) == 1:
            sizes = tuple(length - 1 - sum(sizes) if n == -1 else n for n in sizes)
        if any(n < 0 for n in sizes) or sum(sizes) != length:
            raise InvalidArgumentError(
                f"split: lengths {sizes} do not add up to axis {place} of shape {x.shape}"
            )
    parts = _parts(x.array, sizes, place)
    return list(record_many(parts, (x,), lambda gradients, _need: (joined(gradients, place),)))


def _index_of(item: Any, like: Array) -> Any:
    """Return one item of an index of the array ``like`` as NumPy needs it."""
    if isinstance(item, slice):
        parts = (item.start, item.stop, item.step)
        return slice(*(None if p is None else p.__index__() for p in parts))
    if isinstance(item, (bool, np.bool_)):
        return asarray(np.asarray(item), like=like)  # a mask, of which NumPy returns a copy
    if item is None or item is Ellipsis or isinstance(item, (int, np.generic)):
        return item
    return asarray(as_tensor(item).array, like=like)


@differentiable
def getitem(tensor: Any, index: Any) -> Tensor:
    """Return ``tensor[index]`` by NumPy's rules; the index may contain integer and bool tensors."""
    x = as_tensor(tensor)
    a = x.array
    places = tuple(_index_of(i, a) for i in (index if isinstance(index, tuple) else (index,)))
    basic = not any(is_array(place) for place in places)
    try:
        result = a[places]
    except IndexError as error:
        raise InvalidIndexError(f"index of a tensor of shape {tuple(a.shape)}: {error}") from None

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        if basic:
            return (placed(g, a.shape, places),)
        return (scattered(a.shape, places, g),)

    return record(result, (x,), vjp)


@differentiable
def gather(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: Any = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Tensor:
    """Return the slices of ``params`` at ``indices`` along ``axis``, by default axis ``batch_dims``.

    The first ``batch_dims`` axes of both arguments have the same lengths. Each place in them has its own
    indices. ``validate_indices`` is ignored.

    Raises
    ------
    IndexError
        An index is negative, or not below the length of the axis.
    TypeError
        The indices are not integers.
    ValueError
        The lengths of the first axes differ, or ``axis`` is one of them.

    Notes
    -----
    For floating-point numbers on a device the indices are not checked, because a check would wait for
    the device. An index out of range gives NaN, and has no gradient.
    """
    if batch_dims:
        return _gathered_in_batches(as_tensor(params), as_tensor(indices), axis, batch_dims)
    axis = 0 if axis is None else axis
    if getattr(params, "_by_rows", False) and axis == 0:
        rows: Tensor = params.for_replica(_gathered_rows(params.local(), indices))
        return rows
    x = as_tensor(params)
    a = x.array
    index = asarray(as_tensor(indices).array, like=a)
    if index.dtype.kind not in "iu":
        raise TypeError(f"gather needs integer indices, got {index.dtype}; use cast()")
    (place,) = axes_of(axis, a.ndim, "gather")
    wrong = None
    if a.dtype.kind == "f" and not on_host(a):
        wrong = (index < 0) | (index >= a.shape[place])
        index = np.where(wrong, 0, index)
    elif index.size and (index.min() < 0 or index.max() >= a.shape[place]):
        raise InvalidIndexError(
            f"gather: indices from {int(index.min())} to {int(index.max())} are not all in 0 to "
            f"{a.shape[place] - 1}, axis {place} of shape {a.shape}"
        )
    places = _along(place, index)
    result = np.take(a, index, axis=place)
    beyond = None
    if wrong is not None:
        beyond = wrong.reshape((*wrong.shape, *(1,) * (a.ndim - place - 1)))
        result = np.where(beyond, a.dtype.type(np.nan), result)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Any]:
        if place == 0 and a.__class__ is np.ndarray:
            return (Rows(index.reshape(-1), g.reshape(index.size, *a.shape[1:]), a.shape),)
        inside = g if beyond is None else np.where(beyond, a.dtype.type(0), g)
        return (scattered(a.shape, places, inside),)

    return record(result, (x,), vjp)


def _gathered_in_batches(x: Tensor, index: Tensor, axis: Any, batch_dims: int) -> Tensor:
    """Return the slices that `gather` returns if ``batch_dims`` is not 0."""
    batch = batch_dims + index.ndim if batch_dims < 0 else batch_dims
    (place,) = axes_of(batch_dims if axis is None else axis, x.ndim, "gather")
    lead, between = x.shape[:batch], x.shape[batch:place]
    length, after = x.shape[place], x.shape[place + 1 :]
    if not 0 <= batch <= min(place, index.ndim) or lead != index.shape[:batch]:
        raise InvalidArgumentError(
            f"gather: batch_dims {batch_dims} and axis {place} do not fit the shapes {x.shape} and "
            f"{index.shape}"
        )
    if index.array.dtype.kind not in "iu":
        raise TypeError(f"gather needs integer indices, got {index.dtype}; use cast()")
    # One axis for the batches, then the axis of the slices, which becomes the first one.
    count = prod(lead)
    moved = transpose(reshape(x, (count, prod(between), length, prod(after))), (0, 2, 1, 3))
    flat = asarray(index.array, like=x.array).reshape(count, prod(index.shape[batch:]))
    flat = flat.astype(np.int64)  # unsigned 64-bit indices beyond it would be outside too
    if on_host(flat) and ((flat < 0) | (flat >= length)).any():
        raise InvalidIndexError(
            f"gather: indices from {int(flat.min())} to {int(flat.max())} are not all in 0 to "
            f"{length - 1}, axis {place} of shape {x.shape}"
        )
    begins = length * array_module(flat).arange(count).reshape(-1, 1)
    places = np.where((flat < 0) | (flat >= length), -1, flat + begins)
    rows = gather(reshape(moved, (count * length, *moved.shape[2:])), places)
    ordered = transpose(rows, (0, 2, 1, 3))
    return reshape(ordered, (*lead, *between, *index.shape[batch:], *after))


def _gathered_rows(variable: Any, indices: Any) -> Tensor:
    """Return rows of a variable without reading the others; their gradient is an `IndexedSlices`."""
    index = to_numpy(as_tensor(indices).array)
    like = variable.like()
    length, *row = like.shape
    if index.dtype.kind not in "iu":
        raise TypeError(f"gather needs integer indices, got {index.dtype}; use cast()")
    if index.size and (index.min() < 0 or index.max() >= length):
        raise InvalidIndexError(
            f"gather: indices from {int(index.min())} to {int(index.max())} are not all in 0 to "
            f"{length - 1}, axis 0 of shape {tuple(like.shape)}"
        )
    flat = index.reshape(-1)
    found = variable.rows(flat).reshape(*index.shape, *row)
    if not thread_state.tapes or found.dtype.kind not in "fV":
        return _as_read(variable, Tensor(found))
    # Tapes track a tensor of zeros in place of the value: without a reference to the value, updates need
    # not copy it.
    whole = Tensor(np.broadcast_to(np.zeros((), found.dtype), (length, *row)))
    whole._key = new_key()
    for tape in thread_state.tapes:
        tape.watch_read(variable, whole)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Rows]:
        return (Rows(flat, g.reshape(flat.size, *row), (length, *row)),)

    return _as_read(variable, record(found, (whole,), vjp))


def _as_read(variable: Any, rows: Tensor) -> Tensor:
    """Return rows in the dtype to which this thread converts the variables that it reads."""
    dtype = thread_state.reads_as
    if dtype is not None and variable.trainable and rows.array.dtype.kind in "fV":
        return cast(rows, dtype)
    return rows
