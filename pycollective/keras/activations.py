"""Activation functions, under the names of ``tf.keras.activations``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollective import nn
from pycollective.keras.configs import Kind, deserialize_any
from pycollective.keras.registration import publish
from pycollective.nn import (
    elu,
    gelu,
    hard_sigmoid,
    hard_silu,
    log_softmax,
    mish,
    relu6,
    selu,
    silu,
    softplus,
    softsign,
    tanh,
)
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = [
    "deserialize",
    "elu",
    "exponential",
    "gelu",
    "get",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "leaky_relu",
    "linear",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "serialize",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "swish",
    "tanh",
]

swish = silu
hard_swish = hard_silu


def linear(x: Any) -> Tensor:
    """Return ``x``."""
    return as_tensor(x)


def exponential(x: Any) -> Tensor:
    """Return ``exp(x)``."""
    return ops.exp(x)


def leaky_relu(x: Any, negative_slope: float = 0.2) -> Tensor:
    """Return ``x`` if positive, else ``negative_slope * x``."""
    return nn.leaky_relu(x, negative_slope)


def relu(
    x: Any, negative_slope: float = 0.0, max_value: float | None = None, threshold: float = 0.0
) -> Tensor:
    """Return ``max(x, 0)``, with an optional slope, maximum and threshold.

    Parameters
    ----------
    x
        A floating-point tensor.
    negative_slope : float
        The slope below the threshold, where the result is ``negative_slope * (x - threshold)``.
    max_value : float, optional
        The largest result; None: no limit.
    threshold : float
        The result is ``x`` only if ``x`` is larger than this number.
    """
    if not negative_slope and not threshold:
        if max_value is None:
            return nn.relu(x)
        return nn.relu6(x) if max_value == 6 else ops.minimum(nn.relu(x), max_value)
    values = as_tensor(x)
    above = values > threshold
    high = values if max_value is None else ops.minimum(values, max_value)
    return ops.where(above, high, (values - threshold) * negative_slope)


def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return ``exp(x)`` divided by their sum along ``axis``; losses of the result use ``x`` itself."""
    return _with_logits("softmax", nn.softmax(x, axis), x, axis)


def sigmoid(x: Any) -> Tensor:
    """Return ``1 / (1 + exp(-x))``; losses of the result use ``x`` itself."""
    return _with_logits("sigmoid", nn.sigmoid(x), x, -1)


def _with_logits(name: str, probabilities: Tensor, x: Any, axis: int) -> Tensor:
    if probabilities.__class__ is Tensor:
        probabilities._logits = name, as_tensor(x), axis
    return probabilities


def logits_of(predicted: Tensor, name: str, axis: int = -1) -> Tensor | None:
    """Return the argument of an activation if it is ``name`` along ``axis``, else None."""
    made, logits, along = predicted._logits
    fits = made == name and (name == "sigmoid" or (along - axis) % predicted.ndim == 0)
    return logits if fits else None


_KNOWN: dict[str, Any] = {
    name: globals()[name] for name in __all__ if name not in ("deserialize", "get", "serialize")
}
_KIND = Kind("activation", _KNOWN, "a callable(tensor)")
#: Functions of other packages, each with the equal activation that layers recognize.
_SAME = {
    nn.relu: relu,
    nn.leaky_relu: leaky_relu,
    nn.sigmoid: sigmoid,
    nn.softmax: softmax,
    ops.exp: exponential,
}
_NAMES = {function: name for name, function in reversed(_KNOWN.items())}


def serialize(activation: Any) -> Any:
    """Return the name of an activation of this module, or the config of another one."""
    name = _NAMES.get(activation)
    return _KIND.serialize(activation) if name is None else name


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the activation, a function or a layer, from the result of `serialize`."""
    if isinstance(config, Mapping) and "config" in config:
        name = config.get("class_name")
        if isinstance(name, str) and name != "function" and name not in _KNOWN:
            return deserialize_any(config, custom_objects)
    return _KIND.deserialize(config, custom_objects)


def get(identifier: Any) -> Callable[[Any], Any]:
    """Return an activation, given as itself, a name such as ``"relu"``, a config or None (`linear`).

    Raises
    ------
    ValueError
        The name is unknown, or the value is neither a name, a config nor callable.
    """
    if identifier is None:
        return linear
    found = deserialize(identifier) if isinstance(identifier, Mapping) else _KIND.get(identifier)
    function: Callable[[Any], Any] = _SAME.get(found, found)
    return function


publish("keras.activations", globals(), __all__)
