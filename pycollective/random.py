"""Random tensors and generators, under the path of ``tf.random``."""

from __future__ import annotations

from types import SimpleNamespace

from pycollective.tensor import random as tensor_random
from pycollective.tensor.random import *  # noqa: F403
from pycollective.train.generator import (
    Algorithm,
    Generator,
    create_rng_state,
    get_global_generator,
    set_global_generator,
)

__all__ = [
    "Algorithm",
    "Generator",
    "create_rng_state",
    "experimental",
    "get_global_generator",
    "set_global_generator",
]
__all__ += tensor_random.__all__

#: The older path of the generators in TensorFlow.
experimental = SimpleNamespace(
    Algorithm=Algorithm,
    Generator=Generator,
    create_rng_state=create_rng_state,
    get_global_generator=get_global_generator,
    set_global_generator=set_global_generator,
)
