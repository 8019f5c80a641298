"""Packs: arrays that are joined for one all-reduce, each reduced as soon as it is whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.comm import on_device
from pycollective.comm.arrays import Array
from pycollective.comm.work import Work
from pycollective.nccl import device
from pycollective.workspace import workspace

#: ``begin(source, target, last)`` all-reduces a flat array into another, which may be the same one,
#: and returns the calls that are under way: none, if they are done.
Begin = Callable[[Array, Array, bool], Sequence[Work[Any]]]


def packs(arrays: Sequence[Any], bytes_per_pack: int) -> list[list[int]]:
    """Return the places of the arrays that are joined; the same on all ranks.

    Arrays of one dtype share a pack; one that has more bytes than ``bytes_per_pack`` takes no more.
    """
    sizes = tuple([(x.dtype, x.nbytes) for x in arrays])
    return [list(pack) for pack in _packs_of_sizes(sizes, bytes_per_pack)]


@functools.lru_cache(maxsize=256)
def _packs_of_sizes(sizes: tuple[tuple[Any, int], ...], bytes_per_pack: int) -> list[list[int]]:
    """Do the work of `packs`, once for all steps; the result is not to be changed."""
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
    """Return C-contiguous arrays of one dtype as a flat one, and whether that is a copy.

    Nothing is copied where it is one array, or where they lie one after the other in memory and
    belong to the same array. ``dtype`` is what the flat array has.
    """
    first = arrays[0]
    dtype = first.dtype if dtype is None else np.dtype(dtype)
    if dtype == first.dtype:
        if len(arrays) == 1:
            return first.reshape(-1), False
        together = _together(arrays)
        if together is not None:
            return together, False
    if not array_backend.on_host(first):
        return _joined_on_gpu(arrays, dtype), True
    flat = _empty(sum([x.size for x in arrays]), dtype, first)
    np.concatenate([x.reshape(-1) for x in arrays], out=flat, casting="unsafe")
    return flat, True


def joined(arrays: Sequence[Array], dtype: Any = None) -> tuple[Array, Array]:
    """Return C-contiguous arrays as a flat one, and a flat one for their sum: the same if it is new."""
    flat, is_copy = join(arrays, dtype)
    return flat, flat if is_copy else _empty(flat.size, flat.dtype, flat)


def _joined_on_gpu(arrays: Sequence[Array], dtype: Any) -> Array:
    """Return arrays of one GPU as a flat one of ``dtype``, by a few launches for all of them.

    That is one of the core's kernels, which converts as well, or CuPy's where there is none.
    """
    first = arrays[0]
    if _launches(first.dtype, dtype):
        flat = array_backend.empty(sum([x.size for x in arrays]), dtype, first)
        _launch(flat, arrays, False)
        return flat
    with array_backend.beside(first):
        rows = [array_backend.as_bits(x.reshape(-1)) for x in arrays]
        joined: Array = np.concatenate(rows) if len(rows) > 1 else rows[0]
        whole = joined if joined.dtype == first.dtype else joined.view(first.dtype)
        return whole.astype(dtype, copy=False)


def _launches(kind: Any, other: Any) -> bool:
    """Whether the core has kernels here that pack arrays of one dtype as another one."""
    floats = all(dtype.kind == "f" or dtype.name == "bfloat16" for dtype in (kind, other))
    converts = floats and {kind.itemsize, other.itemsize} in ({2, 4}, {4, 8})
    return (kind == other or converts) and on_device.runtime() is not None


def _launch(flat: Array, arrays: Sequence[Array], unpacks: bool) -> None:
    """Copy arrays of a GPU to a flat one, or back, on this thread's stream."""
    runtime = on_device.runtime()
    assert runtime is not None
    pieces, begin = [], 0
    for x in arrays:
        pieces.append((array_backend.address(x), x.size, begin))
        begin += x.size
    here = array_backend.device_of(flat)[1]
    # It is this thread that launches: a stream of each thread's own is the one that is meant.
    stream = device.stream_on(here).ptr
    runtime.pack(
        array_backend.address(flat), flat.dtype, pieces, arrays[0].dtype, 1.0, unpacks, here, stream
    )


def spread(flat: Array, targets: Sequence[Array]) -> None:
    """Copy the parts of a flat array to arrays of its dtype and device, of any layout."""
    fits = not array_backend.on_host(flat) and all(x.flags.c_contiguous for x in targets)
    if fits and _launches(flat.dtype, flat.dtype):
        _launch(flat, targets, True)
        return
    for target, part in zip(targets, split(flat, targets), strict=True):
        array_backend.assign(target, part)


def _empty(size: int, dtype: Any, like: Array) -> Array:
    """Return uninitialised memory beside an array; on the host, such as packs before it have used."""
    if array_backend.on_host(like):
        return workspace.empty((size,), dtype)
    return array_backend.empty(size, dtype, like)


def _together(arrays: Sequence[Array]) -> Array | None:
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
    """Return the parts of a flat array as views in the shapes of the arrays it was joined of."""
    parts, begin = [], 0
    for like in likes:
        parts.append(flat[begin : begin + like.size].reshape(like.shape))
        begin += like.size
    return parts


class PackedReduction:
    """An all-reduce of several arrays in packs, each begun when it is whole.

    Arrays may be given in any order. A pack is begun when all of its arrays are there and those
    before it have begun, so that every rank begins the same packs in the same order.

    Parameters
    ----------
    members : sequence of lists of int
        The places of the arrays of each pack.
    begin : callable
        Begins the all-reduce of a pack.
    dtypes : sequence of dtype, optional
        In which each pack is reduced; by default that of its arrays.
    last_waits : bool
        Whether the last pack is begun by `totals`: the caller has nothing else to do meanwhile.
    """

    def __init__(
        self,
        members: Sequence[list[int]],
        begin: Begin,
        dtypes: Sequence[Any] | None = None,
        last_waits: bool = False,
    ) -> None:
        self._members = members
        self._early = len(members) - last_waits
        self._begin = begin
        self._dtypes = dtypes or [None] * len(members)
        self._pack_of = {i: p for p, pack in enumerate(members) for i in pack}
        self._missing = [len(pack) for pack in members]
        self._arrays: dict[int, Array] = {}
        self._next = 0
        self._begun: list[tuple[Array, Sequence[Work[Any]]]] = []

    def add(self, place: int, array: Array) -> None:
        """Give an array, C-contiguous and aligned; it must be left alone until `totals`."""
        self._arrays[place] = array
        self._missing[self._pack_of[place]] -= 1
        self._begin_whole(self._early)

    def add_all(self, arrays: Sequence[Array]) -> None:
        """Give all arrays, in order, of which none was given before."""
        self._arrays = dict(enumerate(arrays))
        self._missing = [0] * len(self._missing)
        self._begin_whole(self._early)

    def _begin_whole(self, end: int) -> None:
        while self._next < end and not self._missing[self._next]:
            members = self._members[self._next]
            self._next += 1
            arrays = [self._arrays.pop(i) for i in members]
            flat, target = joined(arrays, self._dtypes[self._next - 1])
            last = self._next == len(self._members)
            self._begun.append((target, self._begin(flat, target, last)))

    def flush(self) -> None:
        """Begin all packs that have not been, of which all arrays must be there."""
        self._begin_whole(len(self._members))

    @property
    def under_way(self) -> list[Work[Any]]:
        """The calls that have begun."""
        return [work for _, works in self._begun for work in works]

    def totals(self) -> Iterator[tuple[list[int], Array]]:
        """Return for each pack, as soon as it is reduced, the places of its arrays and the total."""
        self.flush()
        for members, (target, works) in zip(self._members, self._begun, strict=True):
            for work in works:
                work.wait()
            yield members, target
