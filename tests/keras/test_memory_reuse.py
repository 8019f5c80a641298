"""Memory reuse between steps: after the first steps, no large array needs new memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fitting import mirrored

from pycollective import GradientTape, data, keras, nn
from pycollective.workspace import Workspace, workspace

FIRST, STEPS, BATCH = 5, 10, 64
#: The limit of temporary memory for a step's objects and small arrays. It is far below the size of
#: one activation, which is 1.1 MiB, or half of that with 2 replicas.
SMALL = 256 << 10
RANDOM = np.random.default_rng(7)
X = RANDOM.standard_normal((STEPS * BATCH, 12, 12, 1)).astype(np.float32)
LABELS = RANDOM.integers(0, 10, len(X))


class Watch:
    """Records the temporary memory of NumPy and Python, and the new blocks, of each step."""

    def __init__(self, monkeypatch):
        self.blocks, self.taken = [0], []
        self._begin = 0
        vars(workspace).update(vars(Workspace()))  # without blocks of other tests
        block = Workspace._block

        def counted(space, size):
            self.blocks[-1] += 1
            return block(space, size)

        monkeypatch.setattr(Workspace, "_block", counted)

    def step_ends(self, *_):
        self.taken.append(tracemalloc.get_traced_memory()[1] - self._begin)
        self.blocks.append(0)
        tracemalloc.reset_peak()
        self._begin = tracemalloc.get_traced_memory()[0]

    def check(self):
        assert len(self.taken) == STEPS
        assert sum(self.blocks[:FIRST]) > 3  # proves that blocks are counted
        assert not any(self.blocks[FIRST:])
        assert max(self.taken[:FIRST]) > SMALL > max(self.taken[FIRST:])


@pytest.fixture
def watch(monkeypatch):
    tracemalloc.start()
    yield Watch(monkeypatch)
    tracemalloc.stop()


def model_of():
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Conv2D(32, 3, padding="same", kernel_regularizer="l2", input_shape=(12, 12, 1)),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_fit_reuses_memory_between_steps(watch, replicas):
    with mirrored(replicas).scope():
        model = model_of()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=watch.step_ends)
    model.fit(X, LABELS, BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[clock])
    watch.check()


@pytest.mark.parametrize("replicas", [1, 2])
def test_custom_steps_reuse_memory_between_steps(watch, replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        model = model_of()
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)

    def train(x, labels):
        with GradientTape() as tape:
            losses = nn.sparse_softmax_cross_entropy_with_logits(labels, model(x, training=True))
            loss = nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = data.Dataset.from_tensor_slices((X, LABELS)).batch(BATCH)
    for x, labels in strategy.experimental_distribute_dataset(batches):
        float(strategy.reduce("SUM", strategy.run(train, args=(x, labels)), axis=None))
        watch.step_ends()
    watch.check()
