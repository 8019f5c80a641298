"""Functions of neural networks: activations, losses, convolution, pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .activations import (
    bias_add,
    dropout,
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    relu,
    sigmoid,
    silu,
    softmax,
    softplus,
    tanh,
)
from .conv import conv2d, conv2d_relu_max_pool
from .losses import (
    l2_loss,
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    sparse_softmax_cross_entropy_with_logits,
)
from .pooling import max_pool2d

if TYPE_CHECKING:
    from pycollective.distribute.loss_scaling import (
        compute_average_loss,
        scale_regularization_loss,
    )

swish = silu

__all__ = [
    "bias_add",
    "compute_average_loss",
    "conv2d",
    "conv2d_relu_max_pool",
    "dropout",
    "elu",
    "gelu",
    "l2_loss",
    "leaky_relu",
    "log_softmax",
    "max_pool2d",
    "relu",
    "scale_regularization_loss",
    "sigmoid",
    "sigmoid_cross_entropy_with_logits",
    "silu",
    "softmax",
    "softmax_cross_entropy_with_logits",
    "softplus",
    "sparse_softmax_cross_entropy_with_logits",
    "swish",
    "tanh",
]


def __getattr__(name: str) -> Any:
    # TensorFlow keeps the loss scaling here; it needs the strategy in force, a room above this one.
    if name in ("compute_average_loss", "scale_regularization_loss"):
        from pycollective.distribute import loss_scaling

        return getattr(loss_scaling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
