"""Layers, convolution by both routes, and `fit` on a GPU: the values of the host."""

from __future__ import annotations

import numpy as np
import pytest
from test_fit_on_devices import STRATEGIES, convolutional, fitted
from test_layers_on_devices import gradients
from test_nn_conv import CASES, arrays, assert_close
from test_nn_cudnn import results
from test_zero_rows import INPUTS, exported, fitting, make

from pycollective import distribute, nest
from pycollective.keras import layers
from pycollective.nn import cudnn
from pycollective.tensor import Tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("route", ["cudnn", "im2col"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(cupy, monkeypatch, case, dtype, activation, route):
    if route == "im2col":
        monkeypatch.setattr(cudnn, "_library", lambda: None)
    elif cudnn._library() is None:
        pytest.skip("nvidia-cudnn-frontend is not installed, or finds no cuDNN")
    values = arrays(case, dtype)
    found = results(cupy.asarray, values, case, activation)
    for ours, right in zip(found, results(np.asarray, values, case, activation), strict=True):
        assert isinstance(ours.array, cupy.ndarray)
        assert_close(ours.numpy(), right.numpy(), dtype)


def test_cudnn_has_engines_for_the_tutorial(cupy):
    if cudnn._library() is None:
        pytest.skip("nvidia-cudnn-frontend is not installed, or finds no cuDNN")
    random = np.random.default_rng(0)
    for images, filters in (((64, 28, 28, 1), (3, 3, 1, 32)), ((64, 13, 13, 32), (3, 3, 32, 64))):
        values = [random.random(s).astype(np.float32) for s in (images, filters, filters[3:])]
        results(cupy.asarray, values, (images, filters, (1, 1), "VALID", (1, 1)), "relu")
    assert all(plan is not None for plan in cudnn._kept.plans.values())


@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layers(cupy, cls):
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
            variable._set_array(cupy.asarray(variable.numpy()))
        found = gradients(there, nest.map_structure(lambda t: Tensor(cupy.asarray(t.array)), x))
        for ours, theirs in zip(found, gradients(here, x), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert isinstance(ours.array, cupy.ndarray)
                np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit(cupy, name):
    expected = fitted(convolutional(distribute.get_strategy()))
    model = convolutional(STRATEGIES[name]())
    found = fitted(model)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=5e-3, err_msg=key)
    for variable in model.weights:
        component = getattr(variable, "values", (variable,))[0]
        assert isinstance(component._current().array, cupy.ndarray)
