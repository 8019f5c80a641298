"""Activation functions, under the names of ``tf.keras.activations``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective.keras.backend import find
from pycollective.nn import (
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    relu,
    sigmoid,
    silu,
    softmax,
    softplus,
    tanh,
)
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = [
    "elu",
    "exponential",
    "gelu",
    "get",
    "leaky_relu",
    "linear",
    "log_softmax",
    "relu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "swish",
    "tanh",
]

swish = silu
exponential = ops.exp


def linear(x: Any) -> Tensor:
    """Return ``x``."""
    return as_tensor(x)


_KNOWN: dict[str, Any] = {name: globals()[name] for name in __all__ if name != "get"}


def get(identifier: Any) -> Callable[[Any], Any]:
    """Return an activation: itself, one by its name (``"relu"``), or `linear` for None.

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if identifier is None:
        return linear
    if isinstance(identifier, str):
        activation: Callable[[Any], Any] = find("activation", _KNOWN, identifier)
        return activation
    if callable(identifier):
        function: Callable[[Any], Any] = identifier
        return function
    raise ValueError(f"{identifier!r} is no activation; give a name or a callable(tensor)")
