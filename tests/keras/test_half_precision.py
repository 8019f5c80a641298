"""Half precision of every layer from float32 variables, within rounding errors."""

from __future__ import annotations

import numpy as np
import pytest
from test_zero_rows import INPUTS, RANDOM, exported, fitting, make

import pycollective as tf
from pycollective import keras
from pycollective.keras import layers

#: The rounding error, half a unit in the last place, and the number of such errors allowed.
PRECISION = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}


@pytest.mark.parametrize("policy", PRECISION)
@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layer_half_precision_is_accurate(cls, policy):
    if policy.endswith("bfloat16"):
        pytest.importorskip("ml_dtypes")

    def rows(shape):
        if isinstance(shape, list):
            return [rows(one) for one in shape]
        return tf.Tensor(np.float32(RANDOM.integers(1, 9, (3, *shape)) / 8))

    def result(dtype, x):
        keras.utils.set_random_seed(1)
        layer = make(cls, dtype=dtype)
        layer(x)
        keras.utils.set_random_seed(2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            total = tf.reduce_sum(tf.cast(y, "float32") * 0.125)
        sources = [*(x if isinstance(x, list) else [x]), *layer.trainable_variables]
        slopes = tape.gradient(total, sources)
        return layer, y, [g if g is None else tf.convert_to_tensor(g) for g in slopes]

    def use(shape):
        y = make(cls, dtype="float32")(rows(shape))
        if isinstance(y, list) or len(y) != 3:
            raise ValueError("the list was not taken for several inputs")

    for shape in fitting(INPUTS, use):
        x = rows(shape)
        _, expected, slopes = result("float32", x)
        half, found, others = result(policy, x)
        assert found.dtype == half.compute_dtype == policy.removeprefix("mixed_")
        assert {str(v.dtype) for v in half.trainable_variables} <= {"float32"}
        close = {"rtol": 16 * PRECISION[policy], "atol": 16 * PRECISION[policy]}
        np.testing.assert_allclose(np.float32(found.numpy()), expected.numpy(), **close)
        for a, b in zip(others, slopes, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == np.float32
                size = np.abs(b.numpy()).max(initial=1)
                np.testing.assert_allclose(a.numpy() / size, b.numpy() / size, **close)
