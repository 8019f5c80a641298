"""The models of the training benchmarks, for every implementation of Keras.

Each function gets `tf.keras` of pycollective or TensorFlow, or the module `keras`. `models_torch.py` has
the same models for PyTorch. The layers of a class are made in the same order, so that
`equal_kernels` gives equal weights to both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

L2 = 1e-5


def tutorial(keras: Any) -> Any:
    layers, l2 = keras.layers, keras.regularizers.L2
    return keras.Sequential(
        [
            layers.Conv2D(32, 3, activation="relu", kernel_regularizer=l2(L2)),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu", kernel_regularizer=l2(L2)),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", kernel_regularizer=l2(L2)),
            layers.Dense(10, kernel_regularizer=l2(L2)),
        ]
    )


def resnet20(keras: Any) -> Any:
    layers, l2 = keras.layers, keras.regularizers.L2

    def conv(filters: int, size: int, strides: int) -> Any:
        return layers.Conv2D(
            filters,
            size,
            strides=strides,
            padding="same",
            use_bias=False,
            kernel_regularizer=l2(L2),
        )

    inputs = keras.Input((32, 32, 3))
    x = layers.BatchNormalization()(conv(16, 3, 1)(inputs))
    x = layers.Activation("relu")(x)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            strides = 2 if stage and not block else 1
            y = layers.BatchNormalization()(conv(filters, 3, strides)(x))
            y = layers.Activation("relu")(y)
            y = layers.BatchNormalization()(conv(filters, 3, 1)(y))
            if strides > 1:
                x = conv(filters, 1, strides)(x)
            x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, kernel_regularizer=l2(L2))(x))


def mlp(keras: Any) -> Any:
    dense = keras.layers.Dense
    return keras.Sequential(
        [dense(512, activation="relu"), dense(512, activation="relu"), dense(10)]
    )


def vgg16(keras: Any) -> Any:
    layers = keras.layers
    stack = []
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            stack.append(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        stack.append(layers.MaxPooling2D())
    head = [layers.Flatten(), layers.Dense(512, activation="relu"), layers.Dense(10)]
    return keras.Sequential(stack + head)


def _normalized(keras: Any, layer: Any, x: Any, relu: Any) -> Any:
    """Return the normalized output of a layer, perhaps with a relu."""
    x = keras.layers.BatchNormalization()(layer(x))
    return x if relu is None else relu(x)


def resnet50(keras: Any) -> Any:
    layers = keras.layers

    def conv(x: Any, filters: int, size: int, strides: int = 1, relu: bool = True) -> Any:
        layer = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)
        return _normalized(keras, layer, x, layers.ReLU() if relu else None)

    inputs = keras.Input((224, 224, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(conv(inputs, 64, 7, 2))
    for stage, (filters, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            y = conv(conv(x, filters, 1), filters, 3, strides)
            y = conv(y, 4 * filters, 1, relu=False)
            if not block:
                x = conv(x, 4 * filters, 1, strides, relu=False)
            x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


# Expansion, filters, blocks, and the first block's strides.
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip


def mobilenet_v2(keras: Any) -> Any:
    layers = keras.layers

    def conv(x: Any, filters: int, size: int, strides: int = 1, relu: bool = True) -> Any:
        layer = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)
        return _normalized(keras, layer, x, layers.ReLU(6.0) if relu else None)

    inputs = keras.Input((224, 224, 3))
    x = conv(inputs, 32, 3, 2)
    for expansion, filters, blocks, strides in INVERTED:
        for block in range(blocks):
            y = conv(x, expansion * x.shape[-1], 1) if expansion > 1 else x
            depthwise = layers.DepthwiseConv2D(
                3, strides=1 if block else strides, padding="same", use_bias=False
            )
            y = _normalized(keras, depthwise, y, layers.ReLU(6.0))
            y = conv(y, filters, 1, relu=False)
            x = layers.Add()([x, y]) if block else y
    x = layers.GlobalAveragePooling2D()(conv(x, 1280, 1))
    return keras.Model(inputs, layers.Dense(1000)(x))


def unet(keras: Any) -> Any:
    layers = keras.layers

    def twice(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    inputs = x = keras.Input((128, 128, 3))
    kept = []
    for filters in (32, 64, 128, 256):
        x = twice(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = twice(x, 512)
    for filters in (256, 128, 64, 32):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = twice(layers.Concatenate()([kept.pop(), x]), filters)
    return keras.Model(inputs, layers.Conv2D(2, 1)(x))


class Model(NamedTuple):
    """A model and its data."""

    build: Callable[[Any], Any]
    shape: tuple[int, ...]  # of an image
    images: int
    batch: int  # of a replica
    warmup: int  # steps that are not timed
    classes: int = 10
    l2: float = 0.0  # factor of the squares of all kernels in the loss
    per_pixel: bool = False  # a label for each pixel


MODELS = {
    "tutorial": Model(tutorial, (28, 28, 1), 20_000, 64, 30, l2=L2),
    "resnet20": Model(resnet20, (32, 32, 3), 10_000, 64, 30, l2=L2),
    "resnet50": Model(resnet50, (224, 224, 3), 64, 16, 2, 1000),
    "mobilenet_v2": Model(mobilenet_v2, (224, 224, 3), 64, 16, 3, 1000),
    "vgg16": Model(vgg16, (32, 32, 3), 1_000, 16, 10),
    "unet": Model(unet, (128, 128, 3), 64, 16, 3, 2, per_pixel=True),
    "mlp": Model(mlp, (784,), 10_000, 32, 100),
}


def equal_kernels(found: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[Any]:
    """Yield kernels for layers of these classes and shapes, which depend on nothing else.

    The shape is that of Keras: ``[..., inputs, outputs]``; for a transposed convolution,
    ``[..., outputs, inputs]``.
    """
    counts: Counter[str] = Counter()
    for name, shape in found:
        counts[name] += 1
        random = np.random.default_rng([counts[name], *name.encode()])
        inputs = np.prod(shape) / shape[-2 if "Transpose" in name else -1]
        inputs = np.prod(shape[:2]) if "Depthwise" in name else inputs
        yield (np.sqrt(2 / inputs) * random.standard_normal(shape)).astype(np.float32)


def give_equal_kernels(model: Any) -> None:
    """Set the kernels of a Keras model; layers of a class come in the order of their numbers."""

    def class_and_number(layer: Any) -> tuple[str, int]:
        last = layer.name.rpartition("_")[2]
        return type(layer).__name__, int(last) if last.isdigit() else 0

    layers = sorted(model.layers, key=class_and_number)
    # Keras calls the kernel of a depthwise convolution `kernel`, too.
    kernels = [
        (type(layer).__name__, layer.kernel)
        for layer in layers
        if getattr(layer, "kernel", None) is not None
    ]
    arrays = equal_kernels((name, tuple(kernel.shape)) for name, kernel in kernels)
    for (_, kernel), array in zip(kernels, arrays, strict=True):
        kernel.assign(array)
