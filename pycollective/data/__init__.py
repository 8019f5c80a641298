"""Input pipelines in the shape of ``tf.data``."""

from __future__ import annotations

# These modules add their kinds of datasets to `Dataset`.
from pycollective.data import batching as batching
from pycollective.data import cache as cache
from pycollective.data import experimental
from pycollective.data import functions as functions
from pycollective.data import ordering as ordering
from pycollective.data import sources as sources
from pycollective.data import transformations as transformations
from pycollective.data import windows as windows
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
