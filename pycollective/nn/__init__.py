"""Functions of neural networks: activations, losses, convolution, pooling."""

from __future__ import annotations

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
from .conv import conv2d
from .losses import (
    l2_loss,
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    sparse_softmax_cross_entropy_with_logits,
)
from .pooling import max_pool2d

swish = silu

__all__ = [
    "bias_add",
    "conv2d",
    "dropout",
    "elu",
    "gelu",
    "l2_loss",
    "leaky_relu",
    "log_softmax",
    "max_pool2d",
    "relu",
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
