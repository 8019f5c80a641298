"""Names of TensorFlow 1 that model functions of estimators use, under ``tf.compat``."""

from __future__ import annotations

from pycollective.compat import v1

__all__ = ["v1"]
