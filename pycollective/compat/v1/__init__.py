"""Names under ``tf.compat.v1``."""

from __future__ import annotations

from types import SimpleNamespace

from pycollective.compat.v1 import train

__all__ = ["ConfigProto", "train"]


class ConfigProto(SimpleNamespace):
    """Settings of TensorFlow's sessions, such as ``inter_op_parallelism_threads``; all are ignored."""
