"""What real Keras finds when it is imported: a back end that is no TensorFlow, quick to compile."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The programs run once: optimizing them would take longer than that.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
