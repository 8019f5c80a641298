"""Constraints, regularizers and initializers of weights, activations, and tracking of weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from fitting import STRATEGIES, mirrored

from pycollective import keras
from pycollective.keras import activations, constraints, initializers, layers, regularizers
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops

RANDOM = np.random.default_rng(6)
W = RANDOM.standard_normal((4, 3))


# Constraints --------------------------------------------------------------------------------------


def norms(w, axis=0):
    return np.sqrt((w**2).sum(axis=axis, keepdims=True))


def test_constraints_equal_the_formulas():
    large = W * 3
    np.testing.assert_array_equal(constraints.NonNeg()(W).numpy(), np.maximum(W, 0))
    held = constraints.MaxNorm(2.0)(large).numpy()
    np.testing.assert_allclose(held, large * np.minimum(1, 2 / norms(large)), rtol=1e-6)
    by_row = constraints.MaxNorm(2.0, axis=1)(large).numpy()
    assert (norms(by_row, 1) <= 2 + 1e-9).all()
    np.testing.assert_allclose(norms(constraints.UnitNorm()(W).numpy()), 1, rtol=1e-6)
    np.testing.assert_allclose(norms(constraints.MinMaxNorm(0.5, 1.0)(large).numpy()), 1, rtol=1e-6)
    half = constraints.MinMaxNorm(0.5, 1.0, rate=0.5)(large).numpy()
    np.testing.assert_allclose(norms(half), (1 + norms(large)) / 2, rtol=1e-6)
    assert constraints.NonNeg()(W.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimizer_applies_constraint_to_every_copy(kind, name):
    strategy = STRATEGIES[kind]()
    with strategy.scope():
        layer = layers.Dense(2, kernel_constraint="non_neg", bias_constraint="unit_norm")
        layer.build((None, 3))
        layer.set_weights([np.ones((3, 2)), np.ones(2)])
        optimizer = keras.optimizers.get(name)
        optimizer.learning_rate = 10.0

    def step():
        with GradientTape() as tape:
            loss = ops.reduce_sum(layer(np.ones((1, 3), np.float32)))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, layer.variables), layer.variables, strict=True)
        )

    strategy.run(step)
    kernel, bias = layer.get_weights()
    np.testing.assert_array_equal(kernel, 0)
    np.testing.assert_allclose(bias, -np.sqrt(0.5), rtol=1e-5)
    for copied in getattr(layer.kernel, "values", ()):
        np.testing.assert_array_equal(copied.numpy(), 0)


def test_a_copied_layer_keeps_its_constraints():
    layer = layers.Dense(2, kernel_constraint=constraints.MaxNorm(1))
    layer.build((None, 3))
    assert copy.deepcopy(layer.kernel).constraint is layer.kernel.constraint is not None
    with mirrored(2).scope():
        layer = layers.Dense(2, kernel_constraint=lambda w: w)
        layer.build((None, 3))
    assert copy.deepcopy(layer.kernel).constraint is layer.kernel.constraint is not None
    assert layer.bias.constraint is None


# Regularizers -------------------------------------------------------------------------------------


def test_activity_regularizer_is_divided_by_the_rows():
    layer = layers.Dense(2, activity_regularizer=regularizers.L2(0.5), dtype="float64")
    model = keras.Sequential([layer, layers.ActivityRegularization(l1=0.25, dtype="float64")])
    x = RANDOM.standard_normal((5, 3))
    with GradientTape() as tape:
        y = model(x)
        losses = model.losses
        total = ops.add_n(losses)
    assert float(losses[0]) == pytest.approx(0.5 * (y.numpy() ** 2).sum() / 5)
    assert float(losses[1]) == pytest.approx(0.25 * np.abs(y.numpy()).sum() / 5)
    gradient = tape.gradient(total, layer.bias).numpy()
    expected = (y.numpy() + 0.25 * np.sign(y.numpy())).sum(axis=0) / 5
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    model(x[:0])
    assert [float(loss) for loss in model.losses] == [0, 0]
    model(x)
    assert len(model.losses) == 2


@pytest.mark.parametrize("kind", ["mirrored 2", "mirrored 3", "central storage 2"])
def test_fit_with_activity_regularizer_is_equal_under_any_strategy(kind):
    x, y = RANDOM.standard_normal((21, 3)), RANDOM.standard_normal((21, 2))

    def trained(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    layers.Dense(4, "tanh", activity_regularizer="l2", dtype="float64"),
                    layers.Dense(2, kernel_constraint=constraints.MaxNorm(0.5), dtype="float64"),
                ]
            )
            model.set_weights([np.full(w.shape, 0.3) for w in model.get_weights()])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        # The last batch has 5 instead of 8 examples.
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], model.get_weights()

    loss, weights = trained(STRATEGIES["default"]())
    other_loss, other_weights = trained(STRATEGIES[kind]())
    np.testing.assert_allclose(other_loss, loss, rtol=1e-10)
    for one, other in zip(weights, other_weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
    assert norms(weights[2]).max() <= 0.5


def test_activity_regularizer_prevents_fusion():
    x = RANDOM.standard_normal((2, 6, 6, 1)).astype(np.float32)
    for first, second in (
        ({"activity_regularizer": "l2"}, {}),
        ({}, {"activity_regularizer": "l2"}),
    ):
        model = keras.Sequential(
            [layers.Conv2D(4, 3, activation="relu", **first), layers.MaxPooling2D(**second)]
        )
        model(x)
        assert len(model.losses) == 1 and float(model.losses[0]) > 0


def test_orthogonal_regularizer_equals_the_formula():
    unit = W / norms(W, 1)
    cosines = np.abs(unit @ unit.T)
    expected = 0.1 * (cosines.sum() - 4) / 12
    assert float(regularizers.OrthogonalRegularizer(0.1)(W)) == pytest.approx(expected)
    assert float(regularizers.OrthogonalRegularizer(0.1, "columns")(W.T)) == pytest.approx(expected)
    assert float(regularizers.OrthogonalRegularizer()(W[:1])) == 0
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        regularizers.OrthogonalRegularizer()(np.zeros((2, 2, 2)))


# Initializers -------------------------------------------------------------------------------------


def test_orthogonal_and_identity_initializers_give_such_matrices():
    for shape in ((6, 4), (4, 6), (3, 2, 5)):
        w = initializers.Orthogonal(2.0, seed=1)(shape, "float64").numpy().reshape(-1, shape[-1])
        square = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
        np.testing.assert_allclose(square, 4 * np.eye(len(square)), atol=1e-12)
    w = initializers.Identity(3.0)((2, 3)).numpy()
    np.testing.assert_array_equal(w, [[3, 0, 0], [0, 3, 0]])
    np.testing.assert_array_equal(initializers.get(W)((4, 3), "float64").numpy(), W)


@pytest.mark.parametrize(
    ("initializer", "variance"),
    [
        (initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal", seed=0), 2 / 400),
        (initializers.VarianceScaling(2.0, "fan_out", "normal", seed=0), 2 / 250),
        (initializers.VarianceScaling(input_axes=[1], output_axes=[0], seed=0), 1 / 250),
        (initializers.GlorotUniform(seed=0), 2 / 650),
        (initializers.LecunNormal(seed=0), 1 / 400),
    ],
)
def test_variance_scaling_has_the_expected_variance(initializer, variance):
    w = initializer((400, 250), "float64").numpy()
    assert abs(w.mean()) < 4 * np.sqrt(variance / w.size)
    assert w.var() == pytest.approx(variance, rel=0.02)


# Activations --------------------------------------------------------------------------------------


def test_relu_with_slope_maximum_and_threshold_equals_the_formula():
    x = np.array([-3.0, -0.5, 0.0, 0.5, 1.0, 4.0, 9.0])

    def expected(slope, top, threshold):
        y = np.where(x > threshold, x, slope * (x - threshold))
        return y if top is None else np.where(x > threshold, np.minimum(y, top), y)

    for slope in (0.0, 0.2):
        for top in (None, 6, 3.5):
            for threshold in (0.0, 0.75):
                y = activations.relu(x, slope, top, threshold).numpy()
                np.testing.assert_allclose(y, expected(slope, top, threshold), rtol=1e-14)
                layer = layers.ReLU(top, slope, threshold, dtype="float64")
                np.testing.assert_array_equal(layer(x).numpy(), y)
    with pytest.raises(ValueError, match="negative_slope must be at least 0, got -1"):
        layers.ReLU(negative_slope=-1)


def test_activation_layers_equal_the_functions():
    x = RANDOM.standard_normal((2, 3, 4))

    def apply(layer):
        return layer(x).numpy()

    np.testing.assert_allclose(
        apply(layers.LeakyReLU(dtype="float64")), np.where(x > 0, x, 0.3 * x)
    )
    np.testing.assert_allclose(
        apply(layers.ELU(0.5, dtype="float64")), np.where(x > 0, x, 0.5 * np.expm1(x))
    )
    both = apply(layers.Softmax(axis=(1, 2), dtype="float64"))
    np.testing.assert_allclose(both, np.exp(x) / np.exp(x).sum(axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(
        apply(layers.Softmax(1, dtype="float64")), np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    )
    prelu = layers.PReLU("ones", shared_axes=1, dtype="float64")
    np.testing.assert_allclose(apply(prelu), x)
    assert prelu.alpha.shape == (1, 4)
    with pytest.raises(ValueError, match=r"alpha of shape \(1, 4\).*\(2, 3, 5\)"):
        prelu(np.zeros((2, 3, 5)))


def test_embedding_looks_up_rows():
    table = RANDOM.standard_normal((5, 3)).astype(np.float32)
    layer = layers.Embedding(5, 3, weights=[table])
    numbers = np.array([[0, 4], [4, 2]])
    with GradientTape() as tape:
        y = layer(numbers)
    np.testing.assert_array_equal(y.numpy(), table[numbers])
    gradient = as_tensor(tape.gradient(y, layer.embeddings)).numpy()
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 1, 0, 2])
    np.testing.assert_array_equal(layer(numbers.astype(np.float64)).numpy(), table[numbers])
    assert layer.compute_output_shape((None, 7)) == (None, 7, 3)
    with pytest.raises(IndexError, match="to 5"):
        layer(np.array([5]))
    assert layer(Tensor(numbers[:0])).shape == (0, 2, 3)


# Tracking of sublayers ----------------------------------------------------------------------------


def test_weights_follow_every_change_of_the_layers():
    class Blocks(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.blocks = []
            self.named = {"rest": []}
            self.head = layers.Dense(1)

    def dense():
        layer = layers.Dense(2, kernel_regularizer="l2")
        layer.build((None, 3))
        return layer

    def count():
        assert len(whole.weights) == len(whole.trainable_weights) == 2 * len(whole.losses)
        return len(whole.weights)

    whole = Blocks()
    assert count() == 0
    whole.blocks.append(dense())
    assert count() == 2
    whole.named["rest"].append(dense())
    whole.named["first"] = dense()
    assert count() == 6
    whole.blocks[0] = layers.Dense(2)
    assert count() == 4
    whole.head = dense()
    assert count() == 6
    whole.head = None
    assert count() == 4
    whole.head = keras.Sequential([dense()])
    assert count() == 6
    whole.head.add(layers.Flatten())
    whole.head.add(dense())
    assert count() == 8
    whole.head.pop()
    assert count() == 6
    del whole.head
    assert count() == 4
    whole.blocks[0].build((None, 3))
    assert len(whole.weights) == 6
    whole.blocks[0].trainable = False
    assert len(whole.trainable_weights) == 4


def test_model_after_weights_access_is_freed_immediately():
    import weakref

    layer = keras.Sequential([layers.Dense(2)])
    gone = weakref.ref(layer.layers[0])
    assert layer.weights == []
    del layer
    assert gone() is None


# Order --------------------------------------------------------------------------------------------


def test_weights_order_equals_that_of_keras():
    def names(variables):
        return [variable.name for variable in variables]

    class Pair(layers.Layer):
        def __init__(self, shared):
            super().__init__(name="pair")
            self.shared = shared
            self.own = layers.Dense(2, name="own", use_bias=False)

        def build(self, input_shape):
            self.count = self.add_weight("count", initializer="zeros", trainable=False)
            self.scale = self.add_weight("scale", initializer="ones")

        def call(self, inputs):
            return self.own(self.shared(inputs)) * self.scale + self.count

    shared = layers.Dense(2, name="shared", use_bias=False)
    norm = layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((2,)), norm, Pair(shared), shared])
    trained = ["norm/gamma", "norm/beta", "pair/scale", "shared/kernel", "own/kernel"]
    expected = [*trained[:2], "norm/moving_mean", "norm/moving_variance"]
    expected += ["pair/scale", "pair/count", *trained[3:]]
    assert names(model.weights) == names(model.variables) == expected
    assert names(model.trainable_weights) == trained
    # Freezing a layer does not change the order.
    norm.trainable = False
    assert names(model.weights) == expected
    assert names(model.trainable_weights) == trained[2:]
    fixed = [name for name in expected if name not in trained[2:]]
    assert names(model.non_trainable_weights) == fixed
