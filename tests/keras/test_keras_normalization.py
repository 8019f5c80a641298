"""Batch and layer normalization against the formulas, also with synchronized replicas."""

from __future__ import annotations

import numpy as np
import pytest
from fitting import STRATEGIES, mirrored

from pycollective import distribute, keras
from pycollective.keras import layers
from pycollective.tensor import GradientTape, Tensor, ops

RANDOM = np.random.default_rng(4)
X = RANDOM.standard_normal((6, 3, 4)) * 3 + 5
G = RANDOM.standard_normal(X.shape)
EPSILON = 0.01


def batch_layer(**options):
    layer = layers.BatchNormalization(
        **{"momentum": 0.8, "epsilon": EPSILON, "dtype": "float64", **options}
    )
    layer.build((None, 3, 4))
    shape = layer.gamma.shape
    random = np.random.default_rng(1)
    layer.set_weights([random.random(shape) + 0.5 for _ in layer.weights])
    return layer


def normalized(x, gamma, beta, mean, variance):
    return gamma * (x - mean) / np.sqrt(variance + EPSILON) + beta


def test_batch_normalization_uses_the_batch_in_training_and_averages_in_inference():
    layer = batch_layer()
    gamma, beta, old_mean, old_variance = layer.get_weights()
    assert [v.name.split("/")[1] for v in layer.trainable_weights] == ["gamma", "beta"]
    expected = normalized(X, gamma, beta, old_mean, old_variance)
    np.testing.assert_allclose(layer(X).numpy(), expected, rtol=1e-12)
    mean, variance = X.mean(axis=(0, 1)), X.var(axis=(0, 1))
    expected = normalized(X, gamma, beta, mean, variance)
    np.testing.assert_allclose(layer(X, training=True).numpy(), expected, rtol=1e-10, atol=1e-12)
    new_mean, new_variance = layer.get_weights()[2:]
    np.testing.assert_allclose(new_mean, 0.8 * old_mean + 0.2 * mean, rtol=1e-12)
    np.testing.assert_allclose(new_variance, 0.8 * old_variance + 0.2 * variance, rtol=1e-12)
    layer(X[:0], training=True)
    np.testing.assert_array_equal(layer.get_weights()[2:], [new_mean, new_variance])
    layer.trainable = False
    expected = normalized(X, gamma, beta, new_mean, new_variance)
    np.testing.assert_allclose(layer(X, training=True).numpy(), expected, rtol=1e-12)
    np.testing.assert_array_equal(layer.get_weights()[2], new_mean)


def test_batch_normalization_other_axis_works():
    first = batch_layer(axis=1)
    assert first.gamma.shape == (3,)
    last = layers.BatchNormalization(momentum=0.8, epsilon=EPSILON, dtype="float64")
    swapped = X.transpose(0, 2, 1)
    last.build(swapped.shape)
    last.set_weights(first.get_weights())
    y = first(X, training=True).numpy()
    np.testing.assert_allclose(
        y, last(swapped, training=True).numpy().transpose(0, 2, 1), rtol=1e-12
    )
    for one, other in zip(first.get_weights(), last.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_batch_normalization_without_center_and_scale_has_mean_0_and_deviation_1():
    layer = layers.BatchNormalization(center=False, scale=False, epsilon=0.0, dtype="float64")
    y = layer(X, training=True).numpy()
    np.testing.assert_allclose(y.mean(axis=(0, 1)), 0, atol=1e-12)
    np.testing.assert_allclose(y.std(axis=(0, 1)), 1, rtol=1e-12)
    assert len(layer.weights) == 2


def test_batch_normalization_float16_computes_in_float32():
    x = (RANDOM.standard_normal((5000, 2)) + 200).astype(np.float16)
    layer = layers.BatchNormalization(dtype="float16")
    y = layer(x, training=True).numpy()
    assert y.dtype == np.float16
    np.testing.assert_allclose(y.astype(float).std(axis=0), 1, rtol=0.01)
    assert layers.LayerNormalization(dtype="float16")(x).dtype == np.float16


def test_normalization_mixed_precision_computes_in_float32():
    x = X.reshape(-1, 4).astype(np.float16)
    for cls in (layers.BatchNormalization, layers.LayerNormalization):
        mixed, whole = cls(dtype="mixed_float16"), cls()
        for layer in (mixed, whole):
            layer.build(x.shape)
            # Half precision cannot represent 1.0003: rounded weights would change the results.
            layer.set_weights([np.full(w.shape, 1.0003, np.float32) for w in layer.get_weights()])
        y = mixed(x, training=True)
        assert y.dtype == np.float16
        expected = whole(x.astype(np.float32), training=True).numpy().astype(np.float16)
        np.testing.assert_array_equal(y.numpy(), expected)
        for one, other in zip(mixed.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def parts_of(rows):
    """Return the slice of `X` for each replica, given the number of examples of each."""
    ends = np.cumsum(rows)
    assert ends[-1] == len(X)
    return [slice(end - n, end) for n, end in zip(rows, ends, strict=True)]


def gradients(layer, x, g):
    with GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    variables = layer.trainable_variables
    return y, *tape.gradient(y, [x, *variables], Tensor(g))


@pytest.mark.parametrize("rows", [(6,), (3, 3), (4, 2), (0, 6), (1, 2, 3)])
def test_synchronized_replicas_equal_one_device(rows):
    single = batch_layer()
    expected = gradients(single, Tensor(X), G)
    strategy = mirrored(len(rows))
    with strategy.scope():
        layer = batch_layer(synchronized=True)
    parts = parts_of(rows)

    def step():
        part = parts[distribute.get_replica_context().replica_id_in_sync_group]
        return gradients(layer, Tensor(X[part]), G[part])

    y, by_x, by_gamma, by_beta = (
        [v.numpy() for v in strategy.experimental_local_results(result)]
        for result in strategy.run(step)
    )
    np.testing.assert_allclose(np.concatenate(y), expected[0].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(by_x), expected[1].numpy(), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(sum(by_gamma), expected[2].numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sum(by_beta), expected[3].numpy(), rtol=1e-9, atol=1e-12)
    for one, other in zip(layer.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_unsynchronized_replicas_use_their_own_batch():
    strategy = mirrored(2)
    with strategy.scope():
        layer = batch_layer()
    old = layer.get_weights()[2]
    parts = parts_of((2, 4))

    def step():
        part = parts[distribute.get_replica_context().replica_id_in_sync_group]
        return layer(X[part], training=True)

    for part, y in zip(parts, strategy.run(step).values, strict=True):
        single = batch_layer()
        np.testing.assert_allclose(y.numpy(), single(X[part], training=True).numpy(), rtol=1e-12)
    means = [X[part].mean(axis=(0, 1)) for part in parts]
    own = [0.8 * old + 0.2 * mean for mean in means]
    for component, mean in zip(layer.moving_mean.values, own, strict=True):
        np.testing.assert_allclose(component.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(layer.get_weights()[2], np.mean(own, axis=0), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed_float16"])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_batch_without_rows_changes_no_moving_statistics(dtype, axis, activation):
    layer = batch_layer(dtype=dtype, axis=axis)
    before = layer.get_weights()
    layer(X[:0], training=True, activation=activation)
    for one, other in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    layer(X, training=True, activation=activation)
    assert all((a != b).all() for a, b in zip(layer.get_weights()[2:], before[2:], strict=True))


def test_a_replica_without_rows_keeps_its_own_moving_statistics():
    strategy = mirrored(2)
    with strategy.scope():
        layer = batch_layer()
    before = layer.get_weights()[2:]
    parts = parts_of((6, 0))

    def step():
        return layer(
            X[parts[distribute.get_replica_context().replica_id_in_sync_group]], training=True
        )

    strategy.run(step)
    for moving, old in zip((layer.moving_mean, layer.moving_variance), before, strict=True):
        first, second = (component.numpy() for component in moving.values)
        assert (first != old).all()
        np.testing.assert_array_equal(second, old)


def test_synchronized_batch_without_any_rows_changes_no_statistics():
    strategy = mirrored(2)
    with strategy.scope():
        layer = batch_layer(synchronized=True)
    before = layer.get_weights()
    y = strategy.run(lambda: layer(X[:0], training=True))
    assert y.values[0].shape == (0, 3, 4)
    for one, other in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["one device", "mirrored 2", "mirrored 3", "central storage 2"])
def test_fit_synchronized_equals_one_device(kind):
    def trained(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    layers.Dense(5, dtype="float64"),
                    layers.BatchNormalization(synchronized=True, dtype="float64"),
                    layers.Activation("tanh", dtype="float64"),
                    layers.Dense(2, dtype="float64"),
                ]
            )
            random = np.random.default_rng(2)
            model.set_weights([random.random(w.shape) + 0.1 for w in model.get_weights()])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = RANDOM_DATA
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], model.get_weights()

    loss, weights = trained(STRATEGIES["default"]())
    other_loss, other_weights = trained(STRATEGIES[kind]())
    np.testing.assert_allclose(other_loss, loss, rtol=1e-8)
    for one, other in zip(weights, other_weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-7, atol=1e-9)


RANDOM_DATA = (RANDOM.standard_normal((21, 3)), RANDOM.standard_normal((21, 2)))


def test_layer_normalization_equals_the_formula():
    for axis in (-1, 1, [1, 2]):
        layer = layers.LayerNormalization(axis, epsilon=EPSILON, dtype="float64")
        layer(X)
        gamma, beta = (RANDOM.random(w.shape) for w in layer.get_weights())
        layer.set_weights([gamma, beta])
        axes = tuple(axis) if isinstance(axis, list) else (axis,)
        mean, variance = X.mean(axis=axes, keepdims=True), X.var(axis=axes, keepdims=True)
        if axis == 1:
            gamma, beta = gamma[:, None], beta[:, None]
        expected = normalized(X, gamma, beta, mean, variance)
        np.testing.assert_allclose(layer(X).numpy(), expected, rtol=1e-12)
    with pytest.raises(TypeError, match="axis must be an int"):
        layers.LayerNormalization(axis=1.5)
    assert float(ops.reduce_sum(layers.LayerNormalization()(X[:0]))) == 0
