"""Random tensors, and generators of them, under the path of ``tf.random``."""

from __future__ import annotations

from types import SimpleNamespace

from pycollective.tensor.random import (
    default_generator,
    generator_scope,
    normal,
    set_seed,
    shuffle,
    spawn,
    stateless_normal,
    stateless_truncated_normal,
    stateless_uniform,
    truncated_normal,
    uniform,
)
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
    "default_generator",
    "experimental",
    "generator_scope",
    "get_global_generator",
    "normal",
    "set_global_generator",
    "set_seed",
    "shuffle",
    "spawn",
    "stateless_normal",
    "stateless_truncated_normal",
    "stateless_uniform",
    "truncated_normal",
    "uniform",
]

#: The older path of the generators.
experimental = SimpleNamespace(
    Algorithm=Algorithm,
    Generator=Generator,
    create_rng_state=create_rng_state,
    get_global_generator=get_global_generator,
    set_global_generator=set_global_generator,
)
