"""Models made of symbolic tensors: calls, graphs, nested models and refused graphs."""

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from fitting import mirrored

import pycollective as tf
from pycollective import keras
from pycollective.keras import layers
from pycollective.keras.layers.fusion import ConvReluPool
from pycollective.tensor import GradientTape, ops

RANDOM = np.random.default_rng(3)
A = RANDOM.standard_normal((6, 4)).astype(np.float32)
B = RANDOM.standard_normal((6, 3)).astype(np.float32)


def two_inputs(structure=list):
    """Return a model with two inputs, two outputs, and a layer that is called twice."""
    first, second = keras.Input((4,), name="first"), keras.Input((3,), name="second")
    shared = layers.Dense(5, activation="relu", name="shared")
    x = shared(layers.Dense(2, name="left")(first))
    y = shared(layers.Dense(2, name="right")(second))
    total = x + 2.0 * y
    if structure is dict:
        inputs = {"second": second, "first": first}
        outputs = {"total": total, "difference": x - y}
    else:
        inputs, outputs = structure([first, second]), structure([total, x - y])
    return keras.Model(inputs, outputs, name="pair")


def by_hand(model, a, b):
    x = model.get_layer("shared")(model.get_layer("left")(a)).numpy()
    y = model.get_layer("shared")(model.get_layer("right")(b)).numpy()
    return x + 2 * y, x - y


# Symbolic tensors ---------------------------------------------------------------------------------


def test_input_returns_a_symbolic_tensor():
    x = keras.Input((28, None), batch_size=4, dtype="int32", name="image")
    assert isinstance(x, keras.KerasTensor)
    assert (x.shape, x.dtype, x.name, x.ndim) == ((4, 28, None), np.int32, "image", 3)
    assert keras.Input(batch_shape=(None, 2)).shape == (None, 2)
    assert keras.Input(tensor=x) is x
    for arguments in ({}, {"shape": (1,), "batch_shape": (None, 1)}):
        with pytest.raises(ValueError, match="needs the shape of an example"):
            keras.Input(**arguments)
    with pytest.raises(ValueError, match="sparse, ragged and optional inputs are not supported"):
        keras.Input((1,), sparse=True)


@pytest.mark.parametrize(
    "use", [bool, float, int, len, list, np.asarray, lambda x: ops.exp(x)], ids=str
)
def test_symbolic_tensor_used_as_value_raises(use):
    with pytest.raises(TypeError, match="is symbolic: it has no values"):
        use(keras.Input((3,)))


def test_layer_symbolic_call_returns_shape_and_dtype():
    x = keras.Input((28, 28, 1))
    y = layers.Conv2D(8, 3)(x)
    assert y.shape == (None, 26, 26, 8) and y.dtype == np.float32
    flat = layers.Flatten()
    z = flat(y)
    assert z.shape == (None, 26 * 26 * 8) and flat.input is y and flat.output is z
    assert layers.Flatten()(keras.Input((2, 3), dtype="int32")).dtype == np.int32
    with pytest.raises(AttributeError, match="never called on a symbolic tensor"):
        layers.Dense(1, name="a").output  # noqa: B018


def test_layer_without_output_shape_is_called_on_zeros():
    class Twice(layers.Layer):
        def call(self, inputs):
            return {"twice": ops.concat([inputs, inputs], 1), "half": inputs[:, :2]}

    found = Twice()(keras.Input((4,)))
    assert {key: value.shape for key, value in found.items()} == {
        "twice": (None, 8),
        "half": (None, 2),
    }


def test_symbolic_operators_are_recorded():
    x, y = keras.Input((4,)), keras.Input((1,))
    results = [x + y, x - 1, 2 - x, 3.0 * x, x / y, 1 / y, -x, x * np.arange(4.0), np.ones(4) - x]
    assert all(result.shape == (None, 4) for result in results[:4])
    model = keras.Model([x, y], results)
    a, b = A, B[:, :1]
    expected = [a + b, a - 1, 2 - a, 3 * a, a / b, 1 / b, -a, a * np.arange(4), 1 - a]
    for found, value in zip(model([a, b]), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-6)
        assert found.dtype == np.float32
    assert [layer.name for layer in model.layers] == [x.name, y.name]
    assert len(model.operations) == 11
    with pytest.raises(ValueError, match=r'"add_\d+": shapes \(None, 4\) and \(None, 3\)'):
        x + keras.Input((3,))


MATRIX = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize(
    ("use", "shapes"),
    [
        (lambda x: [x**2, 2**x, abs(x), x // 0.5, x % 0.7, 3 // x, 3 % x], [(None, 4)] * 7),
        (
            lambda x: [x @ MATRIX, x @ MATRIX[:, 0], x[:, None] @ x[..., None], x[0] @ x[1]],
            [(None, 3), (None,), (None, 1, 1), ()],
        ),
        (
            lambda x: [MATRIX.T @ x[..., None], np.ones((2, 1, 1)) @ x[:, None, None]],
            [(None, 3, 1), (None, 2, 1, 4)],
        ),
        (
            lambda x: [
                x[:, 1],
                x[..., -1:],
                x[:, None, ::-2],
                x[1:, 1:3],
                x[0],
                x[:, np.int64(-4)],
            ],
            [(None,), (None, 1), (None, 1, 2), (None, 2), (4,), (None,)],
        ),
    ],
    ids=["numbers", "products", "products from the left", "indices"],
)
def test_symbolic_operators_and_indices_survive_json(use, shapes):
    x = keras.Input((4,))
    model = keras.Model(x, use(x))
    assert [symbol.shape for symbol in model.outputs] == shapes
    for each in model, keras.models.model_from_json(model.to_json()):
        for found, value, symbol in zip(each(A), use(A), model.outputs, strict=True):
            assert found.shape == value.shape and found.dtype == symbol.dtype
            np.testing.assert_allclose(found.numpy(), value, rtol=1e-5)


def test_symbolic_operators_work_on_integers_and_have_gradients():
    whole = keras.Input((2,), dtype="int32")
    model = keras.Model(whole, [whole // 2, whole % 2, whole**2])
    assert [y.dtype for y in model.outputs] == [np.int32] * 3
    x, dense = keras.Input((4,)), layers.Dense(1)
    model = keras.Model(x, (abs(dense(x)) ** 3)[:, 0])
    with GradientTape() as tape:
        total = ops.reduce_sum(model(A))
    found = tape.gradient(total, dense.bias).numpy()
    y = A @ dense.kernel.numpy()
    np.testing.assert_allclose(found, [(3 * y**2 * np.sign(y)).sum()], rtol=1e-4)


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda x: x[:, 4], ValueError, "index 4 is out of range for an axis of length 4"),
        (lambda x: x[0, 0, 0], ValueError, "has 2 axes: the index"),
        (lambda x: x[..., 0, ...], ValueError, "has 2 axes: the index"),
        (lambda x: x["first"], TypeError, "not by 'first'"),
        (lambda x: x[[0, 1]], TypeError, r"not by \[0, 1\]"),
        (lambda x: x[x], TypeError, "not by <KerasTensor"),
        (lambda x: x @ np.ones((3, 4)), ValueError, r"\(None, 4\) and \(3, 4\) do not match"),
        (lambda x: x @ 2.0, ValueError, "do not match"),
    ],
)
def test_symbolic_operators_wrong_shapes_raise(use, error, text):
    with pytest.raises(error, match=text):
        use(keras.Input((4,)))


# Models -------------------------------------------------------------------------------------------


def test_functional_model_of_shared_layers_and_several_inputs_is_right():
    model = two_inputs()
    assert model.built and model.name == "pair"
    assert model.input_names == ["first", "second"]
    assert [layer.name for layer in model.layers] == ["first", "second", "left", "right", "shared"]
    assert len(model.weights) == 6 and model.count_params() == 10 + 8 + 15
    assert model.input_shape == [(None, 4), (None, 3)]
    assert model.output_shape == [(None, 5), (None, 5)]
    for given in ([A, B], (A, B), {"first": A, "second": B}):
        for found, expected in zip(model(given), by_hand(model, A, B), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_functional_inputs_and_outputs_in_dicts_are_matched_by_key():
    model = two_inputs(dict)
    found = model({"first": A, "second": B})
    assert list(found) == ["total", "difference"]
    expected = by_hand(model, A, B)
    np.testing.assert_allclose(found["total"].numpy(), expected[0], rtol=1e-5, atol=1e-6)
    predicted = model.predict({"second": B, "first": A}, verbose=0)
    np.testing.assert_allclose(predicted["difference"], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_functional_trains_like_a_subclassed_model(replicas):
    def train(scope, build):
        keras.utils.set_random_seed(1)
        with scope:
            model = build()
            model.compile("sgd", "mse")
        target = np.ones((6, 5), np.float32)
        history = model.fit([A, B], target, batch_size=4, epochs=3, shuffle=False, verbose=0)
        return history.history["loss"], model.get_weights(), model.predict([A, B], verbose=0)

    def graph():
        pair = two_inputs()
        return keras.Model(pair.inputs, pair.outputs[0])

    class ByHand(keras.Model):
        def __init__(self):
            super().__init__()
            self.left, self.right = layers.Dense(2), layers.Dense(2)
            self.shared = layers.Dense(5, activation="relu")
            self([A[:1], B[:1]])

        def call(self, inputs):
            return self.shared(self.left(inputs[0])) + 2.0 * self.shared(self.right(inputs[1]))

    start = graph().get_weights()

    def with_weights(build):
        def build_with_weights():
            model = build()
            model.set_weights(start)
            return model

        return build_with_weights

    found = train(mirrored(replicas).scope(), with_weights(graph))
    expected = train(nullcontext(), with_weights(ByHand))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4, atol=1e-6)


def test_functional_nested_models_work():
    inner_in = keras.Input((2,))
    inner = keras.Model(inner_in, layers.Dense(3, name="deep")(inner_in), name="inner")
    row = keras.Sequential([layers.Dense(2), layers.Dense(2)], name="row")
    x = keras.Input((4,))
    y = inner(row(x))
    again = inner(row(x * 2.0))
    model = keras.Model(x, y + again)
    assert [layer.name for layer in model.layers[1:]] == ["row", "inner"]
    assert row.built and len(model.trainable_weights) == 6
    expected = inner(row(A)).numpy() + inner(row(2 * A)).numpy()
    np.testing.assert_allclose(model(A).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert model.get_layer("inner").get_layer("deep").units == 3


def test_functional_submodel_from_inner_tensors_shares_layers():
    base = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a"), layers.Dense(2)])
    features = keras.Model(base.inputs, base.get_layer("a").output)
    np.testing.assert_array_equal(features(A).numpy(), base.layers[0](A).numpy())
    tail = keras.Model(base.layers[1].input, base.output)
    np.testing.assert_allclose(tail(features(A)).numpy(), base(A).numpy(), rtol=1e-6)
    assert tail.layers[1] is base.layers[1] and tail.input_shape == (None, 3)
    assert len(tail.weights) == 2


def test_functional_graph_in_a_subclass_works():
    class Own(keras.Model):
        def __init__(self):
            inputs = keras.Input((4,))
            outputs = layers.Dense(2)(inputs)
            super().__init__(inputs=inputs, outputs=outputs, name="own")
            self.scale = 3.0

    model = Own()
    assert type(model) is Own and model(A).shape == (6, 2) and len(model.layers) == 2


def test_graph_fuses_chains_with_single_readers():
    def build(second_reader):
        x = keras.Input((12, 12, 3))
        y = layers.Conv2D(4, 3, activation="relu")(x)
        z = layers.MaxPooling2D()(y)
        return keras.Model(x, [z, y] if second_reader else z)

    images = RANDOM.standard_normal((2, 12, 12, 3)).astype(np.float32)
    for second_reader in (False, True):
        model = build(second_reader)
        found = model(images)
        found = found[0] if second_reader else found
        steps = [part._first for part in model._graph._plan._parts]
        assert any(isinstance(step, ConvReluPool) for step in steps) is not second_reader
        expected = model.layers[2](model.layers[1](images)).numpy()
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_graph_passes_gradients_and_training():
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dropout(0.5)(layers.Dense(3)(x)))
    with GradientTape() as tape:
        loss = ops.reduce_sum(model(A))
    gradients = tape.gradient(loss, model.trainable_variables)
    np.testing.assert_allclose(
        gradients[0].numpy(), np.repeat(A.sum(0)[:, None], 3, 1), rtol=1e-5, atol=1e-5
    )
    assert (model(A, training=True).numpy() == 0).any()
    assert not (model(A, training=False).numpy() == 0).any()
    off = keras.Model(x, model(x, training=False))
    assert not (off(A, training=True).numpy() == 0).any()


def test_graph_frees_values_after_the_last_reader():
    x = keras.Input((4,))
    y = layers.Dense(3)(x)
    z = layers.Add()([y, layers.Dense(3)(y)])
    model = keras.Model(x, z)
    model(A)
    parts = model._graph._plan._parts
    dropped = [place for part in parts for place in part.drops]
    assert len(dropped) == len(set(dropped)) == 3


# Errors -------------------------------------------------------------------------------------------


def test_graph_disconnected_error_names_the_layer():
    x, other = keras.Input((4,), name="x"), keras.Input((4,), name="other")
    y = layers.Dense(2, name="sum")(x + other)
    with pytest.raises(
        ValueError, match=r'Graph disconnected: layer "sum" needs the input "other" of shape'
    ):
        keras.Model(x, y)
    with pytest.raises(ValueError, match="does not come from Input"):
        keras.Model(x, keras.KerasTensor((None, 2)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: keras.Model(x, A), "All `outputs` values must be KerasTensors"),
        (lambda x: keras.Model([], x), "All `inputs` values must be KerasTensors"),
        (lambda x: keras.Model([x, 1], x), "invalid value 1"),
        (
            lambda x: keras.Model(x, layers.Dense(1, name="d")(layers.Dense(1, name="d")(x))),
            'The name "d" is used 2 times',
        ),
        (
            lambda x: layers.Conv2D(2, 3, name="conv")(x),
            r'"conv" is incompatible.*images.*received input with shape \(None, 4\)',
        ),
    ],
)
def test_model_invalid_graph_raises(build, message):
    with pytest.raises(ValueError, match=message):
        build(keras.Input((4,)))


def test_shared_layer_other_shape_raises_at_the_call():
    dense = layers.Dense(2, name="narrow")
    dense(keras.Input((4,)))
    assert dense(keras.Input((7, 4))).shape == (None, 7, 2)
    with pytest.raises(ValueError, match=r'"narrow".*value 4.*shape \(1, 5\)'):
        dense(keras.Input((5,)))


def test_model_inputs_not_matching_raise():
    model = two_inputs()
    cases = [
        (A, "1 inputs were given instead of 2"),
        ([A, B, B], "3 inputs were given instead of 2"),
        ({"first": A}, "there is no 'second' among 'first'"),
        (
            [B, A],
            r'Input 0 of layer "pair" is.*shape=\(None, 4\) for "first", found shape=\(6, 3\)',
        ),
        ([A, [B, B]], 'a list of 2 was given for "second"'),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            model(given)
    with pytest.raises(TypeError, match="inputs and outputs, or neither"):
        keras.Model(inputs=keras.Input((1,)))
    with pytest.raises(AttributeError, match="no inputs"):
        keras.Model().inputs  # noqa: B018


def test_model_inputs_get_declared_dtype_and_rank():
    numbers = keras.Input((1,), dtype="float32")
    model = keras.Model(numbers, numbers * 2.0)
    assert model(np.arange(3)).numpy().tolist() == [[0.0], [2.0], [4.0]]


def test_global_policy_does_not_apply_to_inputs():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x = keras.Input((4,))
        y = layers.Dense(2)(x)
        assert (x.dtype, y.dtype) == (np.float32, np.float16)
        assert keras.Model(x, y)(A).dtype == np.float16
    finally:
        keras.mixed_precision.set_global_policy(None)


def test_model_subclass_call_wraps_the_graph_call():
    class Scaled(keras.Model):
        def call(self, inputs, training=None):
            return super().call(inputs, training=training) * 2.0

    x = keras.Input((4,))
    model = Scaled(x, layers.Dropout(0.5)(x))
    np.testing.assert_array_equal(model(A).numpy(), 2 * A)
    assert (model(A, training=True).numpy() == 0).any()


def test_sequential_last_layer_may_have_several_outputs():
    class Halves(layers.Layer):
        def call(self, inputs):
            return {"left": inputs[:, :2], "right": inputs[:, 2:]}

    model = keras.Sequential([keras.Input((4,)), layers.Dense(5), Halves()])
    assert model.output_shape == {"left": (None, 2), "right": (None, 3)}
    assert model.predict(A, verbose=0)["right"].shape == (6, 3)


# Summary ------------------------------------------------------------------------------------------


def lines_of(model, **options):
    lines = []
    model.summary(print_fn=lines.append, **options)
    return lines


def test_summary_graph_lists_connections():
    model = two_inputs()
    lines = lines_of(model, line_length=100)
    text = "\n".join(lines)
    assert lines[0] == 'Model: "pair"' and {len(line) for line in lines[1:-3]} == {100}
    for part in (
        "┃ Layer (type)",
        "Connected to",
        "first (InputLayer)",
        "left[0][0]",
        "right[0][0]",
        " Total params: 33 (132.00 B)",
        " Trainable params: 33 (132.00 B)",
        " Non-trainable params: 0 (0.00 B)",
    ):
        assert part in text
    narrow = lines_of(model, line_length=60)
    assert max(map(len, narrow[1:-3])) <= 60 and "(InputLayer)" in "\n".join(narrow)
    with pytest.raises(ValueError, match="too few"):
        model.summary(line_length=20)


def test_summary_options_change_the_table():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="deep")], name="inner")
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(2, name="last")])
    inner.trainable = False
    text = "\n".join(lines_of(model, expand_nested=True, show_trainable=True, line_length=90))
    assert "└ deep (Dense)" in text and "Trainable" in text
    column = [line.split("│")[-2].strip() for line in text.splitlines() if line.startswith("│")]
    assert column == ["N", "N", "Y"]
    assert "Connected to" not in text
    text = "\n".join(lines_of(model, layer_range=["last", "last"]))
    assert "last" in text and "inner" not in text
    with pytest.raises(ValueError, match="does not match the layers inner, last"):
        model.summary(layer_range=["a", "b"])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    assert any("Optimizer params" in line for line in lines_of(model))


# Clones -------------------------------------------------------------------------------------------


def test_clone_model_copies_layers_with_new_weights():
    model = two_inputs()
    copy = keras.models.clone_model(model)
    assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]
    assert copy.get_layer("shared") is not model.get_layer("shared")
    assert len(copy.weights) == 6 and copy.name == "pair"
    copy.set_weights(model.get_weights())
    for a, b in zip(copy([A, B]), model([A, B]), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    row = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])

    def wider(layer):
        return layers.Dense(layer.units * 2)

    assert [w.shape for w in keras.models.clone_model(row, clone_function=wider).weights] == [
        (4, 6),
        (6,),
        (6, 4),
        (4,),
    ]
    subclassed = type("Own", (keras.Model,), {})()
    for given in ({"clone_function": wider}, {"input_tensors": keras.Input((3,))}):
        with pytest.raises(ValueError, match="are unknown"):
            keras.models.clone_model(subclassed, **given)


def test_model_with_nested_inputs_takes_a_dict_by_name():
    a, b, c = (keras.Input((2,), name=name) for name in "abc")
    model = keras.Model([[a, b], c], a + 2 * b + 4 * c)
    ones = np.ones((3, 2), np.float32)
    given = {"c": ones, "a": ones, "b": 2 * ones}
    np.testing.assert_array_equal(model(given).numpy(), 9 * ones)
    with pytest.raises(ValueError, match="there is no 'b' among"):
        model({"a": ones, "c": ones})


def test_saved_function_calls_are_loaded_in_a_new_process(tmp_path):
    inputs = keras.Input((3,))
    keras.Model(inputs, tf.reduce_mean(inputs, axis=-1)).save(tmp_path / "m.keras")
    script = """
import numpy as np
from pycollective import keras
print(keras.models.load_model("m.keras")(np.array([[1.0, 2.0, 6.0]])).numpy().tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "[3.0]\n", done.stderr


def test_comparison_of_a_symbol_with_a_number_is_recorded():
    tokens = layers.Input((3,), dtype="int32")
    mask = tf.cast(tokens != 0, "float32")
    model = keras.Model(tokens, [mask, tf.cast(tokens == 2, "float32")])
    found = model(np.array([[1, 2, 0]]))
    assert [part.numpy().tolist() for part in found] == [[[1, 1, 0]], [[0, 1, 0]]]
    assert None not in [tokens]
    assert tokens in [mask, tokens]


def test_first_call_by_several_replicas_runs_the_whole_plan(monkeypatch):
    def slow(run, parts):
        time.sleep(0.05)
        return run

    monkeypatch.setattr("pycollective.keras.graph.graph.OnGpu", slow)
    inputs = keras.Input((3,))
    model, errors = keras.Model(inputs, layers.Flatten()(inputs)), []

    def call():
        try:
            model(np.ones((2, 3), np.float32))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(20)
    assert not errors


def test_frozen_models_and_what_is_added_to_them_do_not_train():
    def dense():
        return layers.Dense(1)

    frozen = keras.Sequential([layers.Input((3,)), dense()], trainable=False)
    assert frozen.trainable_weights == []
    inputs = keras.Input((3,))
    assert keras.Model(inputs, dense()(inputs), trainable=False).trainable_weights == []
    frozen.add(dense())
    assert frozen.trainable_weights == []
    frozen.layers[0].trainable = True
    assert frozen.trainable_weights == []
    assert not keras.models.clone_model(frozen).trainable
    frozen.trainable = True
    assert len(frozen.trainable_weights) == 4


def test_integer_symbol_with_a_float_array_raises():
    with pytest.raises(TypeError, match="without loss"):
        layers.Input((3,), dtype="int32") * np.array([0.5])


def test_reshape_of_unknown_lengths_is_recorded():
    assert tf.reshape(layers.Input((9,)), (-1, 3, 3)).shape == (None, 3, 3)
