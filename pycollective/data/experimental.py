"""Names that ``tf.data.experimental`` had before they moved, and that programs still use."""

from __future__ import annotations

from typing import Any

from .dataset import AUTOTUNE, Dataset
from .node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "cardinality"]


def cardinality(dataset: Dataset) -> Any:
    """Return `Dataset.cardinality` of ``dataset``."""
    return dataset.cardinality()
