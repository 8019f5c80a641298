"""Every layer, loss and metric accepts a batch without rows: no NaN, no warning, gradients of zero.

Replicas get such batches if a batch has fewer rows than there are replicas. The classes are
collected from the package, so that a newly exported class is tested. If its constructor needs an
argument, add a value to `ARGUMENTS`. If no input fits, add one to `INPUTS` or `PAIRS`.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import pycollective as tf
from pycollective.keras import layers, losses, metrics

#: A value for every required argument of a constructor, by name.
ARGUMENTS = {
    "activation": "relu",
    "dims": (1,),
    "filters": 2,
    "fn": losses.mean_squared_error,
    "height": 3,
    "input_dim": 4,
    "kernel_size": 2,
    "output_dim": 3,
    "pool_size": 2,
    "rate": 0.5,
    "scale": 0.5,
    "target_shape": (-1,),
    "units": 3,
    "width": 3,
}
#: Arguments that some classes need although they have defaults.
NEEDED = {"InputLayer": {"shape": (6,)}}
#: Shapes of an example, or of examples of two inputs; a layer must accept at least one of them.
INPUTS = [(6,), (5, 4), (6, 6, 2), (4, 4, 4, 2), [(4, 3), (4, 3)]]
RANDOM = np.random.default_rng(0)
#: Targets and predictions for two examples; a loss or metric must accept at least one pair.
PAIRS = {
    "labels": (np.array([1, 2]), RANDOM.random((2, 3))),
    "targets": (RANDOM.random((2, 3)), RANDOM.random((2, 3))),
    "maps": (RANDOM.random((2, 4, 3)), RANDOM.random((2, 4, 3))),
    "values": (RANDOM.random(2), None),
}


def exported(module, base):
    """Return each subclass of ``base`` in a module once, except the layer of strings."""
    found = {getattr(module, name) for name in module.__all__} - {layers.StringLookup}
    classes = {c for c in found if isinstance(c, type) and issubclass(c, base) and c is not base}
    return sorted(classes, key=lambda c: c.__name__)


def make(cls, **more):
    """Return an object of the class, made with its required arguments."""
    arguments = {**NEEDED.get(cls.__name__, {}), **more}
    for name, parameter in inspect.signature(cls).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic:
            assert name in ARGUMENTS, f"{cls.__name__}: add a value for {name!r} to ARGUMENTS"
            arguments[name] = ARGUMENTS[name]
    return cls(**arguments)


def fitting(candidates, use):
    """Return the candidates that ``use`` accepts; at least one must be accepted."""
    fits = []
    for candidate in candidates:
        try:
            use(candidate)
        except (ValueError, TypeError, IndexError):
            continue
        fits.append(candidate)
    assert fits, "none of the inputs of this file fits: add one that does"
    return fits


def is_zero_or_none(gradient, like):
    if gradient is None:
        return True
    array = tf.convert_to_tensor(gradient).numpy()
    return array.shape == tuple(like.shape) and not np.any(array != 0)  # also false for NaN


@pytest.fixture(autouse=True)
def strict():
    with np.errstate(all="raise"):
        yield


# Layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layer_batch_without_rows_has_zero_gradients(cls, training, dtype):
    def rows(count, shape):
        if isinstance(shape, list):
            return [rows(count, one) for one in shape]
        return tf.Tensor(RANDOM.random((count, *shape)).astype(dtype))

    def use(shape):
        y = make(cls, dtype=dtype)(rows(3, shape))
        if isinstance(y, list) or len(y) != 3:
            raise ValueError("the list was not taken for several inputs")

    for shape in fitting(INPUTS, use):
        for before in (0, 2):  # the layer is built by a batch without or with rows
            layer = make(cls, dtype=dtype)
            full = layer(rows(before, shape), training=training)
            x = rows(0, shape)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=training)
                total = tf.reduce_sum(y)
            assert y.shape == (0, *full.shape[1:])
            assert y.dtype == full.dtype
            assert float(total) == 0.0
            sources = [*(x if isinstance(x, list) else [x]), *layer.trainable_variables]
            for value, gradient in zip(sources, tape.gradient(total, sources), strict=True):
                assert is_zero_or_none(gradient, value)
            assert all(np.isfinite(w).all() for w in layer.get_weights())


# Losses -------------------------------------------------------------------------------------------


def function_losses():
    others = ("deserialize", "get", "serialize")
    names = [
        n for n in losses.__all__ if inspect.isfunction(getattr(losses, n)) and n not in others
    ]
    return [getattr(losses, name) for name in names]


@pytest.mark.parametrize(
    "cls", exported(losses, losses.Loss) + function_losses(), ids=lambda c: c.__name__
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_batch_without_rows_is_finite(cls, weighted, dtype):
    is_function = not isinstance(cls, type)
    reductions = [None] if is_function else list(losses.Reduction)
    for reduction in reductions:
        loss = cls if is_function else make(cls, reduction=reduction)

        def use(pair, rows=2, loss=loss):
            true, predicted = (None if p is None else p[:rows] for p in PAIRS[pair])
            x = tf.Tensor(predicted.astype(dtype))
            options = {"sample_weight": np.ones(rows)} if weighted and not is_function else {}
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(true, x, **options)
                total = tf.reduce_sum(value)
            return x, value, total, tape.gradient(total, x)

        for pair in fitting([p for p in PAIRS if p != "values"], use):
            full = use(pair)[1]
            x, value, total, gradient = use(pair, rows=0)
            assert value.dtype == full.dtype == dtype
            assert value.shape == ((0, *full.shape[1:]) if full.ndim else ())
            assert float(total) == 0.0
            assert gradient is not None
            assert is_zero_or_none(gradient, x)


# Metrics ------------------------------------------------------------------------------------------


def update(metric, pair, rows, weighted):
    values = [p[:rows] for p in PAIRS[pair] if p is not None]
    metric.update_state(*values, **({"sample_weight": np.ones(rows)} if weighted else {}))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cls", exported(metrics, metrics.Metric), ids=lambda c: c.__name__)
def test_metric_batch_without_rows_changes_nothing(cls, weighted):
    for pair in fitting(PAIRS, lambda p: update(make(cls), p, 2, weighted)):
        metric = make(cls)
        nothing = metric.result().numpy()
        update(metric, pair, 0, weighted)
        assert np.isfinite(metric.result().numpy()).all()
        np.testing.assert_array_equal(metric.result().numpy(), nothing)
        update(metric, pair, 2, weighted)
        full = metric.result().numpy()
        assert np.isfinite(full).all()
        update(metric, pair, 0, weighted)
        np.testing.assert_array_equal(metric.result().numpy(), full)


@pytest.mark.parametrize("cls", exported(metrics, metrics.Metric), ids=lambda c: c.__name__)
def test_metric_with_one_replica_without_rows_equals_one_device(cls):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    for pair in fitting(PAIRS, lambda p: update(make(cls), p, 2, False)):
        alone = make(cls)
        update(alone, pair, 2, False)
        with strategy.scope():
            metric = make(cls)

        def replica(metric=metric, pair=pair):
            context = tf.distribute.get_replica_context()
            first = int(context.replica_id_in_sync_group) == 0
            update(metric, pair, 2 if first else 0, False)

        strategy.run(replica)
        np.testing.assert_array_equal(metric.result().numpy(), alone.result().numpy())


def metric_functions():
    """Return the metric functions by name, without losses, which have their own test."""
    found = {name: getattr(metrics, name) for name in metrics.__all__ if not hasattr(losses, name)}
    takes_both = ["y_true", "y_pred"]
    return {
        name: f
        for name, f in found.items()
        if inspect.isfunction(f) and [*inspect.signature(f).parameters][:2] == takes_both
    }


@pytest.mark.parametrize("name", metric_functions())
def test_metric_function_of_a_batch_without_rows_has_no_rows(name):
    function = metric_functions()[name]

    def use(pair):
        function(*PAIRS[pair])

    for pair in fitting([name for name in PAIRS if PAIRS[name][1] is not None], use):
        found = function(*(x[:0] for x in PAIRS[pair]))
        assert found.shape == (0, *function(*PAIRS[pair]).shape[1:])


def leaves(base):
    """Return the subclasses of ``base`` in this package that have no subclasses themselves."""
    found = set()
    for cls in base.__subclasses__():
        ours = cls.__module__.startswith("pycollective.") and not cls.__name__.startswith("_")
        below = leaves(cls)
        found |= below or ({cls} if ours else set())
    return found


@pytest.mark.parametrize(
    ("base", "module"),
    [(layers.Layer, layers), (losses.Loss, losses), (metrics.Metric, metrics)],
    ids=["layers", "losses", "metrics"],
)
def test_every_class_of_the_package_is_exported(base, module):
    """A class that its module does not export would not be tested here."""
    in_fit = {"Functional", "Sequential", "LossTracker"}  # models, and the tracker of their loss
    # Estimators have another subclass, which exists only if another test has imported them.
    found = {cls for cls in leaves(base) if cls.__module__.startswith("pycollective.keras")}
    found = {cls for cls in found if cls.__name__ not in in_fit}
    assert found - {layers.StringLookup} <= set(exported(module, base))


def test_exported_classes_are_found():
    assert layers.Conv2D in exported(layers, layers.Layer)
    assert layers.Layer not in exported(layers, layers.Layer)
    assert len(exported(losses, losses.Loss)) >= 5
    assert len(exported(metrics, metrics.Metric)) >= 6
    assert losses.mean_squared_error in function_losses()
    assert len(metric_functions()) >= 5
