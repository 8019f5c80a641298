"""Arrays as the core takes them: contiguous, of the right shape, input apart from output."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Array",
    "apart",
    "as_input",
    "check_counts",
    "deliver",
    "input_and_output",
    "num_rows",
    "output_for",
    "packs",
    "part_shape",
]

Array: TypeAlias = NDArray[Any]


def as_input(x: ArrayLike) -> Array:
    """Return ``x`` as an array the core can read: C-contiguous and aligned."""
    if not isinstance(x, np.ndarray):
        if hasattr(x, "__cuda_array_interface__"):
            raise TypeError(
                f"{type(x).__name__} lies on a GPU, and this communicator moves host arrays: "
                "copy it to the host first (for CuPy: x.get())"
            )
        x = np.asarray(x)
    array: Array = x
    if array.dtype.hasobject:
        raise TypeError("arrays of Python objects cannot be sent: give a numeric dtype")
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy(order="C")


def check_writable(out: Any) -> None:
    """Raise unless ``out`` can take a result."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if out.dtype.hasobject:
        raise TypeError("out holds Python objects: give an array of a numeric dtype")
    if not out.flags.writeable:
        raise ValueError("out is read-only: give an array that can be written")


def check_out(out: Any, x: Array) -> None:
    """Raise unless ``out`` can take a result that is like ``x``."""
    check_writable(out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out must be like the input, {x.dtype}{list(x.shape)}, and is "
            f"{out.dtype}{list(out.shape)}"
        )


def num_rows(x: Array) -> int:
    """Length of the first axis; a scalar counts as one row."""
    return len(x) if x.ndim else 1


def part_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Shape of one of ``size`` equal parts along the first axis."""
    if not shape or shape[0] % size:
        raise ValueError(
            f"{name} is cut into {size} equal parts along its first axis, and has the shape "
            f"{list(shape)}"
        )
    return (shape[0] // size, *shape[1:])


def output_for(
    out: Any, dtype: Any, shape: tuple[int, ...] | None, other: tuple[int, ...] | None = None
) -> tuple[Array, Array | None]:
    """Array for the core to write, and where the result must be copied, if at all.

    ``out`` must be of ``dtype`` and one of the shapes; None: of any.
    """
    if out is None:
        assert shape is not None
        return np.empty(shape, dtype), None
    check_writable(out)
    if shape is not None and (out.dtype != dtype or out.shape not in (shape, other)):
        raise ValueError(f"out must be {dtype}{list(shape)}, and is {out.dtype}{list(out.shape)}")
    if out.flags.c_contiguous and out.flags.aligned:
        return out, None
    return np.empty(out.shape, out.dtype), out


def apart(source: Array, target: Array, place: Array | None) -> Array:
    """Return the input, or a copy where it overlaps the output in another way than in place.

    In place: the smaller of the two is ``place``, this rank's part of the larger.
    """
    if not np.may_share_memory(source, target):
        return source
    if place is not None:
        smaller = source if source.size < target.size else target
        if place.ctypes.data == smaller.ctypes.data:
            return source
    copied: Array = source.copy()
    return copied


def check_counts(name: str, counts: Sequence[int], size: int) -> list[int]:
    """Return the numbers of rows, one for each rank."""
    found = [operator.index(n) for n in counts]
    if len(found) != size or any(n < 0 for n in found):
        raise ValueError(f"{name} must be {size} numbers of rows, one for each rank, not {found}")
    return found


def packs(arrays: Sequence[Array], bytes_per_pack: int) -> list[list[int]]:
    """Places of the arrays that are joined; the same on all ranks."""
    joined: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(arrays):
        pack, held = open_packs.get(x.dtype, ([], 0))
        if not pack:
            joined.append(pack)
        pack.append(i)
        held += x.nbytes
        open_packs[x.dtype] = ([], 0) if held >= bytes_per_pack else (pack, held)
    return joined


def input_and_output(x: ArrayLike, out: Array | None) -> tuple[Array, Array, Array | None]:
    """Arrays for the core to read and to write, and where the result must be copied, if at all."""
    source = as_input(x)
    if out is None:
        return source, np.empty(source.shape, source.dtype), None
    check_out(out, source)
    if not (out.flags.c_contiguous and out.flags.aligned):
        return source, np.empty(source.shape, source.dtype), out
    if out is not x and np.may_share_memory(source, out):
        same = source.ctypes.data == out.ctypes.data
        source = source if same else source.copy()
    return source, out, None


def deliver(target: Array, result: Array | None) -> Array:
    """Return the result of a call, copied to where it must be."""
    if result is None:
        return target
    result[...] = target
    return result
