"""Input pipelines in the shape of ``tf.data``."""

from __future__ import annotations

from pycollective.data import experimental
from pycollective.data.dataset import Dataset, DatasetIterator
from pycollective.data.files import TextLineDataset
from pycollective.data.options import Options
from pycollective.data.spec import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    TensorSpec,
)

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "DatasetIterator",
    "Options",
    "TensorSpec",
    "TextLineDataset",
    "experimental",
]
