"""Optimizers and schedules compared with real Keras: weights after some steps, state, descriptions."""

import json
import os

import numpy as np
import pytest

from pycollective.keras import optimizers
from pycollective.tensor import Variable, as_tensor

os.environ.setdefault("KERAS_BACKEND", "jax")
theirs = pytest.importorskip("keras")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANDOM = np.random.default_rng(4)
SHAPES = [(4, 3), (3,), (2, 2, 3)]
START = [RANDOM.standard_normal(s).astype(np.float32) for s in SHAPES]
STEPS = 6
GRADIENTS = [
    [(10.0 ** (k % 3 - 1) * RANDOM.standard_normal(s)).astype(np.float32) for s in SHAPES]
    for k in range(STEPS)
]

CASES = [
    ("SGD", {"learning_rate": 0.1}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "clipvalue": 0.5}),
    ("Adam", {}),
    ("Adam", {"learning_rate": 0.1, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3}),
    ("Adam", {"learning_rate": 0.1, "amsgrad": True, "global_clipnorm": 1.0}),
    ("Adam", {"learning_rate": 0.1, "gradient_accumulation_steps": 3}),
    ("AdamW", {}),
    ("AdamW", {"learning_rate": 0.1, "weight_decay": 0.3, "clipnorm": 0.7}),
    ("RMSprop", {}),
    ("RMSprop", {"learning_rate": 0.1, "rho": 0.7, "momentum": 0.5, "epsilon": 1e-3}),
    ("RMSprop", {"learning_rate": 0.1, "centered": True, "momentum": 0.9}),
    ("RMSprop", {"weight_decay": 0.5, "use_ema": True, "ema_momentum": 0.7}),
    ("Adagrad", {}),
    ("Adagrad", {"learning_rate": 0.1, "initial_accumulator_value": 0.5, "epsilon": 1e-2}),
    ("Adagrad", {"gradient_accumulation_steps": 2, "clipnorm": 1.0}),
    ("Adadelta", {"learning_rate": 0.5, "rho": 0.8}),
    ("Adamax", {"learning_rate": 0.1}),
    ("Nadam", {"learning_rate": 0.1, "beta_1": 0.8}),
    ("Ftrl", {"learning_rate": 0.1}),
    (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.3,
            "l1_regularization_strength": 0.5,
            "l2_regularization_strength": 0.2,
            "l2_shrinkage_regularization_strength": 0.1,
            "beta": 0.3,
        },
    ),
    ("SGD", {"learning_rate": 0.1, "use_ema": True, "ema_overwrite_frequency": 4}),
    ("SGD", {"learning_rate": 0.1, "loss_scale_factor": 8.0}),
]


def run_ours(optimizer, steps=STEPS):
    variables = [Variable(value, name=f"v{i}") for i, value in enumerate(START)]
    for gradients in GRADIENTS[:steps]:
        optimizer.apply_gradients(zip([as_tensor(g) for g in gradients], variables, strict=True))
    return variables


def run_theirs(optimizer, steps=STEPS):
    variables = [theirs.Variable(value, name=f"v{i}") for i, value in enumerate(START)]
    for gradients in GRADIENTS[:steps]:
        optimizer.apply([theirs.ops.convert_to_tensor(g) for g in gradients], variables)
    return variables


def assert_close(ours, other, **tolerance):
    for a, b in zip(ours, other, strict=True):
        np.testing.assert_allclose(a.numpy(), np.asarray(b), **tolerance)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda v: str(v))
def test_steps_and_state_equal_those_of_keras(name, settings):
    ours = getattr(optimizers, name)(**settings)
    other = getattr(theirs.optimizers, name)(**settings)
    own, reference = run_ours(ours), run_theirs(other)
    # Keras computes powers of beta in float32, with an error that 1 - 0.999 amplifies.
    assert_close(own, reference, rtol=2e-5, atol=1e-5)
    # The variables of files: their order, shapes and values.
    assert [v.shape for v in ours.variables] == [tuple(v.shape) for v in other.variables]
    assert_close(ours.variables, other.variables, rtol=1e-4, atol=1e-6)
    ours.finalize_variable_values(own)
    other.finalize_variable_values(reference)
    assert_close(own, reference, rtol=2e-5, atol=1e-5)
    stored = {}
    other.save_own_variables(stored)
    again = getattr(optimizers, name)(**settings)
    again.build(own)
    again.load_own_variables(stored)
    assert_close(again.variables, other.variables, rtol=1e-7)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda v: str(v))
def test_config_loads_in_keras_and_returns_unchanged(name, settings):
    ours = getattr(optimizers, name)(**settings)
    other = getattr(theirs.optimizers, name)(**settings)
    mine, reference = optimizers.serialize(ours), theirs.optimizers.serialize(other)
    reference["config"]["name"] = mine["config"]["name"]
    assert mine == reference
    # Through JSON into the other library, and back.
    there = theirs.optimizers.deserialize(json.loads(json.dumps(mine)))
    here = optimizers.deserialize(json.loads(json.dumps(theirs.optimizers.serialize(there))))
    assert here.get_config() == ours.get_config()


def test_dynamic_loss_scale_equals_that_of_keras():
    settings = {"initial_scale": 64.0, "dynamic_growth_steps": 3}
    ours = optimizers.LossScaleOptimizer(optimizers.Adam(0.1), **settings)
    other = theirs.optimizers.LossScaleOptimizer(theirs.optimizers.Adam(0.1), **settings)
    own = [Variable(value, name=f"v{i}") for i, value in enumerate(START)]
    reference = [theirs.Variable(value, name=f"v{i}") for i, value in enumerate(START)]
    other.build(reference)
    ours.build(own)
    assert [v.shape for v in ours.variables] == [tuple(v.shape) for v in other.variables]
    # With JAX, only the stateless form of this optimizer works in Keras.
    values, state = ([v.value for v in each] for each in (reference, other.variables))
    for number, gradients in enumerate(GRADIENTS):
        bad = np.float32(np.inf if number == 2 else 1)
        scaled = [g * bad for g in gradients]
        ours.apply([as_tensor(g) for g in scaled], own)
        values, state = other.stateless_apply(state, scaled, values)
        assert_close(own, values, rtol=1e-4, atol=1e-5)
    # The wrapper's variables come first, then the inner optimizer's. The wrapper's counter is not used.
    assert_close(ours.variables[1:], state[1:], rtol=1e-4, atol=1e-5)
    assert int(ours.iterations) == 5
    mine, description = optimizers.serialize(ours), theirs.optimizers.serialize(other)
    for each in (mine, description):
        each["config"].pop("name")
        each["config"]["inner_optimizer"]["config"].pop("name")
    assert mine == description


SCHEDULES = [
    ("ExponentialDecay", {"initial_learning_rate": 0.5, "decay_steps": 4, "decay_rate": 0.7}),
    (
        "ExponentialDecay",
        {"initial_learning_rate": 0.5, "decay_steps": 4, "decay_rate": 0.7, "staircase": True},
    ),
    ("PiecewiseConstantDecay", {"boundaries": [3, 7], "values": [1.0, 0.5, 0.1]}),
    ("PolynomialDecay", {"initial_learning_rate": 0.5, "decay_steps": 6}),
    (
        "PolynomialDecay",
        {"initial_learning_rate": 0.5, "decay_steps": 5, "power": 2.0, "cycle": True},
    ),
    ("InverseTimeDecay", {"initial_learning_rate": 0.5, "decay_steps": 4, "decay_rate": 0.7}),
    ("CosineDecay", {"initial_learning_rate": 0.5, "decay_steps": 8, "alpha": 0.1}),
    (
        "CosineDecay",
        {
            "initial_learning_rate": 0.0,
            "decay_steps": 8,
            "warmup_target": 0.5,
            "warmup_steps": 4,
        },
    ),
    ("CosineDecayRestarts", {"initial_learning_rate": 0.5, "first_decay_steps": 4, "m_mul": 0.8}),
    (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.5, "first_decay_steps": 3, "t_mul": 1.0, "alpha": 0.2},
    ),
]


@pytest.mark.parametrize(("name", "settings"), SCHEDULES, ids=lambda v: str(v))
def test_schedule_equals_that_of_keras(name, settings):
    ours = getattr(optimizers.schedules, name)(**settings)
    other = getattr(theirs.optimizers.schedules, name)(**settings)
    for step in (0, 1, 3, 4, 6, 7, 9, 12, 15):
        # Keras finds the restart by logarithms in float32, which may be wrong at the restart's own step.
        if name == "CosineDecayRestarts" and step in (4, 12):
            continue
        np.testing.assert_allclose(float(ours(step)), float(other(step)), rtol=2e-5, atol=1e-7)
    mine = optimizers.schedules.serialize(ours)
    assert mine == theirs.optimizers.schedules.serialize(other)
    assert optimizers.schedules.deserialize(mine).get_config() == ours.get_config()
    optimizer = optimizers.SGD(ours, name="steps")
    reference = theirs.optimizers.SGD(other, name="steps")
    assert_close(run_ours(optimizer, 2), run_theirs(reference, 2), rtol=1e-5, atol=1e-6)
    there = theirs.optimizers.deserialize(optimizers.serialize(optimizer))
    assert there.get_config() == reference.get_config()
