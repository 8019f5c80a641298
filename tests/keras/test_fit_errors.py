"""Errors of inconsistent arguments, with TensorFlow's text if TensorFlow has the same error."""

from __future__ import annotations

import numpy as np
import pytest
from fitting import linear, mirrored

import pycollective as tf
from pycollective import keras

ONES = np.ones((10, 1), np.float32)
DATASET = tf.data.Dataset.from_tensor_slices((ONES, ONES)).batch(4)


def model_of(**layer):
    return keras.Sequential([keras.layers.Dense(1, **layer)])


def test_compile_metric_or_optimizer_of_another_scope_raises():
    strategy = mirrored(2)
    outside = model_of(input_shape=(1,))
    metric, optimizer = keras.metrics.Mean(), keras.optimizers.SGD()
    with strategy.scope():
        model = model_of(input_shape=(1,))
        with pytest.raises(ValueError, match="was not created in the distribution strategy"):
            outside.compile("sgd", "mse")
        own_metric, own_optimizer = keras.metrics.Mean(), keras.optimizers.SGD()
    with pytest.raises(
        ValueError,
        match=r"^Metric \(.*\) passed to `model.compile` was created inside a different distribution "
        "strategy scope than the model",
    ):
        model.compile("sgd", "mse", metrics=["mae", metric])
    with pytest.raises(
        ValueError,
        match=r"^Optimizer \(.*\) passed to `model.compile` was created inside a different "
        "distribution strategy scope than the model",
    ):
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"^Metric \(.*\) passed to"):
        outside.compile("sgd", "mse", weighted_metrics=[own_metric])
    with pytest.raises(ValueError, match=r"^Optimizer \(.*\) passed to"):
        outside.compile(own_optimizer, "mse")
    model.compile(own_optimizer, "mse", metrics=[own_metric])


def test_compile_model_of_another_scope_raises():
    late = model_of()
    with mirrored(2).scope():
        with pytest.raises(
            ValueError,
            match=r"^Variable \(.*\) was not created in the distribution strategy scope of \(<Mirrored"
            r".*It is most likely because some layers, model, or optimizer was being created outside "
            "the distribution strategy scope",
        ):
            late.compile("sgd", "mse")
    # A layer that was made outside of the scope, in a model made inside of it.
    layer = keras.layers.Dense(1, input_shape=(1,))
    keras.Sequential([layer])
    with mirrored(2).scope():
        model = keras.Sequential([layer])
        with pytest.raises(ValueError, match=r"^Variable \(.*kernel.*\) was not created in the"):
            model.compile("sgd", "mse")


def test_fit_under_another_strategy_raises():
    with mirrored(2).scope():
        model = linear()
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="Mixing different"):
        model.fit(ONES, ONES, verbose=0)
    outside = linear()
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="Must not nest"):
        outside.fit(ONES, ONES, verbose=0)
    other = mirrored(2).experimental_distribute_dataset(DATASET)
    with pytest.raises(ValueError, match="distributed by another strategy"):
        model.fit(other, verbose=0)


def test_train_step_overridden_averaging_loss_raises():
    class Own(keras.Model):
        def train_step(self, data):
            return {"loss": keras.losses.MeanSquaredError()(*data)}

    with mirrored(2).scope():
        model = Own()
        model.compile()
    with pytest.raises(ValueError, match=r"Please use `tf.keras.losses.Reduction.SUM` or"):
        model.fit(ONES, ONES, verbose=0)


def test_input_indivisible_batch_size_raises():
    with mirrored(2).scope():
        keras.Input((1,), batch_size=4)
        with pytest.raises(
            ValueError,
            match=r"^The `batch_size` argument \(5\) must be divisible by the number of replicas \(2\)",
        ):
            keras.Input((1,), batch_size=5)


def compiled(**arguments):
    return lambda: linear(**arguments)


def fitted(*args, compile=None, **arguments):
    def fit():
        given = {"y": ONES, **arguments} if not args else arguments
        linear(**(compile or {})).fit(*(args or (ONES,)), **{"verbose": 0, **given})

    return fit


class Pair(keras.Model):
    def call(self, x):
        return [x, x]


def pair():
    model = Pair()
    model.compile(loss="mse")
    model.evaluate(ONES, ONES, verbose=0)


class NoDict(keras.Model):
    def train_step(self, data):
        return 1.0


def no_dict():
    model = NoDict()
    model.compile()
    model.fit(ONES, verbose=0)


class OnlyItems:
    """A data set like those of PyTorch, which yields examples instead of batches."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return ONES[i], ONES[i]


WRONG = {
    "not compiled": (
        lambda: model_of(input_shape=(1,)).fit(ONES, ONES),
        r"You must call `compile\(\)` before calling `fit\(\)`",
    ),
    "no loss": (fitted(compile={"loss": None}), "No loss to compute. Provide a `loss` argument"),
    "no optimizer": (fitted(compile={"optimizer": None}), "needs an optimizer"),
    "unknown optimizer": (compiled(optimizer="sdg"), "unknown optimizer 'sdg'"),
    "unknown loss": (compiled(loss="msee"), "unknown loss 'msee'; .*did you mean 'mse'[?]"),
    "unknown metric": (compiled(metrics=["accurate"]), "unknown metric 'accurate'"),
    "several losses": (
        fitted(compile={"loss": ["mse", "mse"]}),
        "the model has one output, but loss has 2 in a list",
    ),
    "no batches at once": (compiled(accumulate_steps=0), "accumulate_steps must be at least 1"),
    "no steps": (compiled(steps_per_execution=0), "steps_per_execution must be at least 1"),
    "neither arrays nor batches": (
        fitted(OnlyItems()),
        "Unrecognized data type: a OnlyItems. Give arrays, a Dataset",
    ),
    "a text": (fitted("rows.csv"), "Unrecognized data type: a str"),
    "no input": (fitted(None), "no input"),
    "an iterator over parts": (
        fitted(iter(mirrored(2).experimental_distribute_dataset(DATASET))),
        "give the distributed dataset itself",
    ),
    "empty input": (fitted(ONES[:0], ONES[:0]), "the input has no batch"),
    "no targets": (fitted(ONES), "give y"),
    "lengths": (
        fitted(y=ONES[:5]),
        r"Data cardinality is ambiguous. Make sure all arrays contain the same number of samples."
        r"\n'x' sizes: 10\n'y' sizes: 5",
    ),
    "weights": (fitted(sample_weight=np.ones(3)), "ambiguous"),
    "scalar": (fitted(y=1.0), "ambiguous"),
    "y beside a dataset": (fitted(DATASET, ONES), "`y` argument is not supported when using"),
    "batch size of a dataset": (
        fitted(DATASET, batch_size=2),
        "The `batch_size` argument must not be specified for the given input type",
    ),
    "batch size": (fitted(batch_size=0), "batch_size must be a positive integer, got 0"),
    "steps of an epoch": (fitted(steps_per_epoch=0), "`steps_per_epoch` must be a positive"),
    "for ever": (
        fitted(DATASET.repeat()),
        "When passing an infinitely repeating dataset, please specify a `steps_per_epoch` value",
    ),
    "validation for ever": (fitted(validation_data=DATASET.repeat()), "`validation_steps` value"),
    "validation split of a dataset": (
        fitted(DATASET, validation_split=0.5),
        "`validation_split` is only supported for Tensors or NumPy arrays",
    ),
    "validation split": (fitted(validation_split=1.5), "between 0 and 1"),
    "nothing left": (fitted(validation_split=0.99), "not sufficient to split it"),
    "validation that ends": (
        fitted(epochs=2, validation_data=iter([(ONES, ONES)])),
        "evaluate: the input has no batch, or is an iterator at its end",
    ),
    "never validated": (fitted(validation_data=DATASET, validation_freq=0), "validation_freq"),
    "tuple": (
        fitted(tf.data.Dataset.zip((DATASET, DATASET, DATASET, DATASET))),
        r"Data is expected to be in format `x`, `\(x,\)`, `\(x, y\)`, or `\(x, y, sample_weight\)`",
    ),
    "class weights": (
        fitted(class_weight={-1: 1.0}),
        "Expected `class_weight` to be a dict whose keys are class numbers",
    ),
    "class weights by name": (fitted(class_weight={"cat": 1.0}), r"class numbers.*'cat'"),
    "class weights without labels": (
        fitted(ONES, class_weight={0: 1.0}),
        "`class_weight` is only supported for Models with a single output",
    ),
    "weights of one number": (
        fitted(compile={"loss": lambda y, p: tf.reduce_mean(p)}, sample_weight=np.ones(10)),
        "returns one number for all of them",
    ),
    "several outputs": (
        pair,
        r"the model has 2 outputs \(output_1, output_2\), but y has one",
    ),
    "verbose": (fitted(verbose=3), "verbose must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fit_wrong_arguments_raise_with_reason(case):
    function, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        function()


def test_fit_epochs_as_text_raises_type_error():
    with pytest.raises(TypeError, match="epochs must be a whole number, not '3'"):
        fitted(epochs="3")()


def test_fit_step_without_dict_raises_type_error():
    with pytest.raises(TypeError, match=r"train_step\(\) must return a dict.*float: 1.0"):
        no_dict()


def test_fit_without_trainable_weights_warns():
    model = linear(weight=2.0)
    model.trainable = False
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        assert model.fit(ONES, ONES, verbose=0).history == {"loss": [1.0]}


def test_fit_fractional_number_of_steps_raises_before_the_first_step():
    with pytest.raises(ValueError, match="`steps_per_epoch` must be a positive integer, got 3.125"):
        fitted(steps_per_epoch=100 / 32)()
    fitted(steps_per_epoch=1.0, batch_size=5)()
