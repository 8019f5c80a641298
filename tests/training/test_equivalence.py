"""The number of replicas and the algorithm do not change the learned weights."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf
from pycollective.cli.train import train_cnn

OPS = {
    "ring": tf.distribute.RingAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one": tf.distribute.ReductionToOneDevice,
}


def mirrored(replicas, ops="ring"):
    return tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], OPS[ops]())


def digits(count):
    """Return noisy prototypes of ten classes."""
    random = np.random.default_rng(0)
    prototypes = random.random((10, 12, 12, 1))
    labels = random.integers(0, 10, count).astype("int32")
    images = prototypes[labels] + 0.2 * random.standard_normal((count, 12, 12, 1))
    return images.astype("float32"), labels


TRAINING, TEST = digits(70), digits(33)


def losses(strategy, dtype, keep=None):
    """Return losses of two epochs; of the last batch of 6, 3 of 4 replicas get 2 rows, one none."""
    epochs = train_cnn(
        strategy, TRAINING, TEST, epochs=2, batch_size=16, seed=3, dtype=dtype, keep=keep
    )
    return [
        value
        for e in epochs
        for value in (*e.step_losses, e.loss, e.accuracy, e.test_loss, e.test_accuracy)
    ]


@pytest.fixture(scope="module", params=["float64", "float32"])
def reference(request):
    """Return the losses without a strategy."""
    return request.param, losses(tf.distribute.get_strategy(), request.param)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("replicas", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_the_replicas(reference, replicas, ops):
    dtype, want = reference
    keep = {}
    got = losses(mirrored(replicas, ops), dtype, keep)
    np.testing.assert_allclose(got, want, rtol=1e-9 if dtype == "float64" else 1e-4)
    # Every replica has the same bits.
    for v in keep["model"].trainable_variables:
        assert len(v.values) == replicas
        assert len({c.numpy().tobytes() for c in v.values}) == 1
        assert v.dtype == dtype


def test_one_device_strategy_is_the_reference(reference):
    dtype, want = reference
    assert losses(tf.distribute.OneDeviceStrategy("cpu:0"), dtype) == want


def test_the_same_run_twice_gives_the_same_bits():
    assert losses(mirrored(3), "float32") == losses(mirrored(3), "float32")


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_custom_loop_of_the_guide_has_the_expected_losses(replicas):
    """Train Dense(1) with L2(1e-4), binary cross-entropy from logits and SGD for 100 steps."""
    strategy = mirrored(replicas)
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(1, kernel_regularizer=tf.keras.regularizers.L2(1e-4))]
        )
        model.build((None, 1))
        model.set_weights([np.array([[0.5]], "float32"), np.zeros(1, "float32")])
        optimizer = tf.keras.optimizers.SGD()
        loss_object = tf.keras.losses.BinaryCrossentropy(
            from_logits=True, reduction=tf.keras.losses.Reduction.NONE
        )
    global_batch = 12  # divides among 1, 2, 3 and 4
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100 * global_batch)
    dataset = dataset.batch(global_batch)

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            per_example = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(per_example)
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(inputs):
        per_replica = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    got = [
        float(distributed_train_step(x)) for x in strategy.experimental_distribute_dataset(dataset)
    ]

    # The same by hand: w, b from 0.5, 0; p = sigmoid(w + b); loss = -log p + 1e-4 w².
    w, b, want = 0.5, 0.0, []
    for _ in range(100):
        p = 1 / (1 + np.exp(-(w + b)))
        want.append(-np.log(p) + 1e-4 * w * w)
        w, b = w - 0.01 * (p - 1 + 2e-4 * w), b - 0.01 * (p - 1)
    assert len(got) == 100
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_train_cnn_resumed_gives_the_losses_of_a_run_that_was_not_interrupted(tmp_path):
    def train(folder, resume=False):
        return train_cnn(
            mirrored(2), TRAINING, TEST, epochs=3, batch_size=16, checkpoint_dir=folder,
            max_to_keep=1, resume=resume,
        )  # fmt: skip

    whole = [epoch.step_losses for epoch in train(tmp_path / "whole")]
    begun = train(tmp_path / "parts")
    assert next(begun).step_losses == whole[0]
    begun.close()
    rest = list(train(tmp_path / "parts", resume=True))
    assert [epoch.number for epoch in rest] == [2, 3]
    assert [epoch.step_losses for epoch in rest] == whole[1:]
    assert [path.name for path in (tmp_path / "parts").glob("*.safetensors")] == [
        "ckpt-3.safetensors"
    ]
    assert list(train(tmp_path / "parts", resume=True)) == []


@pytest.mark.slow
def test_mnist_reaches_98_5_percent_in_three_epochs(mnist_dir, tmp_path):
    from pycollective.cli.train import build_cnn, evaluate, load_digits

    _, training, test = load_digits(str(mnist_dir))
    epochs = list(
        train_cnn(
            mirrored(2),
            training,
            test,
            epochs=3,
            batch_size=128,
            checkpoint_dir=tmp_path,
        )
    )
    assert max(e.test_accuracy for e in epochs) >= 0.985
    model = build_cnn()
    tf.train.Checkpoint(model=model).restore(
        tf.train.latest_checkpoint(str(tmp_path))
    ).expect_partial()
    _, accuracy = evaluate(tf.distribute.get_strategy(), model, test, 128)
    assert accuracy == epochs[-1].test_accuracy
