"""Layers and their parts compared with real Keras: results, gradients and configs."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest

real = pytest.importorskip("keras", minversion="3.5")
jax = pytest.importorskip("jax")

from pycollective import distribute, keras  # noqa: E402
from pycollective.tensor import GradientTape, Tensor, ops  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        real.backend.backend() != "jax", reason="Keras was imported with another back end"
    ),
]

RANDOM = np.random.default_rng(0)
#: Keys that newer releases of Keras write and older ones refuse; this package omits them.
NEWER = {
    "input_axes",
    "output_axes",
    "quantization_config",
    "renorm",
    "renorm_clipping",
    "renorm_momentum",
    "shared_object_id",
}
#: The argument of `Identity` that Keras accepts but does not store.
FORGOTTEN = {"gain"}
IMAGES = (3, 9, 8, 4)

#: Name of the layer, arguments, shape of the input (or shapes), and True to call it in training.
CASES = [
    ("Dense", {"units": 5, "activation": "tanh"}, (4, 3)),
    ("Dense", {"units": 5, "use_bias": False, "kernel_regularizer": "l2"}, (4, 2, 3)),
    ("Embedding", {"input_dim": 7, "output_dim": 3}, "integers"),
    ("Identity", {}, (4, 3)),
    ("Conv2D", {"filters": 6, "kernel_size": 3, "activation": "relu"}, IMAGES),
    ("Conv2D", {"filters": 6, "kernel_size": (3, 2), "strides": 2, "padding": "same"}, IMAGES),
    ("Conv2D", {"filters": 6, "kernel_size": 2, "dilation_rate": (2, 3)}, IMAGES),
    ("Conv2D", {"filters": 6, "kernel_size": 3, "groups": 2, "padding": "same"}, IMAGES),
    ("Conv2D", {"filters": 8, "kernel_size": 3, "groups": 4, "use_bias": False}, IMAGES),
    ("DepthwiseConv2D", {"kernel_size": 3, "padding": "same"}, IMAGES),
    ("DepthwiseConv2D", {"kernel_size": 3, "depth_multiplier": 3, "strides": 2}, IMAGES),
    ("DepthwiseConv2D", {"kernel_size": 2, "dilation_rate": 2, "activation": "silu"}, IMAGES),
    *(
        (
            "Conv2DTranspose",
            {
                "filters": 5,
                "kernel_size": kernel,
                "strides": strides,
                "padding": padding,
                "output_padding": extra,
            },
            IMAGES,
        )
        for kernel, strides, extra in ((3, 2, None), (3, 2, 0), (2, 3, None), ((4, 3), (2, 1), 0))
        for padding in ("valid", "same")
    ),
    ("Conv2DTranspose", {"filters": 5, "kernel_size": 3, "dilation_rate": 2}, IMAGES),
    (
        "Conv2DTranspose",
        {"filters": 5, "kernel_size": 3, "strides": 3, "output_padding": 2},
        IMAGES,
    ),
    ("MaxPooling2D", {}, IMAGES),
    ("MaxPooling2D", {"pool_size": 3, "strides": 2, "padding": "same"}, IMAGES),
    ("AveragePooling2D", {"pool_size": 2}, IMAGES),
    ("AveragePooling2D", {"pool_size": (3, 2), "strides": 2, "padding": "same"}, IMAGES),
    ("GlobalAveragePooling2D", {"keepdims": True}, IMAGES),
    ("GlobalMaxPooling2D", {}, IMAGES),
    ("Flatten", {}, (2, 3, 4)),
    ("Reshape", {"target_shape": (4, -1)}, (2, 3, 8)),
    ("Permute", {"dims": (2, 3, 1)}, (2, 3, 4, 5)),
    ("ZeroPadding2D", {"padding": ((1, 2), (0, 3))}, IMAGES),
    ("UpSampling2D", {"size": (2, 3)}, IMAGES),
    ("UpSampling2D", {"size": 2, "interpolation": "bilinear"}, IMAGES),
    ("Activation", {"activation": "gelu"}, (4, 3)),
    ("ReLU", {"max_value": 1.0, "negative_slope": 0.1, "threshold": 0.2}, (40, 3)),
    ("LeakyReLU", {}, (4, 3)),
    ("PReLU", {"shared_axes": [1]}, (2, 3, 4)),
    ("ELU", {"alpha": 0.5}, (4, 3)),
    ("Softmax", {"axis": 1}, (4, 3, 2)),
    ("Softmax", {"axis": (1, 2)}, (4, 3, 2)),
    ("Dropout", {"rate": 0.5, "seed": 1, "noise_shape": (None, 1)}, (4, 3)),
    ("ActivityRegularization", {"l1": 0.1, "l2": 0.2}, (4, 3)),
    ("BatchNormalization", {"momentum": 0.9}, (5, 3, 4)),
    ("BatchNormalization", {"momentum": 0.9}, (5, 3, 4), True),
    ("BatchNormalization", {"axis": 1, "epsilon": 0.1}, (5, 3, 4), True),
    ("BatchNormalization", {"scale": False, "center": False}, IMAGES, True),
    ("LayerNormalization", {}, (5, 3, 4)),
    ("LayerNormalization", {"axis": [1, 2], "center": False, "epsilon": 0.1}, (5, 3, 4)),
    *((name, {}, [(2, 3, 4), (2, 3, 4)]) for name in ("Add", "Subtract", "Multiply", "Average")),
    *((name, {}, [(2, 3, 4), (2, 1, 4)]) for name in ("Add", "Maximum", "Minimum", "Multiply")),
    ("Add", {}, [(2, 3, 4), (2, 4), (2, 3, 1)]),
    ("Concatenate", {"axis": 1}, [(2, 3, 4), (2, 2, 4), (2, 1, 4)]),
    ("Rescaling", {"scale": 0.5, "offset": 1.0}, (4, 3)),
    ("Rescaling", {"scale": [0.5, 1.0, 2.0]}, (4, 3)),
    ("Normalization", {"mean": [1.0, 2.0, 3.0], "variance": [4.0, 5.0, 6.0]}, (4, 3)),
    ("Normalization", {"axis": None, "mean": 1.0, "variance": 4.0, "invert": True}, (4, 3)),
    ("RandomFlip", {"mode": "vertical", "seed": 3}, IMAGES),
    ("RandomCrop", {"height": 9, "width": 8, "seed": 3}, IMAGES),
]


def identifier(case):
    name, options, *rest = case
    return "-".join([name, *(str(v) for v in options.values()), *(["training"] * (len(rest) > 1))])


def inputs_of(shape):
    if shape == "integers":
        return np.array([[0, 6, 3], [3, 3, 1]], np.int32)
    if isinstance(shape, list):
        return [inputs_of(one) for one in shape]
    return RANDOM.standard_normal(shape).astype(np.float32)


def stored(config):
    return json.loads(json.dumps(config))


def same(theirs, ours, path=""):
    """Compare configs; numbers may differ by a rounding to float32."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), path
        missing = set(theirs) - set(ours)
        assert missing <= NEWER, f"{path}: {missing - NEWER}"
        assert set(ours) - set(theirs) <= FORGOTTEN, f"{path}: {set(ours) - set(theirs)}"
        for key in set(ours) & set(theirs):
            same(theirs[key], ours[key], f"{path}/{key}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-6), path
    else:
        assert theirs == ours, path


def close(ours, theirs, tolerance=1e-5):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    scale = max(np.abs(theirs).max(initial=0), 1e-3)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("case", CASES, ids=identifier)
def test_layer_equals_that_of_keras(case):
    name, options, shape, *more = case
    training = bool(more)
    x = inputs_of(shape)
    arrays = x if isinstance(x, list) else [x]
    theirs = getattr(real.layers, name)(**options, name="one")
    wanted = stored(theirs.get_config())
    # Each library builds the layer from the other one's config.
    ours = getattr(keras.layers, name).from_config(wanted)
    same(wanted, stored(ours.get_config()))
    same(wanted, stored(getattr(keras.layers, name)(**options, name="one").get_config()))
    back = getattr(real.layers, name).from_config(stored(ours.get_config()))
    same(stored(back.get_config()), stored(ours.get_config()))

    sizes = [a.shape for a in arrays]
    theirs.build(sizes if isinstance(x, list) else sizes[0])
    ours(x, training=training)
    weights = [RANDOM.random(w.shape).astype(w.dtype) + 0.5 for w in theirs.get_weights()]
    assert [w.shape for w in weights] == [w.shape for w in ours.get_weights()]
    theirs.set_weights(weights)
    ours.set_weights(weights)
    assert [w.name for w in theirs.weights] == [w.name.split("/")[-1] for w in ours.weights]

    trainable = [v.value for v in theirs.trainable_variables]
    fixed = [v.value for v in theirs.non_trainable_variables]

    takes_training = "training" in inspect.signature(theirs.call).parameters
    mode = {"training": training} if takes_training else {}

    def call(trainable, arrays):
        inputs = list(arrays) if isinstance(x, list) else arrays[0]
        return theirs.stateless_call(trainable, fixed, inputs, **mode)

    floats = all(a.dtype.kind == "f" for a in arrays)
    if floats:
        expected, back, after = jax.vjp(call, trainable, arrays, has_aux=True)
    else:
        expected, back, after = jax.vjp(lambda t: call(t, arrays), trainable, has_aux=True)
    upstream = RANDOM.standard_normal(expected.shape).astype(np.float32)
    tensors = [Tensor(a) for a in arrays]
    sources = [*ours.trainable_variables, *(tensors if floats else [])]
    with GradientTape() as tape:
        if floats:
            tape.watch(tensors)
        y = ours(tensors if isinstance(x, list) else tensors[0], training=training)
    close(y.numpy(), expected)
    parts = back(upstream)
    for mine, other in zip(
        tape.gradient(y, sources, Tensor(upstream)), [g for p in parts for g in p], strict=True
    ):
        close(ops.convert_to_tensor(mine).numpy(), other)
    kept = [
        value
        for value, variable in zip(after, theirs.non_trainable_variables, strict=True)
        if "seed" not in variable.name
    ]
    for mine, other in zip(ours.non_trainable_variables, kept, strict=True):
        close(mine.numpy(), other)
    shapes = [(None, *a.shape[1:]) for a in arrays]
    one = shapes if isinstance(x, list) else shapes[0]
    if not isinstance(ours, (keras.layers.Normalization, keras.layers.RandomCrop)):
        assert tuple(theirs.compute_output_shape(one)) == ours.compute_output_shape(one)


@pytest.mark.parametrize(("rows", "axis"), [((3, 2), -1), ((3, 2), 1), ((0, 5), -1)], ids=str)
def test_synchronized_batch_normalization_equals_that_of_the_whole_batch(rows, axis):
    """Keras synchronizes with TensorFlow only, so compare with Keras on the whole batch."""
    options = {"axis": axis, "momentum": 0.9, "name": "one"}
    theirs = real.layers.BatchNormalization(**options)
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(len(rows))])
    with strategy.scope():
        ours = keras.layers.BatchNormalization(synchronized=True, **options)
    config = stored(ours.get_config())
    same({**stored(theirs.get_config()), "synchronized": True}, config)
    same(config, stored(keras.layers.BatchNormalization.from_config(config).get_config()))

    x = RANDOM.standard_normal((5, 3, 4)).astype(np.float32) * 3 + 2
    upstream = RANDOM.standard_normal(x.shape).astype(np.float32)
    theirs.build(x.shape)
    ours.build(x.shape)
    weights = [RANDOM.random(w.shape).astype(w.dtype) + 0.5 for w in theirs.get_weights()]
    theirs.set_weights(weights)
    ours.set_weights(weights)
    trainable = [v.value for v in theirs.trainable_variables]
    fixed = [v.value for v in theirs.non_trainable_variables]

    def call(trainable, x):
        return theirs.stateless_call(trainable, fixed, x, training=True)

    expected, back, after = jax.vjp(call, trainable, x, has_aux=True)
    (by_gamma, by_beta), by_x = back(upstream)

    ends = np.cumsum(rows)
    parts = [slice(end - count, end) for count, end in zip(rows, ends, strict=True)]

    def step():
        part = parts[distribute.get_replica_context().replica_id_in_sync_group]
        own = Tensor(x[part])
        with GradientTape() as tape:
            tape.watch(own)
            y = ours(own, training=True)
        sources = [own, *ours.trainable_variables]
        return y, *tape.gradient(y, sources, Tensor(upstream[part]))

    found = [
        [np.asarray(v) for v in strategy.experimental_local_results(result)]
        for result in strategy.run(step)
    ]
    close(np.concatenate(found[0]), expected)
    close(np.concatenate(found[1]), by_x, 2e-5)
    close(sum(found[2]), by_gamma)
    close(sum(found[3]), by_beta)
    for mine, other in zip(ours.non_trainable_variables, after, strict=True):
        close(mine.numpy(), other)


PENALIZED = [
    ("Dense", {"units": 3, "activity_regularizer": "l1", "kernel_regularizer": "l2"}, (4, 5)),
    ("Conv2D", {"filters": 3, "kernel_size": 3, "activity_regularizer": "l2"}, IMAGES),
    ("BatchNormalization", {"gamma_regularizer": "l2", "activity_regularizer": "l2"}, (4, 5)),
    ("ActivityRegularization", {"l1": 0.1, "l2": 0.2}, (4, 2, 5)),
]


@pytest.mark.parametrize("case", PENALIZED, ids=identifier)
def test_penalties_equal_those_of_keras(case):
    name, options, shape = case
    x = inputs_of(shape)
    theirs, ours = (getattr(module.layers, name)(**options) for module in (real, keras))
    theirs.build(shape)
    ours.build(shape)
    weights = [RANDOM.random(w.shape).astype(w.dtype) + 0.5 for w in theirs.get_weights()]
    theirs.set_weights(weights)
    ours.set_weights(weights)
    theirs(x)
    ours(x)
    close([loss.numpy() for loss in ours.losses], theirs.losses)


def adding(module, mean, square):
    """Return a model that adds losses, in its layers and in the model itself."""

    class Penalty(module.layers.Layer):
        def call(self, inputs):
            self.add_loss(3.0 * mean(square(inputs)))
            return inputs * 2.0

    class Model(module.Model):
        def __init__(self):
            super().__init__()
            self.dense = module.layers.Dense(2, kernel_regularizer="l2")
            self.penalty = Penalty()

        def call(self, inputs):
            y = self.penalty(self.dense(inputs))
            self.add_loss(mean(y))
            return y

    return Model()


def test_added_losses_equal_those_of_keras():
    x, y = RANDOM.standard_normal((6, 3)), RANDOM.standard_normal((6, 2))
    x, y = x.astype(np.float32), y.astype(np.float32)
    theirs = adding(real, real.ops.mean, real.ops.square)
    ours = adding(keras, ops.reduce_mean, ops.square)
    weights = [RANDOM.standard_normal(n).astype(np.float32) for n in ((3, 2), (2,))]
    found = []
    for model in (theirs, ours):
        model(x)
        model.set_weights(weights)
        model(x)
        found.append(sorted(float(loss) for loss in model.losses))
        model.compile("sgd", "mse")
        found[-1] += model.fit(x, y, 3, 2, verbose=0, shuffle=False).history["loss"]
        found[-1] += [float(w.sum()) for w in map(np.asarray, model.get_weights())]
    assert len(found[0]) == 3 + 2 + 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_every_layer_is_compared():
    named = {name for name, *_ in CASES} | {"Input", "InputLayer", "InputSpec", "Layer"}
    named.add("StringLookup")  # Keras needs TensorFlow for it
    classes = {
        getattr(keras.layers, name).__name__
        for name in keras.layers.__all__
        if isinstance(getattr(keras.layers, name), type)
    }
    assert classes <= named


ACTIVATIONS = [
    name
    for name in keras.activations.__all__
    if name not in ("get", "serialize", "deserialize", "hard_swish", "swish")
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_that_of_keras(name):
    x = np.linspace(-6.1, 6.3, 60, dtype=np.float32).reshape(4, 15)
    function = getattr(real.activations, name)
    expected, back = jax.vjp(function, x)
    ours = keras.activations.get(name)
    tensor = Tensor(x)
    with GradientTape() as tape:
        tape.watch(tensor)
        y = ours(tensor)
    upstream = RANDOM.standard_normal(x.shape).astype(np.float32)
    close(y.numpy(), expected, 2e-6)
    close(tape.gradient(y, tensor, Tensor(upstream)).numpy(), back(upstream)[0])
    assert real.activations.serialize(function) == keras.activations.serialize(ours)


OBJECTS = [
    ("initializers", "Zeros", {}),
    ("initializers", "Ones", {}),
    ("initializers", "Constant", {"value": 0.5}),
    ("initializers", "Identity", {"gain": 2.0}),
    ("initializers", "RandomNormal", {"mean": 1.0, "seed": 3}),
    ("initializers", "TruncatedNormal", {"stddev": 2.0}),
    ("initializers", "RandomUniform", {"minval": -2.0}),
    ("initializers", "VarianceScaling", {"scale": 2.0, "mode": "fan_out"}),
    ("initializers", "GlorotUniform", {}),
    ("initializers", "GlorotNormal", {}),
    ("initializers", "HeUniform", {}),
    ("initializers", "HeNormal", {"seed": 4}),
    ("initializers", "LecunUniform", {}),
    ("initializers", "LecunNormal", {}),
    ("initializers", "Orthogonal", {"gain": 2.0}),
    ("regularizers", "L1", {"l1": 0.1}),
    ("regularizers", "L2", {"l2": 0.1}),
    ("regularizers", "L1L2", {"l1": 0.1, "l2": 0.2}),
    ("regularizers", "OrthogonalRegularizer", {"factor": 0.1, "mode": "columns"}),
    ("constraints", "NonNeg", {}),
    ("constraints", "MaxNorm", {"max_value": 1.5, "axis": 1}),
    ("constraints", "UnitNorm", {}),
    ("constraints", "MinMaxNorm", {"min_value": 1.0, "max_value": 1.5, "rate": 0.5}),
]


@pytest.mark.parametrize(("module", "name", "options"), OBJECTS, ids=lambda v: str(v))
def test_objects_of_layers_equal_those_of_keras(module, name, options):
    their_module, our_module = getattr(real, module), getattr(keras, module)
    theirs = getattr(their_module, name)(**options)
    wanted = stored(their_module.serialize(theirs))
    ours = our_module.get(wanted)
    same(wanted, stored(our_module.serialize(ours)))
    again = their_module.get(stored(our_module.serialize(ours)))
    same(stored(their_module.serialize(again)), stored(our_module.serialize(ours)))
    if module == "initializers":
        # Keras's config of `Identity` lacks the gain, so do not use the object made from it.
        ours = getattr(our_module, name)(**options)
        w, v = (np.asarray(one((60, 50), "float32")) for one in (theirs, ours))
        assert abs(v.mean() - w.mean()) <= 0.1 * w.std()
        assert v.std() == pytest.approx(w.std(), rel=0.1)
    else:
        w = RANDOM.standard_normal((5, 4)).astype(np.float32)
        close(ours(w).numpy(), theirs(jax.numpy.asarray(w)))
