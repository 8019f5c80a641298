"""Max pooling compared with its definition: values, ties, NaN, gradients, bad input."""

from __future__ import annotations

from typing import Any

import nn_reference as reference
import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective.nn import pooling as pooling_module
from pycollective.nn.pooling import max_pool2d
from pycollective.nn.window import make_window
from pycollective.tensor import GradientTape, Tensor, as_tensor

# images, window, strides, padding
CASES = [
    ((2, 6, 8, 3), (2, 2), (2, 2), "VALID"),
    ((2, 7, 9, 35), (2, 2), (2, 2), "VALID"),
    ((2, 7, 9, 33), (2, 2), (2, 2), "SAME"),
    ((2, 7, 6, 5), (3, 3), (2, 2), "SAME"),
    ((2, 7, 6, 40), (3, 2), (1, 1), "VALID"),
    ((2, 7, 6, 4), (2, 2), (1, 3), "VALID"),
    ((1, 9, 9, 2), (2, 3), (4, 4), "SAME"),  # gaps between windows
    ((2, 5, 5, 34), (5, 5), (5, 5), "VALID"),  # many taps
    ((2, 6, 7, 2), (5, 6), (1, 1), "SAME"),
    ((1, 17, 18, 2), (16, 17), (1, 1), "SAME"),  # more taps than a byte counts
    ((2, 3, 3, 1), (1, 1), (1, 1), "VALID"),
    ((0, 6, 6, 3), (2, 2), (2, 2), "VALID"),
]


def values(shape: Any, dtype: str) -> Any:
    """Return few different values, so that there are many ties."""
    return np.random.default_rng(7).integers(-2, 3, shape).astype(dtype)


def gradient(x: Any, case: Any, g: Any) -> Any:
    tensor = as_tensor(x)
    with GradientTape() as tape:
        tape.watch(tensor)
        y = max_pool2d(tensor, *case[1:])
    return tape.gradient(y, tensor, Tensor(g)).array


def scattered(x: Any, where: Any, g: Any) -> Any:
    expected = np.zeros(x.size, g.dtype)
    np.add.at(expected, where.ravel(), g.ravel())
    return expected.reshape(x.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("nan", [False, True])
def test_max_pool2d_values_and_gradients_equal_the_definition(
    case: Any, dtype: str, nan: bool
) -> None:
    x = values(case[0], dtype)
    if nan and x.size:
        x[np.random.default_rng(8).random(x.shape) < 0.1] = np.nan
        x.reshape(-1)[:2] = -np.inf
    expected, where = reference.max_pool(x, *case[1:])
    y = max_pool2d(x, *case[1:])
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.array, expected)
    g = np.random.default_rng(9).integers(1, 9, y.shape).astype(dtype)
    np.testing.assert_array_equal(gradient(x, case, g), scattered(x, where, g))


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    x = np.zeros((1, 2, 2, 1), np.float32)
    g = np.ones((1, 1, 1, 1), np.float32)
    result = gradient(x, (None, 2, 2, "VALID"), g)
    np.testing.assert_array_equal(result.ravel(), [1, 0, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_padding_is_never_the_maximum(dtype: str, padding: str) -> None:
    x = np.full((1, 3, 3, 33), -np.inf, dtype)
    window = make_window(x.shape[1:], (3, 3), (1, 1), (1, 1), padding == "SAME")
    for route in ("_compiled", "_generic"):
        y, codes = getattr(pooling_module, route + "_forward")(x, window)
        back = getattr(pooling_module, route + "_backward")(np.ones_like(y), codes, x.shape, window)
        assert np.isneginf(y).all()
        assert back.sum() == y.size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_array_module_route_equals_the_compiled_one(case: Any, dtype: str) -> None:
    x = values(case[0], dtype)
    window = make_window(x.shape[1:], case[1], case[2], (1, 1), case[3] == "SAME")
    y, codes = pooling_module._compiled_forward(x, window)
    other, other_codes = pooling_module._generic_forward(x, window)
    np.testing.assert_array_equal(y, other)
    np.testing.assert_array_equal(codes, other_codes)
    g = np.random.default_rng(9).integers(1, 9, y.shape).astype(dtype)
    np.testing.assert_array_equal(
        pooling_module._compiled_backward(g, codes, x.shape, window),
        pooling_module._generic_backward(g, other_codes, x.shape, window),
    )


def test_integers_and_noncontiguous_input_are_pooled() -> None:
    x = values((2, 6, 6, 3), "int32")
    expected, _ = reference.max_pool(x, (2, 2), (2, 2), "VALID")
    np.testing.assert_array_equal(max_pool2d(x).array, expected)
    turned = np.asfortranarray(x.astype(np.float32))
    np.testing.assert_array_equal(max_pool2d(turned).array, expected)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((6, 6, 3), {}, ["(6, 6, 3)"]),
        ((1, 2, 2, 3), {"ksize": 3}, ["(1, 2, 2, 3)", "larger"]),
        ((1, 2, 2, 0), {}, ["channels"]),
        ((1, 2, 2, 3), {"ksize": -1}, ["ksize", "-1"]),
        ((1, 2, 2, 3), {"strides": True}, ["strides"]),
        ((1, 2, 2, 3), {"padding": None}, ["padding"]),
    ],
)
def test_bad_input_is_named(shape: Any, options: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        max_pool2d(np.zeros(shape), **options)
    for word in words:
        assert word in str(error.value)


def test_kernels_check_their_arrays() -> None:
    """Wrong sizes and codes are errors before a kernel runs."""
    window = make_window((4, 4, 3), (2, 2), (2, 2), (1, 1), False)
    x, y = np.zeros((1, 4, 4, 3), np.float32), np.zeros((1, 2, 2, 3), np.float32)
    codes = np.zeros((1, 2, 2, 3), np.uint8)
    with pytest.raises(ValueError, match=r"codes has shape \(1, 2, 2, 2\)"):
        kernels.max_pool(x, None, y, codes[..., :2].copy(), window, False)
    with pytest.raises(ValueError, match="dtype float64"):
        kernels.max_pool(x, None, y.astype(np.float64), codes, window, False)
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.max_pool(x.transpose(0, 2, 1, 3), None, y, codes, window, False)
    with pytest.raises(ValueError, match="read-only"):
        sealed = y.copy()
        sealed.setflags(write=False)
        kernels.max_pool(x, None, sealed, codes, window, False)
    with pytest.raises(ValueError, match="outside the pooling window"):
        kernels.max_pool_gradient(y, codes + 4, x, None, window)
    with pytest.raises(ValueError, match="int32"):
        kernels.max_pool(x.astype(np.int32), None, y, codes, window, False)
    with pytest.raises(ValueError, match="output rows"):
        kernels.im2col(x, np.zeros((4, 12), np.float32), window, 1, 2)
