"""Functions of neural networks: activations, losses, convolution, pooling, normalization."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import activations
from .activations import *  # noqa: F403
from .activations import silu
from .conv import conv2d, conv2d_relu_max_pool
from .depthwise import depthwise_conv2d, grouped_conv2d
from .losses import (
    l2_loss,
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    sparse_softmax_cross_entropy_with_logits,
)
from .normalization import (
    batch_normalization,
    layer_normalization,
    moments,
    normalize_batch,
)
from .pooling import avg_pool2d, max_pool2d
from .resizing import resize_bilinear, upsample_nearest
from .transposed import conv2d_transpose

if TYPE_CHECKING:
    from pycollective.distribute.loss_scaling import (
        compute_average_loss,
        scale_regularization_loss,
    )
    from pycollective.distribute.sharded import embedding_lookup

swish = silu

__all__ = [
    "avg_pool2d",
    "batch_normalization",
    "compute_average_loss",
    "conv2d",
    "conv2d_relu_max_pool",
    "conv2d_transpose",
    "depthwise_conv2d",
    "embedding_lookup",
    "grouped_conv2d",
    "l2_loss",
    "layer_normalization",
    "max_pool2d",
    "moments",
    "normalize_batch",
    "resize_bilinear",
    "scale_regularization_loss",
    "sigmoid_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits",
    "sparse_softmax_cross_entropy_with_logits",
    "swish",
    "upsample_nearest",
]
__all__ += activations.__all__


#: TensorFlow has these functions in this module. Here they belong to modules of
#: pycollective.distribute, because they need strategies; that package imports this one.
_IN_DISTRIBUTE = {
    "compute_average_loss": "loss_scaling",
    "embedding_lookup": "sharded",
    "scale_regularization_loss": "loss_scaling",
}


def __getattr__(name: str) -> Any:
    if name in _IN_DISTRIBUTE:
        module = importlib.import_module(f"pycollective.distribute.{_IN_DISTRIBUTE[name]}")
        # Store the function, so that later uses do not call `__getattr__`.
        globals()[name] = getattr(module, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
