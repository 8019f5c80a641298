"""Optimizers against their formulas in float64, clipping, schedules, and replicas."""

import math
import warnings

import numpy as np
import pytest

from pycollective import distribute, keras
from pycollective.keras import optimizers
from pycollective.keras.optimizers import schedules
from pycollective.tensor import GradientTape, IndexedSlices, Variable, as_tensor, ops

RNG = np.random.default_rng(3)
GRADIENTS = [[RNG.standard_normal((3, 2)), RNG.standard_normal(5)] for _ in range(6)]
START = [RNG.standard_normal((3, 2)), RNG.standard_normal(5)]


@pytest.fixture(autouse=True)
def _float64():
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


def new_variables(dtype=np.float64):
    return [Variable(value.astype(dtype), name=f"v{i}") for i, value in enumerate(START)]


def run(optimizer, steps=6, gradients=GRADIENTS, dtype=np.float64):
    variables = new_variables(dtype)
    for step in range(steps):
        pairs = zip([as_tensor(g.astype(dtype)) for g in gradients[step]], variables, strict=True)
        optimizer.apply_gradients(pairs)
    return [v.numpy() for v in variables]


def sgd(start, gradients, rate, momentum=0.0, nesterov=False):
    w, velocity = start.copy(), np.zeros_like(start)
    for g in gradients:
        velocity = momentum * velocity - rate * g
        w = w + (momentum * velocity - rate * g if nesterov else velocity)
    return w


def adam(start, gradients, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    w = start.copy()
    for t in range(1, len(gradients) + 1):
        # The running means in closed form, not step by step.
        m = sum((1 - beta_1) * beta_1 ** (t - i) * gradients[i - 1] for i in range(1, t + 1))
        v = sum((1 - beta_2) * beta_2 ** (t - i) * gradients[i - 1] ** 2 for i in range(1, t + 1))
        alpha = rate * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        w = w - alpha * m / (np.sqrt(v) + epsilon)
    return w


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_equals_the_formula(options):
    found = run(optimizers.SGD(0.1, **options))
    for i, value in enumerate(found):
        expected = sgd(START[i], [g[i] for g in GRADIENTS], 0.1, **options)
        np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"beta_1": 0.5, "beta_2": 0.8, "epsilon": 1e-3}])
def test_adam_equals_the_formula(options):
    found = run(optimizers.Adam(0.01, **options))
    for i, value in enumerate(found):
        expected = adam(START[i], [g[i] for g in GRADIENTS], 0.01, **options)
        np.testing.assert_allclose(value, expected, rtol=1e-11)


@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.Adam])
def test_float32_follows_float64(make):
    for single, double in zip(run(make(0.01), dtype=np.float32), run(make(0.01)), strict=True):
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, double, rtol=1e-4, atol=1e-6)


def test_build_makes_the_variables_and_steps_are_counted():
    optimizer = optimizers.Adam(0.5)
    assert int(optimizer.iterations) == 0 and optimizer.iterations.dtype == np.int64
    variables = new_variables()
    assert not optimizer.built
    optimizer.build(variables)
    assert optimizer.built and [v.shape for v in optimizer.variables] == [
        *[(), ()],
        *[(3, 2), (3, 2)],
        *[(5,), (5,)],
    ]
    run(optimizer, 2)
    assert int(optimizer.iterations) == 2
    assert optimizers.SGD(0.1).variables[0].name.endswith("/iterations")


def test_custom_optimizer_needs_two_methods():
    class Signs(optimizers.Optimizer):
        def slot_names(self):
            return ("count",)

        def update_step(self, parameter, gradient, slots, learning_rate, step):
            slots["count"] += 1
            parameter -= learning_rate * step * slots["count"] * np.sign(gradient)

    found = run(Signs(0.1), 3)
    expected = START[0] - 0.1 * sum(t * t * np.sign(GRADIENTS[t - 1][0]) for t in (1, 2, 3))
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.Adam])
def test_overridden_update_step_is_called_per_variable(kind):
    class Halved(kind):
        def update_step(self, parameter, gradient, slots, learning_rate, step):
            super().update_step(parameter, gradient, slots, learning_rate / 2, step)

    for found, expected in zip(run(Halved(0.1), 3), run(kind(0.05), 3), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_values_read_before_a_step_do_not_change():
    variables = new_variables()
    before = variables[0].value()
    copy = before.numpy().copy()
    optimizers.SGD(1.0).apply_gradients([(as_tensor(GRADIENTS[0][0]), variables[0])])
    np.testing.assert_array_equal(before.numpy(), copy)
    assert not np.array_equal(variables[0].numpy(), copy)


def test_gradients_are_not_written_to():
    gradient = as_tensor(GRADIENTS[0][0].copy())
    for optimizer in (optimizers.Adam(), optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1)):
        optimizer.apply_gradients([(gradient, new_variables()[0])])
        np.testing.assert_array_equal(gradient.numpy(), GRADIENTS[0][0])


# Missing and wrong gradients ----------------------------------------------------------------------


def test_missing_gradients_are_named_once():
    variables = new_variables()
    optimizer = optimizers.SGD(1.0)
    pairs = [(None, variables[0]), (as_tensor(np.ones(5)), variables[1])]
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['v0'\]"):
        optimizer.apply_gradients(pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply_gradients(pairs)
    np.testing.assert_array_equal(variables[0].numpy(), START[0])
    np.testing.assert_allclose(variables[1].numpy(), START[1] - 2)


def test_apply_takes_the_variables_for_which_the_optimizer_was_built():
    plain = keras.optimizers.SGD(0.1)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for optimizer, gradient in ((plain, 1.0), (scaled, 2.0**15)):
        variable = Variable([1.0])
        optimizer.build([variable])
        optimizer.apply([as_tensor([gradient])])
        assert variable.numpy().tolist() == [np.float32(0.9)]


def test_apply_without_any_gradient_raises():
    variables = new_variables()
    with pytest.raises(ValueError, match="No gradients provided for any variable: v0, v1"):
        optimizers.SGD().apply_gradients([(None, v) for v in variables])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizers.SGD().apply_gradients([])


@pytest.mark.parametrize(
    "gradient", [np.ones((2, 3)), np.ones((3, 2), np.int64), np.ones(())], ids=str
)
@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.Adam])
@pytest.mark.parametrize("step", [1, 2])
def test_gradient_of_another_shape_or_dtype_raises(gradient, make, step):
    variables = new_variables()
    optimizer = make()
    for _ in range(step - 1):  # a gradient of the right shape
        optimizer.apply_gradients([(as_tensor(GRADIENTS[0][0]), variables[0])])
    before = variables[0].numpy()
    with pytest.raises(ValueError, match=r"'v0' has shape .*the variable has \(3, 2\) and float64"):
        optimizer.apply_gradients([(as_tensor(gradient), variables[0])])
    np.testing.assert_array_equal(variables[0].numpy(), before)


def test_apply_different_variables_in_each_step_updates_only_these():
    variables = new_variables()
    optimizer = optimizers.SGD(1.0)
    pairs = [(as_tensor(g), v) for g, v in zip(GRADIENTS[0], variables, strict=True)]
    for chosen in (pairs, pairs[::-1], pairs[1:], pairs[:1], [(GRADIENTS[0][0], variables[0])]):
        optimizer.apply_gradients(chosen)
    for start, gradient, times, variable in zip(
        START, GRADIENTS[0], (4, 3), variables, strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), start - times * gradient, rtol=1e-12)


def test_apply_same_variable_twice_raises():
    (variable, _), gradient = new_variables(), as_tensor(GRADIENTS[0][0])
    with pytest.raises(ValueError, match=r"variables \['v0'\] appear more than once"):
        optimizers.SGD().apply_gradients([(gradient, variable), (gradient, variable)])


# Clipping -----------------------------------------------------------------------------------------


def clipped_step(**options):
    variables = new_variables()
    pairs = zip([as_tensor(g) for g in GRADIENTS[0]], variables, strict=True)
    optimizers.SGD(1.0, **options).apply_gradients(pairs)
    return [start - v.numpy() for start, v in zip(START, variables, strict=True)]


def test_clipping_equals_the_formulas():
    a, b = GRADIENTS[0]
    by_value = clipped_step(clipvalue=0.3)
    np.testing.assert_allclose(by_value[0], np.clip(a, -0.3, 0.3), rtol=1e-12)
    by_norm = clipped_step(clipnorm=0.5)
    np.testing.assert_allclose(by_norm[0], a * 0.5 / np.linalg.norm(a), rtol=1e-12)
    np.testing.assert_allclose(by_norm[1], b * 0.5 / np.linalg.norm(b), rtol=1e-12)
    global_norm = math.sqrt((a**2).sum() + (b**2).sum())
    by_global = clipped_step(global_clipnorm=0.5)
    np.testing.assert_allclose(by_global[0], a * 0.5 / global_norm, rtol=1e-12)
    np.testing.assert_allclose(clipped_step(clipnorm=1e6)[0], a, rtol=1e-12)


def test_clipping_of_large_float32_gradients_does_not_overflow():
    variable = Variable(np.zeros(2, np.float32))
    gradient = as_tensor(np.full(2, 1e30, np.float32))
    optimizers.SGD(1.0, clipnorm=1.0).apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), [-math.sqrt(0.5)] * 2, rtol=1e-6)


def test_clipping_wrong_arguments_raise():
    with pytest.raises(ValueError, match="only one of clipnorm"):
        optimizers.SGD(clipnorm=1.0, clipvalue=1.0)
    with pytest.raises(ValueError, match="clipnorm must be positive, got 0"):
        optimizers.Adam(clipnorm=0)


# Learning rates -----------------------------------------------------------------------------------


def test_learning_rate_is_a_variable():
    optimizer = optimizers.SGD(0.1)
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.5
    optimizer.learning_rate.assign(0.25)
    value = run(optimizer, 1)[0]
    np.testing.assert_allclose(value, START[0] - 0.25 * GRADIENTS[0][0], rtol=1e-12)


def test_schedules_follow_their_formulas():
    steps = np.arange(12)
    decay = schedules.ExponentialDecay(0.1, 4, 0.5)
    np.testing.assert_allclose(decay(steps).numpy(), 0.1 * 0.5 ** (steps / 4), rtol=1e-12)
    stairs = schedules.ExponentialDecay(0.1, 4, 0.5, staircase=True)
    np.testing.assert_allclose(stairs(steps).numpy(), 0.1 * 0.5 ** (steps // 4), rtol=1e-12)
    pieces = schedules.PiecewiseConstantDecay([2, 5], [1.0, 0.5, 0.1])
    assert pieces(steps).numpy().tolist() == [1.0] * 3 + [0.5] * 3 + [0.1] * 6
    cosine = schedules.CosineDecay(0.2, 8, alpha=0.1)
    expected = 0.2 * (0.9 * 0.5 * (1 + np.cos(np.pi * np.minimum(steps, 8) / 8)) + 0.1)
    np.testing.assert_allclose(cosine(steps).numpy(), expected, rtol=1e-12)
    warm = schedules.CosineDecay(0.0, 8, warmup_target=0.4, warmup_steps=4)
    assert [float(warm(s)) for s in (0, 2, 4)] == pytest.approx([0, 0.2, 0.4])
    assert float(warm(12)) == pytest.approx(0)


def test_schedule_drives_the_steps():
    optimizer = optimizers.SGD(schedules.PiecewiseConstantDecay([0], [1.0, 0.5]))
    assert float(optimizer.learning_rate) == 1
    value = run(optimizer, 2)[0]
    np.testing.assert_allclose(
        value, START[0] - GRADIENTS[0][0] - 0.5 * GRADIENTS[1][0], rtol=1e-12
    )
    with pytest.raises(TypeError, match="the optimizer has a schedule"):
        optimizer.learning_rate = 0.1
    called = optimizers.SGD(lambda: 0.25)
    np.testing.assert_allclose(run(called, 1)[0], START[0] - 0.25 * GRADIENTS[0][0], rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: schedules.PiecewiseConstantDecay([1, 2], [1.0]), "one value more"),
        (lambda: schedules.PiecewiseConstantDecay([2, 1], [1.0, 2, 3]), "must increase"),
        (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), "decay_steps must be positive"),
        (lambda: optimizers.SGD(momentum=2), "momentum must be from 0 to 1, got 2"),
        (lambda: optimizers.Adam(beta_2=1.0), "beta_2"),
        (lambda: optimizers.get("lion"), "unknown optimizer 'lion'; known names are ada"),
        (lambda: optimizers.get(3), "3 is not an optimizer"),
    ],
)
def test_optimizer_arguments_out_of_range_raise(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_minimize_takes_functions_or_a_tape():
    weight = Variable(3.0, dtype="float64")
    optimizer = optimizers.get("SGD")
    optimizer.minimize(lambda: ops.square(weight), [weight])
    assert float(weight) == pytest.approx(3 - 0.01 * 6)
    with GradientTape() as tape:
        loss = ops.square(weight)
    optimizer.minimize(loss, lambda: [weight], tape=tape)
    assert float(weight) == pytest.approx(2.94 * 0.98)
    with pytest.raises(ValueError, match="needs the tape"):
        optimizer.minimize(loss, [weight])
    assert optimizers.get(optimizer) is optimizer


# Replicas -----------------------------------------------------------------------------------------


def mirrored(count):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def replica():
    return int(distribute.get_replica_context().replica_id_in_sync_group)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}])
def test_gradients_are_summed_then_clipped(count, options):
    strategy = mirrored(count)
    with strategy.scope():
        variables = new_variables()
        optimizer = optimizers.Adam(0.1, **options)
    shares = RNG.dirichlet(np.ones(count))

    def step(gradients):
        parts = [as_tensor(g * shares[replica()]) for g in gradients]
        optimizer.apply_gradients(zip(parts, variables, strict=True))

    for gradients in GRADIENTS:
        strategy.run(step, args=(gradients,))
    for found, value in zip(variables, run(optimizers.Adam(0.1, **options)), strict=True):
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-9)
        for component in getattr(found, "values", [found]):
            np.testing.assert_array_equal(component.numpy(), found.numpy())
    assert int(optimizer.iterations) == 6


@pytest.mark.parametrize(
    "option", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}]
)
def test_apply_without_aggregation_keeps_own_gradients(option):
    strategy = mirrored(2)
    with strategy.scope():
        variable, _ = new_variables()
        optimizer = optimizers.SGD(1.0)
    gradient = as_tensor(np.ones((3, 2)))
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)], **option) and None)
    np.testing.assert_allclose(variable.numpy(), START[0] - 1)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]) and None)
    np.testing.assert_allclose(variable.numpy(), START[0] - 3)


def test_missing_gradients_in_replicas_warn_and_others_are_applied():
    strategy = mirrored(2)
    with strategy.scope():
        variables = new_variables()
        optimizer = optimizers.SGD(1.0)
    gradient = as_tensor(np.ones(5))
    with pytest.warns(UserWarning, match="v0"):
        strategy.run(
            lambda: (
                optimizer.apply_gradients(zip([None, gradient], variables, strict=True)) and None
            )
        )
    np.testing.assert_allclose(variables[1].numpy(), START[1] - 2)


def test_apply_in_cross_replica_context_raises():
    strategy = mirrored(2)
    with strategy.scope():
        variable, _ = new_variables()
        optimizer = optimizers.SGD(1.0)
        with pytest.raises(RuntimeError, match="cannot be called in cross-replica context"):
            optimizer.apply_gradients([(as_tensor(GRADIENTS[0][0]), variable)])
    single = mirrored(1)
    with single.scope():
        alone, _ = new_variables()
        optimizers.SGD(1.0).apply_gradients([(as_tensor(GRADIENTS[0][0]), alone)])
    np.testing.assert_allclose(alone.numpy(), START[0] - GRADIENTS[0][0])


def test_apply_outside_of_scope_updates_every_copy():
    strategy = mirrored(2)
    with strategy.scope():
        variable, _ = new_variables()
        optimizer = optimizers.Adam(0.1)
    for gradients in GRADIENTS:
        optimizer.apply_gradients([(as_tensor(gradients[0]), variable)])
    expected = adam(START[0], [g[0] for g in GRADIENTS], 0.1)
    for component in variable.values:
        np.testing.assert_allclose(component.numpy(), expected, rtol=1e-11)
    assert [int(c) for c in optimizer.iterations.values] == [6, 6]


@pytest.mark.parametrize("outside", ["variables", "optimizer"])
def test_apply_in_replica_of_outside_objects_raises(outside):
    strategy = mirrored(2)
    variables, optimizer = new_variables(), optimizers.SGD(1.0)
    with strategy.scope():
        if outside == "variables":
            optimizer = optimizers.SGD(1.0)
        else:
            variables = new_variables()
    gradient = as_tensor(GRADIENTS[0][0])
    with pytest.raises(ValueError, match="was not created in the scope"):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, variables[0])]) and None)
    np.testing.assert_array_equal(variables[0].numpy(), START[0])


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_learning_rate_not_finite_raises(rate):
    with pytest.raises(ValueError, match="sgd.*the learning rate must be a finite number, got"):
        keras.optimizers.SGD(rate)
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="finite number"):
        optimizer.learning_rate = rate
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.Adam])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float64"), ("float64", "float32"), ("float16", "float32")]
)
def test_gradient_of_another_floating_point_dtype_is_converted(make, dtypes):
    gradient_dtype, variable_dtype = dtypes
    found = []
    for dtype in (gradient_dtype, variable_dtype):
        variable = Variable(np.array([1.0, 2.0], variable_dtype))
        optimizer = make(0.5)
        for _ in range(2):
            optimizer.apply_gradients([(as_tensor(np.array([0.5, 0.25], dtype)), variable)])
        assert variable.dtype == variable_dtype
        found.append(variable.numpy())
    np.testing.assert_array_equal(*found)


def test_gradient_of_integer_variable_raises():
    variable = Variable(np.array([1, 2]))
    with pytest.raises(ValueError, match="the variable has .* int64"):
        optimizers.SGD().apply_gradients([(as_tensor(np.array([0.5, 0.25])), variable)])
    assert variable.numpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.SGD(0.1),
        lambda: optimizers.SGD(0.1, clipnorm=0.5),
        lambda: optimizers.SGD(0.1, momentum=0.9),
        lambda: optimizers.SGD(0.1, weight_decay=0.1),
        lambda: optimizers.Adagrad(0.1),
        lambda: optimizers.Adam(0.1),
    ],
)
def test_steps_by_rows_equal_those_by_arrays(make):
    rng = np.random.default_rng(5)
    start, matrix = rng.normal(size=(400, 6)).astype("f4"), rng.normal(size=(6, 2)).astype("f4")
    found = []
    for dense in (False, True):
        optimizer = make()
        table, weight = Variable(start), Variable(matrix)
        draws = np.random.default_rng(6)
        for _ in range(4):
            index = draws.integers(0, 400, (8, 3))
            with GradientTape() as tape:
                loss = ops.reduce_sum(
                    ops.square(ops.tensordot(ops.gather(table, index), weight, 1))
                )
            gradients = tape.gradient(loss, [table, weight])
            if dense:
                gradients = [as_tensor(g) for g in gradients]
            optimizer.apply_gradients(zip(gradients, [table, weight], strict=True))
        assert int(optimizer.iterations) == 4
        found.append((table.numpy(), weight.numpy()))
    for rows, arrays in zip(*found, strict=True):
        np.testing.assert_allclose(rows, arrays, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(1.0), initial_scale=2.0**17),
        lambda: optimizers.SGD(1.0, loss_scale_factor=2.0**17),
    ],
)
def test_scale_beyond_float16_keeps_the_gradients(make):
    v = Variable(np.zeros((), np.float16))
    make().apply_gradients([(np.asarray(13107, np.float16), v)])
    assert v.numpy() == np.float16(-0.1)


def test_step_with_rows_beside_a_variable_without_gradient():
    rows = IndexedSlices(as_tensor(np.ones((1, 2), "f4")), as_tensor(np.array([1])), (4, 2))
    table, unused, optimizer = (
        Variable(np.zeros((4, 2), "f4")),
        Variable([0.0]),
        optimizers.SGD(1.0),
    )
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients([(rows, table), (None, unused)])
    assert table.numpy()[1].tolist() == [-1, -1]
    assert int(optimizer.iterations) == 1
    for index in (-1, 4):
        wrong = IndexedSlices(
            as_tensor(np.ones((1, 2), "f4")), as_tensor(np.array([index])), (4, 2)
        )
        with pytest.raises(ValueError, match="outside the 4 rows"):
            optimizer.apply_gradients([(wrong, table)])
    assert table.numpy().sum() == -2


def test_ftrl_makes_no_step_at_a_learning_rate_of_zero():
    v = Variable([1.0])
    optimizers.Ftrl(schedules.CosineDecay(0.1, 1)).build([v])
    optimizer = optimizers.Ftrl(0.0)
    optimizer.apply_gradients([(as_tensor(np.ones(1, "f4")), v)])
    assert v.numpy().tolist() == [1.0]
