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


def test_cache_in_a_file_keeps_elements_for_later_datasets(tmp_path: Path) -> None:
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
    assert os.listdir(tmp_path) == []  # the pass was not complete, so no file is kept
    written = list(first)
    calls.clear()
    for again in (first, dataset()):
        read = list(again)
        assert len(read) == 3
        for one, other in zip(written, read, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert one[name].dtype == other[name].dtype
                assert one[name].array.tolist() == other[name].array.tolist()
    assert set(calls) <= {0, 37}  # calls that determine the elements' structure
    assert os.listdir(tmp_path) == ["kept"]


def test_unusable_file_of_a_cache_raises(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    assert values(Dataset.range(3).cache(file)) == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="another structure"):
        list(Dataset.from_tensors(()).cache(file))
    pairs = Dataset.range(3).enumerate().cache(file)
    with pytest.raises(DataLossError, match="not a complete cache of this dataset.*delete it"):
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


class Counted:
    """A counter of the elements that are made."""

    def __init__(self) -> None:
        self.made = 0

    def map(self, dataset: Dataset) -> Dataset:
        def count(x: Tensor) -> Tensor:
            self.made += 1
            return x

        mapped = dataset.map(count)
        assert mapped.element_spec == TensorSpec((), np.int64)
        self.made = 0
        return mapped


def of_unknown_cardinality(dataset: Dataset) -> Dataset:
    return dataset.filter(lambda x: x >= 0)


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("lengths", [(3, 3), (3, 3, 3), (4, 3, 3), (4, 4, 3)])
def test_zip_of_caches_completes_each_that_ends(
    tmp_path: Path, lengths: tuple[int, ...], known: bool, in_a_file: bool
) -> None:
    counts = [Counted() for _ in lengths]
    sources = [c.map(Dataset.range(n)) for c, n in zip(counts, lengths, strict=True)]
    if not known:
        sources = [of_unknown_cardinality(source) for source in sources]
    names = [str(tmp_path / f"{i}") if in_a_file else "" for i in range(len(lengths))]
    zipped = Dataset.zip(*(s.cache(n) for s, n in zip(sources, names, strict=True)))
    rows = [(i,) * len(lengths) for i in range(min(lengths))]
    for _ in range(3):
        assert [tuple(map(int, element)) for element in zipped] == rows
    for count, length in zip(counts, lengths, strict=True):
        if length == min(lengths):
            assert count.made == length


def test_zip_ignores_errors_of_elements_that_nobody_gets() -> None:
    def fails_at_the_third(x: Tensor) -> Tensor:
        if x == 2:
            raise KeyError("nobody gets this element")
        return x

    failing = Dataset.range(3).map(fails_at_the_third)
    pairs = Dataset.zip(Dataset.range(2), failing)
    assert [(int(a), int(b)) for a, b in pairs] == [(0, 0), (1, 1)]
    with pytest.raises(KeyError):
        list(Dataset.zip(Dataset.range(3), failing))


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        lambda d: d.take(4),
        lambda d: d.take(5),
        lambda d: d.batch(2).take(2),
        lambda d: d.batch(2, drop_remainder=True),
        lambda d: d.batch(2).rebatch(2),
        lambda d: d.batch(2).unbatch().take(4),
        lambda d: d.enumerate().map(lambda _i, x: x).take(4),
        lambda d: d.concatenate(Dataset.range(2)).take(6),
        lambda d: Dataset.range(1).concatenate(d).take(5),
        lambda d: Dataset.range(2).interleave(lambda _i: d, cycle_length=1),
        lambda d: Dataset.zip(Dataset.range(2).interleave(lambda _i: d, cycle_length=1)),
        lambda d: d.repeat(2).take(8),
        lambda d: d.shard(2, 0),
        lambda d: d.skip(2).take(2),
        lambda d: d.prefetch(1).take(4),
    ],
)
def test_cache_of_known_cardinality_is_complete_after_its_last_element(
    tmp_path: Path, read: Any, in_a_file: bool
) -> None:
    count = Counted()
    cached = count.map(Dataset.range(4)).cache(str(tmp_path / "kept") if in_a_file else "")
    first = [np.asarray(x).tolist() for x in read(cached).as_numpy_iterator()]
    assert [np.asarray(x).tolist() for x in read(cached).as_numpy_iterator()] == first
    assert count.made == 4


def test_cache_of_rows_is_complete_after_all_rows() -> None:
    cached = Dataset.range(8).shuffle(8).cache()
    orders = {tuple(values(cached.take(8))) for _ in range(4)}
    assert len(orders) == 1
    cached = Dataset.range(20).shuffle(20).cache()
    zipped = Dataset.zip(Dataset.range(20), cached)
    assert len({tuple(int(b) for _a, b in zipped) for _ in range(4)}) == 1


def test_first_complete_pass_of_several_at_a_time_decides_the_kept_order() -> None:
    cached = Dataset.range(20).map(lambda x: x).shuffle(20).cache()
    one, two = iter(cached), iter(cached)
    next(one), next(two)
    kept = [int(x) for x in cached]
    list(one), list(two)
    assert values(cached) == kept
