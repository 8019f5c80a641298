"""Layers on a device: the outputs are on the device, and nothing is fetched from it."""

from __future__ import annotations

import numpy as np
import pytest
from device_arrays import DeviceArray
from test_zero_rows import INPUTS, exported, fitting, make

from pycollective import nest
from pycollective.keras import layers
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops


def gradients(layer, x):
    with GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        total = ops.reduce_sum(y * y)
    sources = [*nest.flatten(x), *layer.trainable_variables]
    return [y, *tape.gradient(total, sources)]


def layer_pairs(cupy, cls):
    """Yield a layer with inputs on the host, and equal ones on the device, for up to two shapes."""
    random = np.random.default_rng(2)

    def inputs(shape):
        if isinstance(shape, list):
            return [inputs(one) for one in shape]
        return Tensor(random.random((3, *shape)))

    def use(shape):
        y = make(cls, dtype="float64")(inputs(shape))
        if isinstance(y, list) or len(y) != 3:
            raise ValueError("the list was not taken for several inputs")

    options = {"seed": 1} if cls in (layers.Dropout, layers.RandomCrop, layers.RandomFlip) else {}
    for shape in fitting(INPUTS, use)[:2]:
        x = inputs(shape)
        here, there = (make(cls, dtype="float64", **options) for _ in range(2))
        for layer in (here, there):
            layer(x, training=False)
        there.set_weights(here.get_weights())
        for variable in there.weights:
            variable.set_array(cupy.asarray(variable.numpy()))
        yield here, x, there, nest.map_structure(lambda t: Tensor(cupy.asarray(t.array)), x)


@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layer_on_device_fetches_nothing(cupy, cls):
    for here, x, there, moved in layer_pairs(cupy, cls):
        fetched = cupy.fetched
        found = gradients(there, moved)
        assert cupy.fetched == fetched
        for ours, theirs in zip(found, gradients(here, x), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert type(ours.array) is DeviceArray
                expected = as_tensor(theirs).numpy()
                np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-10, atol=1e-12)
        for ours, theirs in zip(there.weights, here.weights, strict=True):
            assert type(ours.current().array) is DeviceArray
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10)
