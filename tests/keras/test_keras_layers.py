"""Layers and models: values, shapes, variables, losses, errors."""

import threading
import time

import numpy as np
import pytest

from pycollective import distribute, keras, nn
from pycollective.keras import layers
from pycollective.keras.layers.fusion import ConvReluPool, WithRelu, steps_of
from pycollective.tensor import GradientTape, Variable, as_tensor, ops

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 3))
IMAGES = RNG.standard_normal((2, 7, 6, 3))


@pytest.fixture(autouse=True)
def _fresh_names():
    keras.backend.clear_session()
    yield
    keras.backend.set_floatx("float32")


def convolved(x, kernel, stride=1):
    kh, kw = kernel.shape[:2]
    rows, columns = (x.shape[1] - kh) // stride + 1, (x.shape[2] - kw) // stride + 1
    y = np.zeros((len(x), rows, columns, kernel.shape[3]))
    for i in range(rows):
        for j in range(columns):
            window = x[:, i * stride : i * stride + kh, j * stride : j * stride + kw]
            y[:, i, j] = np.tensordot(window, kernel, 3)
    return y


def test_dense_equals_the_formula():
    layer = layers.Dense(2, activation="tanh", dtype="float64")
    y = layer(X)
    kernel, bias = layer.get_weights()
    np.testing.assert_allclose(y.numpy(), np.tanh(X @ kernel + bias), rtol=1e-14)
    assert kernel.shape == (3, 2) and np.array_equal(bias, np.zeros(2))
    assert [v.name for v in layer.weights] == ["dense/kernel", "dense/bias"]
    high = RNG.standard_normal((2, 5, 3))
    np.testing.assert_allclose(layer(high).numpy(), np.tanh(high @ kernel), rtol=1e-14)


def test_dense_without_bias_multiplies_by_the_kernel():
    layer = layers.Dense(
        1, use_bias=False, kernel_initializer=keras.initializers.Constant(2.0), dtype="float64"
    )
    np.testing.assert_allclose(layer(X).numpy()[:, 0], 2 * X.sum(axis=1), rtol=1e-14)
    assert len(layer.weights) == 1


@pytest.mark.parametrize("activation", ["relu", None, "sigmoid"])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv2d_equals_a_direct_convolution(activation, stride):
    layer = layers.Conv2D(
        4,
        (3, 2),
        strides=stride,
        activation=activation,
        bias_initializer=keras.initializers.RandomNormal(seed=1),
        dtype="float64",
    )
    y = layer(IMAGES).numpy()
    kernel, bias = layer.get_weights()
    expected = convolved(IMAGES, kernel, stride) + bias
    if activation == "relu":
        expected = np.maximum(expected, 0)
    elif activation == "sigmoid":
        expected = 1 / (1 + np.exp(-expected))
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
    assert layer.compute_output_shape((None, 7, 6, 3)) == (None, *y.shape[1:])


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_output_shapes_agree_with_results(padding, window, stride):
    conv = layers.Conv2D(2, window, strides=stride, padding=padding)
    pool = layers.MaxPooling2D(window, strides=stride, padding=padding)
    for layer in (conv, pool):
        shape = layer(IMAGES).shape
        assert layer.compute_output_shape((None, 7, 6, 3)) == (None, *shape[1:])
        assert layer.output_shape == (None, *shape[1:])


def test_max_pooling_takes_the_maximum():
    y = layers.MaxPooling2D()(IMAGES.astype(np.float32)).numpy()
    windows = IMAGES.astype(np.float32)[:, :6].reshape(2, 3, 2, 3, 2, 3)
    np.testing.assert_array_equal(y, windows.max(axis=(2, 4)))


def test_flatten_and_reshape_equal_those_of_numpy():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(layers.Flatten()(x).numpy(), x.reshape(2, 12))
    np.testing.assert_array_equal(layers.Reshape((2, -1))(x).numpy(), x.reshape(2, 2, 6))
    assert layers.Reshape((2, -1))(x[:0]).shape == (0, 2, 6)
    assert layers.Reshape((-1,)).compute_output_shape((None, 3, 4)) == (None, 12)
    assert layers.Flatten().compute_output_shape((None, None, 4)) == (None, None)
    np.testing.assert_array_equal(layers.Activation("relu")(-x).numpy(), np.minimum(x, 0))


def test_dropout_drops_in_training_only_and_is_repeatable():
    x = np.ones((50, 40), np.float32)
    layer = layers.Dropout(0.25, seed=3)
    np.testing.assert_array_equal(layer(x).numpy(), x)
    np.testing.assert_array_equal(layer(x, training=False).numpy(), x)
    first, second = layer(x, training=True).numpy(), layer(x, training=True).numpy()
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    assert abs((first == 0).mean() - 0.25) < 0.05
    assert not np.array_equal(first, second)
    again = layers.Dropout(0.25, seed=3)
    np.testing.assert_array_equal(again(x, training=True).numpy(), first)
    keras.utils.set_random_seed(8)
    one = layers.Dropout(0.5)(x, training=True).numpy()
    keras.utils.set_random_seed(8)
    np.testing.assert_array_equal(layers.Dropout(0.5)(x, training=True).numpy(), one)


def test_training_argument_reaches_sublayers():
    inner = keras.Sequential([layers.Dropout(0.5, seed=1)])
    model = keras.Sequential([keras.Sequential([inner]), layers.Activation("linear")])
    x = np.ones((8, 8), np.float32)
    assert (model(x, training=True).numpy() == 0).any()
    assert not (model(x).numpy() == 0).any()

    class Fixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def call(self, inputs):
            return self.inner(inputs, training=False)

    assert not (Fixed()(x, training=True).numpy() == 0).any()


def test_layer_default_names_are_numbered_as_in_keras():
    names = [layers.Conv2D(1, 1).name, layers.Conv2D(1, 1).name, layers.MaxPooling2D().name]
    assert names == ["conv2d", "conv2d_1", "max_pooling2d"]
    assert layers.Dense(1, name="out").name == "out"
    assert keras.Sequential().name == "sequential"


def test_layer_dtype_converts_inputs():
    x = RNG.standard_normal((2, 3))
    assert layers.Dense(2)(x).dtype == np.float32
    assert layers.Dense(2, dtype="float64")(x.astype(np.float32)).dtype == np.float64
    keras.backend.set_floatx("float64")
    layer = layers.Dense(2)
    assert layer(x.astype(np.float32)).dtype == np.float64 and layer.dtype == np.float64
    assert layer(np.ones((2, 3), np.uint8)).dtype == np.float64
    with pytest.raises(ValueError, match="int32"):
        keras.backend.set_floatx("int32")


def test_layer_integer_inputs_stay_integers():
    class Embedding(layers.Layer):
        def build(self, input_shape):
            self.table = self.add_weight("table", (4, 2))

        def call(self, numbers):
            return ops.gather(self.table, numbers)

    layer = Embedding()
    numbers = np.array([[0, 3], [1, 1]])
    np.testing.assert_array_equal(layer(numbers).numpy(), layer.get_weights()[0][numbers])


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dense(3, activation="softmax", kernel_regularizer="l2"),
        lambda: layers.Conv2D(3, 3, activation="relu"),
        lambda: layers.Conv2D(3, 3, padding="same"),
        lambda: layers.MaxPooling2D(),
        lambda: layers.Flatten(),
        lambda: layers.Dropout(0.5),
        lambda: layers.Activation("sigmoid"),
        lambda: layers.Reshape((3, -1)),
        lambda: keras.Sequential(
            [
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(2),
            ]
        ),
    ],
)
def test_layers_batch_without_rows_has_zero_gradients(layer):
    layer = layer()
    layer(IMAGES)
    with GradientTape() as tape:
        y = layer(IMAGES[:0], training=True)
        total = ops.reduce_sum(y)
    assert y.shape[0] == 0 and float(total) == 0
    for gradient in tape.gradient(total, layer.trainable_variables):
        np.testing.assert_array_equal(gradient.numpy(), np.zeros(gradient.shape))


def test_layer_first_call_without_rows_builds():
    model = keras.Sequential([layers.Flatten(), layers.Dense(2)])
    assert model(IMAGES[:0]).shape == (0, 2)
    assert model(IMAGES).shape == (2, 2)


# Errors -------------------------------------------------------------------------------------------


def test_incompatible_input_names_layer_and_shapes():
    dense = layers.Dense(2, name="head")
    dense(X)
    with pytest.raises(ValueError, match=r'"head".*value 3.*\(3, 2\).*shape \(4, 5\)'):
        dense(np.zeros((4, 5)))
    conv = layers.Conv2D(2, 3, name="stem")
    with pytest.raises(ValueError, match=r'"stem".*\[n, height, width, channels\].*\(4, 3\)'):
        conv(X)
    conv(IMAGES)
    with pytest.raises(ValueError, match=r'"stem".*width, 3\].*\(3, 3, 3, 2\).*\(1, 9, 9, 1\)'):
        conv(np.zeros((1, 9, 9, 1)))
    with pytest.raises(ValueError, match=r'"stem".*window of 3 x 3.*\(1, 2, 9, 3\)'):
        conv(np.zeros((1, 2, 9, 3)))
    with pytest.raises(ValueError, match=r"window of 2 x 2.*\(1, 1, 4, 3\)"):
        layers.MaxPooling2D()(np.zeros((1, 1, 4, 3)))
    with pytest.raises(ValueError, match=r"reshaped to \(5, -1\).*\(2, 3\)"):
        layers.Reshape((5, -1))(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="at least one axis"):
        layers.Flatten()(np.float32(1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: layers.Dense(0), "units must be a positive integer, got 0"),
        (lambda: layers.Dense(2.5), "units .* got 2.5"),
        (lambda: layers.Conv2D(2, (3, 3, 3)), "kernel_size"),
        (lambda: layers.Conv2D(2, 3, strides=0), "strides"),
        (lambda: layers.Conv2D(2, 3, padding="full"), "'full'"),
        (lambda: layers.Conv2D(2, 3, data_format="channels_first"), "channels_first"),
        (lambda: layers.Dropout(1.5), r"rate.*1\.5"),
        (
            lambda: layers.Dense(2, activation="rleu"),
            "unknown activation 'rleu'; known names are .*relu",
        ),
        (lambda: layers.Dense(2, kernel_initializer="x"), "unknown initializer 'x'"),
        (lambda: layers.Dense(2, kernel_regularizer=3), "3 is no regularizer"),
        (lambda: layers.Reshape((-1, -1)), "at most one -1"),
        (lambda: layers.InputLayer(), "shape of an example"),
    ],
)
def test_layer_arguments_out_of_range_raise(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_layer_attribute_before_init_raises():
    class Careless(layers.Layer):
        def __init__(self):
            self.dense = layers.Dense(1)
            super().__init__()

    with pytest.raises(RuntimeError, match=r"call super\(\)\.__init__\(\) before setting 'dense'"):
        Careless()


def test_layer_failed_build_keeps_no_variables():
    class Picky(layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight("scale")

        def build(self, input_shape):
            self.kernel = self.add_weight("kernel", (2,), regularizer="l2")
            if input_shape[-1] != 2:
                raise ValueError("no")

        def call(self, x):
            return x * self.kernel

    layer = Picky()
    with pytest.raises(ValueError, match="no"):
        layer(np.ones((1, 3), np.float32))
    layer(np.ones((1, 2), np.float32))
    assert [v.name for v in layer.weights] == ["picky/scale", "picky/kernel"]
    assert len(layer.losses) == 1


# Weights ------------------------------------------------------------------------------------------


def test_get_and_set_weights_round_trip():
    layer = layers.Dense(2)
    layer(X)
    values = [np.ones((3, 2)), np.array([1.0, 2.0])]
    layer.set_weights(values)
    for weight, value in zip(layer.get_weights(), values, strict=True):
        np.testing.assert_array_equal(weight, value)
    np.testing.assert_allclose(
        layer(X).numpy(), X.sum(axis=1, keepdims=True) + np.array([1, 2]), rtol=1e-5
    )
    with pytest.raises(ValueError, match="'dense' has 2 weights, got 1"):
        layer.set_weights(values[:1])
    with pytest.raises(ValueError, match=r"dense/bias.*\(2,\).*\(3,\)"):
        layer.set_weights([np.zeros((3, 2)), np.zeros(3)])
    np.testing.assert_array_equal(layer.get_weights()[0], values[0])
    with pytest.raises(ValueError, match="not built yet"):
        layers.Dense(2).set_weights(values)


def test_trainable_assignment_applies_to_sublayers():
    model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    model(X)
    assert len(model.trainable_variables) == 4
    model.layers[0].trainable = False
    assert model.trainable_weights == model.layers[1].weights
    assert model.non_trainable_weights == model.layers[0].weights
    assert model.weights == model.layers[0].weights + model.layers[1].weights
    model.trainable = False
    assert model.trainable_variables == [] and len(model.variables) == 4
    model.trainable = True
    assert len(model.trainable_variables) == 4


def test_variables_are_tracked_in_the_order_of_definition():
    class Block(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(2)
            self.many = [layers.Dense(3), {"x": layers.Dense(4)}]
            self.scale = Variable(1.0, name="scale")
            self.hidden = (layers.Dense(5), "text", None)
            self.again = self.first
            self.steps = Variable(0, trainable=False, name="steps")

        def call(self, x):
            for layer in (self.first, self.many[0], self.many[1]["x"], self.hidden[0]):
                x = layer(x)
            return x * self.scale

    block = Block()
    block(X)
    assert [layer.name for layer in block.layers] == ["dense", "dense_1", "dense_2", "dense_3"]
    assert [v.name for v in block.trainable_variables] == ["scale"] + [
        f"{layer.name}/{part}" for layer in block.layers for part in ("kernel", "bias")
    ]
    assert [v.name for v in block.non_trainable_variables] == ["steps"]
    block.many.append(layers.Dense(6))
    assert len(block.layers) == 5


def test_count_params_and_summary_count_all_weights():
    model = keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    assert model.count_params() == 9 * 32 + 32 + 13 * 13 * 32 * 10 + 10
    model.layers[0].trainable = False
    lines = []
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    for part in (
        'Model: "sequential"',
        "conv2d (Conv2D)",
        "(None, 26, 26, 32)",
        "(None, 5408)",
        "Total params: 54,410",
        "Non-trainable params: 320",
    ):
        assert part in text
    lines.clear()
    keras.Sequential([layers.Dense(1, name="last")]).summary(print_fn=lines.append)
    assert lines[4].split() == ["│", "last", "(Dense)", "│", "?", "│", "0", "(unbuilt)", "│"]
    assert lines[-1] == " Non-trainable params: 0 (0.00 B)"
    with pytest.raises(ValueError, match="not built"):
        layers.Dense(1).count_params()


# Losses -------------------------------------------------------------------------------------------


def test_regularizers_are_losses_with_gradients():
    model = keras.Sequential(
        [
            layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5), dtype="float64"),
            layers.Dense(1, kernel_regularizer="l1", bias_regularizer="l2", dtype="float64"),
        ]
    )
    assert model.losses == []
    model(X)
    with GradientTape() as tape:
        losses = model.losses
        total = ops.add_n(losses)
    first, second = (layer.get_weights()[0] for layer in model.layers)
    expected = [0.5 * (first**2).sum(), 0.01 * np.abs(second).sum(), 0.0]
    np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=1e-14)
    gradients = tape.gradient(total, [model.layers[0].kernel, model.layers[1].kernel])
    np.testing.assert_allclose(gradients[0].numpy(), first, rtol=1e-14)
    np.testing.assert_allclose(gradients[1].numpy(), 0.01 * np.sign(second), rtol=1e-14)
    model.layers[0].trainable = False
    assert len(model.losses) == 2


class Penalized(layers.Layer):
    def call(self, x, training=None):
        if training:
            self.add_loss(ops.reduce_sum(x))
        return x


def test_add_loss_keeps_only_the_last_call():
    layer = Penalized()
    model = keras.Sequential([layer, layer.__class__(name="other")])
    model(np.ones((2, 2), np.float32), training=True)
    model(np.full((2, 2), 3, np.float32), training=True)
    assert [float(loss) for loss in model.losses] == [12, 12]
    assert [float(loss) for loss in layer.losses] == [12]
    model(np.ones((2, 2), np.float32))
    assert model.losses == []


def test_add_loss_layer_called_twice_adds_two():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = Penalized()

        def call(self, x):
            return self.layer(self.layer(x, training=True) * 2.0, training=True)

    model = Twice()
    for _ in range(2):
        model(np.ones(3, np.float32))
        assert [float(loss) for loss in model.losses] == [3, 6]


def test_add_loss_values_belong_to_the_thread():
    layer = Penalized()
    found = {}
    ready = threading.Barrier(2)

    def work(value):
        layer(np.full(2, value, np.float32), training=True)
        ready.wait(10)
        found[value] = [float(loss) for loss in layer.losses]

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {1: [2], 2: [4]} and layer.losses == []


# Models -------------------------------------------------------------------------------------------


def test_sequential_equals_its_layers_in_order():
    model = keras.Sequential(
        [
            layers.Conv2D(4, 3, activation="relu", dtype="float64"),
            layers.MaxPooling2D(dtype="float64"),
            layers.Flatten(dtype="float64"),
            layers.Dense(3, dtype="float64"),
        ]
    )
    x = as_tensor(IMAGES)
    results = []
    for run in (model, model.layers):
        with GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x
            for step in [run] if run is model else run:
                y = step(y)
            loss = ops.reduce_sum(ops.tanh(y))
        results.append([y, *tape.gradient(loss, [x, *model.trainable_variables])])
    assert isinstance(steps_of(model.layers)[0], ConvReluPool)
    for fused, single in zip(*results, strict=True):
        np.testing.assert_allclose(fused.numpy(), single.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sequential_fuses_relu_after_normalization_or_convolution(training, dtype):
    stack = [
        layers.Conv2D(4, 3, dtype=dtype),
        layers.BatchNormalization(momentum=0.5, beta_initializer="uniform", dtype=dtype),
        layers.Activation("relu", dtype=dtype),
        layers.Conv2D(8, 3, padding="same", dtype=dtype),
        layers.ReLU(dtype=dtype),
        layers.MaxPooling2D(dtype=dtype),
        layers.BatchNormalization(axis=1, scale=False, center=False, dtype=dtype),
        layers.ReLU(dtype=dtype),
    ]
    model = keras.Sequential(stack)
    x = as_tensor(IMAGES.astype(dtype))
    results = []
    model.build(x.shape)
    start = model.get_weights()
    for run in ([model], stack):
        model.set_weights(start)
        with GradientTape() as tape:
            tape.watch(x)
            y = x
            for step in run:
                y = step(y, training=training)
            loss = ops.reduce_sum(ops.tanh(y) * y)
        gradients = tape.gradient(loss, [x, *model.trainable_variables])
        results.append([y, *gradients, *model.get_weights()])
    replayed, last = model._steps
    assert [type(step) for step in replayed._steps] == [layers.Conv2D, WithRelu, ConvReluPool]
    assert type(last) is WithRelu
    size = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    for fused, single in zip(*results, strict=True):
        fused, single = (np.asarray(value, np.float64) for value in (fused, single))
        np.testing.assert_allclose(fused, single, rtol=size, atol=size * (1 + abs(single).max()))


@pytest.mark.parametrize("shapes", [[(4, 3)] * 2, [(4, 3)] * 3, [(4, 3), (3,)], [(4, 3)]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_add_followed_by_relu_is_fused(shapes, dtype):
    rng = np.random.default_rng(5)
    values = [as_tensor(rng.normal(size=(2, *shape)).astype(dtype)) for shape in shapes]
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    add, relu = layers.Add(dtype=dtype), layers.ReLU(dtype=dtype)
    model = keras.Model(inputs, relu(add(inputs)))
    results = []
    for run in (model, lambda values: relu(add(values))):
        with GradientTape() as tape:
            tape.watch(values)
            y = run(values)
            loss = ops.reduce_sum(y * y)
        results.append([y, *tape.gradient(loss, values)])
    assert [type(step) for step in steps_of([add, relu])] == [WithRelu]
    for fused, single in zip(*results, strict=True):
        np.testing.assert_array_equal(fused, single)
    assert 0 < np.count_nonzero(results[0][0]) < results[0][0].array.size


@pytest.mark.parametrize(
    "second",
    [
        lambda: layers.ReLU(max_value=6),
        lambda: layers.ReLU(threshold=0.1),
        lambda: layers.ReLU(negative_slope=0.1),
        lambda: layers.Activation("relu", activity_regularizer="l2"),
        lambda: layers.Activation("relu", dtype="float64"),
        lambda: layers.Activation("tanh"),
    ],
)
def test_sequential_other_layer_after_normalization_is_not_fused(second):
    layer = second()
    assert steps_of([layers.BatchNormalization(), layer])[1] is layer
    assert steps_of([layers.Add(), layer])[1] is layer
    assert steps_of([layers.Conv2D(4, 3), layer, layers.MaxPooling2D()])[1] is layer


def conv(**options):
    return layers.Conv2D(4, 3, **{"activation": "relu", **options})


class Subclass(layers.Conv2D):
    pass


@pytest.mark.parametrize(
    ("pair", "fused"),
    [
        (lambda: [conv(), layers.MaxPooling2D()], True),
        (lambda: [conv(activation=nn.relu, use_bias=False), layers.MaxPooling2D(3)], True),
        (lambda: [conv(padding="same", strides=2), layers.MaxPooling2D()], True),
        (lambda: [conv(activation=None), layers.MaxPooling2D()], False),
        (lambda: [conv(), layers.MaxPooling2D(2, strides=1)], False),
        (lambda: [conv(), layers.MaxPooling2D(padding="same")], False),
        (lambda: [conv(), layers.MaxPooling2D(dtype="float64")], False),
        (lambda: [Subclass(4, 3, activation="relu"), layers.MaxPooling2D()], False),
        (lambda: [layers.MaxPooling2D(), conv()], False),
    ],
)
def test_fusion_depends_on_layer_settings(pair, fused):
    model = keras.Sequential(pair())
    x = np.random.default_rng(0).standard_normal((2, 12, 12, 3)).astype(np.float32)
    y = model(x)
    assert len(steps_of(model.layers)) == (1 if fused else 2)
    single = x
    for layer in model.layers:
        single = layer(single)
    np.testing.assert_allclose(y.numpy(), single.numpy(), rtol=1e-4, atol=1e-6)


def test_sequential_built_by_input_shape_or_build():
    declared = [
        keras.Sequential([keras.Input((3,)), layers.Dense(2)]),
        keras.Sequential([layers.InputLayer(input_shape=(3,)), layers.Dense(2)]),
        keras.Sequential([layers.Dense(2, input_shape=(3,))]),
        keras.Sequential([layers.Dense(2, input_dim=3)]),
    ]
    later = keras.Sequential([layers.Dense(2)])
    assert not later.built and later.weights == []
    later.build((None, 3))
    grown = keras.Sequential([keras.Input((3,))])
    grown.add(layers.Dense(2))
    for model in (*declared, later, grown):
        assert model.built and len(model.weights) == 2 and len(model.layers) == 1
        assert model.output_shape == (None, 2) and model.input_shape == (None, 3)
        assert model(X).shape == (4, 2)


def test_sequential_add_and_pop_rebuild():
    model = keras.Sequential([layers.Dense(2)])
    model(X)
    kept = model.weights
    model.add(layers.Dense(5))
    assert model(X).shape == (4, 5) and model.weights[:2] == kept
    model.pop()
    assert model(X).shape == (4, 2)
    model.pop()
    with pytest.raises(TypeError, match="no layer to remove"):
        model.pop()


def test_sequential_item_that_is_no_layer_raises():
    with pytest.raises(TypeError, match="is no layer"):
        keras.Sequential([nn.relu])
    with pytest.raises(ValueError, match="names must differ"):
        keras.Sequential([layers.Dense(1, name="a"), layers.Dense(1, name="a")])
    with pytest.raises(ValueError, match="can only be first"):
        keras.Sequential([layers.Dense(1), keras.Input((2,))])
    with pytest.raises(ValueError, match=r'"dense_1".*known length'):
        keras.Sequential([layers.Dense(2)]).build((None, None))


def test_get_layer_by_name_and_index():
    model = keras.Sequential([layers.Dense(2, name="a"), layers.Dense(1, name="b")])
    assert model.get_layer("b") is model.get_layer(index=1) is model.layers[1]
    with pytest.raises(ValueError, match="layers are a, b"):
        model.get_layer("c")
    with pytest.raises(ValueError, match="has 2 layers"):
        model.get_layer(index=2)


def test_subclassed_model_builds_by_a_call_on_zeros():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    net = Net()
    net.build((None, 3))
    assert net.built and len(net.weights) == 2 and net.name == "net"
    nested = keras.Sequential([net, layers.Dense(1)])
    assert nested(X).shape == (4, 1) and len(nested.weights) == 4


def test_subclassed_model_takes_several_inputs():
    class Add(keras.Model):
        def call(self, inputs):
            return inputs["a"] + inputs["b"][0]

    y = Add()({"a": X, "b": [X, X]})
    np.testing.assert_allclose(y.numpy(), 2 * X.astype(np.float32), rtol=1e-6)


# Strategies ---------------------------------------------------------------------------------------


def mirrored(count):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(count)])


@pytest.mark.parametrize("in_replica", [False, True])
def test_variables_are_made_once_for_all_replicas(in_replica):
    strategy = mirrored(3)

    def make():
        return keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(2)])

    with strategy.scope():
        shared = make()

    def step():
        model = make() if in_replica else shared
        return model(X), *[as_tensor(w) for w in model.weights]

    for _ in range(2):
        for value in strategy.run(step):
            first, *others = value.values
            for other in others:
                np.testing.assert_array_equal(first.numpy(), other.numpy())
    if not in_replica:
        assert all(len(w.values) == 3 for w in shared.weights)


def test_layer_build_runs_in_one_replica():
    class Slow(layers.Layer):
        builds = 0

        def build(self, input_shape):
            Slow.builds += 1
            time.sleep(0.05)
            self.kernel = self.add_weight("kernel", (3,))

        def call(self, x):
            return x * self.kernel

    strategy = mirrored(3)
    with strategy.scope():
        layer = Slow(dtype="float64")
    results = strategy.run(lambda: layer(X)).values
    assert Slow.builds == 1 and len(layer.weights) == 1
    np.testing.assert_array_equal(results[0].numpy(), results[2].numpy())


def test_model_late_build_uses_its_scope():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(2)])
    model(X)
    assert all(len(w.values) == 2 for w in model.weights)
    model.set_weights([np.ones((3, 2)), np.zeros(2)])
    for component in model.weights[0].values:
        np.testing.assert_array_equal(component.numpy(), np.ones((3, 2)))


def test_layer_that_synchronizes_replicas_builds():
    class Mean(layers.Layer):
        def call(self, x):
            return distribute.get_replica_context().all_reduce("MEAN", x)

    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(3), Mean(), layers.Dense(1)])
    y = strategy.run(lambda: model(X))
    assert y.values[0].shape == (4, 1) and len(model.weights) == 4


def test_regularization_losses_are_on_each_replicas_tape():
    strategy = mirrored(2)
    with strategy.scope():
        layer = layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5))

    def step():
        layer(X)
        with GradientTape() as tape:
            loss = ops.add_n(layer.losses)
        return tape.gradient(loss, layer.kernel)

    for gradient in strategy.run(step).values:
        np.testing.assert_allclose(gradient.numpy(), layer.get_weights()[0], rtol=1e-6)


def test_dropout_replicas_draw_own_repeatable_numbers():
    def run():
        strategy = mirrored(2)
        with strategy.scope():
            layer = layers.Dropout(0.5, seed=1)
        x = np.ones((20, 20), np.float32)
        return [v.numpy() for v in strategy.run(lambda: layer(x, training=True)).values]

    first, again = run(), run()
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (lambda: layers.Rescaling([1.0, 2.0], name="one"), r"axes for scale of shape \(2,\)"),
        (lambda: layers.Rescaling(1, [[[1.0]]], name="one"), r"axes for offset of shape"),
        (
            lambda: layers.Normalization(mean=[1.0, 2.0], variance=[1.0, 2.0], name="one"),
            r"axes \(-1,\) for mean of shape \(2,\)",
        ),
        (lambda: layers.Softmax(axis=2, name="one"), "an axis 2"),
        (lambda: layers.Softmax(axis=(0, -3), name="one"), r"an axis \(0, -3\)"),
        (lambda: layers.Dropout(0.5, noise_shape=(4, 2), name="one"), r"noise_shape of \(4, 2\)"),
        (lambda: layers.Dropout(0.5, noise_shape=(4,), name="one"), r"noise_shape of \(4,\)"),
    ],
)
def test_layer_wrong_shape_error_names_layer_and_shape(layer, text):
    start = f'Input 0 of layer "one" is incompatible with the layer: expected .*{text}.* received '
    for training in (False, True):
        with pytest.raises(ValueError, match=start + r"input with shape \(4, 3\)"):
            layer()(np.ones((4, 3), np.float32), training=training)
    with pytest.raises(ValueError, match=start + r"input with shape \(None, 3\)"):
        layer()(layers.Input((3,)))


def test_embedding_number_out_of_range_names_the_layer():
    with pytest.raises(IndexError, match='layer "one": the table has rows 0 to 2'):
        layers.Embedding(3, 2, name="one")(np.array([[1, 3]]))


def test_normalization_statistics_may_have_the_shape_of_axes_or_inputs():
    x = np.arange(24.0).reshape(2, 3, 4)
    flat = layers.Normalization(1, [1.0, 2.0, 3.0], [4.0, 9.0, 16.0], dtype="float64")
    whole = layers.Normalization(
        1, [[[1.0], [2.0], [3.0]]], [[[4.0], [9.0], [16.0]]], dtype="float64"
    )
    expected = (x - np.array([[1.0], [2.0], [3.0]])) / np.array([[2.0], [3.0], [4.0]])
    for layer in (flat, whole):
        np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-12)
