"""compute_average_loss and scale_regularization_loss; the numbers are TensorFlow's."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import mirrored

import pycollective as tf
from pycollective.errors import InvalidArgumentError

average = tf.nn.compute_average_loss
scale = tf.nn.scale_regularization_loss


@pytest.mark.parametrize(
    ("losses", "options", "value", "dtype"),
    [
        ([1.0, 2.0, 4.0], {}, 7 / 3, "float32"),
        ([1, 2, 4], {}, 7 / 3, "float64"),
        ([1, 2], {"sample_weight": [0.5, 0.5]}, 0.75, "float64"),
        (np.array([1.0, 2.0, 4.0]), {"sample_weight": [1, 2, 3]}, 17 / 3, "float64"),
        (np.array([1, 2], "float16"), {"sample_weight": np.array([0.5, 0.5])}, 0.75, "float16"),
        ([1.0, 2.0, 4.0], {"sample_weight": [[1.0], [2.0], [3.0]]}, 17 / 3, "float32"),
        ([[1.0], [3.0]], {"sample_weight": [1.0, 2.0]}, 3.5, "float32"),
        ([[1.0, 2.0], [3.0, 4.0]], {"sample_weight": [1.0, 2.0]}, 8.5, "float32"),
        ([[1.0, 2.0], [3.0, 4.0]], {"sample_weight": [[1.0], [2.0]]}, 8.5, "float32"),
        ([[1.0, 2.0], [3.0, 4.0]], {"sample_weight": 2.0}, 10.0, "float32"),
        ([1.0, 2.0], {"sample_weight": [2.0]}, 3.0, "float32"),
        # The second axis is summed, and not counted.
        (np.ones((2, 3), "float32"), {}, 3.0, "float32"),
        (np.ones((2, 3), "float32"), {"global_batch_size": 4}, 1.5, "float32"),
        ([1.0, 2.0], {"global_batch_size": np.int64(8)}, 0.375, "float32"),
        ([1.0, 2.0], {"global_batch_size": tf.Tensor(np.int32(8))}, 0.375, "float32"),
        # Without losses, or with a batch size of 0, the result is 0.
        (np.zeros(0, "float32"), {}, 0.0, "float32"),
        (np.zeros((0, 3), "float64"), {}, 0.0, "float64"),
        ([1.0, np.inf], {"global_batch_size": 0}, 0.0, "float32"),
    ],
)
def test_average_loss_values_are_tensorflows(losses, options, value, dtype):
    got = average(losses, **options)
    assert got.shape == ()
    assert got.dtype == dtype
    np.testing.assert_allclose(float(got), value, rtol=1e-6)


@pytest.mark.parametrize(
    ("losses", "options", "error", "text"),
    [
        (
            3.0,
            {},
            ValueError,
            "Invalid value passed for `per_example_loss`. Expected a tensor with at least rank 1. "
            "Received per_example_loss=3.0 with rank 0",
        ),
        ([1.0], {"global_batch_size": [1]}, ValueError, "global_batch_size must be scalar."),
        ([1.0], {"global_batch_size": 2.0}, TypeError, "global_batch_size must be an integer."),
        ([1.0], {"global_batch_size": True}, TypeError, "global_batch_size must be an integer."),
        (
            [1.0],
            {"global_batch_size": -1},
            InvalidArgumentError,
            "global_batch_size must be non-negative.",
        ),
        ([1.0], {"global_batch_size": -1}, ValueError, "Received -1"),
        (
            [[1.0, 2.0], [3.0, 4.0]],
            {"sample_weight": [1.0, 2.0, 3.0]},
            InvalidArgumentError,
            r"sample_weight of shape \(3, 1\) does not fit losses of shape \(2, 2\)",
        ),
        ([1.0, 2.0], {"sample_weight": np.ones((2, 1, 1))}, ValueError, "does not fit"),
        (np.ones((2, 3, 4)), {"sample_weight": [1.0, 2.0]}, ValueError, "does not fit"),
        ([True, False], {}, TypeError, "bool"),
    ],
)
def test_average_loss_wrong_arguments_raise(losses, options, error, text):
    with pytest.raises(error, match=text):
        average(losses, **options)


def test_regularization_loss_outside_of_a_strategy_is_the_sum():
    assert float(scale([1.0, 2.0])) == 3.0
    assert scale([1, 2]).dtype == np.float64
    assert scale(np.float16(3)).dtype == np.float16


def test_each_replica_has_its_share(strategy):
    n = strategy.num_replicas_in_sync

    def replica():
        r = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        rows = np.ones(r + 1, "float32")  # ragged: 1, 2, 3, …
        return average(rows), average(rows, global_batch_size=10), scale(6.0)

    by_rows, by_batch, regularization = strategy.run(replica)
    # The default divides by this replica's rows times the replicas …
    for value in strategy.experimental_local_results(by_rows):
        np.testing.assert_allclose(float(value), 1 / n, rtol=1e-6)
    # … the size of the global batch is exact.
    total = n * (n + 1) / 2
    np.testing.assert_allclose(float(strategy.reduce("SUM", by_batch, None)), total / 10, rtol=1e-6)
    np.testing.assert_allclose(float(strategy.reduce("SUM", regularization, None)), 6.0, rtol=1e-6)


def test_loss_of_a_replica_without_rows_is_zero_and_has_a_gradient():
    def replica():
        x = tf.Variable(2.0, aggregation=tf.VariableAggregation.SUM)
        r = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        with tf.GradientTape() as tape:
            loss = average(np.ones(2 - 2 * r, "float32") * x)
        return loss, tape.gradient(loss, x)

    losses, gradients = mirrored(2).run(replica)
    assert [float(v) for v in losses.values] == [1.0, 0.0]
    assert [float(v) for v in gradients.values] == [0.5, 0.0]


@pytest.mark.parametrize("make", [lambda: mirrored(2), lambda: mirrored(1)])
def test_average_loss_in_cross_replica_context_needs_a_batch_size(make):
    def merged(_strategy):
        with pytest.raises(RuntimeError, match="compute_average_loss` in cross replica context"):
            average([1.0])

    strategy = make()
    with strategy.scope():
        with pytest.raises(
            RuntimeError,
            match="You are calling `compute_average_loss` in cross replica context, while it was "
            "expected to be called in replica context.",
        ):
            average([1.0, 2.0])
        assert float(average([1.0, 2.0], global_batch_size=2)) == 1.5
        with pytest.raises(
            RuntimeError,
            match="You are calling `scale_regularization_loss` in cross replica context, while it "
            "was expected to be called in replica context.",
        ):
            scale(1.0)
    strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merged))


def test_losses_under_one_device_are_not_divided():
    one = tf.distribute.OneDeviceStrategy("cpu:0")
    assert float(one.run(lambda: average([1.0, 2.0]))) == 1.5
    assert float(one.run(lambda: scale(3.0))) == 3.0


# Loss objects -------------------------------------------------------------------------------------

USE_SUM_OR_NONE = (
    "Please use `tf.keras.losses.Reduction.SUM` or `tf.keras.losses.Reduction.NONE` for loss "
    "reduction when losses are used with `tf.distribute.Strategy`, except for specifying losses in "
    "`Model.compile()` for use by the built-in training looop `Model.fit()`.\nPlease see "
    "https://www.tensorflow.org/tutorials/distribute/custom_training for more details."
)


class SumOfSquares(tf.keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_sum(tf.square(y_pred - y_true), axis=-1)


@pytest.mark.parametrize("make", [SumOfSquares, tf.keras.losses.MeanAbsoluteError])
@pytest.mark.parametrize("reduction", ["auto", "sum_over_batch_size"])
@pytest.mark.parametrize(
    "strategy_of", [lambda: mirrored(2), lambda: tf.distribute.OneDeviceStrategy("cpu:0")]
)
def test_loss_objects_that_average_raise_under_a_strategy(make, reduction, strategy_of):
    strategy = strategy_of()
    x = np.ones((2, 3), "float32")
    with strategy.scope():
        loss = make(reduction=reduction)  # making it is fine
        with pytest.raises(ValueError) as caught:
            loss(x, x)
    assert str(caught.value) == USE_SUM_OR_NONE
    with pytest.raises(ValueError) as caught:
        strategy.run(loss, args=(x, x))
    assert str(caught.value) == USE_SUM_OR_NONE
    assert float(loss(x, x)) == 0.0  # outside every strategy
    for allowed in ("none", "sum"):
        strategy.run(make(reduction=allowed), args=(x, x))
