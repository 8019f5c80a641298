"""Names of ``tf.data.experimental`` that programs use."""

from __future__ import annotations

from collections.abc import Callable

from pycollective.data.dataset import Dataset, DatasetIterator
from pycollective.data.optional import Optional
from pycollective.data.options import SHARD_HINT, AutoShardPolicy, DistributeOptions
from pycollective.data.spec import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from pycollective.data.transformations import AssertCardinality
from pycollective.tensor import Tensor

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


def cardinality(dataset: Dataset) -> Tensor:
    """Return the number of elements of ``dataset`` as int64, -1 if infinite, -2 if unknown."""
    return dataset.cardinality()


def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that asserts the number of a dataset's elements.

    Iterating raises a FailedPreconditionError if the number is different.
    """
    return lambda dataset: AssertCardinality(dataset, expected_cardinality)


def get_next_as_optional(iterator: DatasetIterator) -> Optional:
    """Return an `Optional` of the iterator's next element."""
    return iterator.get_next_as_optional()
