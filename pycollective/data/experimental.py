"""Names that ``tf.data.experimental`` had before they moved, and that programs still use."""

from __future__ import annotations

from pycollective.data.dataset import Dataset
from pycollective.data.spec import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "cardinality"]


def cardinality(dataset: Dataset) -> int:
    """Return the number of elements of ``dataset``; -1: infinite, -2: unknown."""
    return dataset.cardinality()
