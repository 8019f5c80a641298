"""Datasets that keep their elements in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycollective.data import Dataset, TensorSpec
from pycollective.data.dataset import as_element
from pycollective.errors import DataLossError, InvalidArgumentError
from pycollective.tensor import Tensor, ops


def values(dataset: Dataset) -> list[Any]:
    return [element.numpy().tolist() for element in dataset]


WORDS = as_element(["a", "", "bc\0"])


def test_cache_in_a_file(tmp_path: Path) -> None:
    calls = []

    def count(x: Tensor) -> dict[str, Tensor]:
        calls.append(int(x))
        return {
            "number": x,
            "halves": ops.cast(x, "bfloat16") / 2,
            "words": WORDS,
        }

    def dataset() -> Dataset:
        return Dataset.range(3).map(count).cache(tmp_path / "kept")

    first = dataset()
    assert first.element_spec["number"] == TensorSpec((), np.int64)
    assert len(list(first.take(2))) == 2
    assert os.listdir(tmp_path) == []  # not complete, hence not kept
    made = list(first)
    calls.clear()
    for again in (first, dataset()):
        read = list(again)
        assert len(read) == 3
        for one, other in zip(made, read, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert one[name].dtype == other[name].dtype
                assert one[name].array.tolist() == other[name].array.tolist()
    assert set(calls) <= {0}  # to know the elements' structure
    assert os.listdir(tmp_path) == ["kept"]


def test_a_file_of_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    assert values(Dataset.range(3).cache(file)) == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="another structure"):
        list(Dataset.from_tensors(()).cache(file))
    pairs = Dataset.range(3).enumerate().cache(file)
    with pytest.raises(DataLossError, match="no complete cache of this dataset.*delete it"):
        list(pairs)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataLossError, match="delete it"):
        values(Dataset.range(3).cache(file))
    with pytest.raises(FileNotFoundError):
        values(Dataset.range(3).cache(tmp_path / "nowhere" / "kept"))


def test_a_workers_share_of_a_cache_in_a_file_is_kept_in_memory(tmp_path: Path) -> None:
    whole = Dataset.range(6).cache(tmp_path / "kept")
    assert values(whole._with_inputs([Dataset.range(6).shard(2, 1)])) == [1, 3, 5]
    assert os.listdir(tmp_path) == []
