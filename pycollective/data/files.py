"""Sources of datasets: names of files, and lines of text files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pycollective.arguments import path_of
from pycollective.data.dataset import Dataset, kind
from pycollective.data.sources import TensorSlices
from pycollective.data.spec import UNKNOWN_SPEC, TensorSpec
from pycollective.dtypes import string
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Tensor


@kind
def matching_files(patterns: Any) -> TensorSlices:
    """Return a dataset of the sorted names of all files that match the patterns.

    The names are bytes. Raise an `InvalidArgumentError` if no file matches.
    """
    one = isinstance(patterns, (str, bytes, os.PathLike))
    if not one and not np.iterable(patterns):
        raise TypeError(f"patterns must be a pattern of paths or several, not {patterns!r}")
    wanted = [path_of("patterns", p) for p in ([patterns] if one else patterns)]
    names = sorted({os.fsencode(name) for pattern in wanted for name in glob.glob(pattern)})
    if not names:
        shown = ", ".join(os.fsdecode(p) for p in wanted)
        raise InvalidArgumentError(f"No files matched pattern: {shown}")
    return TensorSlices(names)


class TextLineDataset(Dataset):
    """The lines of text files, as bytes without line ends.

    Parameters
    ----------
    filenames : str, list of str, or Dataset
        Names of files, or a dataset of names.

    Raises
    ------
    TypeError
        If the elements of ``filenames`` are not names.
    """

    def __init__(self, filenames: Any) -> None:
        if isinstance(filenames, os.PathLike):
            filenames = os.fspath(filenames)
        names = filenames if isinstance(filenames, Dataset) else TensorSlices(_listed(filenames))
        if names.element_spec not in (TensorSpec((), string), UNKNOWN_SPEC):
            raise TypeError(
                f"TextLineDataset needs names of files, not elements of {names.element_spec}"
            )
        self._names = names

    def _inputs(self) -> tuple[Dataset, ...]:
        return (self._names,)

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        return self._copy(_names=inputs[0])

    def _iter(self) -> Iterator[Any]:
        for name in self._names._iter():
            with open(name.item(), "rb") as file:
                for line in file:
                    # As in TensorFlow, no "\r" is part of a line.
                    yield np.asarray(line.removesuffix(b"\n").replace(b"\r", b""), string)

    def _make_spec(self) -> Any:
        return TensorSpec((), string)


def _listed(filenames: Any) -> Any:
    if isinstance(filenames, Tensor):
        filenames = filenames.array if filenames.ndim else filenames.numpy()
    if isinstance(filenames, (str, bytes)):
        return [filenames]
    if isinstance(filenames, (list, tuple)):
        filenames = [os.fspath(f) if isinstance(f, os.PathLike) else f for f in filenames]
        return filenames or np.empty(0, string)
    return filenames
