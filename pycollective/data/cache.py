"""Caches, which keep elements in memory or in a file after they are made once."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.arguments import path_of
from pycollective.array_backend import is_array, to_numpy
from pycollective.atomic_files import replacing
from pycollective.data.dataset import Dataset, kind
from pycollective.data.rows import Rows
from pycollective.data.transformed import Transformed
from pycollective.dtypes import as_dtype, string
from pycollective.errors import DataLossError, InvalidArgumentError

_log = logging.getLogger("pycollective")


@kind
class Cache(Transformed):
    """Elements kept in memory."""

    def __init__(self, source: Dataset) -> None:
        super().__init__(source)
        self._kept: list[Any] | None = None

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        return self._copy(_source=inputs[0], _kept=None)

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        if rows is None or rows.results:  # the results of functions are kept, not the rows' numbers
            return None
        source = rows.blocks
        return replace(rows, blocks=lambda: self._once(source))

    def _iter(self) -> Iterator[Any]:
        # Rows and elements share one cache, so that both have the order of the first pass.
        rows = self._rows()
        return self._once(self._source._iter) if rows is None else rows.elements()

    def _once(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._kept is None:
            made = []
            for item in start():
                made.append(item)
                yield item
            if self._kept is None:  # of concurrent passes, the first to end fills the cache
                self._kept = made
            return
        yield from self._kept


@kind
class FileCache(Transformed):
    """Elements kept in a file, which a later program can read.

    The file is a zip archive of arrays in NumPy's format, named ``element/leaf/dtype``. Strings are
    stored as their lengths, with their bytes in another entry. The index is written last, so that a
    file without an index is recognized as incomplete.
    """

    _INDEX = "cache.json"

    def __init__(self, source: Dataset, filename: str | os.PathLike[str]) -> None:
        super().__init__(source)
        self._filename = path_of("filename", filename)

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        # A worker's share is another dataset, which must not use the file of the whole dataset.
        _log.warning("cache(%r): this worker's share is kept in memory instead", self._filename)
        return Cache(inputs[0])

    def _iter(self) -> Iterator[Any]:
        return self._read() if os.path.exists(self._filename) else self._made()

    def _made(self) -> Iterator[Any]:
        count = 0
        # A pass that does not reach the end leaves no file.
        with replacing(self._filename) as file, zipfile.ZipFile(file, "w") as archive:
            for element in self._source._iter():
                alike = nest.map_structure(self._leaf, self.element_spec, element)
                for k, leaf in enumerate(nest.flatten(alike)):
                    _write(archive, f"{count}/{k}", to_numpy(leaf))
                count += 1
                yield element
            archive.writestr(self._INDEX, json.dumps({"elements": count}))

    def _leaf(self, _: Any, leaf: Any) -> Any:
        if not is_array(leaf):
            raise InvalidArgumentError(
                f"cache({self._filename!r}): the structure of the elements must be known before they "
                "are read; give from_generator an output_signature, or cache() in memory"
            )
        return leaf

    def _read(self) -> Iterator[Any]:
        spec = self.element_spec
        width = len(nest.flatten(spec))
        try:
            with open(self._filename, "rb") as file, zipfile.ZipFile(file) as archive:
                *names, index = archive.namelist()
                if index != self._INDEX:
                    raise zipfile.BadZipFile("no index at its end")
                expected = json.loads(archive.read(index))["elements"]
                arrays = (name for name in names if not name.endswith(_BYTES))
                for number in range(expected):
                    leaves = [_read(archive, f"{number}/{k}", next(arrays)) for k in range(width)]
                    yield nest.pack_as(spec, leaves)
                if next(arrays, None) is not None:
                    raise InvalidArgumentError(
                        f"the elements in {self._filename} have another structure than this dataset's, "
                        f"{spec}; delete it, or choose another name"
                    )
        except (InvalidArgumentError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # zipfile and NumPy raise many classes for a damaged file
            raise DataLossError(
                f"{self._filename} is not a complete cache of this dataset ({error}); delete it, and it "
                "is made again"
            ) from None


_BYTES = "/bytes"


def _write(archive: zipfile.ZipFile, place: str, array: Any) -> None:
    if array.dtype == string:
        items = array.ravel().tolist()
        archive.writestr(f"{place}/string{_BYTES}", b"".join(items))
        array = np.array([len(item) for item in items], np.int64).reshape(array.shape)
        name = "string"
    else:
        name = array.dtype.name
        if array.dtype.kind == "V":  # a dtype that NumPy does not define, such as bfloat16
            array = array.view(f"u{array.itemsize}")
    with archive.open(f"{place}/{name}", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def _read(archive: zipfile.ZipFile, place: str, name: str) -> Any:
    found, _, dtype = name.rpartition("/")
    if found != place:
        raise ValueError(f"{name} where {place} was expected")
    with archive.open(name) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    if dtype != "string":
        return array if array.dtype.name == dtype else array.view(as_dtype(dtype))
    text = archive.read(f"{name}{_BYTES}")
    if (array < 0).any() or array.sum() != len(text):
        raise ValueError(f"{name} has other lengths than its bytes")
    ends = np.cumsum(array.ravel()).tolist()
    items = np.empty(array.size, string)
    items[:] = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return items.reshape(array.shape)
