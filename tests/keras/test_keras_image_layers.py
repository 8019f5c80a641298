"""Layers of images, merging and preprocessing: shapes, values, errors."""

from __future__ import annotations

import numpy as np
import pytest
from fitting import mirrored

from pycollective import keras, nn
from pycollective.data import Dataset
from pycollective.keras import layers
from pycollective.keras.layers.fusion import steps_of

RANDOM = np.random.default_rng(8)
IMAGES = RANDOM.standard_normal((2, 7, 6, 4))


SHAPES = [
    *(
        lambda p=p, s=s, d=d: layers.Conv2D(6, (3, 2), s, p, dilation_rate=d, groups=2)
        for p, s, d in (("valid", 1, 1), ("same", 2, 1), ("valid", 1, 2))
    ),
    *(
        lambda p=p, s=s, m=m: layers.DepthwiseConv2D((2, 3), s, p, m)
        for p, s, m in (("valid", 1, 1), ("same", 2, 3), ("valid", 3, 2))
    ),
    *(
        lambda k=k, s=s, p=p, o=o: layers.Conv2DTranspose(3, k, s, p, o)
        for k in (1, 2, 3, 4)
        for s in (1, 2, 3)
        for p in ("valid", "same")
        for o in (None, 0)
        if (k, s, p, o) != (1, 3, "same", 0)
    ),
    lambda: layers.Conv2DTranspose(3, 2, 1, "same", dilation_rate=(2, 3)),
    lambda: layers.Conv2DTranspose(3, 3, (3, 2), "valid", (2, 1)),
    *(
        lambda p=p, s=s: layers.AveragePooling2D((2, 3), s, p)
        for p in ("valid", "same")
        for s in (None, 1, 3)
    ),
    *(lambda k=k: layers.GlobalAveragePooling2D(keepdims=k) for k in (False, True)),
    *(lambda k=k: layers.GlobalMaxPooling2D(keepdims=k) for k in (False, True)),
    lambda: layers.ZeroPadding2D(2),
    lambda: layers.ZeroPadding2D(((1, 0), (2, 3))),
    lambda: layers.UpSampling2D((2, 3)),
    lambda: layers.UpSampling2D(3, interpolation="bilinear"),
    lambda: layers.Permute((3, 1, 2)),
    lambda: layers.RandomCrop(4, 5),
    lambda: layers.RandomCrop(9, 9),
    lambda: layers.RandomFlip(),
    lambda: layers.BatchNormalization(axis=1),
    lambda: layers.LayerNormalization(axis=[1, 3]),
]


@pytest.mark.parametrize(
    "make",
    [
        *SHAPES[:6],
        SHAPES[8],
        lambda: layers.AveragePooling2D(2),
        lambda: layers.GlobalAveragePooling2D(),
        lambda: layers.UpSampling2D(2, interpolation="bilinear"),
        lambda: layers.PReLU(),
        lambda: layers.Rescaling(0.5),
        lambda: layers.Normalization(),
        lambda: layers.Normalization(mean=[0.0] * 4, variance=[1.0] * 4),
        lambda: layers.RandomFlip(),
        lambda: layers.RandomCrop(3, 3),
    ],
)
def test_image_layers_mixed_precision_computes_in_half(make):
    layer = make()
    mixed = type(layer).from_config({**layer.get_config(), "dtype": "mixed_float16"})
    layer(IMAGES)
    y = mixed(IMAGES)
    assert y.dtype == np.float16
    assert {w.dtype.name for w in mixed.get_weights()} <= {"float32", "int32"}
    mixed.set_weights(layer.get_weights())
    if not isinstance(layer, (layers.RandomFlip, layers.RandomCrop)):
        expected = layer(IMAGES).numpy()
        np.testing.assert_allclose(mixed(IMAGES).numpy(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("make", SHAPES)
def test_image_layers_compute_output_shape_equals_result(make):
    layer = make()
    expected = layer.compute_output_shape((None, *IMAGES.shape[1:]))
    assert layer.compute_output_shape(IMAGES.shape) == (2, *expected[1:])
    y = layer(IMAGES)
    assert y.shape == (2, *expected[1:])
    assert layer.output_shape == expected
    assert y.dtype == np.float32
    assert layer(IMAGES[:0]).shape == (0, *expected[1:])
    unknown = (None, None, None, 4)
    if not isinstance(layer, (layers.BatchNormalization, layers.LayerNormalization)):
        known = [n for n in layer.compute_output_shape(unknown) if n is not None]
        assert all(n in expected for n in known)


def test_global_pooling_reduces_whole_images():
    for cls, name in ((layers.GlobalAveragePooling2D, "mean"), (layers.GlobalMaxPooling2D, "max")):
        y = cls(dtype="float64")(IMAGES).numpy()
        np.testing.assert_allclose(y, getattr(IMAGES, name)(axis=(1, 2)), rtol=1e-14)


def test_conv2d_transpose_inverts_the_shape():
    forth = layers.Conv2D(5, 3, 2, "same", use_bias=False, dtype="float64")
    y = forth(RANDOM.standard_normal((2, 8, 6, 4)))
    back = layers.Conv2DTranspose(4, 3, 2, "same", use_bias=False, dtype="float64")
    x = back(y)
    back.set_weights(forth.get_weights())
    assert x.shape == (2, 8, 6, 4)
    expected = nn.conv2d_transpose(y, forth.kernel, (2, 8, 6, 4), 2, "SAME")
    np.testing.assert_allclose(back(y).numpy(), expected.numpy(), rtol=1e-12, atol=1e-12)


def test_convolutions_apply_bias_and_activation():
    for layer in (
        layers.DepthwiseConv2D(2, activation="relu", bias_initializer="ones", dtype="float64"),
        layers.Conv2DTranspose(3, 2, activation="relu", bias_initializer="ones", dtype="float64"),
        layers.Conv2D(4, 2, groups=2, activation="tanh", bias_initializer="ones", dtype="float64"),
    ):
        y = layer(IMAGES).numpy()
        function = layer.activation
        layer.activation = keras.activations.linear
        plain = layer(IMAGES)
        np.testing.assert_allclose(function(plain).numpy(), y, rtol=1e-14)
        layer.set_weights([layer.get_weights()[0], np.zeros(layer.bias.shape)])
        np.testing.assert_allclose(layer(IMAGES).numpy() + 1, plain.numpy(), rtol=1e-12, atol=1e-12)


def test_grouped_convolution_is_not_fused():
    x = IMAGES.astype(np.float32)
    model = keras.Sequential(
        [layers.Conv2D(4, 2, groups=2, activation="relu"), layers.MaxPooling2D()]
    )
    y = model(x)
    assert len(steps_of(model.layers)) == 2
    single = model.layers[1](model.layers[0](x))
    np.testing.assert_array_equal(y.numpy(), single.numpy())


# Merging ------------------------------------------------------------------------------------------

A, B = RANDOM.standard_normal((2, 3, 4)), RANDOM.standard_normal((2, 3, 4))
C = RANDOM.standard_normal((2, 4))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (layers.Add, lambda a, b: a + b),
        (layers.Subtract, lambda a, b: a - b),
        (layers.Multiply, lambda a, b: a * b),
        (layers.Average, lambda a, b: (a + b) / 2),
        (layers.Maximum, np.maximum),
        (layers.Minimum, np.minimum),
    ],
)
def test_merging_layers_combine_inputs(layer, expected):
    merge = layer(dtype="float64")
    np.testing.assert_allclose(merge([A, B]).numpy(), expected(A, B), rtol=1e-14)
    np.testing.assert_allclose(merge([A, B[:, :1]]).numpy(), expected(A, B[:, :1]), rtol=1e-14)
    np.testing.assert_allclose(merge([A, C]).numpy(), expected(A, C[:, None]), rtol=1e-14)
    assert merge.compute_output_shape([(None, 3, 4), (None, 1, 4)]) == (None, 3, 4)
    assert merge.compute_output_shape([(None, None, 4), (5, 4)]) == (5, None, 4)
    if layer is not layers.Subtract:
        np.testing.assert_allclose(merge([A]).numpy(), A)
    function = getattr(layers, layer.__name__.lower())
    np.testing.assert_allclose(function([A, B], dtype="float64").numpy(), expected(A, B))


def test_concatenate_joins_along_the_axis():
    y = layers.concatenate([A, B[:, :, :2]], dtype="float64")
    np.testing.assert_array_equal(y.numpy(), np.concatenate([A, B[:, :, :2]], axis=-1))
    assert layers.Concatenate(1)([A, B]).shape == (2, 6, 4)
    shape = layers.Concatenate(1).compute_output_shape([(None, None, 4), (None, 3, 4)])
    assert shape == (None, None, 4)


# Preprocessing ------------------------------------------------------------------------------------


def test_rescaling_multiplies_and_adds():
    pixels = RANDOM.integers(0, 256, (2, 3, 3, 3)).astype(np.uint8)
    y = layers.Rescaling(1 / 255, offset=-0.5)(pixels)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.numpy(), pixels / 255 - 0.5, rtol=1e-5, atol=1e-6)
    by_channel = layers.Rescaling(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(by_channel(pixels).numpy(), pixels * [1.0, 2.0, 3.0], rtol=1e-6)


def test_normalization_adapts_to_data_and_inverts():
    data = RANDOM.standard_normal((50, 3)) * [1, 2, 3] + [5, 0, -5]
    expected = (data - data.mean(axis=0)) / data.std(axis=0)
    whole, batches = layers.Normalization(dtype="float64"), layers.Normalization(dtype="float64")
    np.testing.assert_array_equal(layers.Normalization(dtype="float64")(data).numpy(), data)
    whole.adapt(data)
    batches.adapt(Dataset.from_tensor_slices((data, data)).batch(8))
    for layer in (whole, batches):
        np.testing.assert_allclose(layer(data).numpy(), expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(layer.mean, data.mean(axis=0, keepdims=True), rtol=1e-10)
        np.testing.assert_allclose(layer.variance, data.var(axis=0, keepdims=True), rtol=1e-10)
    given = layers.Normalization(
        mean=data.mean(axis=0), variance=data.var(axis=0), invert=True, dtype="float64"
    )
    np.testing.assert_allclose(given(expected).numpy(), data, rtol=1e-10, atol=1e-10)
    one = layers.Normalization(axis=None, dtype="float64")
    one.adapt(data)
    np.testing.assert_allclose(one(data).numpy(), (data - data.mean()) / data.std(), rtol=1e-10)
    with pytest.raises(ValueError, match="nothing to adapt"):
        given.adapt(data)
    with pytest.raises(ValueError, match="no data"):
        layers.Normalization().adapt(data[:0])
    with pytest.raises(ValueError, match="both mean and variance"):
        layers.Normalization(mean=1.0)


@pytest.mark.parametrize("mode", ["horizontal", "vertical", "horizontal_and_vertical"])
def test_random_flip_flips_some_images_in_training_only(mode):
    images = RANDOM.standard_normal((40, 3, 4, 2)).astype(np.float32)
    layer = layers.RandomFlip(mode, seed=1)
    y = layer(images, training=True).numpy()
    ways = {
        "": images,
        "horizontal": images[:, :, ::-1],
        "vertical": images[:, ::-1],
        "horizontal_and_vertical": images[:, ::-1, ::-1],
    }
    found = [
        next(name for name, way in ways.items() if np.array_equal(y[i], way[i])) for i in range(40)
    ]
    assert set(found) == {"", mode}
    assert 8 < found.count(mode) < 32
    np.testing.assert_array_equal(layer(images, training=False).numpy(), images)
    again = layers.RandomFlip(mode, seed=1)(images, training=True).numpy()
    np.testing.assert_array_equal(again, y)


def test_random_crop_is_random_in_training_and_central_in_evaluation():
    images = np.arange(2 * 6 * 8, dtype=np.float32).reshape(2, 6, 8, 1)
    layer = layers.RandomCrop(3, 4, seed=2)
    corners = set()
    for _ in range(60):
        y = layer(images, training=True).numpy()
        top, left = divmod(int(y[0, 0, 0, 0]), 8)
        np.testing.assert_array_equal(y, images[:, top : top + 3, left : left + 4])
        corners.add((top, left))
    assert {top for top, _ in corners} == set(range(4))
    assert {left for _, left in corners} == set(range(5))
    middle = layers.RandomCrop(6, 4)(images, training=False).numpy()
    np.testing.assert_array_equal(middle, images[:, :, 2:6])
    assert layers.RandomCrop(12, 4)(images, training=True).shape == (2, 12, 4, 1)


def test_random_flip_differs_between_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        layer = layers.RandomFlip(seed=1)
    images = RANDOM.standard_normal((20, 3, 4, 2)).astype(np.float32)
    first, second = strategy.run(lambda: layer(images, training=True)).values
    assert not np.array_equal(first.numpy(), second.numpy())


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: layers.Conv2D(6, 3, groups=4), r"filters \(6\) must be divisible by groups \(4\)"),
        (lambda: layers.Conv2D(6, 3, groups=3, name="g")(IMAGES), r'"g".*groups=3.*\(2, 7, 6, 4\)'),
        (
            lambda: layers.DepthwiseConv2D(8, name="d")(IMAGES),
            r'"d".*window of 8 x 8.*\(2, 7, 6, 4\)',
        ),
        (lambda: layers.DepthwiseConv2D(2, name="d")(C), r'"d".*\[n, height.*\(2, 4\)'),
        (lambda: layers.Conv2DTranspose(2, 3, 2, dilation_rate=2), "both be larger than 1"),
        (lambda: layers.Conv2DTranspose(2, 3, 2, output_padding=2), "output_padding"),
        (lambda: layers.AveragePooling2D(9, name="p")(IMAGES), r'"p".*9 x 9'),
        (lambda: layers.GlobalMaxPooling2D(name="p")(IMAGES[:, :0]), r'"p".*\(2, 0, 6, 4\)'),
        (lambda: layers.ZeroPadding2D(((1, 2), (3, -1))), "padding"),
        (lambda: layers.ZeroPadding2D(name="z")(A), r'"z".*\(2, 3, 4\)'),
        (lambda: layers.UpSampling2D(interpolation="cubic"), "'cubic'"),
        (lambda: layers.Permute((1, 3)), "each of 1 to 2 once"),
        (lambda: layers.Permute((2, 1), name="t")(C), r'"t".*\(2, 4\)'),
        (lambda: layers.Add(name="s")([A, B[:, :2]]), r'"s" \(Add\).*\(2, 3, 4\), \(2, 2, 4\)'),
        (lambda: layers.Add(name="s")([A, B[:1]]), r'"s".*numbers of rows'),
        (lambda: layers.Add(name="s")(A), r'"s".*on a list of inputs'),
        (lambda: layers.Subtract(name="s")([A, B, A]), r'"s".*two inputs'),
        (lambda: layers.Concatenate(name="c")([A, B[:, :2]]), r'"c".*axis -1 only'),
        (lambda: layers.Concatenate(5, name="c")([A, B]), r'"c".*axis 5'),
        (lambda: layers.RandomFlip("diagonal"), "'diagonal'"),
        (lambda: layers.RandomCrop(0, 3), "height must be a positive integer"),
        (lambda: layers.Dropout(0.5, noise_shape=(0,)), "noise_shape"),
        (lambda: layers.BatchNormalization(axis=3, name="b")(A), r'"b".*axis 3.*\(2, 3, 4\)'),
        (lambda: layers.LayerNormalization(axis=[3], name="l")(A), r'"l".*axis 3.*\(2, 3, 4\)'),
    ],
)
def test_image_layers_wrong_shape_raises(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_layer_list_instead_of_tensor_raises():
    for layer in (layers.Dense(2, name="x"), layers.Flatten(name="x"), layers.ReLU(name="x")):
        for _ in range(2):
            with pytest.raises(ValueError, match=r'"x".*one tensor.*\[\(2, 3, 4\), \(2, 3, 4\)\]'):
                layer([A, B])
            layer(A)
    with pytest.raises(ValueError, match=r'"x".*one tensor'):
        layers.AveragePooling2D(2, name="x")([keras.Input((4, 4, 1)), keras.Input((4, 4, 1))])


def test_layer_other_channels_after_build_raises():
    for layer, first, second, text in (
        (layers.BatchNormalization(name="b"), A, A[..., :2], r'"b".*value 4.*\(2, 3, 2\)'),
        (layers.LayerNormalization(name="l"), A, A[..., :2], r'"l".*\(4,\).*\(2, 3, 2\)'),
        (layers.DepthwiseConv2D(2, name="d"), IMAGES, IMAGES[..., :2], r'"d".*\(2, 2, 4, 1\)'),
        (layers.Conv2DTranspose(3, 2, name="t"), IMAGES, IMAGES[..., :2], r'"t".*\(2, 2, 3, 4\)'),
    ):
        layer(first)
        with pytest.raises(ValueError, match=text):
            layer(second)


def test_bilinear_upsampling_of_integers_is_that_of_floats():
    images = np.array([[[[0], [200]], [[50], [250]]]], np.uint8)
    layer = layers.UpSampling2D(2, interpolation="bilinear")
    found = layer(images)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.numpy(), layer(images.astype(np.float32)).numpy())


class Convolved(layers.Layer):
    def __init__(self, padding):
        super().__init__()
        self.convolution = layers.Conv2D(4, 3, padding=padding)

    def call(self, x):
        return self.convolution(x)


def test_symbolic_call_with_unknown_lengths_has_unknown_lengths():
    assert Convolved("valid")(layers.Input((None, None, 3))).shape == (None, None, None, 4)
    pooled = layers.MaxPooling2D()(Convolved("same")(layers.Input((None, None, 3))))
    assert pooled.shape == (None, None, None, 4)


def test_layers_of_integers_compute_in_floats():
    numbers = np.array([[50, 175], [150, 25]], np.uint8)
    images = numbers.reshape(1, 2, 1, 2)
    for make, given in (
        (lambda: layers.BatchNormalization(), numbers),
        (lambda: layers.LayerNormalization(), numbers),
        (lambda: layers.GlobalAveragePooling2D(), images),
        (lambda: layers.AveragePooling2D((2, 1)), images),
    ):
        layer = make()
        for training in (True, False):
            found, expected = (
                layer(x, training=training).numpy() for x in (given, given.astype(np.float32))
            )
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_fused_layers_follow_later_changes():
    model = keras.Sequential(
        [
            layers.Input((4, 4, 1)),
            layers.Conv2D(1, 1, activation="relu", kernel_initializer="ones"),
            layers.MaxPooling2D(),
        ]
    )
    negative = -np.ones((1, 4, 4, 1), np.float32)
    assert model(negative).numpy().ravel().tolist() == [0] * 4
    model.layers[0].activation = keras.activations.linear
    assert model(negative).numpy().ravel().tolist() == [-1] * 4


def test_normalization_keeps_its_axis_for_inputs_of_another_rank():
    layer = layers.Normalization()
    layer.adapt(np.array([[0.0, 10, 20, 30], [2, 14, 28, 40]]))
    found = layer(np.tile(np.array([0.0, 10, 20, 30], np.float32), (1, 4, 1))).numpy()
    np.testing.assert_allclose(found, -np.ones((1, 4, 4)), rtol=1e-5)
