"""Buckets: arrays that are joined for one all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.comm import on_device
from pycollective.comm.arrays import Array
from pycollective.nccl import device
from pycollective.workspace import workspace


def packs(arrays: Sequence[Any], bytes_per_pack: int) -> list[list[int]]:
    """Return the indices of the arrays of each bucket, the same on all ranks.

    Arrays of one dtype share a bucket. A bucket of more than ``bytes_per_pack`` bytes is closed.
    """
    sizes = tuple([(x.dtype, x.nbytes) for x in arrays])
    return [list(pack) for pack in _packs_of_sizes(sizes, bytes_per_pack)]


@functools.lru_cache(maxsize=256)
def _packs_of_sizes(sizes: tuple[tuple[Any, int], ...], bytes_per_pack: int) -> list[list[int]]:
    """Do the work of `packs`, once for all steps; callers must not change the result."""
    joined: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for i, (dtype, size) in enumerate(sizes):
        pack, held = open_packs.get(dtype, ([], 0))
        if not pack:
            joined.append(pack)
        pack.append(i)
        held += size
        open_packs[dtype] = ([], 0) if held > bytes_per_pack else (pack, held)
    return joined


def join(arrays: Sequence[Array], dtype: Any = None) -> tuple[Array, bool]:
    """Return C-contiguous arrays of one dtype as a flat array, and True if that is a copy.

    A single array is not copied, nor are adjacent views of one array. ``dtype`` is the dtype of the
    flat array, by default that of the arrays.
    """
    first = arrays[0]
    dtype = first.dtype if dtype is None else np.dtype(dtype)
    if dtype == first.dtype:
        if len(arrays) == 1:
            return first.reshape(-1), False
        adjacent = _adjacent(arrays)
        if adjacent is not None:
            return adjacent, False
    if not array_backend.on_host(first):
        return _joined_on_gpu(arrays, dtype), True
    flat = _empty(sum([x.size for x in arrays]), dtype, first)
    np.concatenate([x.reshape(-1) for x in arrays], out=flat, casting="unsafe")
    return flat, True


def joined(arrays: Sequence[Array], dtype: Any = None) -> tuple[Array, Array]:
    """Return C-contiguous arrays as a flat array, and a flat array for the sum.

    The two are the same array if the first is a copy.
    """
    flat, is_copy = join(arrays, dtype)
    return flat, flat if is_copy else _empty(flat.size, flat.dtype, flat)


def _joined_on_gpu(arrays: Sequence[Array], dtype: Any) -> Array:
    """Return arrays of one GPU as a flat array of ``dtype``, with few launches for all of them.

    One of the core's kernels converts and copies in one pass. Without it, CuPy copies first.
    """
    first = arrays[0]
    if _has_kernel(first.dtype, dtype):
        flat = array_backend.empty(sum([x.size for x in arrays]), dtype, first)
        _launch(flat, arrays, False)
        return flat
    with array_backend.beside(first):
        rows = [array_backend.as_bits(x.reshape(-1)) for x in arrays]
        joined: Array = np.concatenate(rows) if len(rows) > 1 else rows[0]
        whole = joined if joined.dtype == first.dtype else joined.view(first.dtype)
        return whole.astype(dtype, copy=False)


def _has_kernel(kind: Any, other: Any) -> bool:
    """Return True if the core has a kernel here that packs arrays of one dtype as another."""
    floats = all(dtype.kind == "f" or dtype.name == "bfloat16" for dtype in (kind, other))
    converts = floats and {kind.itemsize, other.itemsize} in ({2, 4}, {4, 8})
    return (kind == other or converts) and on_device.runtime() is not None


def _launch(flat: Array, arrays: Sequence[Array], unpacks: bool) -> None:
    """Copy arrays of a GPU to a flat array, or back, on this thread's stream."""
    runtime = on_device.runtime()
    assert runtime is not None
    pieces, begin = [], 0
    for x in arrays:
        pieces.append((array_backend.address(x), x.size, begin))
        begin += x.size
    here = array_backend.device_of(flat)[1]
    stream = device.stream_on(here).ptr
    runtime.pack(
        array_backend.address(flat), flat.dtype, pieces, arrays[0].dtype, 1.0, unpacks, here, stream
    )


def spread(flat: Array, targets: Sequence[Array]) -> None:
    """Copy the parts of a flat array to arrays of its dtype and device, of any layout."""
    fits = not array_backend.on_host(flat) and all(x.flags.c_contiguous for x in targets)
    if fits and _has_kernel(flat.dtype, flat.dtype):
        _launch(flat, targets, True)
        return
    for target, part in zip(targets, split(flat, targets), strict=True):
        array_backend.assign(target, part)


def _empty(size: int, dtype: Any, like: Array) -> Array:
    """Return uninitialized memory on the device of ``like``; on the host, reused memory."""
    if array_backend.on_host(like):
        return workspace.empty((size,), dtype)
    return array_backend.empty(size, dtype, like)


def _adjacent(arrays: Sequence[Array]) -> Array | None:
    """Return one flat view of adjacent views of a host array; None if they are not adjacent."""
    base = arrays[0].base
    if not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
        return None
    address = start = arrays[0].ctypes.data
    for x in arrays:
        if x.base is not base or x.ctypes.data != address:
            return None
        address += x.nbytes
    whole = base.reshape(-1).view(np.uint8)
    offset = start - base.ctypes.data
    return whole[offset : offset + address - start].view(arrays[0].dtype)


def split(flat: Array, likes: Sequence[Array]) -> list[Array]:
    """Return the parts of a flat array as views in the shapes of ``likes``."""
    parts, begin = [], 0
    for like in likes:
        parts.append(flat[begin : begin + like.size].reshape(like.shape))
        begin += like.size
    return parts
