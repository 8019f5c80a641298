"""Names that TensorFlow keeps under ``tf.distribute.cluster_resolver``."""

from __future__ import annotations

from pycollective.distribute.tpu import TPUClusterResolver

__all__ = ["TPUClusterResolver"]
