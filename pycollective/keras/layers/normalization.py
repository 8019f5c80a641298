"""`BatchNormalization` and `LayerNormalization`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollective import nn
from pycollective.array_backend import asarray
from pycollective.distribute.default import get_replica_context
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.keras import initializers
from pycollective.keras.layers.layer import SameShape, assign_in_call
from pycollective.nn.normalization import moved_average
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
    ops,
)

__all__ = ["BatchNormalization", "LayerNormalization"]


class _Normalization(SameShape):
    """Base of both layers: the variables ``gamma`` and ``beta``."""

    gamma: Variable | None
    beta: Variable | None

    def __init__(self, epsilon: float, center: bool, scale: bool, **options: Any) -> None:
        super().__init__(**options)
        # The kernels compute in float32 or wider, so variables must not be cast to half precision.
        self._reads_as = None
        self.epsilon = float(epsilon)
        self.center = bool(center)
        self.scale = bool(scale)
        self.gamma = self.beta = None

    def _make_parameters(self, shape: tuple[int, ...]) -> None:
        if self.scale:
            self.gamma = self._weight("gamma", shape)
        if self.center:
            self.beta = self._weight("beta", shape)

    def _length(self, shape: Any, axis: int) -> int:
        """Return the length of an axis, or raise ``ValueError`` if it is unknown."""
        if not -len(shape) <= axis < len(shape) or shape[axis] is None:
            raise self._incompatible(tuple(shape), f"a known length of axis {axis}")
        return int(shape[axis])


class BatchNormalization(_Normalization):
    """Normalize each channel, by batch statistics in training and by moving averages otherwise.

    Parameters
    ----------
    axis : int
        The axis of the channels.
    momentum : float
        The weight of the old value in the update of the moving mean and variance.
    epsilon : float
        The number added to the variance.
    center, scale : bool
        True to add ``beta``, and to multiply by ``gamma``.
    beta_initializer, gamma_initializer, moving_mean_initializer, moving_variance_initializer
        Initializers of the variables, each ``[channels]``.
    beta_regularizer, gamma_regularizer, beta_constraint, gamma_constraint
        Regularizers and constraints of ``beta`` and ``gamma``.
    synchronized : bool
        True to use the statistics of all replicas' batches instead of each replica's own batch.

    Raises
    ------
    ValueError
        In a call, if the input's shape does not fit.

    Notes
    -----
    With ``trainable = False`` a training step uses the moving mean and variance too, as in Keras.
    Every replica keeps its own moving averages; a read outside of the replicas returns their mean. A
    batch without rows does not change the moving averages. With ``synchronized`` all replicas must
    call the layer.
    """

    _fixed = (("renorm", False), ("renorm_clipping", None))

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 0.001,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        moving_mean_initializer: Any = "zeros",
        moving_variance_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        synchronized: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(epsilon, center, scale, **options)
        self._set(beta_initializer=beta_initializer, gamma_initializer=gamma_initializer)
        self._set(beta_regularizer=beta_regularizer, gamma_regularizer=gamma_regularizer)
        self._set(beta_constraint=beta_constraint, gamma_constraint=gamma_constraint)
        self.axis = int(axis)
        self.momentum = float(momentum)
        self.moving_mean_initializer = initializers.get(moving_mean_initializer)
        self.moving_variance_initializer = initializers.get(moving_variance_initializer)
        self.synchronized = bool(synchronized)
        self._channels = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        # renorm_momentum has a meaning only with renorm=True, which is an error.
        return super().from_config({k: v for k, v in config.items() if k != "renorm_momentum"})

    def build(self, input_shape: Any) -> None:
        self._channels = self._length(input_shape, self.axis)
        shape = (self._channels,)
        self._make_parameters(shape)
        self.moving_mean = self._moving_average("moving_mean", self.moving_mean_initializer)
        self.moving_variance = self._moving_average(
            "moving_variance", self.moving_variance_initializer
        )

    def _moving_average(self, name: str, initializer: Any) -> Variable:
        return self.add_weight(
            name,
            (self._channels,),
            initializer=initializer,
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.MEAN,
        )

    def call(
        self, inputs: Tensor, training: bool | None = None, activation: str | None = None
    ) -> Tensor:
        """Return the normalized inputs, or their relu if ``activation`` is ``"relu"``."""
        shape = inputs.array.shape
        if self._length(shape, self.axis) != self._channels:
            raise self._incompatible(
                shape, f"axis {self.axis} of input shape to have value {self._channels}"
            )
        dtype = inputs.dtype
        if dtype.kind != "f" or dtype.itemsize < 4:
            inputs = ops.cast(inputs, np.float32)
        last = len(shape) - 1
        order = list(range(len(shape)))
        order[self.axis], order[last] = order[last], order[self.axis]
        swapped = order != sorted(order)
        if swapped:
            inputs = ops.transpose(inputs, order)
        if training and self._trainable:
            outputs = self._by_batch(inputs, activation)
        else:
            moving = self.moving_mean, self.moving_variance
            outputs, _, _ = nn.normalize_batch(
                inputs, self.gamma, self.beta, self.epsilon, activation, moving
            )
        if swapped:
            outputs = ops.transpose(outputs, order)
        if dtype.kind not in "fV":
            dtype = self._dtype
        return outputs if outputs.dtype == dtype else ops.cast(outputs, dtype)

    def _by_batch(self, inputs: Tensor, activation: str | None) -> Tensor:
        """Return the inputs, normalized by the batch; update the moving mean and variance."""
        context = get_replica_context() if self.synchronized else None
        counted: Any
        if context is not None and context.num_replicas_in_sync > 1:
            outputs, mean, variance, rows = self._by_all_batches(inputs, context)
            if activation is not None:
                outputs = nn.relu(outputs)
            counted = np.minimum(rows.array, 1)
        else:
            outputs, mean, variance = nn.normalize_batch(
                inputs, self.gamma, self.beta, self.epsilon, activation
            )
            counted = min(math.prod(inputs.shape[:-1]), 1)
        # Without rows, `counted` is 0, and the averages do not change.
        weight = counted * (1 - self.momentum)
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            average = as_tensor(moving).array
            assign_in_call(moving, Tensor(moved_average(average, value.array, weight)))
        return outputs

    def _by_all_batches(
        self, inputs: Tensor, context: ReplicaContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalize by the batches of all replicas; gradients flow to all replicas.

        Return the outputs, the mean, the variance, and the number of rows of all batches.
        """
        axes = list(range(inputs.ndim - 1))
        here = asarray(math.prod(inputs.shape[:-1]), inputs.dtype, like=inputs.array)
        total, rows = context.all_reduce("SUM", [ops.reduce_sum(inputs, axes), Tensor(here)])
        count = ops.maximum(rows, 1)
        mean = total / count
        squares = ops.reduce_sum(ops.squared_difference(inputs, mean), axes)
        variance = context.all_reduce("SUM", squares) / count
        beta, gamma = (
            None if value is None else ops.cast(value, inputs.dtype)
            for value in (self.beta, self.gamma)
        )
        outputs = nn.batch_normalization(inputs, mean, variance, beta, gamma, self.epsilon)
        return outputs, mean, variance, rows


class LayerNormalization(_Normalization):
    """Normalize each example by its mean and variance along ``axis``.

    Parameters
    ----------
    axis
        An axis, or a list of axes.
    epsilon : float
        The number added to the variance.
    center, scale : bool
        True to add ``beta``, and to multiply by ``gamma``. Their shape is the lengths of ``axis``.
    beta_initializer, beta_regularizer, beta_constraint
        The settings of ``beta``.
    gamma_initializer, gamma_regularizer, gamma_constraint
        The settings of ``gamma``.
    """

    _fixed = (("rms_scaling", False),)

    def __init__(
        self,
        axis: Any = -1,
        epsilon: float = 0.001,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(epsilon, center, scale, **options)
        self._set(beta_initializer=beta_initializer, gamma_initializer=gamma_initializer)
        self._set(beta_regularizer=beta_regularizer, gamma_regularizer=gamma_regularizer)
        self._set(beta_constraint=beta_constraint, gamma_constraint=gamma_constraint)
        if isinstance(axis, (list, tuple)):
            self.axis: Any = list(axis)
        elif isinstance(axis, int):
            self.axis = axis
        else:
            raise TypeError(
                f"LayerNormalization: axis must be an int or a list of them, got {axis!r}"
            )
        self._lengths: tuple[int, ...] = ()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **dict(self._fixed)}

    def _lengths_of(self, shape: Any) -> tuple[int, ...]:
        axes = sorted(self.axis) if isinstance(self.axis, list) else [self.axis]
        return tuple(self._length(shape, axis) for axis in axes)

    def build(self, input_shape: Any) -> None:
        """Make ``gamma`` and ``beta`` for inputs of this shape."""
        self._lengths = self._lengths_of(input_shape)
        self._make_parameters(self._lengths)

    def call(self, inputs: Tensor) -> Tensor:
        shape = inputs.array.shape
        if self._lengths_of(shape) != self._lengths:
            raise self._incompatible(
                shape, f"axes {self.axis} of input shape to have values {self._lengths}"
            )
        if inputs.dtype.kind not in "fV":
            inputs = ops.cast(inputs, self._dtype)
        return nn.layer_normalization(inputs, self.gamma, self.beta, self.axis, self.epsilon)
