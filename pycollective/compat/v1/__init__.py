"""Names under ``tf.compat.v1``."""

from __future__ import annotations

from pycollective.compat.v1 import train

__all__ = ["train"]
