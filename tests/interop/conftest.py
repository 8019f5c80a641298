"""Settings for real Keras before its import: the JAX back end, with fast compilation."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each program runs once: optimizing it would take longer than running it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
