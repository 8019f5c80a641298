"""Operations on tensors, under TensorFlow's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..tensor import Operators, Tensor
from . import arrays, elementwise, joining, norms, reductions
from ._define import operands
from .arrays import *  # noqa: F403
from .elementwise import *  # noqa: F403
from .joining import *  # noqa: F403
from .norms import *  # noqa: F403
from .reductions import *  # noqa: F403

__all__: list[str] = []
__all__ += arrays.__all__
__all__ += elementwise.__all__
__all__ += joining.__all__
__all__ += norms.__all__
__all__ += reductions.__all__


def _equal(x: Any, y: Any) -> Any:
    # None equals no tensor, and needs no conversion.
    return False if y is None else _compared(x, y, elementwise.equal, False)


def _not_equal(x: Any, y: Any) -> Any:
    return True if y is None else _compared(x, y, elementwise.not_equal, True)


def _compared(x: Any, y: Any, compare: Any, otherwise: bool) -> Tensor:
    first, second = operands(x, y)
    try:
        np.broadcast_shapes(first.array.shape, second.array.shape)
    except ValueError:  # as in TensorFlow, such tensors are not equal
        return Tensor(np.asarray(otherwise))
    result: Tensor = compare(first, second)
    return result


def _install() -> None:
    """Store the operations as the operators of tensors."""
    two_operands: dict[str, Any] = {
        "add": elementwise.add,
        "sub": elementwise.subtract,
        "mul": elementwise.multiply,
        "truediv": elementwise.divide,
        "floordiv": elementwise.floordiv,
        "mod": elementwise.mod,
        "pow": elementwise.pow,
        "matmul": reductions.matmul,
        "and": elementwise.bits_and,
        "or": elementwise.bits_or,
        "xor": elementwise.bits_xor,
    }
    for name, operation in two_operands.items():
        setattr(Operators, f"__{name}__", operation)
        setattr(Operators, f"__r{name}__", _reflected(operation))
    others: dict[str, Any] = {
        "neg": elementwise.negative,
        "pos": arrays.identity,
        "abs": elementwise.abs,
        "invert": elementwise.invert,
        "lt": elementwise.less,
        "le": elementwise.less_equal,
        "gt": elementwise.greater,
        "ge": elementwise.greater_equal,
        "eq": _equal,
        "ne": _not_equal,
        "getitem": joining.getitem,
    }
    for name, operation in others.items():
        setattr(Operators, f"__{name}__", operation)
    setattr(Operators, "stack", staticmethod(joining.stack))  # noqa: B010


def _reflected(operation: Any) -> Any:
    def operator(x: Any, y: Any) -> Tensor:
        result: Tensor = operation(y, x)
        return result

    return operator


_install()
