"""Input pipelines in the shape of ``tf.data``."""

from __future__ import annotations

from pycollective.data.dataset import Dataset
from pycollective.data.spec import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, TensorSpec

AUTOTUNE = -1

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "Dataset", "TensorSpec"]
