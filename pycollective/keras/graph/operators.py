"""What ``+ - * /`` of symbolic tensors are in a graph.

They have no weights, and are not among a model's `layers`. In files they are the operations that
Keras writes for the same operators.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from pycollective.keras.backend import name_of_class, unique_name
from pycollective.keras.graph.symbols import KerasTensor, Node, Shape, has_symbols, shape_of
from pycollective.tensor import Tensor, as_tensor

__all__ = ["OPERATIONS", "Add", "Multiply", "Negative", "Operation", "Subtract", "TrueDivide"]


class Operation:
    """An element-wise operation of a graph.

    Parameters
    ----------
    name
        By default the class's name with a number.
    """

    built = True

    def __init__(self, name: str | None = None) -> None:
        self.name = unique_name(name_of_class(type(self))) if name is None else str(name)
        self._inbound_nodes: list[Node] = []

    def __call__(self, *values: Any) -> Any:
        """Compute the result; on symbolic tensors, record the call."""
        if not has_symbols(values):
            return self.call(*values)
        shape: Shape = ()
        for value in values:
            shape = self._broadcast(shape, shape_of(value))
        dtype = np.result_type(*[value.dtype for value in values if isinstance(value, KerasTensor)])
        # Constants have the dtype of the tensors, as Python's numbers do.
        values = tuple(v.astype(dtype) if isinstance(v, np.ndarray) else v for v in values)
        output = KerasTensor(shape, self.result_dtype(dtype))
        Node(self, values, {}, output)
        return output

    def call(self, *values: Any) -> Tensor:
        """Compute the result."""
        raise NotImplementedError

    def result_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of the result for operands of a dtype."""
        return dtype

    def _broadcast(self, first: Shape, second: Shape) -> Shape:
        length = max(len(first), len(second))
        pairs = zip(
            (1,) * (length - len(first)) + first,
            (1,) * (length - len(second)) + second,
            strict=True,
        )
        shape: list[int | None] = []
        for a, b in pairs:
            if a is not None and b is not None and a != b and 1 not in (a, b):
                raise ValueError(
                    f'operation "{self.name}": shapes {first} and {second} do not go together'
                )
            shape.append(b if a == 1 or (a is None and b != 1) else a)
        return tuple(shape)

    def get_config(self) -> dict[str, Any]:
        """Return what the operation is made of."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Operation:
        """Make the operation that has a configuration."""
        return cls(**config)

    def __repr__(self) -> str:
        return f"<Operation {type(self).__name__} name={self.name}>"


class _Binary(Operation):
    function: Any = None

    def call(self, *values: Any) -> Tensor:
        x1, x2 = values
        if not isinstance(x1, Tensor):
            x1 = as_tensor(x1, like=x2 if isinstance(x2, Tensor) else None)
        result: Tensor = type(self).function(x1, x2)
        return result


class Add(_Binary):
    """``x1 + x2``."""

    function = operator.add


class Subtract(_Binary):
    """``x1 - x2``."""

    function = operator.sub


class Multiply(_Binary):
    """``x1 * x2``."""

    function = operator.mul


class TrueDivide(_Binary):
    """``x1 / x2``."""

    function = operator.truediv

    def result_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of the result: a quotient of integers is none."""
        return dtype if dtype.kind in "fV" else np.dtype(np.float32)


class Negative(Operation):
    """``-x``."""

    def call(self, *values: Any) -> Tensor:
        """Compute the result."""
        return -as_tensor(values[0])


#: By the names that files have for them.
OPERATIONS: dict[str, type[Operation]] = {
    "Add": Add,
    "Subtract": Subtract,
    "Multiply": Multiply,
    "TrueDivide": TrueDivide,
    "Divide": TrueDivide,
    "Negative": Negative,
}
