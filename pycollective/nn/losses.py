"""Losses per example from logits, and sums of squares."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import REAL_DTYPES, Array, array_module, asarray, native, on_host
from ..errors import InvalidArgumentError
from ..tensor.compiled import is_half, reduced
from ..tensor.multiple import Multiple
from ..tensor.ops._define import check_dtypes, differentiable, keep_dtype, operands
from ..tensor.ops.arrays import cast
from ..tensor.tape import is_tracked, record, recording, thread_state
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from . import cross_entropy, cross_entropy_on_gpu
from .activations import _classes, log_softmax_of, softplus_of, stable_sigmoid

__all__ = [
    "l2_loss",
    "sigmoid_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits",
    "sparse_softmax_cross_entropy_with_logits",
]


@differentiable
def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> Tensor:
    """Return the cross-entropy of class numbers and logits.

    Parameters
    ----------
    labels
        Integers from 0 to the number of classes - 1, of the shape of ``logits`` without its last
        axis.
    logits
        Floating point, [..., classes].

    Returns
    -------
    Tensor
        One loss per label, in the dtype of ``logits``.

    Raises
    ------
    TypeError
        The labels are not integers, or the logits do not have a floating-point dtype.
    ValueError
        A label is out of range, or the shapes do not match.

    Notes
    -----
    On a device the labels are not checked, because that would wait for the device. The loss of a label
    out of range is NaN there, and so is its gradient, as in TensorFlow.
    """
    x, axis = _classes("sparse_softmax_cross_entropy_with_logits", logits, -1)
    a = x.array
    label = asarray(as_tensor(labels).array, like=a)
    if label.dtype.kind not in "iu":
        raise TypeError(f"labels must be integers, got dtype {label.dtype}; use cast()")
    if label.shape != a.shape[:-1]:
        raise InvalidArgumentError(
            f"labels of shape {label.shape} do not fit logits of shape {a.shape}: one "
            "label for each row of logits is needed"
        )
    classes = a.shape[axis]
    if native(a) is not None:
        return record(*_by_kernel(label, a, x))
    table = a.reshape(-1, classes)
    if cross_entropy_on_gpu.fits(table):
        labels_of_rows = array_module(a).ascontiguousarray(label.reshape(-1))
        losses, slopes = cross_entropy_on_gpu.forward(table, labels_of_rows)

        def slope(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
            return ((slopes * g.reshape(-1, 1)).reshape(a.shape),)

        return record(losses.reshape(label.shape), (x,), slope)
    wrong = (label < 0) | (label >= classes)
    if not on_host(a):
        label = np.where(wrong, 0, label)
    elif wrong.any():
        raise InvalidArgumentError(
            f"labels must be in 0 to {classes - 1} for logits of shape {a.shape}, got "
            f"{int(label[wrong].ravel()[0])}"
        )
    logs = log_softmax_of(a.reshape(-1, classes), 1)
    if not on_host(a):
        logs = np.where(wrong.reshape(-1, 1), logs.dtype.type(np.nan), logs)
    rows = array_module(a).arange(logs.shape[0])
    columns = label.reshape(-1)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        weights = g.reshape(-1, 1)
        gradient = np.exp(logs)
        gradient *= weights
        gradient[rows, columns] -= weights[:, 0]
        return (gradient.reshape(a.shape),)

    return record(-logs[rows, columns].reshape(label.shape), (x,), vjp)


def _by_kernel(label: Array, a: Array, x: Tensor) -> tuple[Array, tuple[Tensor], Any]:
    """Compute the losses in one pass over the logits, with the derivatives while a tape records."""
    rows = a.reshape(-1, a.shape[-1])
    losses, slope = cross_entropy.forward(rows, label.reshape(-1), recording())

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return ((slope * g.reshape(-1, 1)).reshape(a.shape),)

    return losses.reshape(label.shape), (x,), vjp


def losses_of_rows(kernel: str, true: Tensor, predicted: Tensor, number: float) -> Tensor | None:
    """Return a loss for each vector along the last axis, by the kernel of this name.

    The tensors have one shape and dtype. The result is None if the kernel does not support them. It is
    None too if a tape tracks ``true``, because the kernel has no derivative by ``true``.
    """
    found = native(true.array, predicted.array)
    if found is None or not found[1].ndim or not found[1].size:
        return None
    if is_tracked(true):
        return None
    shape, dtype = found[1].shape, found[1].dtype
    losses = np.empty(shape[:-1], dtype)
    slopes = workspace.empty(shape, dtype) if thread_state.tapes else None
    kernels.loss_rows(kernel, *found, losses, slopes, number)
    return record(losses, (predicted,), lambda g, _need: (slopes * g[..., None],))


@differentiable
def softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, axis: int = -1, name: str | None = None
) -> Tensor:
    """Return the cross-entropy of distributions over classes and logits.

    Parameters
    ----------
    labels
        The probability of each class, in the shape and dtype of ``logits``.
    logits
        Floating point.
    axis : int
        The axis of the classes.

    Returns
    -------
    Tensor
        One loss per distribution: the shape of ``logits`` without ``axis``.

    Raises
    ------
    TypeError
        The dtypes differ, or are not floating point.
    ValueError
        The shapes differ, or there are no classes.
    """
    x, place = _classes("softmax_cross_entropy_with_logits", logits, axis)
    y = as_tensor(labels, like=x)
    _same_shape("softmax_cross_entropy_with_logits", y, x)
    if place == x.array.ndim - 1:
        found = losses_of_rows("softmax_cross_entropy", y, x, 0.0)
        if found is not None:
            return found
    target = y.array
    logs = log_softmax_of(x.array, place)

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        weights = np.expand_dims(g, place)
        by_labels = by_logits = None
        if need[0]:
            by_labels = -weights * logs
        if need[1]:
            total = reduced("sum", target, (place,), True)
            by_logits = weights * (np.exp(logs) * total - target)
        return by_labels, by_logits

    return record(-reduced("sum", target * logs, (place,)), (y, x), vjp)


@differentiable
def sigmoid_cross_entropy_with_logits(labels: Any, logits: Any, name: str | None = None) -> Tensor:
    """Return the cross-entropy of probabilities and the logits of binary decisions, by element.

    ``labels`` and ``logits`` have one shape and one floating-point dtype, which are the result's too.
    Raise a ``TypeError`` if their dtypes differ or are not floating-point, and a ``ValueError`` if
    their shapes differ.
    """
    name = "sigmoid_cross_entropy_with_logits"
    y, x = operands(labels, logits)
    _same_shape(name, y, x)
    target, a = y.array, x.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"{name} needs floating-point tensors, got {a.dtype}; use cast()")

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        return (
            -(g * a) if need[0] else None,
            g * keep_dtype(stable_sigmoid(a) - target, a.dtype) if need[1] else None,
        )

    return record(keep_dtype(softplus_of(a) - a * target, a.dtype), (y, x), vjp)


def _same_shape(name: str, labels: Tensor, logits: Tensor) -> None:
    check_dtypes(name, labels, logits)
    if labels.shape != logits.shape:
        raise InvalidArgumentError(
            f"{name}: labels of shape {labels.shape} and logits of shape {logits.shape} "
            "must have one shape"
        )


@differentiable
def l2_loss(t: Any, name: str | None = None) -> Tensor:
    """Return half the sum of the squares of a tensor."""
    return sum_of_squares(t, 0.5)


def sum_of_squares(t: Any, factor: float) -> Tensor:
    """Return the sum of the squares times a factor, as one operation."""
    x = as_tensor(t)
    a = x.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"l2_loss needs a floating-point tensor, got {a.dtype}; use cast()")
    if is_half(a.dtype):  # the sum before the factor may be too large for halves
        return cast(sum_of_squares(cast(x, np.float32), factor), a.dtype)
    number = a.dtype.type
    found = native(a)
    total: Any
    if found is not None:
        total = kernels.sum_of_squares(*found)
    else:
        row = a.reshape(1, -1)
        total = workspace.matmul(row, row.T).reshape(())

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Any]:
        if found is not None:
            return (Multiple(a, float(g * number(2 * factor))),)
        if on_host(a) or a.dtype not in REAL_DTYPES or not a.flags.c_contiguous:
            return (g * number(2 * factor) * a,)
        return (Multiple(a, g, 2 * factor),)

    product = total * number(factor)
    result = asarray(product, a.dtype, like=a) if found is None else np.asarray(product, a.dtype)
    return record(result, (x,), vjp)
