"""The fused product, bias and relu against the operations it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pycollective.nn import bias_add, relu
from pycollective.nn.dense import dense
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(5, 7, 3), (0, 4, 2), (1, 1, 1), (40, 33, 65)])
def test_dense_is_the_composition(shape: Any, biased: bool, activation: Any, dtype: str) -> None:
    n, inputs, units = shape
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=s).astype(dtype) for s in ((n, inputs), (inputs, units), (units,))]
    tensors = [as_tensor(a) for a in (arrays if biased else arrays[:2])]
    with GradientTape(persistent=True) as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = dense(*tensors, activation=activation)
        parts = ops.matmul(*tensors[:2])
        if biased:
            parts = bias_add(parts, tensors[2])
        if activation:
            parts = relu(parts)
    np.testing.assert_array_equal(y.array, parts.array)
    g = Tensor(rng.normal(size=y.shape).astype(dtype))
    tolerance = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    expected = tape.gradient(parts, tensors, g)
    for a, e in zip(tape.gradient(y, tensors, g), expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.array, e.array, rtol=tolerance, atol=tolerance * 10)
    for which, e in enumerate(expected):
        alone = tape.gradient(y, tensors[which], g)
        np.testing.assert_allclose(alone.array, e.array, rtol=tolerance, atol=tolerance * 10)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4, 5\)"):
        dense(np.zeros((2, 3)), np.zeros((4, 5)))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        dense(np.zeros((2, 4)), np.zeros((4, 5)), np.zeros(3))
    with pytest.raises(TypeError, match=r"float64.*float32"):
        dense(np.zeros((2, 4)), np.zeros((4, 5), np.float32))
    with pytest.raises(ValueError, match="tanh"):
        dense(np.zeros((2, 4)), np.zeros((4, 5)), activation="tanh")
