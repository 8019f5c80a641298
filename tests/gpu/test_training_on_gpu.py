"""Layers, both implementations of convolution, and `fit` on a GPU equal the host."""

from __future__ import annotations

import numpy as np
import pytest
from test_fit_on_devices import STRATEGIES, convolutional, fitted
from test_layers_on_devices import gradients, layer_pairs
from test_nn_conv import CASES, arrays, assert_close
from test_nn_cudnn import results
from test_zero_rows import exported

from pycollective import distribute
from pycollective.keras import layers
from pycollective.nn import cudnn
from pycollective.tensor import as_tensor

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["cudnn", "im2col"])
def route(request, monkeypatch):
    if request.param == "im2col":
        monkeypatch.setattr(cudnn, "_library", lambda: None)
    elif cudnn._library() is None:
        pytest.skip("nvidia-cudnn-frontend is not installed, or finds no cuDNN")


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_equals_that_of_the_host(cupy, route, case, dtype, activation):
    values = arrays(case, dtype)
    found = results(cupy.asarray, values, case, activation)
    for ours, right in zip(found, results(np.asarray, values, case, activation), strict=True):
        assert isinstance(ours.array, cupy.ndarray)
        assert_close(ours.numpy(), right.numpy(), dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_of_halves_sums_in_float32(cupy, route, case):
    """Sums are in float32; only inputs and results are rounded."""
    values = [v.astype(np.float16) for v in arrays(case, "float64")]
    found = results(cupy.asarray, values, case, None)
    wide = results(np.asarray, [v.astype(np.float64) for v in values], case, None)
    for ours, right in zip(found, wide, strict=True):
        assert ours.array.dtype == np.float16
        close = 5e-3 * (1 + np.abs(right.numpy()).max(initial=0))
        np.testing.assert_allclose(ours.numpy(), right.numpy(), rtol=0, atol=close)


def test_cudnn_has_engines_for_the_tutorial(cupy):
    if cudnn._library() is None:
        pytest.skip("nvidia-cudnn-frontend is not installed, or finds no cuDNN")
    random = np.random.default_rng(0)
    for images, filters in (((64, 28, 28, 1), (3, 3, 1, 32)), ((64, 13, 13, 32), (3, 3, 32, 64))):
        values = [random.random(s).astype(np.float32) for s in (images, filters, filters[3:])]
        results(cupy.asarray, values, (images, filters, (1, 1), "VALID", (1, 1)), "relu")
    assert all(plan is not None for plan in cudnn._plans.found.values())


@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layers_equal_those_of_the_host(cupy, cls):
    for here, x, there, moved in layer_pairs(cupy, cls):
        found = gradients(there, moved)
        for ours, theirs in zip(found, gradients(here, x), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert isinstance(ours.array, cupy.ndarray)
                expected = as_tensor(theirs).numpy()
                np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_on_a_gpu_equals_fit_on_the_host(cupy, name):
    expected = fitted(convolutional(distribute.get_strategy()))
    model = convolutional(STRATEGIES[name]())
    found = fitted(model)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=5e-3, err_msg=key)
    for variable in model.weights:
        component = getattr(variable, "values", (variable,))[0]
        assert isinstance(component.current().array, cupy.ndarray)
