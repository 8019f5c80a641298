"""Custom losses, several losses for an output, and nested outputs, as in Keras 3."""

from __future__ import annotations

import numpy as np
import pytest
from fitting import STRATEGIES, WEIGHTS, X, mirrored

from pycollective import keras
from pycollective.keras import layers, losses
from pycollective.tensor import ops

SOME = ["default", "mirrored 2", "mirrored 3"]
RANDOM = np.random.default_rng(11)
Y = RANDOM.standard_normal((21, 2))
KERNEL = RANDOM.standard_normal((3, 2))
#: The predictions of a `Dense` layer with these weights.
PREDICTED = X @ KERNEL


@pytest.fixture(autouse=True)
def float64():
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


def dense(name=None, kernel=KERNEL):
    return layers.Dense(
        kernel.shape[1], use_bias=False, kernel_initializer=lambda *_: kernel, name=name
    )


def compiled(name, loss, **options):
    with STRATEGIES[name]().scope():
        model = keras.Sequential([layers.Input((3,)), dense()])
        model.compile("sgd", loss, **options)
    return model


def losses_of(model, y, **options):
    """Return the loss of `evaluate`, and the loss of one step of training after it."""
    options = {"batch_size": 21, "verbose": 0, **options}
    before = model.evaluate(X, y, **options)
    return before, model.fit(X, y, **options).history["loss"][0]


# Steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_compute_loss_without_training_argument_is_called_without_it(name):
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return 7.0 * super().compute_loss(x, y, y_pred, sample_weight)

    with STRATEGIES[name]().scope():
        model = Own([layers.Input((3,)), dense()])
        model.compile("sgd", "mse")
    np.testing.assert_allclose(losses_of(model, Y), [7 * ((PREDICTED - Y) ** 2).mean()] * 2)


def test_compute_loss_with_training_argument_gets_it():
    passed = []

    class Own(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight, training):
            passed.append(training)
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    model = Own([layers.Input((3,)), dense()])
    model.compile("sgd", "mse")
    losses_of(model, Y)
    assert passed == [False, True]


# Losses -------------------------------------------------------------------------------------------


def squares(y_true, y_pred):
    return ops.reduce_mean((y_true - y_pred) ** 2, axis=-1)


class Squares(losses.Loss):
    def call(self, y_true, y_pred):
        return squares(y_true, y_pred)


CUSTOM_LOSSES = {
    "function": lambda: squares,
    "class": Squares,
    "wrapped": lambda: losses.LossFunctionWrapper(squares),
}


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float32"])
@pytest.mark.parametrize("kind", CUSTOM_LOSSES)
def test_own_loss_labels_of_any_dtype_become_those_of_predictions(kind, dtype):
    y = (np.arange(42).reshape(21, 2) % 3).astype(dtype)
    expected = ((PREDICTED - y) ** 2).mean()
    np.testing.assert_allclose(
        losses_of(compiled("default", CUSTOM_LOSSES[kind]()), y), [expected] * 2
    )


@pytest.mark.parametrize("y", [[[1, 2]], np.array([[1, 2]]), np.array([[1, 2]], np.float32)])
def test_own_loss_called_with_labels_of_another_dtype_converts_them(y):
    assert float(Squares()(y, np.array([[1.0, 4.0]]))) == 2.0


def test_known_loss_class_with_call_overridden_gets_floats():
    class Own(losses.MeanSquaredError):
        def call(self, y_true, y_pred):
            return squares(y_true, y_pred)

    assert float(Own()(np.array([[1, 2]]), np.array([[1.0, 4.0]]))) == 2.0


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_that_overrides_its_call_operator_is_called_with_it(name, weighted):
    class Own(losses.MeanSquaredError):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return 7.0 * super().__call__(y_true, y_pred, sample_weight)

    weights = WEIGHTS if weighted else np.ones(21)
    expected = 7 * (weights * ((PREDICTED - Y) ** 2).mean(axis=1)).mean()
    found = losses_of(compiled(name, Own()), Y, sample_weight=weights if weighted else None)
    np.testing.assert_allclose(found, [expected] * 2)


def test_loss_that_overrides_its_call_operator_alone_needs_no_call():
    class Own(losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.reduce_mean(squares(y_true, y_pred))

    expected = ((PREDICTED - Y) ** 2).mean()
    np.testing.assert_allclose(losses_of(compiled("default", Own()), Y), [expected] * 2)


def test_loss_that_averages_inside_a_function_works_in_fit_alone():
    mean = losses.MeanSquaredError()
    found = losses_of(compiled("mirrored 3", lambda y, p: mean(y, p) + 1.0), Y)
    np.testing.assert_allclose(found, [((PREDICTED - Y) ** 2).mean() + 1] * 2)
    # Outside of `fit`, averaging is still an error.
    with mirrored(2).scope(), pytest.raises(ValueError, match="Please use"):
        mean(Y, Y)


# Several losses, and outputs in nests -------------------------------------------------------------

KERNELS = {name: RANDOM.standard_normal((3, 2)) for name in "abc"}
MSE = {name: ((X @ kernel - Y) ** 2).mean() for name, kernel in KERNELS.items()}
MAE = {name: np.abs(X @ kernel - Y).mean() for name, kernel in KERNELS.items()}


def three(name, structure, **options):
    """Return a model with three outputs in a structure."""
    with STRATEGIES[name]().scope():
        x = keras.Input((3,))
        model = keras.Model(x, structure(*(dense(n, k)(x) for n, k in KERNELS.items())))
        model.compile("sgd", **options)
    return model


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ([["mse", "mae"], "mse", None], None),
        ({"a": ["mse", "mae"], "b": "mse"}, None),
        ([["mse", "mae"], "mse", None], [[2.0, 3.0], 5.0, None]),
        ([["mse", "mae"], "mse", None], [2.0, 5.0, None]),
    ],
)
def test_several_losses_of_an_output_are_summed(name, loss, weights):
    model = three(name, lambda *o: list(o), loss=loss, loss_weights=weights)
    first, second, third = (1, 1, 1) if weights is None else (2, 3, 5)
    if weights is not None and not isinstance(weights[0], list):
        second = first
    found = model.evaluate(X, [Y, Y, Y], verbose=0, return_dict=True)
    assert list(found) == ["loss", "a_loss", "a_loss_1", "b_loss"]
    total = first * MSE["a"] + second * MAE["a"] + third * MSE["b"]
    np.testing.assert_allclose(list(found.values()), [total, MSE["a"], MAE["a"], MSE["b"]])


def test_several_losses_of_an_output_with_too_many_weights_raise():
    model = three("default", lambda a, *_: a, loss=[["mse", "mae"]], loss_weights=[[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="'a' has 2 losses, but 3 loss_weights"):
        model.evaluate(X, Y, verbose=0)


def test_several_losses_of_a_single_output_are_summed():
    model = three("default", lambda a, *_: a, loss=[["mse", "mae"]], loss_weights=[[1.0, 2.0]])
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(MSE["a"] + 2 * MAE["a"])


#: The structure of the outputs, the losses, and their names in Keras's logs.
NESTS = {
    "dict of list": (
        lambda a, b, c: {"p": a, "q": [b, c]},
        {"p": "mse", "q": ["mae", "mse"]},
        ["p", "q/b", "q/c"],
    ),
    "list of tuple": (
        lambda a, b, c: [a, (b, c)],
        ["mse", ("mae", "mse")],
        ["a", "1/b", "1/c"],
    ),
    "list of dict": (
        lambda a, b, c: [a, {"r": b, "s": c}],
        ["mse", {"r": "mae", "s": "mse"}],
        ["a", "1/r", "1/s"],
    ),
}


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("kind", NESTS)
def test_outputs_in_nests_have_their_own_losses(name, kind):
    structure, loss, names = NESTS[kind]
    model = three(name, structure, loss=loss, loss_weights=structure(1.0, 2.0, 3.0))
    targets = structure(Y, Y, Y)
    expected = [MSE["a"] + 2 * MAE["b"] + 3 * MSE["c"], MSE["a"], MAE["b"], MSE["c"]]
    found = model.evaluate(X, targets, verbose=0, return_dict=True)
    assert list(found) == ["loss", *(f"{each}_loss" for each in names)]
    np.testing.assert_allclose(list(found.values()), expected)
    logs = model.fit(X, targets, batch_size=21, verbose=0).history
    np.testing.assert_allclose([value for (value,) in logs.values()], expected)
    predicted = model.predict(X, verbose=0)
    assert type(predicted) is type(structure(0, 0, 0))


def test_outputs_in_nests_may_have_one_loss_and_some_metrics():
    structure, _, names = NESTS["dict of list"]
    metrics = {"q": [["mae"], ["mse", "mae"]]}
    model = three("default", structure, loss="mse", metrics=metrics)
    found = model.evaluate(X, structure(Y, Y, Y), verbose=0, return_dict=True)
    expected = {"loss": sum(MSE.values())}
    expected |= {f"{name}_loss": MSE[key] for name, key in zip(names, "abc", strict=True)}
    expected |= {"q/b_mae": MAE["b"], "q/c_mse": MSE["c"], "q/c_mae": MAE["c"]}
    assert found == pytest.approx(expected)


def test_outputs_in_nests_have_their_own_weights_of_examples():
    structure = NESTS["dict of list"][0]
    model = three("default", structure, loss="mse")
    weights = structure(WEIGHTS, np.ones(21), np.zeros(21))
    found = model.evaluate(X, structure(Y, Y, Y), sample_weight=weights, verbose=0)
    first = (WEIGHTS * ((X @ KERNELS["a"] - Y) ** 2).mean(axis=1)).mean()
    np.testing.assert_allclose(found, [first + MSE["b"], first, MSE["b"], 0.0], atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ({"p": Y, "q": [Y]}, r"the model has 2 outputs \(q/b, q/c\), but y has 1 in a"),
        ({"p": Y, "r": [Y, Y]}, r"y names \['r'\]; the outputs are \['p', 'q'\]"),
        ({"p": [Y, Y], "q": [Y, Y]}, "output 'p' is one tensor, but y has a tuple of 2"),
    ],
)
def test_outputs_in_nests_targets_that_do_not_fit_are_named(targets, text):
    model = three("default", NESTS["dict of list"][0], loss="mse")
    with pytest.raises(ValueError, match=text):
        model.evaluate(X, targets, verbose=0)


# Ranks --------------------------------------------------------------------------------------------

PAIRS = {
    "a last axis of length 1 in y_pred": ((4, 3), (4, 3, 1)),
    "a last axis of length 1 in y_true": ((4, 3, 1), (4, 3)),
    "vector in y_true": ((4,), (4, 1)),
    "vector in y_pred": ((4, 1), (4,)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["mse", "mae"])
def test_loss_last_axis_of_length_1_matches_labels_to_examples(pair, name):
    true_shape, predicted_shape = PAIRS[pair]
    true = RANDOM.standard_normal(true_shape)
    predicted = RANDOM.standard_normal(predicted_shape)
    size = max(true.size, predicted.size)
    difference = true.reshape(size) - predicted.reshape(size)
    per_element = difference**2 if name == "mse" else np.abs(difference)
    expected = per_element.reshape(4, -1).mean(axis=1)
    np.testing.assert_allclose(losses.get(name)(true, predicted).numpy(), expected)
