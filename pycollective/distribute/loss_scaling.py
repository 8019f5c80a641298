"""Loss scaling: losses whose gradients are summed over the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective.distribute.context import (
    current_mode,
    has_strategy,
)
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Tensor, as_tensor
from pycollective.tensor import ops as tensor_ops
from pycollective.tensor.ops.reductions import sum_over


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Tensor:
    """Return the sum of a replica's losses divided by the global batch size.

    Parameters
    ----------
    per_example_loss : tensor
        A loss for each example, of rank 1 or more. Other axes are summed, but not counted.
    sample_weight : tensor, optional
        A weight for each example, or an array that broadcasts. A last axis of length 1 is added to, or
        removed from, the weights as needed.
    global_batch_size : int, optional
        The divisor; by default this replica's number of examples times the number of replicas. This
        is TensorFlow's rule, and exact if all replicas have equal numbers of examples.

    Returns
    -------
    Tensor
        A scalar of the losses' dtype (float64 for integers), or 0 for a divisor of 0. The sum over the
        replicas is the loss of the global batch.

    Raises
    ------
    ValueError
        The loss has no batch axis, or the batch size is not a scalar. The subclass
        `InvalidArgumentError`: the batch size is negative, or the weights do not match the losses.
    TypeError
        The batch size is not an int.
    RuntimeError
        This is cross-replica context, and there is no ``global_batch_size``.
    """
    losses = _floating(per_example_loss)
    if losses.array.ndim == 0:
        raise ValueError(
            "Invalid value passed for `per_example_loss`. Expected a tensor with at least rank 1. "
            f"Received per_example_loss={losses.numpy()} with rank 0"
        )
    if sample_weight is not None:
        losses = _weighted(losses, sample_weight)
    if global_batch_size is None:
        count = losses.shape[0] * _replicas("compute_average_loss")
    else:
        count = _check_batch_size(global_batch_size)
    if count:
        return sum_over(losses, float(count))
    # Without examples, the loss and its gradients are 0.
    return tensor_ops.where(False, tensor_ops.reduce_sum(losses), 0.0)


def _replicas(caller: str) -> int:
    """Return the number of replicas; raise an error in cross-replica context."""
    mode = current_mode()
    if mode is None:
        return 1
    if mode.replica_context is None and has_strategy():
        raise RuntimeError(
            f"You are calling `{caller}` in cross replica context, while it was expected to be called "
            "in replica context."
        )
    return mode.strategy.num_replicas_in_sync


def _floating(values: Any) -> Tensor:
    """Return a tensor, with integers converted to float64."""
    tensor = as_tensor(values)
    return tensor_ops.cast(tensor, np.float64) if tensor.array.dtype.kind in "iu" else tensor


def _weighted(losses: Tensor, sample_weight: Any) -> Tensor:
    weights = as_tensor(sample_weight, like=losses)
    if weights.dtype != losses.dtype:
        weights = tensor_ops.cast(weights, losses.dtype)
    # As in Keras, a last axis of length 1 on one side is ignored.
    if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
        weights = tensor_ops.squeeze(weights, -1)
    elif 0 < weights.ndim == losses.ndim - 1:
        weights = tensor_ops.expand_dims(weights, -1)
    try:
        fits = np.broadcast_shapes(losses.shape, weights.shape) == losses.shape
    except ValueError:
        fits = False
    if not fits:
        raise InvalidArgumentError(
            f"sample_weight of shape {weights.shape} does not fit losses of shape {losses.shape}"
        )
    return losses * weights


def _check_batch_size(size: Any) -> int:
    if size.__class__ is int and size >= 0:
        return int(size)
    array = as_tensor(size).array
    if array.ndim != 0:
        raise ValueError("global_batch_size must be scalar.")
    if array.dtype.kind not in "iu":
        raise TypeError("global_batch_size must be an integer.")
    if int(array) < 0:
        raise InvalidArgumentError(f"global_batch_size must be non-negative. Received {int(array)}")
    return int(array)


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """Return the sum of a regularization loss divided by the number of replicas.

    Every replica adds the same regularization loss, and the sum over the replicas contains it once.

    Raises
    ------
    RuntimeError
        This is cross-replica context.
    """
    replicas = _replicas("scale_regularization_loss")
    total = _floating(regularization_loss)
    if total.array.ndim:
        total = tensor_ops.reduce_sum(total)
    return total if replicas == 1 else total / float(replicas)
