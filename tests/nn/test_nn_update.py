"""Optimizer updates and softmax cross-entropy compared with the formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective.nn import cross_entropy
from pycollective.nn.update import adagrad_update, adam_update, rmsprop_update, sgd_update

SHAPES = [(1000,), (7, 13), (), (0, 3)]


def normal(rng: Any, shape: Any, dtype: str) -> Any:
    return np.asarray(rng.normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize("shape", SHAPES)
def test_adam_equals_the_formula(shape: Any, dtype: str) -> None:
    rng = np.random.default_rng(1)
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    p = normal(rng, shape, dtype)
    m, v = np.zeros(shape, dtype), np.zeros(shape, dtype)
    ep, em, ev = (a.astype(np.float64) for a in (p, m, v))
    for t in range(1, 6):
        g = normal(rng, shape, dtype)
        g.setflags(write=False)
        alpha = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        adam_update([p], [g], [m], [v], alpha, 0.9, 0.999, 1e-7)
        em += (g - em) * (1 - 0.9)
        ev += (g.astype(np.float64) ** 2 - ev) * (1 - 0.999)
        ep -= alpha * em / (np.sqrt(ev) + 1e-7)
    np.testing.assert_allclose(m, em, atol=tolerance)
    np.testing.assert_allclose(v, ev, atol=tolerance)
    np.testing.assert_allclose(p, ep, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
def test_rmsprop_equals_the_formula(shape: Any, dtype: str, centered: bool, momentum: Any) -> None:
    rng = np.random.default_rng(3)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    p = normal(rng, shape, dtype)
    v = np.zeros(shape, dtype)
    mean = np.zeros(shape, dtype) if centered else None
    speed = None if momentum is None else np.zeros(shape, dtype)
    ep, ev, em, es = (a.astype(np.float64) for a in (p, v, v, v))
    for _ in range(5):
        g = normal(rng, shape, dtype)
        g.setflags(write=False)
        rmsprop_update(p, g, v, 0.1, 0.9, 1e-3, mean, speed, momentum or 0.0)
        wide = g.astype(np.float64)
        ev = 0.9 * ev + 0.1 * wide**2
        em = 0.9 * em + 0.1 * wide
        spread = ev - em**2 if centered else ev
        es = (momentum or 0.0) * es + 0.1 * wide / np.sqrt(spread + 1e-3)
        ep = ep - es
    np.testing.assert_allclose(v, ev, atol=tolerance)
    np.testing.assert_allclose(p, ep, atol=10 * tolerance)
    for found, expected in ((mean, em), (speed, es)):
        if found is not None:
            np.testing.assert_allclose(found, expected, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize("shape", SHAPES)
def test_adagrad_equals_the_formula(shape: Any, dtype: str) -> None:
    rng = np.random.default_rng(4)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    p, a = normal(rng, shape, dtype), np.full(shape, 0.1, dtype)
    ep, ea = p.astype(np.float64), a.astype(np.float64)
    for _ in range(5):
        g = normal(rng, shape, dtype)
        adagrad_update(p, g, a, 0.1, 1e-7)
        ea = ea + g.astype(np.float64) ** 2
        ep = ep - 0.1 * g.astype(np.float64) / np.sqrt(ea + 1e-7)
    np.testing.assert_allclose(a, ea, atol=10 * tolerance)
    np.testing.assert_allclose(p, ep, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sgd_equals_the_formula(shape: Any, dtype: str, momentum: Any, nesterov: bool) -> None:
    rng = np.random.default_rng(2)
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    p = normal(rng, shape, dtype)
    velocity = None if momentum is None else np.zeros(shape, dtype)
    ep, ev = p.astype(np.float64), np.zeros(shape)
    for _ in range(5):
        g = normal(rng, shape, dtype)
        velocities = None if velocity is None else [velocity]
        sgd_update([p], [g], 0.1, velocities, momentum or 0.0, nesterov)
        if momentum is None:
            ep -= 0.1 * g.astype(np.float64)
        else:
            ev = momentum * ev - 0.1 * g.astype(np.float64)
            ep += momentum * ev - 0.1 * g.astype(np.float64) if nesterov else ev
    np.testing.assert_allclose(p, ep, atol=tolerance)
    if velocity is not None:
        np.testing.assert_allclose(velocity, ev, atol=tolerance)


RULES = {
    "adam": (2, [0.1, 0.2, 0.3, 1e-3]),
    "adamax": (2, [0.1, 0.2, 0.9, 1e-3]),
    "nadam": (2, [0.1, 0.2, 0.3, 0.4, 1.5, 1e-3]),
    "adadelta": (2, [0.1, 0.9, 0.1, 1e-3]),
    "adagrad": (1, [0.1, 1e-3]),
}


def step_of(rule: str, p: Any, g: Any, m: Any, v: Any, c: Any) -> tuple[Any, Any, Any]:
    """Return parameters and slots after a step, by the formula."""
    if rule == "adagrad":
        m = m + g * g
        return p - c[0] * g / np.sqrt(m + c[1]), m, v
    if rule == "adadelta":
        m = c[1] * m + c[2] * g * g
        d = np.sqrt(v + c[3]) * g / np.sqrt(m + c[3])
        return p - c[0] * d, m, c[1] * v + c[2] * d * d
    first = c[2] if rule == "nadam" else c[1]
    m = m + (g - m) * first
    if rule == "adamax":
        v = np.maximum(c[2] * v, np.abs(g))
        return p - c[0] * m / (v + c[3]), m, v
    v = v + (g * g - v) * c[3 if rule == "nadam" else 2]
    if rule == "adam":
        return p - c[0] * m / (np.sqrt(v) + c[3]), m, v
    return p - (c[0] * m + c[1] * g) / (np.sqrt(v * c[4]) + c[5]), m, v


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 7, 33, 90_001])
@pytest.mark.parametrize("rule", RULES)
def test_rule_equals_the_formula_also_for_numbers_that_are_not_finite(
    rule: str, size: int, dtype: str
) -> None:
    rng = np.random.default_rng(6)
    slots, numbers = RULES[rule]
    p, m, v = (np.abs(normal(rng, size, dtype)) for _ in range(3))
    wide = [a.astype(np.float64) for a in (p, m, v)]
    for step in range(3):
        g = normal(rng, size, dtype)
        if step and size > 7:
            g[3], g[5] = np.nan, np.inf
        kernels.rule_update(rule, [p], [g], [[m], [v]][:slots], numbers)
        with np.errstate(invalid="ignore"):
            wide = list(step_of(rule, wide[0], g.astype(np.float64), *wide[1:], numbers))
    close = 1e-5 if dtype == "float32" else 1e-12
    for found, expected in zip((p, m, v), wide, strict=True):
        np.testing.assert_allclose(found, expected, rtol=close, atol=close)


def test_unknown_rule_or_wrong_numbers_raise_value_error() -> None:
    a = [np.zeros(3)]
    with pytest.raises(ValueError, match="unknown rule 'lion'"):
        kernels.rule_update("lion", a, a, [a], [1.0])
    with pytest.raises(ValueError, match="the rule adagrad has 1 slots and 2 numbers"):
        kernels.rule_update("adagrad", a, a, [a, a], [1.0, 2.0])
    with pytest.raises(ValueError, match="the rule adam has 2 slots and 4 numbers"):
        kernels.rule_update("adam", a, a, [], [1.0, 2.0])


def test_update_of_many_parameters_equals_the_formula() -> None:
    rng = np.random.default_rng(5)
    shapes = [(3, 5), (0,), (), (200, 300), (7,), (90_001,)]
    dtypes = ["float32", "float32", "float64", "float32", "longdouble", "float64"]
    rows: list[list[Any]] = [[], [], [], []]
    for shape, dtype in zip(shapes, dtypes, strict=True):
        for column in rows:
            column.append(np.asarray(abs(normal(rng, shape, dtype))))
    alone = [[a.copy() for a in column] for column in rows]
    adam_update(rows[0], rows[1], rows[2], rows[3], 0.1, 0.9, 0.999, 1e-7)
    for p, g, m, v in zip(*alone, strict=True):
        m += (g - m) * (1 - 0.9)
        v += (g * g - v) * (1 - 0.999)
        p -= 0.1 * m / (np.sqrt(v) + 1e-7)
    for found, expected in zip(rows, alone, strict=True):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    speeds = [np.zeros_like(p) for p in rows[0]]
    before = [p.copy() for p in rows[0]]
    sgd_update(rows[0], rows[1], 0.5, speeds, 0.9)
    for p, g, speed, old in zip(rows[0], rows[1], speeds, before, strict=True):
        np.testing.assert_allclose(speed, -0.5 * g, rtol=1e-6)
        np.testing.assert_allclose(p, old - 0.5 * g, rtol=2e-6, atol=1e-6)
    with pytest.raises(ValueError, match="shorter"):
        sgd_update(rows[0], rows[1][:-1], 0.5)


def test_noncontiguous_parameters_and_gradients_are_updated() -> None:
    p = np.ones((6, 4), np.float32)
    half = p[::2]
    sgd_update([half], [np.ones((4, 3), np.float32).T], 1.0)
    np.testing.assert_array_equal(p[::2], 0)
    np.testing.assert_array_equal(p[1::2], 1)
    state = [[np.zeros_like(half)], [np.zeros_like(half)]]
    adam_update([half], [np.ones_like(half)], *state, 1, 0, 0, 0)
    np.testing.assert_array_equal(p[::2], -1)


def test_arrays_of_other_shapes_or_dtypes_raise() -> None:
    p = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"grad has shape \(4,\).*\(3,\)"):
        sgd_update([p], [np.zeros(4, np.float32)], 1.0)
    with pytest.raises(TypeError, match=r"v has dtype float64.*float32"):
        adam_update([p], [p], [p.copy()], [np.zeros(3)], 1, 0.9, 0.999, 1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(64, 10), (3, 1), (5, 16), (7, 33), (0, 4)])
@pytest.mark.parametrize("spread", [1.0, 50.0, 1e4])
def test_softmax_cross_entropy_equals_the_formula(shape: Any, dtype: str, spread: float) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=shape) * spread).astype(dtype)
    labels = rng.integers(0, shape[1], shape[0])
    wide = logits.astype(np.longdouble)
    shifted = wide - wide.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True)
    expected = np.log(total[:, 0]) - shifted[np.arange(shape[0]), labels]
    slope = np.exp(shifted) / total
    slope[np.arange(shape[0]), labels] -= 1
    losses, gradient = cross_entropy.forward(logits, labels, True)
    assert gradient is not None
    tolerance = {"float32": 5e-7, "float64": 1e-15}[dtype]
    np.testing.assert_allclose(losses, expected, rtol=8 * tolerance, atol=4 * tolerance)
    np.testing.assert_allclose(gradient, slope, atol=2 * tolerance)
    alone, none = cross_entropy.forward(logits, labels.astype(np.uint8), False)
    assert none is None
    np.testing.assert_array_equal(alone, losses)


def test_softmax_cross_entropy_of_nan_is_nan() -> None:
    for classes in (4, 40):
        for at in range(0, classes, 3):
            logits = np.zeros((1, classes), np.float32)
            logits[0, at] = np.nan
            losses, _ = cross_entropy.forward(logits, np.zeros(1, np.int64), True)
            assert np.isnan(losses).all()


@pytest.mark.parametrize("label", [-1, 3])
def test_softmax_cross_entropy_names_a_bad_label(label: int) -> None:
    with pytest.raises(ValueError, match=rf"got {label} in row 1"):
        cross_entropy.forward(np.zeros((2, 3)), np.array([0, label]), True)
