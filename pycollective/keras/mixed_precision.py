"""Mixed precision, under the names of ``tf.keras.mixed_precision``."""

from __future__ import annotations

from pycollective.keras.optimizers import LossScaleOptimizer
from pycollective.keras.policy import DTypePolicy, dtype_policy, set_dtype_policy
from pycollective.keras.registration import publish

__all__ = [
    "DTypePolicy",
    "LossScaleOptimizer",
    "Policy",
    "dtype_policy",
    "global_policy",
    "set_dtype_policy",
    "set_global_policy",
]

Policy = DTypePolicy
global_policy = dtype_policy
set_global_policy = set_dtype_policy
publish("keras.mixed_precision", globals(), ("DTypePolicy", "LossScaleOptimizer"))
