"""`Window`: groups of elements, each of which is a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pycollective import nest
from pycollective.data.dataset import Dataset, kind
from pycollective.data.spec import UNKNOWN_SPEC, common_spec, spec_of
from pycollective.data.transformed import Transformed, at_least


class _Component(Dataset):
    """One component of a window's elements."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays

    def _iter(self) -> Iterator[Any]:
        return iter(self._arrays)

    def _known_length(self) -> int:
        return len(self._arrays)

    def _make_spec(self) -> Any:
        spec = spec_of(self._arrays[0])
        for array in self._arrays[1:]:
            spec = common_spec(spec, spec_of(array))
        return spec


@kind
class Window(Transformed):
    """Windows of several elements; each component of a window is a dataset."""

    def __init__(
        self, source: Dataset, size: int, shift: int | None, stride: int, drop_remainder: bool
    ) -> None:
        super().__init__(source)
        self._size = at_least(size, 1, "size")
        self._shift = self._size if shift is None else at_least(shift, 1, "shift")
        self._stride = at_least(stride, 1, "stride")
        self._drop = drop_remainder
        #: Number of source elements from the first to the last element of a window.
        self._span = (self._size - 1) * self._stride + 1

    def _iter(self) -> Iterator[Any]:
        elements = self._source._iter()
        kept: list[Any] = []
        while True:
            kept += itertools.islice(elements, self._span - len(kept))
            window = kept[:: self._stride]
            if not window or (self._drop and len(window) < self._size):
                return
            yield nest.map_structure(lambda *arrays: _Component(arrays), *window)
            missing = self._shift - len(kept)
            del kept[: self._shift]
            if missing > 0:  # the next window begins after the elements read so far
                next(itertools.islice(elements, missing, missing), None)

    def _known_length(self) -> int:
        count = self._source._known_length()
        if count < 0:
            return count
        if self._drop:
            return max(0, (count - self._span) // self._shift + 1)
        return -(-count // self._shift)

    def _make_spec(self) -> Any:
        return UNKNOWN_SPEC

    def _batch_size(self) -> int | None:
        return None
