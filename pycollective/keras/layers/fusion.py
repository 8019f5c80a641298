"""Fusion of consecutive layers into one operation.

A `Sequential` runs steps; by default each step is one layer. `steps_of` decides once which
consecutive layers become one step. Outputs and gradients equal those of the separate layers.
`with_replays` joins consecutive steps whose kernels can be recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pycollective.keras import activations
from pycollective.keras.layers import (
    Activation,
    Add,
    BatchNormalization,
    Conv2D,
    Layer,
    MaxPooling2D,
    ReLU,
)
from pycollective.keras.layers.layer import training_of_call
from pycollective.keras.layers.replayed import (
    ITS_ARGUMENT,
    Replayed,
    can_replay,
    gives_probabilities,
    is_dropout,
    obstacle_of,
)
from pycollective.nn.conv import conv2d_relu_max_pool
from pycollective.tensor import Tensor


def _is_relu(layer: Layer) -> bool:
    """Return True if a layer computes exactly ``max(x, 0)``."""
    if layer.activity_regularizer is not None:
        return False
    if type(layer) is ReLU:
        return (layer.max_value, layer.negative_slope, layer.threshold) == (None, 0, 0)
    return type(layer) is Activation and layer.activation is activations.relu


def _same_dtype(layers: Sequence[Layer]) -> bool:
    """Return True if the layers convert neither their inputs nor their variables to another dtype."""
    dtype = layers[0].variable_dtype
    return all(layer.compute_dtype == dtype for layer in layers)


class _Fused:
    """Base of the fused steps: the layers run one after the other once they cannot be fused."""

    layers: list[Layer]
    of: Any
    _changes = -1
    _fits = True

    def _still_fits(self) -> bool:
        """Return True if the layers can be fused; find out again after a change of an attribute."""
        changes = sum([layer._changes for layer in self.layers])
        if changes != self._changes:
            found = type(self).of(self.layers)
            self._fits = found is not None and found[1] == len(self.layers)
            self._changes = changes
        return self._fits

    def _separately(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class ConvReluPool(_Fused):
    """`Conv2D` with relu (an activation or a separate layer), followed by `MaxPooling2D`."""

    def __init__(self, layers: Sequence[Layer], conv: Conv2D, pool: MaxPooling2D) -> None:
        #: The layers that are one step.
        self.layers = list(layers)
        self._conv = conv
        self._pool = pool
        #: The last image shape that passed the check of both windows.
        self._fitting: Any = None

    @staticmethod
    def of(layers: Sequence[Layer]) -> tuple[Any, int] | None:
        """Return the step for the first layers, and the number of these layers; or None."""
        conv = layers[0]
        # Subclasses may compute something else.
        if type(conv) is not Conv2D or conv.groups != 1 or conv.activity_regularizer is not None:
            return None
        relu = conv.activation is activations.linear and len(layers) > 1 and _is_relu(layers[1])
        if not relu and conv.activation is not activations.relu:
            return None
        count = 3 if relu else 2
        pool = layers[count - 1] if len(layers) >= count else None
        if (
            type(pool) is not MaxPooling2D
            or pool.activity_regularizer is not None
            or pool.padding != "valid"
            or pool.strides != pool.pool_size
            or not _same_dtype(layers[:count])
        ):
            return None
        return ConvReluPool(layers[:count], conv, pool), count

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the pooled images."""
        if not self._still_fits():
            return self._separately(inputs)
        conv, pool = self._conv, self._pool
        if not conv.built:
            conv.ensure_built(inputs.shape)
        images = conv.checked(inputs)
        shape = images.array.shape
        if shape[1:] != self._fitting:
            # These calls raise the error of the layer whose window does not fit.
            pool.compute_output_shape(conv.compute_output_shape(shape))
            self._fitting = shape[1:]
        return conv2d_relu_max_pool(
            images,
            conv.kernel,
            conv.bias,
            strides=conv.strides,
            padding=conv.padding,
            dilations=conv.dilation_rate,
            pool_size=pool.pool_size,
        )


class WithRelu(_Fused):
    """`BatchNormalization` or `Add`, followed by relu."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        #: The layers that are one step.
        self.layers = list(layers)
        self._layer = layers[0]

    @staticmethod
    def of(layers: Sequence[Layer]) -> tuple[Any, int] | None:
        """Return the step for the first layers, and the number of these layers; or None."""
        first = layers[0]
        fits = (
            type(first) in (BatchNormalization, Add)
            and len(layers) > 1
            and first.activity_regularizer is None
            and _is_relu(layers[1])
            and _same_dtype(layers[:2])
        )
        return (WithRelu(layers[:2]), 2) if fits else None

    def __call__(self, inputs: Any) -> Tensor:
        """Return ``max(outputs, 0)`` of the layer's outputs."""
        if not self._still_fits():
            return self._separately(inputs)
        outputs: Tensor = self._layer(inputs, activation="relu")
        return outputs


def steps_of(layers: Sequence[Layer]) -> list[Any]:
    """Return the steps of a `Sequential` of these layers, in order."""
    steps: list[Any] = []
    rest = list(layers)
    while rest:
        step, count = ConvReluPool.of(rest) or WithRelu.of(rest) or (rest[0], 1)
        steps.append(step)
        rest = rest[count:]
    return steps


def _layers_of(step: Any) -> list[Layer]:
    return step.layers if isinstance(step, (ConvReluPool, WithRelu)) else [step]


class AroundDropout:
    """Consecutive steps with `Dropout` among them, which are one record in inference."""

    def __init__(self, steps: Sequence[Any]) -> None:
        #: The steps of inference, joined across `Dropout`.
        self.in_inference = Replayed(
            steps, [layer for step in steps for layer in _layers_of(step)], in_training=False
        )
        #: The steps of training, joined between one `Dropout` and the next.
        self.in_training = _joined(steps)

    def __call__(self, inputs: Any) -> Any:
        """Return the output of the last step."""
        if not training_of_call():
            return self.in_inference(inputs)
        for step in self.in_training:
            inputs = step(inputs)
        return inputs


def lines_of(steps: Sequence[Any]) -> Iterator[str]:
    """Yield lines of text about the records of steps, and about the steps without a record."""
    for step in steps:
        if isinstance(step, AroundDropout):
            yield f"in inference: {step.in_inference.names}"
            yield from (f"  {line}" for line in step.in_inference.lines())
            yield "in training:"
            yield from (f"  {line}" for line in lines_of(step.in_training))
            continue
        if isinstance(step, Replayed):
            yield step.names
            yield from (f"  {line}" for line in step.lines())
            continue
        layers = _layers_of(step)
        names = ", ".join(layer.name for layer in layers)
        operations = [layer for layer in layers if not isinstance(layer, Layer)]
        obstacles = ["it is not a layer"] if operations else list(map(obstacle_of, layers))
        if gives_probabilities(layers[-1]):
            obstacles.append(ITS_ARGUMENT)
        obstacle = next(filter(None, obstacles), "no layer beside it can be recorded")
        yield names
        if not operations and any(len([*layer._flatten_layers()]) > 1 for layer in layers):
            yield "  has layers of its own"
        else:
            yield f"  runs from Python: {obstacle}"


def with_replays(steps: Sequence[Any]) -> list[Any]:
    """Return the steps; consecutive steps whose kernels can be recorded become one step.

    A `Dropout` joins the steps around it, because it computes nothing in inference.
    """
    joined: list[Any] = []
    for fits, found in itertools.groupby(steps, lambda s: is_dropout(s) or _can_replay(s)):
        group = list(found)
        group, last = _last_apart(group)
        if fits and any(map(is_dropout, group)) and sum(map(_can_replay, group)) > 1:
            joined.append(AroundDropout(group))
        else:
            joined += _joined(group)
        joined += last
    return joined


def _can_replay(step: Any) -> bool:
    return all(map(can_replay, _layers_of(step)))


def _last_apart(steps: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the steps; the last one is in a list of its own if it gives probabilities."""
    apart = steps and gives_probabilities(_layers_of(steps[-1])[-1])
    return (steps[:-1], steps[-1:]) if apart else (steps, [])


def _joined(steps: Sequence[Any]) -> list[Any]:
    joined: list[Any] = []
    for replays, found in itertools.groupby(steps, _can_replay):
        group = list(found)
        group, last = _last_apart(group)
        if replays and len(group) > 1:
            joined.append(Replayed(group, [layer for step in group for layer in _layers_of(step)]))
        else:
            joined += group
        joined += last
    return joined
