"""`RowBlock`: many rows of an array in the role of one row.

An operation on a `RowBlock` computes all its rows at once, by the protocols of NEP 13 and NEP 18. Only
operations whose result for a row is the same bits, alone or in a block, are implemented. All others
raise TypeError, and so does each attempt to read a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import index
from typing import Any

import numpy as np

from ..array_backend import Array

#: These are exact: their results are correctly rounded, or are one of the operands.
_EXACT = frozenset(
    getattr(np, name)
    for name in (
        "add subtract multiply true_divide negative positive absolute square sqrt maximum minimum "
        "floor ceil trunc rint sign floor_divide remainder isnan isfinite isinf "
        "equal not_equal less less_equal greater greater_equal "
        "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor invert"
    ).split()
)
#: The sign of a zero that these functions return depends on the number of elements.
_SIGN_OF_ZERO = (np.maximum, np.minimum)
#: NumPy 1 gives an operation of a scalar and an array without axes another dtype.
_SCALARS_CHANGE_DTYPES = np.__version__.startswith("1.")


class RowBlock(np.lib.mixins.NDArrayOperatorsMixin):
    """Rows of one shape, along the first axis of an array.

    Attributes
    ----------
    block : numpy.ndarray
        The rows. Every other attribute describes one row.
    """

    __slots__ = ("block",)

    def __init__(self, block: Array) -> None:
        self.block = block

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.block.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.block.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of a row."""
        return self.block.ndim - 1

    @property
    def size(self) -> int:
        """The number of elements of a row."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of a row."""
        return self.size * self.block.itemsize

    @property
    def flags(self) -> Any:
        """The flags of the block."""
        return self.block.flags

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError("the values of a RowBlock cannot be read: it stands for many rows")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc not in _EXACT or method != "__call__" or kwargs:
            return NotImplemented
        if ufunc in _SIGN_OF_ZERO and any(item.dtype.kind == "f" for item in inputs):
            return NotImplemented
        arrays = (np.ndarray, RowBlock)
        if _SCALARS_CHANGE_DTYPES and not all(isinstance(item, arrays) for item in inputs):
            return NotImplemented
        return RowBlock(ufunc(*_aligned(inputs)))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = _RULES.get(func)
        return NotImplemented if rule is None else RowBlock(rule(*args, **kwargs))

    def __getitem__(self, key: Any) -> RowBlock:
        places = key if isinstance(key, tuple) else (key,)
        for place in places:
            if type(place) is not int and not (
                place is None or place is Ellipsis or isinstance(place, (np.integer, slice))
            ):
                raise TypeError(
                    "the index of a RowBlock has integers, slices, None and Ellipsis, got a "
                    f"{type(place).__name__}"
                )
        in_block = (slice(None), *places)
        return RowBlock(self.block[in_block])

    def reshape(self, shape: Sequence[int]) -> RowBlock:
        """Return the rows in another shape, in which one length may be -1."""
        lengths = list(map(index, shape))
        if lengths.count(-1) == 1:
            rest = prod(n for n in lengths if n != -1)
            lengths[lengths.index(-1)] = self.size // rest if rest else 0
        if prod(lengths) != self.size or min(lengths, default=0) < 0:
            raise ValueError(f"cannot reshape a row of shape {self.shape} into {tuple(shape)}")
        return RowBlock(self.block.reshape((len(self.block), *lengths)))

    def transpose(self, axes: Sequence[int]) -> RowBlock:
        """Return the rows with their axes in another order."""
        return RowBlock(self.block.transpose((0, *(axis + 1 for axis in axes))))

    def astype(self, dtype: Any, copy: bool = True) -> RowBlock:
        """Return the rows in another dtype."""
        return RowBlock(self.block.astype(dtype, copy=copy))


def _aligned(inputs: Sequence[Any]) -> list[Any]:
    """Return operands whose axes broadcast as those of single rows do."""
    axes = max(np.ndim(item) if not isinstance(item, RowBlock) else item.ndim for item in inputs)

    def with_axes(item: Any) -> Any:
        if not isinstance(item, RowBlock):
            return item
        rows, *lengths = item.block.shape
        return item.block.reshape((rows, *(1,) * (axes - item.ndim), *lengths))

    return [with_axes(item) for item in inputs]


def _joined(join: Callable[..., Array], arrays: Sequence[Any], axis: int, ndim: int) -> Array:
    """Join blocks, and arrays that each row of the blocks is joined with."""
    rows = next(len(array.block) for array in arrays if isinstance(array, RowBlock))
    parts = [
        array.block if isinstance(array, RowBlock) else np.broadcast_to(array, (rows, *array.shape))
        for array in arrays
    ]
    return join(parts, axis=_axis(axis, ndim))


def _axis(axis: int, ndim: int) -> int:
    """Return the axis of a block for the axis of a row that has ``ndim`` axes."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} of a row with {ndim} axes")
    return axis % ndim + 1


def _stack(arrays: Sequence[Any], axis: int = 0) -> Array:
    return _joined(np.stack, arrays, axis, arrays[0].ndim + 1)


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> Array:
    return _joined(np.concatenate, arrays, axis, arrays[0].ndim)


def _pad(array: RowBlock, pad_width: Any, mode: str, constant_values: Any) -> Array:
    if not array.ndim:
        raise TypeError("a row without axes cannot be padded")
    return np.pad(array.block, [(0, 0), *pad_width], mode, constant_values=constant_values)  # type: ignore[call-overload, no-any-return]


#: The functions of NumPy that rows of a block support, each with its form for blocks.
_RULES: dict[Any, Callable[..., Array]] = {
    np.where: lambda condition, x, y: np.where(*_aligned((condition, x, y))),
    np.expand_dims: lambda a, axis: np.expand_dims(a.block, _axis(axis, a.ndim + 1)),
    np.moveaxis: lambda a, source, destination: np.moveaxis(
        a.block, _axis(source, a.ndim), _axis(destination, a.ndim)
    ),
    np.stack: _stack,
    np.concatenate: _concatenate,
    np.pad: _pad,
}
