"""Layers that are replayed give the bits of the same layers called from Python."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from fitting import mirrored

import pycollective as tf
from pycollective import keras
from pycollective.keras import layers
from pycollective.keras.layers.fusion import AroundDropout
from pycollective.keras.layers.replayed import Replayed

STEPS, BATCH = 9, 16
RANDOM = np.random.default_rng(11)
IMAGES = RANDOM.standard_normal((STEPS * BATCH, 10, 10, 2)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, len(IMAGES))


def head(activation=None):
    return [layers.Flatten(), layers.Dense(9, activation=activation), layers.Dense(4)]


STACKS = {
    "dense": lambda: head("relu"),
    "pooled": lambda: [
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(),
        *head("relu"),
    ],
    "winograd": lambda: [
        layers.Conv2D(16, 3, activation="relu", padding="same"),
        layers.Conv2D(16, 3, padding="same"),
        layers.ReLU(),
        *head(),
    ],
    "strided": lambda: [
        layers.Conv2D(40, 5, strides=2),
        layers.LeakyReLU(),
        layers.Conv2D(3, 1, dilation_rate=1, use_bias=False),
        *head(),
    ],
    "normalized": lambda: [
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Conv2D(8, 3, padding="same"),
        layers.BatchNormalization(axis=3, scale=False),
        *head(),
    ],
    "depthwise": lambda: [
        layers.Conv2D(12, 1, use_bias=False),
        layers.ReLU(6),
        layers.DepthwiseConv2D(3, padding="same", strides=2, use_bias=False),
        layers.BatchNormalization(),
        *head(),
    ],
    "average": lambda: [
        layers.AveragePooling2D(),
        layers.MaxPooling2D(2, 1, padding="same"),
        layers.Reshape((25, 2)),
        layers.ELU(),
        *head(),
    ],
    "activations": lambda: [
        layers.Conv2D(4, 3, activation="tanh"),
        *head("sigmoid"),
        layers.Activation("gelu"),
        layers.Dense(4, activation="softplus"),
        layers.Softmax(),
        layers.Dense(4, activation="softmax"),
        layers.Activation("log_softmax"),
    ],
}


def model_of(stack, functional=False):
    keras.utils.set_random_seed(3)
    row = STACKS[stack]() if isinstance(stack, str) else stack
    if not functional:
        return keras.Sequential([keras.Input((10, 10, 2)), *row])
    tensor = first = keras.Input((10, 10, 2))
    for layer in row:
        tensor = layer(tensor)
    return keras.Model(first, tensor)


def replayed_steps(model):
    steps = list(getattr(model, "_steps", None) or ())
    if not steps and model._graph._plan is not None:
        for part in model._graph._plan._parts:
            steps += [part._first, *part._rest]
    around = [step for step in steps if isinstance(step, AroundDropout)]
    steps += [inner for step in around for inner in (step.in_inference, *step.in_training)]
    return [step for step in steps if isinstance(step, Replayed)]


def uses_replay(model):
    known = [known for step in replayed_steps(model) for known in step._known.values()]
    return any(each.trusted is not None and not each.refused for each in known)


def step_of(model, optimizer, x, y):
    """Make a step; return copies of all results."""
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return [np.array(each) for each in (outputs, loss, *gradients) if each is not None]


def trained(model, change=lambda model, step: None, size=lambda step: BATCH, images=IMAGES):
    """Make steps; return the bytes of all results, weights and predictions."""
    optimizer, found = keras.optimizers.SGD(0.05, momentum=0.9), []
    for step in range(STEPS):
        rows = slice(step * BATCH, step * BATCH + size(step))
        change(model, step)
        found += step_of(model, optimizer, tf.constant(images[rows]), LABELS[rows])
        found.append(np.array(model(images[rows])))
    return [array.tobytes() for array in [*found, *model.get_weights()]]


@pytest.fixture
def from_python():
    """Return a function that calls another one with all layers run from Python."""

    def call(function, *args, **kwargs):
        tf.config.run_functions_eagerly(True)
        try:
            return function(*args, **kwargs)
        finally:
            tf.config.run_functions_eagerly(False)

    return call


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("stack", STACKS)
def test_training_replayed_has_the_same_bits(stack, functional, from_python):
    if functional:
        expected = from_python(trained, model := model_of(stack, True))
        assert not uses_replay(model)
    else:
        expected = from_python(trained, model_of(stack))
    model = model_of(stack, functional)
    assert trained(model) == expected
    assert uses_replay(model)


def set_weights(model, step):
    if step == 6:
        model.set_weights([weights * 0.5 for weights in model.get_weights()])


def set_activation(model, step):
    if step == 6:
        model.layers[-2].activation = keras.activations.tanh


def set_own_activation(model, step):
    if step == 6:
        model.layers[-2].activation = lambda x: x + 1


def set_trainable(model, step):
    if step == 6:
        model.layers[0].trainable = False
    if step == 8:
        model.layers[0].trainable = True


def freeze(model, step):
    model.layers[0].trainable = False


CHANGES = [set_weights, set_activation, set_own_activation, set_trainable, freeze]


@pytest.mark.parametrize("change", CHANGES)
def test_change_after_replays_has_effect(change, from_python):
    expected = from_python(trained, model_of("pooled"), change)
    assert expected != from_python(trained, model_of("pooled"))
    assert trained(model_of("pooled"), change) == expected


def test_changed_strides_have_effect(from_python):
    def stack():
        return [layers.Conv2D(4, 1), layers.MaxPooling2D(2, 2, "same"), layers.Conv2D(4, 1)]

    x = tf.constant(IMAGES[:4])
    model = model_of(stack())
    for _ in range(6):
        model(x)
    assert uses_replay(model)
    model.layers[1].strides = (1, 1)
    for _ in range(6):
        assert np.array(model(x)).tobytes() == np.array(from_python(model, x)).tobytes()


def test_replaced_variable_has_effect(from_python):
    model = model_of("pooled")
    for _ in range(6):
        before = np.array(model(IMAGES[:4]))
    model.layers[-1].kernel = tf.Variable(np.full((9, 4), 0.1, np.float32))
    for _ in range(6):
        found = np.array(model(IMAGES[:4]))
        assert found.tobytes() != before.tobytes()
        assert found.tobytes() == np.array(from_python(model, IMAGES[:4])).tobytes()


def test_batches_of_other_sizes_have_the_same_bits(from_python):
    sizes = [16, 16, 5, 16, 16, 16, 16, 5, 1]
    expected = from_python(trained, model_of("pooled"), size=sizes.__getitem__)
    model = model_of("pooled")
    assert trained(model, size=sizes.__getitem__) == expected
    assert uses_replay(model)


def test_nan_and_infinity_have_the_same_bits(from_python):
    images = IMAGES.copy()
    images[7 * BATCH, 3, 3] = np.nan
    images[8 * BATCH + 1, 5, 5] = np.inf
    expected = from_python(trained, model_of("pooled"), images=images)
    assert trained(model_of("pooled"), images=images) == expected


@pytest.mark.parametrize("stack", ["pooled", "normalized"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_fit_has_the_same_bits_as_with_run_eagerly(replicas, stack):
    def fitted(run_eagerly):
        with mirrored(replicas).scope():
            model = model_of(stack)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"], run_eagerly=run_eagerly)
        history = model.fit(IMAGES, LABELS, BATCH, epochs=3, shuffle=False, verbose=0)
        evaluated = model.evaluate(IMAGES, LABELS, BATCH, verbose=0)
        assert uses_replay(model) is not run_eagerly
        weights = [w.tobytes() for w in model.get_weights()]
        return (
            weights,
            history.history,
            evaluated,
            model.predict(IMAGES, BATCH, verbose=0).tobytes(),
        )

    assert fitted(False) == fitted(True)


def test_moving_averages_of_replays_are_those_of_the_layers(from_python):
    def averages(model):
        found = []
        for step in range(STEPS):
            x = tf.constant(IMAGES[step * BATCH :][:BATCH])
            # Without a tape, training has a record, and inference has another one.
            found += [np.array(model(x, training=training)) for training in (True, False, True)]
            found += [np.array(v) for v in model.non_trainable_variables]
        return [each.tobytes() for each in found]

    expected = from_python(averages, model_of("normalized"))
    model = model_of("normalized")
    assert averages(model) == expected
    assert len(set(expected[3 :: len(expected) // STEPS])) == STEPS
    assert uses_replay(model)


def test_frozen_normalization_keeps_its_averages_after_replays(from_python):
    def freeze(model, step):
        model.layers[1].trainable = step < 6

    expected = from_python(trained, model_of("normalized"), freeze)
    model = model_of("normalized")
    assert trained(model, freeze) == expected


@pytest.mark.parametrize(
    "between",
    [
        lambda: layers.BatchNormalization(axis=1),
        lambda: layers.BatchNormalization(synchronized=True),
        lambda: layers.DepthwiseConv2D(3),
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False),
    ],
)
def test_layers_around_another_one_are_replayed(between, from_python):
    def stack():
        return [*STACKS["normalized"]()[:3], between(), *head("relu")]

    expected = from_python(trained, model_of(stack()))
    model = model_of(stack())
    assert trained(model) == expected
    assert len(replayed_steps(model)) == 2


def test_results_of_earlier_steps_are_not_overwritten():
    model = model_of("pooled")
    optimizer = keras.optimizers.SGD(0.1)
    kept = []
    for step in range(STEPS):
        x = tf.constant(IMAGES[step * BATCH :][:BATCH])
        with tf.GradientTape() as tape:
            outputs = model(x)
            loss = tf.reduce_mean(outputs * outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        kept += [(each, np.array(each)) for each in (outputs, *gradients)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert uses_replay(model)
    for tensor, before in kept:
        np.testing.assert_array_equal(tensor, before)


def test_two_calls_on_one_tape_have_the_same_bits(from_python):
    def steps(model):
        found = []
        for step in range(STEPS):
            one, other = (
                tf.constant(IMAGES[step:][:BATCH]),
                tf.constant(IMAGES[step + 20 :][:BATCH]),
            )
            with tf.GradientTape() as tape:
                tape.watch(one)
                loss = tf.reduce_mean(model(one) * model(other))
            gradients = tape.gradient(loss, [one, *model.trainable_variables])
            found += [np.array(each).tobytes() for each in gradients]
        return found

    model = model_of("pooled")
    assert steps(model) == from_python(steps, model)


def test_gradients_of_some_variables_have_the_same_bits(from_python):
    def steps(model, wanted):
        found = []
        for step in range(STEPS):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.constant(IMAGES[step:][:BATCH])))
            variables = model.trainable_variables
            chosen = variables if step < 7 and not wanted else variables[1::3]
            found += [np.array(each).tobytes() for each in tape.gradient(loss, chosen)]
        return found

    model = model_of("pooled")
    assert steps(model, True) == from_python(steps, model, True)
    assert not uses_replay(model)
    model = model_of("pooled")
    found, expected = steps(model, False), from_python(steps, model, False)
    assert found == expected


def test_persistent_tape_runs_from_python():
    model = model_of("dense")
    x = tf.constant(IMAGES[:4])
    for _ in range(8):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(model(x))
        first = tape.gradient(loss, model.trainable_variables)
        second = tape.gradient(loss, model.trainable_variables)
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not uses_replay(model)


class _Doubled(layers.Dense):
    def call(self, inputs):
        return super().call(inputs) * 2


@pytest.mark.parametrize(
    "stack",
    [
        lambda: [layers.Flatten(), _Doubled(4), _Doubled(4)],
        lambda: [layers.Flatten(), layers.Dense(4, activation=lambda x: x + 1)],
        lambda: [layers.Flatten(), *(layers.Dense(4, dtype="float64") for _ in range(2))],
        lambda: [layers.Flatten(), layers.Dense(4, activity_regularizer="l2")],
        lambda: [
            layers.Conv2D(4, 3, groups=2),
            *head()[:1],
            layers.Rescaling(0.5),
            layers.Dense(4),
        ],
    ],
    ids=["subclass", "function", "float64", "activity", "groups"],
)
def test_layers_that_cannot_be_replayed_run_from_python(stack, from_python):
    expected = from_python(trained, model_of(stack()))
    model = model_of(stack())
    assert trained(model) == expected
    assert not uses_replay(model)


def test_layers_around_dropout_are_replayed(from_python):
    def stack():
        return [
            *STACKS["pooled"](),
            layers.Dropout(0.5),
            layers.Dense(8, activation="relu"),
            layers.Dense(4),
        ]

    expected = from_python(trained, model_of(stack()))
    model = model_of(stack())
    assert trained(model) == expected
    inference, *training = replayed_steps(model)
    assert len(inference._layers) == len(model.layers) and len(training) == 2
    assert all(each.trusted for step in replayed_steps(model) for each in step._known.values())


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_in_inference_and_training_has_the_bits_of_python(functional, from_python):
    def stack():
        return [
            layers.Flatten(),
            layers.Dropout(0.2, noise_shape=(None, 1)),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]

    def found():
        # The first call is one of inference, and each layer draws its seed when it is built.
        model, results = model_of(stack(), functional), []
        for training in (False, None, False, True, True, True, True, False):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(IMAGES[:8], training=training) ** 2)
                results += [loss, *tape.gradient(loss, model.trainable_variables)]
        results.append(keras.layers.Dense(3)(IMAGES[0, 0]))  # the default generator's next numbers
        return model, [np.array(each).tobytes() for each in results]

    _, expected = from_python(found)
    model, results = found()
    assert results == expected
    inference = next(step for step in replayed_steps(model) if not step._in_training)
    assert any(known.trusted for known in inference._known.values())


def test_dropout_with_training_argument_of_its_own_is_random():
    first = keras.Input((3,))
    hidden = layers.Dropout(0.5)(layers.Dense(64)(first), training=True)
    model = keras.Model(first, layers.Dense(64)(hidden))
    x = tf.ones((2, 3))
    assert len({np.array(model(x)).tobytes() for _ in range(8)}) == 8


def test_wrong_shape_after_replays_raises_the_layers_error():
    model = model_of("pooled")
    for _ in range(6):
        model(IMAGES[:4])
    with pytest.raises(ValueError, match="incompatible"):
        model(IMAGES[:4, :, :, :1])
    assert uses_replay(model)
    assert model(IMAGES[:4]).shape == (4, 4)


def test_copied_model_has_layers_and_records_of_its_own(from_python):
    model = model_of("pooled")
    for _ in range(6):
        model(IMAGES[:4])
    other = copy.deepcopy(model)
    other.set_weights([weights + 1 for weights in model.get_weights()])
    for _ in range(6):
        found, theirs = np.array(model(IMAGES[:4])), np.array(other(IMAGES[:4]))
    assert found.tobytes() == np.array(from_python(model, IMAGES[:4])).tobytes()
    assert theirs.tobytes() == np.array(from_python(other, IMAGES[:4])).tobytes()
    assert uses_replay(other)


def test_gradient_after_an_update_is_that_of_the_old_values(from_python):
    def steps(model):
        found = []
        for _ in range(STEPS):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.constant(IMAGES[:BATCH])) ** 2)
            for variable in model.trainable_variables:
                variable.assign_add(np.full(variable.shape, 0.01, np.float32))
            gradients = tape.gradient(loss, model.trainable_variables)
            found += [np.array(each).tobytes() for each in gradients]
        return found

    model, other = model_of("pooled"), model_of("pooled")
    assert steps(model) == from_python(steps, other)
    assert uses_replay(model)


def test_variable_assigned_before_a_layer_reads_it_has_the_right_gradients():
    """Parameter servers change variables while a worker records a call."""
    layer = layers.Dense(3)
    layer.build((None, 4))

    def step(x):
        layer.kernel.assign(layer.kernel.numpy() + 1)  # as another thread would
        return layer(x)

    replayed = Replayed([step], [layer])
    x = tf.constant(IMAGES[:4, 0, 0].repeat(2, axis=1))
    for _ in range(6):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(replayed(x))
        kernel, bias = tape.gradient(total, [layer.kernel, layer.bias])
        assert np.array_equal(kernel, np.repeat(x.numpy().sum(0)[:, None], 3, 1))
        assert np.array_equal(bias, [4, 4, 4])
