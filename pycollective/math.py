"""Operations on numbers, under the path of ``tf.math``."""

# ruff: noqa: F405 (the names come from the modules of operations)
from __future__ import annotations

from pycollective.nn import log_softmax, softmax, softplus
from pycollective.tensor.ops.elementwise import *  # noqa: F403
from pycollective.tensor.ops.elementwise import divide, mod
from pycollective.tensor.ops.reductions import *  # noqa: F403
from pycollective.tensor.symbolic import accepts_symbols

__all__ = [
    "abs",
    "add",
    "add_n",
    "argmax",
    "argmin",
    "cos",
    "divide",
    "equal",
    "exp",
    "floor",
    "floordiv",
    "floormod",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "not_equal",
    "pow",
    "reciprocal",
    "reduce_all",
    "reduce_any",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "squared_difference",
    "subtract",
    "tanh",
    "truediv",
]

#: Other names of TensorFlow for `mod` and `divide`.
floormod = mod
truediv = divide

for _name in __all__:
    globals()[_name] = accepts_symbols(globals()[_name])
