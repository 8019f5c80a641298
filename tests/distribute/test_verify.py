"""verify_equivalence: gradients of N replicas against those of one."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf

IMAGES = np.random.default_rng(0).random((7, 6, 6, 1)).astype("float32")
LABELS = np.arange(7) % 3


def make_model(dtype="float32"):
    regularizer = tf.keras.regularizers.L2(1e-2)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(4, 3, activation="relu", dtype=dtype),
            tf.keras.layers.Flatten(dtype=dtype),
            tf.keras.layers.Dense(3, kernel_regularizer=regularizer, dtype=dtype),
        ]
    )


def loss(labels, outputs):
    return tf.keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [7, 2])  # With 2 rows some replicas get none.
def test_gradients_are_those_of_one_replica(strategy, rows, dtype):
    with strategy.scope():
        model = make_model(dtype)
    batch = (IMAGES[:rows].astype(dtype), LABELS[:rows])
    before = None
    for given in (None, loss):
        report = tf.distribute.verify_equivalence(model, batch, given)
        assert report.ok
        assert report.replicas == strategy.num_replicas_in_sync
        assert list(report.differences) == [v.name for v in model.trainable_variables]
        assert 0 <= report.largest < (1e-4 if dtype == "float32" else 1e-12)
        lines = str(report).splitlines()
        assert len(lines) == 5
        assert lines[0].startswith(f"gradients of {report.replicas} replicas against one")
        weights = [w.tobytes() for w in model.get_weights()]
        assert before in (None, weights)  # the first call has built the model
        before = weights


def test_verify_equivalence_finds_the_strategy_and_refuses_replica_functions(two):
    with two.scope():
        model = make_model()
        assert tf.distribute.verify_equivalence(model, IMAGES).replicas == 2
    assert tf.distribute.verify_equivalence(model, IMAGES).replicas == 2
    plain = make_model()
    assert tf.distribute.verify_equivalence(plain, (IMAGES, LABELS), loss).largest == 0.0
    assert two.verify_equivalence(model, (IMAGES, LABELS), loss).replicas == 2
    with pytest.raises(RuntimeError, match="cross-replica context"):
        two.run(lambda: tf.distribute.verify_equivalence(model, IMAGES))


def test_verify_equivalence_of_a_distributed_batch_gives_the_same_differences(strategy):
    with strategy.scope():
        model = make_model()
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(7)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    got = tf.distribute.verify_equivalence(model, batch, loss)
    assert got.differences == (
        tf.distribute.verify_equivalence(model, (IMAGES, LABELS), loss).differences
    )


def test_verify_equivalence_of_a_wrong_loss_raises_with_the_differences(two):
    with two.scope():
        model = make_model()

    def mean_of_a_part(labels, outputs):
        return loss(labels, outputs) / float(len(labels))

    with pytest.raises(AssertionError) as caught:
        tf.distribute.verify_equivalence(model, (IMAGES, LABELS), mean_of_a_part)
    report = caught.value.report
    assert not report.ok
    assert report.largest == max(report.differences.values()) > 0.1
    assert "dense" in str(caught.value)
    assert "more than 0.00012" in str(caught.value)
    assert "not their mean" in str(caught.value)
    # A larger tolerance allows it.
    allowed = tf.distribute.verify_equivalence(
        model, (IMAGES, LABELS), mean_of_a_part, tolerance=100.0
    )
    assert allowed.differences == report.differences


def test_verify_equivalence_of_a_layer_that_uses_the_whole_batch_raises(two):
    class Centered(tf.keras.layers.Layer):
        def call(self, inputs):
            return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)

    with two.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(3), Centered()])
    with pytest.raises(AssertionError, match="batch normalization"):
        tf.distribute.verify_equivalence(model, IMAGES.reshape(7, 36)[:, :4])


def test_verify_equivalence_gradient_of_one_side_alone_is_an_infinite_difference(two):
    class Odd(tf.keras.layers.Layer):
        def build(self, shape):
            self.used = self.add_weight("used", shape=(), initializer="ones")
            self.maybe = self.add_weight("maybe", shape=(), initializer="ones")

        def call(self, inputs):
            return inputs * self.used * (self.maybe if len(inputs) > 4 else 1.0)

    with two.scope():
        model = tf.keras.Sequential([Odd()])
    with pytest.raises(AssertionError) as caught:
        tf.distribute.verify_equivalence(model, np.ones((6, 1), "float32"))
    assert sorted(caught.value.report.differences.values())[1] == np.inf


@pytest.mark.parametrize("batch", [3.0, (IMAGES, LABELS[:3]), ()])
def test_verify_equivalence_batch_that_cannot_be_split_raises(two, batch):
    with two.scope():
        model = make_model()
    with pytest.raises(ValueError, match="must have the examples as its first axis"):
        tf.distribute.verify_equivalence(model, batch, loss)


def test_verify_equivalence_loss_without_a_value_for_each_example_raises(two):
    with two.scope():
        model = make_model()
    with pytest.raises(ValueError, match="Invalid value passed for `per_example_loss`"):
        tf.distribute.verify_equivalence(
            model, (IMAGES, LABELS), lambda t, o: tf.reduce_sum(loss(t, o))
        )
    averaged = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.raises(
        ValueError, match="Invalid value|Please use `tf.keras.losses.Reduction.SUM`"
    ):
        tf.distribute.verify_equivalence(model, (IMAGES, LABELS), averaged)


@pytest.mark.parametrize("is_built", [False, True])
def test_moving_means_keep_their_values(two, is_built):
    with two.scope():
        model = tf.keras.Sequential([tf.keras.layers.BatchNormalization()])
        if is_built:
            model.build((None, 6, 6, 1))
            model.layers[0].moving_mean.assign([0.25])
    with pytest.raises(AssertionError):  # each replica has a mean of its own
        tf.distribute.verify_equivalence(model, IMAGES, training=True)
    for part in model.layers[0].moving_mean.values:
        assert part.numpy().tolist() == [0.25 if is_built else 0]
