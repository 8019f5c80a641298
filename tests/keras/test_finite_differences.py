"""Gradients of every layer and loss, by inputs and weights, against finite differences in float64.

The classes are collected from the package and made as in `test_zero_rows`. Each derivative is
compared along a random direction, which includes every element.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from test_zero_rows import INPUTS, PAIRS, exported, fitting, make

from pycollective import nest
from pycollective.keras import layers, losses
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops

STEP = 1e-6
#: Arguments that enable more of a layer, by name.
MORE = {
    "activation": "tanh",
    "activity_regularizer": "l2",
    "bias_regularizer": "l1",
    "depth_multiplier": 2,
    "embeddings_regularizer": "l2",
    "interpolation": "bilinear",
    "kernel_regularizer": "l2",
    "l1": 0.1,
    "l2": 0.2,
    "max_value": 0.9,
    "negative_slope": 0.1,
}
#: More such arguments, for layers with a window.
WINDOW = {"strides": 2, "padding": "same"}


def check(function, sources, gradients, random):
    """Compare gradients with finite differences of a function of arrays; None means zero."""
    for k, (source, gradient) in enumerate(zip(sources, gradients, strict=True)):
        found = np.zeros_like(source) if gradient is None else as_tensor(gradient).numpy()
        assert found.shape == source.shape and found.dtype == source.dtype
        direction = random.standard_normal(source.shape)
        ends = []
        for sign in (1, -1):
            moved = [*sources]
            moved[k] = source + sign * STEP * direction
            ends.append(function(moved))
        expected = (ends[0] - ends[1]) / (2 * STEP)
        size = np.abs(found * direction).sum()
        assert float((found * direction).sum()) == pytest.approx(
            expected, rel=1e-6, abs=1e-8 * max(size, 1.0)
        ), f"source {k} of shape {source.shape}"


def options_of(cls, full):
    names = inspect.signature(cls).parameters
    given = {"dtype": "float64"} | ({"seed": 1} if "seed" in names else {})
    if full:
        given |= {name: value for name, value in MORE.items() if name in names}
        if {"kernel_size", "pool_size"} & set(names):
            given |= WINDOW
    return given


def inputs_of(shape, random):
    if isinstance(shape, list):
        return [inputs_of(one, random) for one in shape]
    # Values of both signs, which as integers are the rows 0 to 3 of an embedding.
    return Tensor(4.9 * random.random((3, *shape)) - 0.95)


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layer_gradients_equal_finite_differences(cls, full):
    random = np.random.default_rng(4)
    options = options_of(cls, full)

    def use(shape):
        y = make(cls, **options)(inputs_of(shape, random))
        if isinstance(y, list) or len(y) != 3:
            raise ValueError("the list was not taken for several inputs")

    for shape in fitting(INPUTS, use):
        check_layer(lambda: make(cls, **options), inputs_of(shape, random), random)


def check_layer(make_layer, x, random):
    layer = make_layer()
    outputs = layer(x)
    values = [
        random.random(w.shape) + 0.5 if w.dtype.kind == "f" else w for w in layer.get_weights()
    ]
    upstream = random.standard_normal(outputs.shape)

    def new_layer(values):
        # A new layer for each call, so that random layers draw the same numbers.
        layer = make_layer()
        layer.build(nest.map_structure(lambda t: t.shape, x))
        layer.set_weights(values)
        return layer

    def total(x, layer):
        y = layer(x, training=True)
        return ops.add_n([ops.reduce_sum(y * upstream), *layer.losses])

    layer = new_layer(values)
    trained = [
        next(i for i, w in enumerate(layer.weights) if w is variable)
        for variable in layer.trainable_variables
    ]
    flat = nest.flatten(x)
    with GradientTape() as tape:
        tape.watch(flat)
        value = total(x, layer)
    gradients = tape.gradient(value, [*flat, *layer.trainable_variables])
    assert all(g is not None for g in gradients) or isinstance(layer, layers.Embedding)

    def function(sources):
        moved = nest.pack_as(x, [Tensor(a) for a in sources[: len(flat)]])
        weights = list(values)
        for place, value in zip(trained, sources[len(flat) :], strict=True):
            weights[place] = value
        return float(total(moved, new_layer(weights)))

    check(function, [t.numpy() for t in flat] + [values[i] for i in trained], gradients, random)


#: Arguments that enable more of a loss.
LOSS_OPTIONS = {"from_logits": True, "label_smoothing": 0.1, "delta": 0.3}


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize("cls", exported(losses, losses.Loss), ids=lambda c: c.__name__)
def test_loss_gradients_equal_finite_differences(cls, full):
    names = inspect.signature(cls).parameters
    options = {name: v for name, v in LOSS_OPTIONS.items() if full and name in names}
    if "dtype" in names:
        options["dtype"] = "float64"
    weights = np.array([0.5, 2.0]) if full else None

    def result(true, predicted):
        return ops.reduce_sum(make(cls, **options)(true, predicted, sample_weight=weights))

    pairs = [p for p in PAIRS if PAIRS[p][1] is not None]
    for pair in fitting(pairs, lambda p: result(*map(Tensor, PAIRS[p]))):
        check_loss(result, PAIRS[pair], np.random.default_rng(4))


def check_loss(result, arrays, random):
    floats = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
    tensors = [Tensor(a) for a in arrays]
    sources = [tensors[i] for i in floats]
    with GradientTape() as tape:
        tape.watch(sources)
        value = result(*tensors)
    gradients = tape.gradient(value, sources)
    assert gradients[-1] is not None

    def function(sources):
        moved = list(arrays)
        for place, value in zip(floats, sources, strict=True):
            moved[place] = value
        return float(result(*map(Tensor, moved)))

    check(function, [arrays[i] for i in floats], gradients, random)
