"""Optimizer steps of a parameter, in one pass over its memory, in place.

Compiled kernels update NumPy arrays of float32 and float64 in C order, without the GIL. One launch
updates many arrays of a GPU (`together`). Other arrays use the functions of their array module.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, in_c_order, native, on_host
from ..errors import InvalidArgumentError
from . import together


def _check(param: Array, **others: Array | None) -> None:
    for name, array in others.items():
        if array is None:
            continue
        if array.shape != param.shape:
            raise InvalidArgumentError(
                f"{name} has shape {array.shape}, its parameter {param.shape}"
            )
        if array.dtype != param.dtype:
            raise TypeError(
                f"{name} has dtype {array.dtype}, its parameter {param.dtype}; cast one of them"
            )


def _in_place(*arrays: Array | None) -> bool:
    """Return True if the compiled kernels can write to these arrays."""
    found = native(*arrays)
    return found is not None and all(map(operator.is_, found, arrays))


def multiply(arrays: Sequence[Array], factor: float) -> None:
    """Multiply arrays by a number, in place."""
    if together.fits(arrays):
        together.times(arrays, factor)
        return
    for array in arrays:
        array *= factor


def _in_order(grads: Sequence[Array]) -> Sequence[Array]:
    """Return the gradients; those on a GPU in C order, which its kernels need."""
    if not grads or on_host(grads[0]):
        return grads
    return list(map(in_c_order, grads))


def adam_update(
    params: Sequence[Array],
    grads: Sequence[Array],
    ms: Sequence[Array],
    vs: Sequence[Array],
    alpha: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """Make one step of Adam (Kingma and Ba, 2015; in the form of Keras), in place.

    In step ``t`` = 1, 2, … ``alpha`` is ``learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t)``.

    ``m += (grad - m)(1 - beta1)``, ``v += (grad² - v)(1 - beta2)``,
    ``param -= alpha m / (sqrt(v) + epsilon)``
    """
    if kernels.alike((params, grads, ms, vs)):
        kernels.rule_update("adam", params, grads, (ms, vs), (alpha, 1 - beta1, 1 - beta2, epsilon))
        return
    grads = _in_order(grads)
    if together.fits(params, grads, ms, vs):
        together.adam(params, grads, ms, vs, alpha, beta1, beta2, epsilon)
        return
    for param, grad, m, v in zip(params, grads, ms, vs, strict=True):
        _check(param, grad=grad, m=m, v=v)
        found = native(grad) if _in_place(param, m, v) else None
        if found is not None:
            numbers = (alpha, 1 - beta1, 1 - beta2, epsilon)
            kernels.rule_update("adam", [param], [*found], ([m], [v]), numbers)
            continue
        m += (grad - m) * (1 - beta1)
        v += (grad * grad - v) * (1 - beta2)
        param -= alpha * m / (np.sqrt(v) + epsilon)


def sgd_update(
    params: Sequence[Array],
    grads: Sequence[Array],
    rate: float,
    velocities: Sequence[Array] | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Make one step of gradient descent (in the form of Keras), in place.

    Without velocities: ``param -= rate grad``. With them:
    ``velocity = momentum velocity - rate grad``, then ``param += velocity`` or, with ``nesterov``,
    ``param += momentum velocity - rate grad``.
    """
    if kernels.alike((params, grads) if velocities is None else (params, grads, velocities)):
        kernels.sgd_update(params, grads, velocities, rate, momentum, nesterov)
        return
    grads = _in_order(grads)
    if together.fits(params, grads, velocities):
        together.sgd(params, grads, velocities, rate, momentum, nesterov)
        return
    speeds = [None] * len(params) if velocities is None else velocities
    for param, grad, velocity in zip(params, grads, speeds, strict=True):
        _check(param, grad=grad, velocity=velocity)
        found = native(grad) if _in_place(param, velocity) else None
        if found is not None:
            speed = None if velocity is None else [velocity]
            kernels.sgd_update([param], [*found], speed, rate, momentum, nesterov)
            continue
        step = grad * rate
        if velocity is None:
            param -= step
            continue
        velocity *= momentum
        velocity -= step
        param += momentum * velocity - step if nesterov else velocity


def rmsprop_update(
    param: Array,
    grad: Array,
    v: Array,
    rate: float,
    rho: float,
    epsilon: float,
    mean: Array | None = None,
    speed: Array | None = None,
    momentum: float = 0.0,
) -> None:
    """Make one step of RMSprop (Hinton, 2012; in the form of Keras), in place.

    ``v = rho v + (1 - rho) grad²``, ``step = rate grad / sqrt(v + epsilon)``, ``param -= step``.
    With ``mean``: ``mean = rho mean + (1 - rho) grad``, whose square is subtracted from ``v`` in the
    step. With ``speed``: ``momentum speed`` is added to the step, and ``speed = step``.
    """
    _check(param, grad=grad, v=v, mean=mean, speed=speed)
    found = native(grad) if _in_place(param, v, mean, speed) else None
    if found is not None:
        kernels.rmsprop_update(param, *found, v, mean, speed, rate, rho, momentum, epsilon)
        return
    v *= rho
    v += (1 - rho) * grad * grad
    spread = v + epsilon
    if mean is not None:
        mean *= rho
        mean += (1 - rho) * grad
        spread -= mean * mean
    step = rate * grad / np.sqrt(spread)
    if speed is not None:
        speed *= momentum
        speed += step
        step = speed
    param -= step


def updated(
    rule: str, param: Array, grad: Array, slots: Sequence[Array], numbers: Sequence[float]
) -> bool:
    """Update a parameter and its slots in place by the kernel of a rule.

    Return False, without doing anything, if the kernel does not support the arrays.
    """
    _check(param, grad=grad, **dict(zip("mv", slots, strict=False)))
    found = native(grad) if _in_place(param, *slots) else None
    if found is None:
        return False
    kernels.rule_update(rule, [param], [*found], [[slot] for slot in slots], numbers)
    return True


def adagrad_update(param: Array, grad: Array, a: Array, rate: float, epsilon: float) -> None:
    """Make one step of Adagrad (Duchi et al., 2011; in the form of Keras), in place.

    ``a += grad²``, ``param -= rate grad / sqrt(a + epsilon)``.
    """
    if updated("adagrad", param, grad, (a,), (rate, epsilon)):
        return
    a += grad * grad
    param -= rate * grad / np.sqrt(a + epsilon)
