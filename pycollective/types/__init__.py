"""Types for annotations and for ``isinstance``, under the path of ``tf.types``."""

from __future__ import annotations

from pycollective.types import experimental

__all__ = ["experimental"]
