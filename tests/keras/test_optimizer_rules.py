"""The optimizers besides SGD and Adam, their common options, and their configs."""

import json
import math

import numpy as np
import pytest

from pycollective import distribute, keras
from pycollective.keras import optimizers
from pycollective.keras.optimizers import schedules
from pycollective.tensor import GradientTape, Variable, as_tensor, ops

RNG = np.random.default_rng(8)
GRADIENTS = [[RNG.standard_normal((3, 2)), RNG.standard_normal(5)] for _ in range(6)]
START = [RNG.standard_normal((3, 2)), RNG.standard_normal(5)]


@pytest.fixture(autouse=True)
def _float64():
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


def new_variables():
    return [Variable(value, name=f"layer/v{i}") for i, value in enumerate(START)]


def apply(optimizer, variables, gradients):
    optimizer.apply_gradients(zip([as_tensor(g) for g in gradients], variables, strict=True))


def run(optimizer, gradients=GRADIENTS):
    variables = new_variables()
    for each in gradients:
        apply(optimizer, variables, each)
    return [v.numpy() for v in variables]


# The rules for a single number --------------------------------------------------------------------


def by_number(rule):
    """Return START after the steps of a rule, a generator that receives gradients."""
    found = []
    for place, start in enumerate(START):
        flat = start.ravel().copy()
        for number in range(flat.size):
            steps = rule(flat[number])
            next(steps)
            for each in GRADIENTS:
                flat[number] = steps.send(each[place].ravel()[number])
        found.append(flat.reshape(start.shape))
    return found


def rmsprop(w, rate=0.01, rho=0.9, momentum=0.0, epsilon=1e-7, centered=False):
    v = mean = speed = 0.0
    g = yield
    while True:
        v = rho * v + (1 - rho) * g**2
        mean = rho * mean + (1 - rho) * g
        spread = v - mean**2 if centered else v
        speed = momentum * speed + rate * g / math.sqrt(spread + epsilon)
        w -= speed
        g = yield w


def adagrad(w, rate=0.01, initial=0.1, epsilon=1e-7):
    total = initial
    g = yield
    while True:
        total += g**2
        w -= rate * g / math.sqrt(total + epsilon)
        g = yield w


def adadelta(w, rate=0.5, rho=0.9, epsilon=1e-5):
    grads = deltas = 0.0
    g = yield
    while True:
        grads = rho * grads + (1 - rho) * g**2
        delta = math.sqrt(deltas + epsilon) / math.sqrt(grads + epsilon) * g
        deltas = rho * deltas + (1 - rho) * delta**2
        w -= rate * delta
        g = yield w


def adamax(w, rate=0.01, b1=0.9, b2=0.999, epsilon=1e-7):
    m = u = 0.0
    g = yield
    t = 0
    while True:
        t += 1
        m = b1 * m + (1 - b1) * g
        u = max(b2 * u, abs(g))
        w -= rate * m / ((1 - b1**t) * (u + epsilon))
        g = yield w


def nadam(w, rate=0.01, b1=0.9, b2=0.999, epsilon=1e-7):
    m = v = 0.0
    g = yield
    t, product = 0, 1.0
    while True:
        t += 1
        now, after = (b1 * (1 - 0.5 * 0.96**k) for k in (t, t + 1))
        product *= now
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        mean = after * m / (1 - product * after) + (1 - now) * g / (1 - product)
        w -= rate * mean / (math.sqrt(v / (1 - b2**t)) + epsilon)
        g = yield w


def adam(w, rate=0.01, decay=0.0, amsgrad=False, b1=0.9, b2=0.999, epsilon=1e-7):
    m = v = top = 0.0
    g = yield
    t = 0
    while True:
        t += 1
        w -= rate * decay * w
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        top = max(top, v) if amsgrad else v
        alpha = rate * math.sqrt(1 - b2**t) / (1 - b1**t)
        w -= alpha * m / (math.sqrt(top) + epsilon)
        g = yield w


def ftrl(w, rate=0.1, power=0.5, n=0.1, l1=0.0, l2=0.0, shrinkage=0.0):
    z = 0.0
    g = yield
    while True:
        after = n + g**2
        z += g + 2 * shrinkage * w - (after**power - n**power) / rate * w
        n = after
        w = (min(max(z, -l1), l1) - z) / (n**power / rate + 2 * l2)
        g = yield w


def with_rule(rule, **settings):
    return lambda start: rule(start, **settings)


RULES = {
    "rmsprop": (lambda: optimizers.RMSprop(0.01), with_rule(rmsprop)),
    "rmsprop momentum": (
        lambda: optimizers.RMSprop(0.01, 0.8, 0.5, 1e-3),
        with_rule(rmsprop, rho=0.8, momentum=0.5, epsilon=1e-3),
    ),
    "rmsprop centered": (
        lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
        with_rule(rmsprop, momentum=0.9, centered=True),
    ),
    "adagrad": (lambda: optimizers.Adagrad(0.01), with_rule(adagrad)),
    "adagrad from 1": (
        lambda: optimizers.Adagrad(0.01, 1.0, 1e-2),
        with_rule(adagrad, initial=1.0, epsilon=1e-2),
    ),
    "adadelta": (lambda: optimizers.Adadelta(0.5, 0.9, 1e-5), with_rule(adadelta)),
    "adamax": (lambda: optimizers.Adamax(0.01), with_rule(adamax)),
    "nadam": (lambda: optimizers.Nadam(0.01), with_rule(nadam)),
    "ftrl": (lambda: optimizers.Ftrl(0.1), with_rule(ftrl)),
    "ftrl with penalties": (
        lambda: optimizers.Ftrl(0.1, -0.3, 0.5, 0.4, 0.2, 0.1, beta=0.02),
        with_rule(ftrl, power=0.3, n=0.5, l1=0.4, l2=0.3, shrinkage=0.1),
    ),
    "amsgrad": (
        lambda: optimizers.Adam(0.01, beta_2=0.5, amsgrad=True),
        with_rule(adam, amsgrad=True, b2=0.5),
    ),
    "adamw": (lambda: optimizers.AdamW(0.01, 0.3), with_rule(adam, decay=0.3)),
    "weight decay": (
        lambda: optimizers.Adam(0.01, weight_decay=0.3),
        with_rule(adam, decay=0.3),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_optimizer_steps_equal_the_rules(name):
    make, rule = RULES[name]
    for found, expected in zip(run(make()), by_number(rule), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11)


# Common options -----------------------------------------------------------------------------------


def test_weight_decay_excludes_named_variables():
    def step(**excluded):
        variables = new_variables()
        optimizer = optimizers.SGD(0.5, weight_decay=0.2)
        excluded.setdefault("var_names", None)
        if excluded.pop("first", False):
            excluded["var_list"] = variables[:1]
        optimizer.exclude_from_weight_decay(**excluded)
        apply(optimizer, variables, [np.zeros_like(v) for v in START])
        return [
            not np.array_equal(v.numpy(), s) for v, s in zip(variables, START, strict=True)
        ], optimizer

    assert step()[0] == [True, True]
    assert step(var_names=["v1$", "nothing"])[0] == [True, False]
    decays, optimizer = step(first=True)
    assert decays == [False, True]
    with pytest.raises(ValueError, match="only be configured before the optimizer is built"):
        optimizer.exclude_from_weight_decay(var_names=["v"])


def test_use_ema_averages_the_variables():
    optimizer = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)
    plain, means = [s.copy() for s in START], [None, None]
    variables = new_variables()
    for number, gradients in enumerate(GRADIENTS, 1):
        apply(optimizer, variables, gradients)
        for i, g in enumerate(gradients):
            plain[i] = plain[i] - 0.1 * g
            means[i] = plain[i] if number == 1 else 0.8 * means[i] + 0.2 * plain[i]
            if number % 4 == 0:
                plain[i] = means[i]
            np.testing.assert_allclose(variables[i].numpy(), plain[i], rtol=1e-12)
    optimizer.finalize_variable_values(variables)
    for found, mean in zip(variables, means, strict=True):
        np.testing.assert_allclose(found.numpy(), mean, rtol=1e-12)


@pytest.mark.parametrize("make", [optimizers.Adam, optimizers.RMSprop])
def test_gradient_accumulation_averages_several_gradients(make):
    gathered = make(0.1, gradient_accumulation_steps=3, clipnorm=0.5)
    found = run(gathered)
    means = [[sum(g[i] for g in GRADIENTS[s : s + 3]) / 3 for i in (0, 1)] for s in (0, 3)]
    for value, expected in zip(found, run(make(0.1, clipnorm=0.5), means), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-11)
    assert int(gathered.iterations) == 2


def test_loss_scale_factor_scales_the_loss():
    scaled = [[g * 8 for g in each] for each in GRADIENTS]
    plain, found = optimizers.Adam(0.1), optimizers.Adam(0.1, loss_scale_factor=8.0)
    for value, expected in zip(run(found, scaled), run(plain), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert float(found.scale_loss(as_tensor(2.0))) == 16
    weights = [Variable(3.0, dtype="float64") for _ in range(2)]
    for optimizer, weight in zip((plain, found), weights, strict=True):
        optimizer.minimize(lambda weight=weight: ops.square(weight), [weight])
    assert float(weights[0]) == float(weights[1]) != 3


def test_dynamic_loss_scale_grows_and_shrinks():
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(1.0), 16.0, dynamic_growth_steps=2)
    variables = [Variable(np.zeros(2))]

    def step(gradient):
        apply(optimizer, variables, [np.asarray(gradient, float)])
        return (
            float(optimizer.dynamic_scale),
            variables[0].numpy().tolist(),
            int(optimizer.iterations),
        )

    assert step([16, 32]) == (16, [-1, -2], 1)
    assert step([np.inf, 0]) == (8, [-1, -2], 1)
    assert step([0, np.nan]) == (4, [-1, -2], 1)
    assert step([4, 0]) == (4, [-2, -2], 2)
    assert step([4, 0]) == (8, [-3, -2], 3)
    assert float(optimizer.scale_loss(as_tensor(2.0))) == 16
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5
    with GradientTape() as tape:
        loss = ops.reduce_sum(variables[0])
    optimizer.minimize(loss, variables, tape=tape)
    assert variables[0].numpy().tolist() == [-3.5, -2.5]
    with pytest.raises(ValueError, match="3 is not an optimizer"):
        optimizers.LossScaleOptimizer(3)


def test_constraints_are_applied_after_each_step():
    variables = new_variables()
    variables[1].constraint = lambda x: ops.maximum(x, 0.0)
    optimizer = optimizers.SGD(0.1)
    for gradients in GRADIENTS:
        apply(optimizer, variables, gradients)
        assert variables[1].numpy().min() >= 0 > variables[0].numpy().min()


def test_global_clipnorm_not_finite_gives_nan():
    variables = new_variables()
    gradients = [np.full((3, 2), np.inf), np.ones(5)]
    apply(optimizers.SGD(1.0, global_clipnorm=1.0), variables, gradients)
    assert all(np.isnan(v.numpy()).all() for v in variables)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.RMSprop(0.1, momentum=0.5, use_ema=True, ema_overwrite_frequency=2),
        lambda: optimizers.Nadam(0.1, weight_decay=0.1),
        lambda: optimizers.Adagrad(0.1, gradient_accumulation_steps=2, global_clipnorm=0.5),
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), 2.0, 3),
    ],
    ids=["rmsprop", "nadam", "adagrad", "loss scale"],
)
def test_optimizer_on_replicas_equals_one_device(count, make):
    gradients = [list(each) for each in GRADIENTS]
    # A gradient that is infinite on one replica makes all replicas skip the step.
    infinite = isinstance(make(), optimizers.LossScaleOptimizer)
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    with strategy.scope():
        variables, optimizer = new_variables(), make()
    shares = RNG.dirichlet(np.ones(count))

    def step(values, number):
        replica = int(distribute.get_replica_context().replica_id_in_sync_group)
        parts = [g * shares[replica] for g in values]
        if infinite and number == 3 and replica == count - 1:
            parts[1] = np.full_like(parts[1], np.inf)
        apply(optimizer, variables, parts)

    for number, each in enumerate(gradients):
        strategy.run(step, args=(each, number))
    if infinite:
        gradients[3][1] = np.full_like(gradients[3][1], np.inf)
    for found, expected in zip(variables, run(make(), gradients), strict=True):
        for component in getattr(found, "values", [found]):
            np.testing.assert_allclose(component.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_loss_scale_on_replicas_equals_one_device(count):
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    # A bucket for each gradient, so that the first sum starts before the last gradient is computed.
    strategy.extended.gradient_options = distribute.experimental.CommunicationOptions(1)
    for make in (
        lambda: optimizers.SGD(0.1, loss_scale_factor=8.0),
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
    ):
        with strategy.scope():
            variables, optimizer = new_variables(), make()

        def step(variables=variables, optimizer=optimizer):
            with GradientTape() as tape:
                loss = sum(ops.reduce_sum(ops.square(v)) for v in variables) / float(count)
            optimizer.minimize(loss, variables, tape=tape)

        strategy.run(step)
        for found, start in zip(variables, START, strict=True):
            np.testing.assert_allclose(found.numpy(), 0.8 * start, rtol=1e-12)


# Configs ------------------------------------------------------------------------------------------

OPTIMIZERS = [
    optimizers.SGD(0.5, 0.9, True, 0.1, clipnorm=2.0),
    optimizers.Adam(0.5, 0.8, 0.7, 1e-3, True),
    optimizers.AdamW(0.5, 0.1),
    optimizers.RMSprop(0.5, 0.8, 0.7, 1e-3, True),
    optimizers.Adagrad(0.5, 0.2),
    optimizers.Adadelta(0.5, 0.8),
    optimizers.Adamax(0.5, 0.8, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    optimizers.Nadam(0.5, name="mine", gradient_accumulation_steps=2),
    optimizers.SGD(schedules.ExponentialDecay(0.5, 10, 0.5)),
    optimizers.LossScaleOptimizer(optimizers.Adam(0.5, global_clipnorm=1.0), 8.0),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_optimizer_made_from_its_config_makes_the_same_steps(optimizer):
    description = json.loads(json.dumps(optimizers.serialize(optimizer)))
    assert description["module"] == "keras.optimizers" and description["registered_name"] is None
    for same in (optimizers.deserialize(description), optimizers.get(description)):
        assert type(same) is type(optimizer)
        assert same.get_config() == optimizer.get_config()
    for value, expected in zip(
        run(same, GRADIENTS[:2]), run(optimizer, GRADIENTS[:2]), strict=True
    ):
        np.testing.assert_array_equal(value, expected)
    stored = {}
    optimizer.save_own_variables(stored)
    assert list(stored) == [str(i) for i in range(len(optimizer.variables))]
    other = optimizers.deserialize(description)
    other.build(new_variables())
    other.load_own_variables(stored)
    for a, b in zip(other.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    with pytest.raises(ValueError, match=r"has variables of shapes .*the stored ones have"):
        other.load_own_variables(dict(list(stored.items())[1:]))


SCHEDULES = [
    schedules.ExponentialDecay(0.5, 4, 0.5, True),
    schedules.PiecewiseConstantDecay([2, 5], [1.0, 0.5, 0.1]),
    schedules.PolynomialDecay(0.5, 4, 0.1, 2.0, True),
    schedules.InverseTimeDecay(0.5, 4, 0.5, True, "mine"),
    schedules.CosineDecay(0.1, 8, 0.1, warmup_target=0.5, warmup_steps=4),
    schedules.CosineDecayRestarts(0.5, 4, 1.5, 0.9, 0.1),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_schedule_made_from_its_config_has_the_same_rates(schedule):
    description = json.loads(json.dumps(schedules.serialize(schedule)))
    assert description["module"] == "keras.optimizers.schedules"
    same = schedules.deserialize(description)
    np.testing.assert_array_equal(same(range(20)).numpy(), schedule(range(20)).numpy())
    assert same.get_config() == schedule.get_config()


def test_schedules_follow_their_formulas():
    steps = np.arange(14)
    line = schedules.PolynomialDecay(0.5, 4, 0.1)
    np.testing.assert_allclose(line(steps), 0.5 - 0.1 * np.minimum(steps, 4), rtol=1e-12)
    again = schedules.PolynomialDecay(0.5, 4, 0.1, cycle=True)
    ends = 4 * np.maximum(1, np.ceil(steps / 4))
    np.testing.assert_allclose(again(steps), 0.4 * (1 - steps / ends) + 0.1, rtol=1e-12)
    inverse = schedules.InverseTimeDecay(0.5, 4, 0.5)
    np.testing.assert_allclose(inverse(steps), 0.5 / (1 + 0.5 * steps / 4), rtol=1e-12)
    restarts = schedules.CosineDecayRestarts(0.5, 2, 2.0, 0.5, 0.1)
    # Decays of 2, 4 and 8 steps, each from half the height of the previous one.
    done = np.array([0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7])
    length, height = np.repeat([2, 4, 8], [2, 4, 8]), np.repeat([1, 0.5, 0.25], [2, 4, 8])
    cosine = 0.5 * height * (1 + np.cos(np.pi * done / length))
    np.testing.assert_allclose(restarts(steps), 0.5 * (0.9 * cosine + 0.1), rtol=1e-12)
    even = schedules.CosineDecayRestarts(0.5, 4, 1.0)
    np.testing.assert_allclose(even(9), even(1), rtol=1e-12)


def test_learning_rate_assigned_schedule_is_used():
    optimizer = optimizers.SGD(1.0)
    optimizer.learning_rate = schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    found = run(optimizer, GRADIENTS[:2])[0]
    np.testing.assert_allclose(
        found, START[0] - 0.5 * GRADIENTS[0][0] - 0.25 * GRADIENTS[1][0], rtol=1e-12
    )
    assert len(optimizer.variables) == 1


class Own(optimizers.SGD):
    """A custom optimizer."""


def test_custom_optimizer_is_made_from_its_config():
    description = optimizers.serialize(Own(0.5))
    assert description["registered_name"] == "Own"
    assert type(optimizers.deserialize(description, {"Own": Own})) is Own
    with pytest.raises(ValueError, match="unknown optimizer 'own'"):
        optimizers.deserialize(description)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: optimizers.AdamW(weight_decay=None), "`weight_decay` must be a float"),
        (lambda: optimizers.SGD(gradient_accumulation_steps=1), "must be an integer >= 2"),
        (lambda: optimizers.SGD(ema_momentum=2.0), r"must be in the range \[0, 1\]"),
        (lambda: optimizers.SGD(use_ema=True, ema_overwrite_frequency=0), "integer >= 1"),
        (lambda: optimizers.SGD(loss_scale_factor=-1.0), "loss_scale_factor must be positive"),
        (lambda: optimizers.RMSprop(rho=1.5), "rho must be from 0 to 1"),
        (lambda: optimizers.Adagrad(initial_accumulator_value=-1.0), "must be at least 0"),
        (lambda: optimizers.Nadam(beta_1=1.0), "Nadam: beta_1"),
        (lambda: optimizers.Ftrl(learning_rate_power=0.5), "negative or zero. Received"),
        (lambda: optimizers.Ftrl(l1_regularization_strength=-1), "positive or zero. Received"),
        (lambda: optimizers.SGD().apply([as_tensor(1.0)]), "must already be built"),
        (lambda: schedules.CosineDecayRestarts(1.0, 3, t_mul=0.5), "t_mul must be at least 1"),
        (lambda: optimizers.deserialize({"config": {}}), "describes no optimizer"),
    ],
)
def test_optimizers_wrong_arguments_raise_with_reason(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_iterations_set_to_a_variable_counts_in_it_and_raises_once_built():
    steps = Variable(np.int64(4), trainable=False)
    optimizer = optimizers.LossScaleOptimizer(optimizers.Adam(0.1), initial_scale=1.0)
    optimizer.iterations = steps
    apply(optimizer, new_variables(), GRADIENTS[0])
    assert int(steps) == 5
    with pytest.raises(RuntimeError, match="Cannot set `iterations` to a new Variable"):
        optimizer.iterations = Variable(np.int64(0))


def test_learning_rate_function_get_config_raises():
    with pytest.raises(TypeError, match="cannot be serialized; use a LearningRateSchedule"):
        optimizers.SGD(lambda: 0.5).get_config()


def test_update_step_with_keras_arguments_raises():
    def update_step(self, gradient, variable, learning_rate):
        raise AssertionError

    with pytest.raises(
        TypeError, match=r"Own.update_step\(self, gradient, .*must take \(self, par"
    ):
        type("Own", (keras.optimizers.Optimizer,), {"update_step": update_step})
