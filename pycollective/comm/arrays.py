"""Conversion of arrays for the core: contiguous, of the right shape, input and output disjoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import array_backend
from pycollective.arguments import whole

Array: TypeAlias = NDArray[Any]


NewResult: TypeAlias = Callable[[tuple[int, ...], Array], Array]
"""``new(shape, like)`` makes an array for a result, with the dtype and the device of ``like``."""


OBJECTS_REFUSED = (
    "arrays of Python objects cannot be sent: give a numeric dtype, or use the calls for objects, such "
    "as broadcast_object"
)


class CallerArray(NamedTuple):
    """The caller's array for a result."""

    array: Array
    given: Any  # the caller's object, of which ``array`` is a view


_ARRAY_PROTOCOLS = (
    "array", "array_interface", "array_struct", "dlpack", "cuda_array_interface"
)  # fmt: skip

# Devices of DLPack whose memory the host can read: CPU, and pinned memory of CUDA and ROCm.
_HOST_DEVICES = (1, 3, 11)


def _as_array(x: Any) -> Array:
    """Return an array on the memory of ``x`` if possible, else a copy: CuPy's on a GPU, else NumPy's."""
    if type(x) is np.ndarray:
        return x
    if type(x) is bytes:  # NumPy would make a text of it, and drop zeros at its end
        return np.frombuffer(x, np.uint8)
    if array_backend.is_on_gpu(x):
        return array_backend.gpu_array(x)
    if any(isinstance(one, np.ma.MaskedArray) for one in (x if isinstance(x, list) else [x])):
        raise TypeError(
            "masked arrays would lose their masks: give x.filled(value), or x.data and x.mask"
        )
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        kind = x.__dlpack_device__()[0]
        if kind not in _HOST_DEVICES:
            raise TypeError(
                f"{type(x).__name__} is on a device (DLPack's type {int(kind)}) that communicators do "
                "not support: copy it to the host first"
            )
        return np.from_dlpack(x)
    return np.asarray(x)


def as_input(x: ArrayLike) -> Array:
    """Return ``x`` as an array that the core can read: C-contiguous and aligned.

    ``x`` is a number, a list of numbers, an object with the buffer protocol, ``__array__``,
    ``__array_interface__`` or DLPack, or a GPU array with ``__cuda_array_interface__`` or DLPack.
    """
    array = _as_array(x)
    if array.dtype.hasobject:
        raise TypeError(OBJECTS_REFUSED)
    return array if is_fit(array) else _copied(array)


def _copied(array: Array) -> Array:
    """Return a copy of an array on its own device; CuPy would use the thread's current device."""
    with array_backend.beside(array):
        return array_backend.copy(array)


def is_fit(array: Array) -> bool:
    """Return True if the core can use the array: C-contiguous and aligned (as CuPy's always are)."""
    flags = array.flags
    return flags.c_contiguous and (type(array) is not np.ndarray or flags.aligned)


def as_output(out: Any) -> Array:
    """Return a writable view of ``out``; raise an error if there is none."""
    view = _as_array(out)
    if view is not out and not _has_memory(out):
        raise TypeError(f"out must be an array, not {type(out).__name__}")
    if view.dtype.hasobject:
        raise TypeError("out contains Python objects: give an array of a numeric dtype")
    if type(view) is np.ndarray and not view.flags.writeable:
        raise ValueError("out is read-only: give an array that can be written")
    if not view.flags.c_contiguous and _overlaps_itself(view):
        raise ValueError(
            f"out has elements that share memory (shape {list(view.shape)}, strides "
            f"{list(view.strides)} bytes): give an array whose elements have memory of their own"
        )
    return view


def _has_memory(x: Any) -> bool:
    """Return False for an object whose array is a copy, such as a number, a list or a range."""
    if isinstance(x, np.generic):  # its buffer is a copy
        return False
    if any(hasattr(x, f"__{name}__") for name in _ARRAY_PROTOCOLS[1:]):
        return True
    try:
        memoryview(x)
    except TypeError:
        if not hasattr(x, "__array__"):
            return False
        view = np.asarray(x)  # of its memory, or a copy, as of a data set of h5py
        return not view.size or np.may_share_memory(view, np.asarray(x))
    return True


def _overlaps_itself(array: Array) -> bool:
    """Return True if two elements of an array share memory."""
    axes = sorted(
        (abs(step), n) for step, n in zip(array.strides, array.shape, strict=True) if n > 1
    )
    width, beyond = array.dtype.itemsize, array.dtype.itemsize
    if array.size == 0 or width == 0:
        return False
    for step, n in axes:
        if step < beyond:
            break
        beyond += step * (n - 1)
    else:
        return False  # each axis steps over all elements of the axes with smaller strides
    if axes[0][0] == 0:
        return True
    starts = np.zeros(1, np.int64)
    for step, n in axes:
        starts = (starts[:, None] + step * np.arange(n)).reshape(-1)
    return bool((np.diff(np.sort(starts)) < width).any())


def several(name: str, arrays: Any) -> list[Any]:
    """Return the arrays of an iterable; raise an error for anything else."""
    if not np.iterable(arrays) or isinstance(arrays, (str, bytes, Mapping)):
        raise TypeError(f"{name} must be several arrays, such as a list, not {arrays!r}")
    return list(arrays)


def check_out(out: Any, x: Array) -> Array:
    """Return a writable view of ``out``; raise an error unless it is like ``x``."""
    view = as_output(out)
    if view.shape != x.shape or view.dtype != x.dtype:
        raise ValueError(
            f"out must be like the input, {x.dtype}{list(x.shape)}, not "
            f"{view.dtype}{list(view.shape)}"
        )
    _check_same_device(view, x)
    return view


def _check_same_device(out: Array, x: Array) -> None:
    """Raise an error unless both arrays are on the host or on one GPU."""
    if type(out) is np.ndarray and type(x) is np.ndarray:
        return
    places = _place_of(x), _place_of(out)
    if places[0] != places[1]:
        raise ValueError(f"out must be on {places[0]}, as the input is, not on {places[1]}")


def check_one_device(arrays: Sequence[Array]) -> None:
    """Raise an error unless all arrays are on the host or on one GPU."""
    places = sorted({_place_of(x) for x in arrays})
    if len(places) > 1:
        raise ValueError(
            f"the arrays of one call are on {' and on '.join(places)}: put all on one GPU or on the host"
        )


def _place_of(array: Array) -> str:
    if array_backend.on_host(array):
        return "the host"
    return f"GPU {array_backend.device_of(array)[1]}"


def target_in(new: NewResult, view: Array, given: Any) -> tuple[Array, CallerArray | None]:
    """Return an array for the core to write, and the caller's array if it is another one."""
    if is_fit(view):
        return view, None if view is given else CallerArray(view, given)
    return new(view.shape, view), CallerArray(view, given)


def num_rows(x: Array) -> int:
    """Return the length of the first axis; a scalar counts as one row."""
    return len(x) if x.ndim else 1


def part_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of one of ``size`` equal parts along the first axis."""
    if not shape or shape[0] % size:
        raise ValueError(
            f"{name} of shape {list(shape)} cannot be cut into {size} equal parts along its first axis"
        )
    return (shape[0] // size, *shape[1:])


def output_for(
    new: NewResult,
    out: Any,
    like: Array | None,
    shape: tuple[int, ...] | None,
    other: tuple[int, ...] | None = None,
) -> tuple[Array, CallerArray | None]:
    """Return an array for the core to write, and the caller's array if it is another one.

    ``out`` must have the dtype and the device of ``like`` and one of the shapes, unless these are None.
    """
    if out is None:
        assert shape is not None and like is not None
        return new(shape, like), None
    view = as_output(out)
    if like is not None and shape is not None:
        if view.dtype != like.dtype or view.shape not in (shape, other):
            raise ValueError(
                f"out must be {like.dtype}{list(shape)}, not {view.dtype}{list(view.shape)}"
            )
        _check_same_device(view, like)
    return target_in(new, view, out)


def disjoint(source: Array, target: Array, place: Array | None) -> Array:
    """Return the input, or a copy if it overlaps the output and the call is not in place.

    A call is in place if the smaller of the two is ``place``, this rank's part of the larger.
    """
    if not np.may_share_memory(source, target):
        return source
    if place is not None:
        smaller = source if source.size < target.size else target
        if array_backend.address(place) == array_backend.address(smaller):
            return source
    return _copied(source)


def check_counts(name: str, counts: Sequence[int], size: int, x: Array | None = None) -> list[int]:
    """Return the number of rows of each rank; their sum must be the number of rows of ``x``."""
    if not np.iterable(counts) or isinstance(counts, (str, bytes)):
        raise TypeError(f"{name} must be {size} numbers of rows, one for each rank, not {counts!r}")
    found = [whole(f"a number of {name}", n, -sys.maxsize, sys.maxsize) for n in counts]
    if len(found) != size or any(n < 0 for n in found):
        raise ValueError(f"{name} must be {size} numbers of rows, one for each rank, not {found}")
    if x is not None and (x.ndim == 0 or sum(found) != len(x)):
        raise ValueError(f"{name} add up to {sum(found)} rows, but x has the shape {list(x.shape)}")
    return found


def input_and_output(
    new: NewResult, x: ArrayLike, out: Any
) -> tuple[Array, Array, CallerArray | None]:
    """Return arrays for the core to read and to write, and the caller's array if it is another one."""
    source = as_input(x)
    if out is None:
        return source, new(source.shape, source), None
    target, place = target_in(new, check_out(out, source), out)
    if out is not x and np.may_share_memory(source, target):
        same = array_backend.address(source) == array_backend.address(target)
        source = source if same else _copied(source)
    return source, target, place


def deliver(target: Array | None, place: CallerArray | None) -> Any:
    """Return the result of a call, in the caller's array if there is one; None without a result."""
    if place is None:
        return target
    if place.array is not target and target is not None:
        array_backend.assign(place.array, target)
    return place.given
