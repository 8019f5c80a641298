"""Arrays as the core takes them: contiguous, of the right shape, input apart from output."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import array_backend
from pycollective.arguments import whole

Array: TypeAlias = NDArray[Any]


NewResult: TypeAlias = Callable[[tuple[int, ...], Array], Array]
"""``new(shape, like)`` makes an array for a result, with the dtype and on the device of another one."""


class Place(NamedTuple):
    """Where a result must be, when the core does not write it into a new array."""

    array: Array
    given: Any  # what the caller gave, of which the array is a view


# Devices of DLPack whose memory the host reads: its own, and what CUDA and ROCm keep for it.
_HOST_DEVICES = (1, 3, 11)


def _as_array(x: Any) -> Array:
    """Return an array of the same memory where there is one, else of the values.

    It is NumPy's, or CuPy's for what lies on a GPU.
    """
    if type(x) is np.ndarray:
        return x
    if array_backend.is_on_gpu(x):
        return array_backend.gpu_array(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            "masked arrays would lose their masks: give x.filled(value), or data and mask apart"
        )
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        kind = x.__dlpack_device__()[0]
        if kind not in _HOST_DEVICES:
            raise TypeError(
                f"{type(x).__name__} lies on a device (DLPack's type {int(kind)}), and this "
                "communicator moves host arrays: copy it to the host first"
            )
        return np.from_dlpack(x)
    return np.asarray(x)


def as_input(x: ArrayLike) -> Array:
    """Return ``x`` as an array the core can read: C-contiguous and aligned.

    ``x`` may be anything with the buffer protocol, ``__array__``, ``__array_interface__`` or DLPack,
    numbers and lists of them, or a GPU array: CuPy's, or of ``__cuda_array_interface__`` or DLPack.
    """
    array = _as_array(x)
    if array.dtype.hasobject:
        raise TypeError("arrays of Python objects cannot be sent: give a numeric dtype")
    return array if is_fit(array) else _copied(array)


def _copied(array: Array) -> Array:
    """Return a copy of an array beside it; CuPy's own would lie on this thread's present device."""
    with array_backend.beside(array):
        return array_backend.copy(array)


def is_fit(array: Array) -> bool:
    """Whether the core can take it: C-contiguous and aligned, as CuPy's arrays always are."""
    flags = array.flags
    return flags.c_contiguous and (type(array) is not np.ndarray or flags.aligned)


def as_output(out: Any) -> Array:
    """Return a view of ``out`` that can take a result, or raise."""
    view = _as_array(out)
    if isinstance(out, (np.generic, numbers.Number, str, list, tuple)):
        raise TypeError(f"out must be an array, not {type(out).__name__}")
    if view.dtype.hasobject:
        raise TypeError("out holds Python objects: give an array of a numeric dtype")
    if type(view) is np.ndarray and not view.flags.writeable:
        raise ValueError("out is read-only: give an array that can be written")
    return view


def check_out(out: Any, x: Array) -> Array:
    """Return a view of ``out`` that can take a result that is like ``x``, or raise."""
    view = as_output(out)
    if view.shape != x.shape or view.dtype != x.dtype:
        raise ValueError(
            f"out must be like the input, {x.dtype}{list(x.shape)}, and is "
            f"{view.dtype}{list(view.shape)}"
        )
    _check_place(view, x)
    return view


def _check_place(out: Array, x: Array) -> None:
    """Raise unless both lie on the host, or on one GPU."""
    if type(out) is np.ndarray and type(x) is np.ndarray:
        return
    places = _place_of(x), _place_of(out)
    if places[0] != places[1]:
        raise ValueError(f"out must lie where the input does, on {places[0]}, not on {places[1]}")


def check_one_place(arrays: Sequence[Array]) -> None:
    """Raise unless all arrays lie on the host, or on one GPU."""
    places = sorted({_place_of(x) for x in arrays})
    if len(places) > 1:
        raise ValueError(
            f"the arrays of one call lie on {' and on '.join(places)}: they must all be on one GPU, or "
            "all on the host"
        )


def _place_of(array: Array) -> str:
    if array_backend.on_host(array):
        return "the host"
    return f"GPU {array_backend.device_of(array)[1]}"


def target_in(new: NewResult, view: Array, given: Any) -> tuple[Array, Place | None]:
    """Array for the core to write, and where the result must be."""
    if is_fit(view):
        return view, None if view is given else Place(view, given)
    return new(view.shape, view), Place(view, given)


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
    new: NewResult,
    out: Any,
    like: Array | None,
    shape: tuple[int, ...] | None,
    other: tuple[int, ...] | None = None,
) -> tuple[Array, Place | None]:
    """Array for the core to write, and where the result must be.

    ``out`` must be of the dtype and the device of ``like``, and of one of the shapes; None: of any.
    """
    if out is None:
        assert shape is not None and like is not None
        return new(shape, like), None
    view = as_output(out)
    if like is not None and shape is not None:
        if view.dtype != like.dtype or view.shape not in (shape, other):
            raise ValueError(
                f"out must be {like.dtype}{list(shape)}, and is {view.dtype}{list(view.shape)}"
            )
        _check_place(view, like)
    return target_in(new, view, out)


def apart(source: Array, target: Array, place: Array | None) -> Array:
    """Return the input, or a copy where it overlaps the output in another way than in place.

    In place: the smaller of the two is ``place``, this rank's part of the larger.
    """
    if not np.may_share_memory(source, target):
        return source
    if place is not None:
        smaller = source if source.size < target.size else target
        if array_backend.address(place) == array_backend.address(smaller):
            return source
    return _copied(source)


def check_counts(name: str, counts: Sequence[int], size: int) -> list[int]:
    """Return the numbers of rows, one for each rank."""
    if not np.iterable(counts) or isinstance(counts, (str, bytes)):
        raise TypeError(f"{name} must be {size} numbers of rows, one for each rank, not {counts!r}")
    found = [whole(f"a number of {name}", n, -sys.maxsize, sys.maxsize) for n in counts]
    if len(found) != size or any(n < 0 for n in found):
        raise ValueError(f"{name} must be {size} numbers of rows, one for each rank, not {found}")
    return found


def input_and_output(new: NewResult, x: ArrayLike, out: Any) -> tuple[Array, Array, Place | None]:
    """Arrays for the core to read and to write, and where the result must be."""
    source = as_input(x)
    if out is None:
        return source, new(source.shape, source), None
    target, place = target_in(new, check_out(out, source), out)
    if out is not x and np.may_share_memory(source, target):
        same = array_backend.address(source) == array_backend.address(target)
        source = source if same else _copied(source)
    return source, target, place


def deliver(target: Array | None, place: Place | None) -> Any:
    """Return the result of a call, copied to where it must be; None where this rank has no result."""
    if place is None:
        return target
    if place.array is not target and target is not None:
        array_backend.assign(place.array, target)
    return place.given
