"""`Dataset.window`: the elements of each window, and the use of windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pycollective as tf
from pycollective.data import Dataset, TensorSpec


def values(dataset: Dataset) -> list[Any]:
    return [x.tolist() for x in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("shift", [None, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_windows_have_the_elements_of_their_definition(
    length: int, size: int, shift: int | None, stride: int, drop: bool
) -> None:
    step = size if shift is None else shift
    expected = [
        [i for i in range(start, start + size * stride, stride) if i < length]
        for start in range(0, length, step)
    ]
    if drop:
        expected = [window for window in expected if len(window) == size]
    windows = Dataset.range(length).window(size, shift, stride, drop)
    assert [values(window) for window in windows] == expected
    assert windows.cardinality() == len(expected)


def test_windows_of_components_are_datasets_side_by_side() -> None:
    pairs = Dataset.zip({"a": Dataset.range(5), "b": Dataset.range(10, 15)}).window(2)
    assert [(values(w["a"]), values(w["b"])) for w in pairs] == [
        ([0, 1], [10, 11]),
        ([2, 3], [12, 13]),
        ([4], [14]),
    ]
    flat = Dataset.zip(Dataset.range(4), Dataset.range(4)).window(2, drop_remainder=True)
    joined = flat.flat_map(lambda a, b: Dataset.zip(a.batch(2), b.skip(1)))
    assert [(x.numpy().tolist(), int(y)) for x, y in joined] == [([0, 1], 1), ([2, 3], 3)]


def test_windows_go_into_functions_of_datasets() -> None:
    windows = Dataset.range(7).window(3, shift=1, drop_remainder=True)
    assert values(windows.flat_map(lambda w: w.batch(3)))[-1] == [4, 5, 6]
    sums = windows.map(lambda w: w.reduce(np.int64(0), lambda s, x: s + x))
    assert values(sums) == [3, 6, 9, 12, 15]
    assert [len(w) for w in windows.filter(lambda w: tf.constant(len(w) == 3))] == [3] * 5
    assert len(list(windows.take(2).concatenate(windows).prefetch(2).repeat(2))) == 14
    first = next(iter(windows))
    assert first.element_spec == TensorSpec((), np.int64)
    assert values(first) == values(first) == [0, 1, 2]


def test_windows_of_an_infinite_dataset_come_one_by_one() -> None:
    windows = Dataset.range(3).repeat().window(2, shift=4)
    assert [values(w) for w in windows.take(3)] == [[0, 1], [1, 2], [2, 0]]
    assert windows.cardinality() == tf.data.INFINITE_CARDINALITY


def test_windows_as_numpy_iterator_raises_type_error() -> None:
    with pytest.raises(TypeError, match="elements are datasets"):
        list(Dataset.range(3).window(2).as_numpy_iterator())
