"""Names of ``tf.types.experimental``."""

from __future__ import annotations

from pycollective.types.experimental import distributed

__all__ = ["distributed"]
