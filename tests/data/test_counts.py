"""Counts as arguments of datasets: ints, arrays, tensors and variables; and wrong values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycollective as tf
from pycollective.data import Dataset
from pycollective.errors import InvalidArgumentError

KINDS: dict[str, Callable[[int], Any]] = {
    "int32 tensor": lambda n: tf.constant(n),
    "int64 tensor": lambda n: tf.constant(n, tf.int64),
    "NumPy int": np.int64,
    "NumPy array": lambda n: np.array(n, np.int32),
    "variable": lambda n: tf.Variable(n),
}

CALLS: dict[str, Callable[[Dataset, Callable[[int], Any]], Dataset]] = {
    "batch": lambda d, n: d.batch(n(4)),
    "padded_batch": lambda d, n: d.padded_batch(n(4)),
    "rebatch": lambda d, n: d.batch(2).rebatch(n(4)),
    "rebatch, sizes in turn": lambda d, n: d.batch(2).rebatch([n(4), n(1)]),
    "take": lambda d, n: d.take(n(3)),
    "take all": lambda d, n: d.take(n(-1)),
    "skip": lambda d, n: d.skip(n(3)),
    "shuffle": lambda d, n: d.shuffle(n(4), seed=n(1)),
    "repeat": lambda d, n: d.repeat(n(2)),
    "shard": lambda d, n: d.shard(n(3), n(1)),
    "prefetch": lambda d, n: d.prefetch(n(2)),
    "prefetch, AUTOTUNE": lambda d, n: d.prefetch(n(-1)),
    "window": lambda d, n: d.window(n(3), n(2), n(2)).flat_map(lambda w: w.batch(n(3))),
    "enumerate": lambda d, n: d.enumerate(n(3)),
    "map": lambda d, n: d.map(lambda x: x + 1, num_parallel_calls=n(2)),
    "map, AUTOTUNE": lambda d, n: d.map(lambda x: x + 1, num_parallel_calls=n(-1)),
    "interleave": lambda d, n: d.interleave(
        lambda x: Dataset.range(x), n(2), n(2), num_parallel_calls=n(2)
    ),
    "interleave, AUTOTUNE": lambda d, n: d.interleave(
        lambda x: Dataset.range(x), n(1), num_parallel_calls=n(-1)
    ),
    "range": lambda d, n: Dataset.range(n(2), n(9), n(3)),
    "assert_cardinality": lambda d, n: d.apply(tf.data.experimental.assert_cardinality(n(10))),
}


def values(dataset: Dataset) -> Any:
    return [
        tuple(np.asarray(part).tolist() for part in x) if isinstance(x, tuple) else x.tolist()
        for x in dataset.as_numpy_iterator()
    ]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_count_of_any_integer_type_gives_the_dataset_of_an_int(
    call: Callable[[Dataset, Callable[[int], Any]], Dataset], kind: Callable[[int], Any]
) -> None:
    expected, found = call(Dataset.range(10), int), call(Dataset.range(10), kind)
    assert found.cardinality() == expected.cardinality()
    assert found.cardinality().dtype == "int64"
    assert values(found) == values(expected)
    assert found.element_spec == expected.element_spec


def test_shuffle_with_unknown_cardinality_as_buffer_size_shuffles_all_elements() -> None:
    dataset = Dataset.range(50).filter(lambda x: x >= 0)
    shuffled = dataset.shuffle(dataset.cardinality(), seed=1)
    assert sorted(values(shuffled)) == list(range(50))
    assert values(shuffled.take(10)) != list(range(10))


TOO_SMALL: dict[str, Callable[[Dataset], Any]] = {
    "batch_size": lambda d: d.batch(0),
    "batch_size, negative": lambda d: d.batch(tf.constant(-3)),
    "batch_size, padded": lambda d: d.padded_batch(0),
    "batch_size, rebatch": lambda d: d.batch(2).rebatch(0),
    "buffer_size": lambda d: d.shuffle(0),
    "buffer_size, infinite": lambda d: d.shuffle(d.repeat().cardinality()),
    "buffer_size, prefetch": lambda d: d.prefetch(-2),
    "count": lambda d: d.take(-2),
    "size": lambda d: d.window(0),
    "shift": lambda d: d.window(1, 0),
    "stride": lambda d: d.window(1, 1, 0),
    "num_shards": lambda d: d.shard(0, 0),
    "num_parallel_calls": lambda d: d.map(lambda x: x, num_parallel_calls=0),
    "cycle_length": lambda d: d.interleave(Dataset.range, 0),
    "block_length": lambda d: d.interleave(Dataset.range, 1, 0),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_count_that_is_too_small_is_an_invalid_argument(name: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"{name.split(',')[0]} must be at least .*, not"
    ):
        TOO_SMALL[name](Dataset.range(4))


def test_shard_index_out_of_range_is_an_invalid_argument() -> None:
    for wrong in (2, -1, -5, tf.constant(2)):
        with pytest.raises(InvalidArgumentError, match="Index must be between 0 and 1"):
            Dataset.range(4).shard(2, wrong)


@pytest.mark.parametrize("wrong", [4.0, "4", True, None, [4], tf.constant(4.0), tf.constant([4])])
def test_count_that_is_no_integer_is_a_type_error(wrong: Any) -> None:
    for call in (Dataset.batch, Dataset.shuffle, Dataset.take, Dataset.skip, Dataset.prefetch):
        with pytest.raises(TypeError, match="must be an int of at least .*, not"):
            call(Dataset.range(4), wrong)
