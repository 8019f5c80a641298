"""The names of ``tf.data.experimental`` that programs use."""

from __future__ import annotations

from collections.abc import Callable

from pycollective.data.dataset import Dataset, DatasetIterator
from pycollective.data.optional import Optional
from pycollective.data.options import SHARD_HINT, AutoShardPolicy, DistributeOptions
from pycollective.data.spec import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from pycollective.data.transformations import AssertCardinality

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "DistributeOptions",
    "Optional",
    "assert_cardinality",
    "cardinality",
    "get_next_as_optional",
]


def cardinality(dataset: Dataset) -> int:
    """Return the number of elements of ``dataset``; -1: infinite, -2: unknown."""
    return dataset.cardinality()


def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that gives a dataset a number of elements.

    Iterating raises a FailedPreconditionError if there are more or fewer.
    """
    return lambda dataset: AssertCardinality(dataset, expected_cardinality)


def get_next_as_optional(iterator: DatasetIterator) -> Optional:
    """Return an `Optional` of the iterator's next element."""
    return iterator.get_next_as_optional()
