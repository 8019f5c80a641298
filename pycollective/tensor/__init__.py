"""Tensors over NumPy and CuPy arrays, their operations, and gradients."""

from __future__ import annotations

from . import ops
from .control_flow import cond, numpy_function, print, py_function, while_loop
from .custom import custom_gradient
from .function import function
from .indexed_slices import IndexedSlices
from .ops import *  # noqa: F403
from .shape import TensorShape
from .tape import GradientTape, record, record_many
from .tensor import Tensor, as_tensor
from .variable import Variable, VariableAggregation, VariableSynchronization, creator_scope

__all__ = [
    "GradientTape",
    "IndexedSlices",
    "Tensor",
    "TensorShape",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "as_tensor",
    "cond",
    "creator_scope",
    "custom_gradient",
    "function",
    "numpy_function",
    "print",
    "py_function",
    "record",
    "record_many",
    "while_loop",
]
__all__ += ops.__all__
