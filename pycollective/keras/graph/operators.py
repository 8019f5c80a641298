"""Operations of a graph: operators, indexing and functions of symbolic tensors.

Operations have no weights, and are not among a model's `layers`. Files store operators and indexing
as Keras does. Only this package can read a stored `FunctionCall`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from pycollective import math as math  # its functions accept symbolic tensors
from pycollective import nest
from pycollective.keras.backend import name_of_class, unique_name
from pycollective.keras.graph.symbols import (
    MODULE,
    KerasTensor,
    Node,
    Shape,
    has_symbols,
    shape_of,
)
from pycollective.keras.registration import public
from pycollective.tensor import Tensor, as_tensor, ops
from pycollective.tensor.symbolic import FUNCTIONS, accepts_symbols, recorders

_operation = functools.partial(public, MODULE, registered=True)


class Operation:
    """An operation of a graph, element-wise unless a subclass overrides `result_shape`."""

    built = True

    def __init__(self, name: str | None = None) -> None:
        self.name = unique_name(name_of_class(type(self))) if name is None else str(name)
        self.inbound_nodes: list[Node] = []

    def __call__(self, *values: Any) -> Any:
        """Compute the result; on symbolic tensors, record the call."""
        if not has_symbols(values):
            return self.call(*values)
        shape = self.result_shape(*values)
        dtype = np.result_type(*[value.dtype for value in values if isinstance(value, KerasTensor)])
        # Constant arrays get the tensors' dtype, as Python numbers do.
        values = tuple(_constant(v, dtype) if isinstance(v, np.ndarray) else v for v in values)
        output = KerasTensor(shape, self.result_dtype(dtype))
        Node(self, values, {}, output)
        return output

    def call(self, *values: Any) -> Tensor:
        """Compute the result."""
        raise NotImplementedError

    def result_shape(self, *values: Any) -> Shape:
        """Return the shape of the result."""
        shape: Shape = ()
        for value in values:
            shape = self._broadcast(shape, shape_of(value))
        return shape

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
                    f'operation "{self.name}": shapes {first} and {second} do not match'
                )
            shape.append(b if a == 1 or (a is None and b != 1) else a)
        return tuple(shape)

    def get_config(self) -> dict[str, Any]:
        """Return the operation's config."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Operation:
        """Make the operation of a config."""
        return cls(**config)

    def __repr__(self) -> str:
        return f"<Operation {type(self).__name__} name={self.name}>"


def _constant(value: Any, dtype: np.dtype[Any]) -> Any:
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise TypeError(
            f"an array of dtype {value.dtype} cannot become a tensor of dtype {dtype} without loss; "
            "use cast()"
        )
    return value.astype(dtype)


class _Binary(Operation):
    function: Any = None

    def call(self, *values: Any) -> Tensor:
        x1, x2 = values
        if not isinstance(x1, Tensor):
            x1 = as_tensor(x1, like=x2 if isinstance(x2, Tensor) else None)
        result: Tensor = type(self).function(x1, x2)
        return result


@_operation()
class Add(_Binary):
    """``x1 + x2``."""

    function = operator.add


@_operation()
class Subtract(_Binary):
    """``x1 - x2``."""

    function = operator.sub


@_operation()
class Multiply(_Binary):
    """``x1 * x2``."""

    function = operator.mul


@_operation("Divide")
class TrueDivide(_Binary):
    """``x1 / x2``."""

    function = operator.truediv

    def result_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return dtype if dtype.kind in "fV" else np.dtype(np.float32)


@_operation()
class FloorDivide(_Binary):
    """``x1 // x2``."""

    function = operator.floordiv


@_operation()
class Mod(_Binary):
    """``x1 % x2``."""

    function = operator.mod


@_operation()
class Power(_Binary):
    """``x1 ** x2``."""

    function = operator.pow


@_operation()
class Matmul(Operation):
    """``x1 @ x2``, the product of matrices in the last two axes; other axes broadcast."""

    def call(self, *values: Any) -> Tensor:
        x1, x2 = map(as_tensor, values)
        left = x1 if x1.ndim > 1 else ops.expand_dims(x1, 0)
        result = left @ (x2 if x2.ndim > 1 else ops.expand_dims(x2, 1))
        if x1.ndim == 1:
            result = ops.squeeze(result, -2)
        return result if x2.ndim > 1 else ops.squeeze(result, -1)

    def result_shape(self, *values: Any) -> Shape:
        first, second = map(shape_of, values)
        inside = first[-1:], second[-2:-1] or second
        # An axis of unknown length matches every length; a scalar has no axes.
        fits = len(inside[0]) == len(inside[1]) and (inside[0] == inside[1] or (None,) in inside)
        if not fits or not first:
            raise ValueError(f'operation "{self.name}": shapes {first} and {second} do not match')
        columns = second[-1:] if len(second) > 1 else ()
        return (*self._broadcast(first[:-2], second[:-2]), *first[-2:-1], *columns)


@_operation()
class Negative(Operation):
    """``-x``."""

    def call(self, *values: Any) -> Tensor:
        return -as_tensor(values[0])


@_operation("Abs")
class Absolute(Operation):
    """``abs(x)``."""

    def call(self, *values: Any) -> Tensor:
        return abs(as_tensor(values[0]))


@_operation()
class GetItem(Operation):
    """``x[key]``, with a key of integers, slices, ``...`` and None."""

    def call(self, *values: Any) -> Tensor:
        x, key = values
        # Files store a tuple as a list.
        return as_tensor(x)[tuple(key) if isinstance(key, list) else key]

    def result_shape(self, *values: Any) -> Shape:
        x, key = values
        keys = list(key) if isinstance(key, (list, tuple)) else [key]
        wrong = [k for k in keys if not (k is None or k is Ellipsis or _is_index(k))]
        if wrong:
            raise TypeError(
                f"{x} can be indexed by integers, slices, ... and None, not by {wrong[0]!r}"
            )
        whole = [position for position, k in enumerate(keys) if k is Ellipsis]
        used = sum(_is_index(k) for k in keys)
        if used > x.ndim or len(whole) > 1:
            raise ValueError(f"{x} has {x.ndim} axes: the index {key!r} does not fit")
        position = whole[0] if whole else len(keys)
        keys[position : position + 1] = [slice(None)] * (x.ndim - used)
        lengths = iter(x.shape)
        shape: list[int | None] = []
        for k in keys:
            length = 1 if k is None else next(lengths)
            if isinstance(k, slice):
                # A slice of an axis of unknown length has unknown length.
                shape.append(None if length is None else len(range(*k.indices(length))))
            elif k is None:
                shape.append(1)
            elif length is not None and not -length <= k < length:
                raise ValueError(f"{x}: index {k} is out of range for an axis of length {length}")
        return tuple(shape)


def _is_index(key: Any) -> bool:
    return isinstance(key, (slice, int, np.integer)) and not isinstance(key, bool)


@public("pycollective.keras", registered=True)
class FunctionCall(Operation):
    """A call of a function of tensors, such as ``tf.reduce_mean``.

    Parameters
    ----------
    function : str
        The function's name.
    name : str, optional
        The operation's name; the default is the function's name with a number.

    Raises
    ------
    ValueError
        If the function does not accept symbolic tensors.
    """

    def __init__(self, function: str, name: str | None = None) -> None:
        if function not in FUNCTIONS:
            raise ValueError(f"no function {function!r} takes symbolic tensors")
        self.function = function
        super().__init__(unique_name(function) if name is None else name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; on symbolic tensors, record the call."""
        if not has_symbols((args, kwargs)):
            return FUNCTIONS[self.function](*args, **kwargs)
        outputs = self._outputs(args, kwargs)
        Node(self, args, kwargs, outputs)
        return outputs

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return symbolic results, with None for unknown lengths of axes.

        Call the function on ones twice: with the length 2, and then with 3, for each unknown length.
        A length that differs between the two results is unknown.
        """

        def results(length: int) -> Any:
            def ones(leaf: Any) -> Any:
                if not isinstance(leaf, KerasTensor):
                    return leaf
                return Tensor(np.ones([length if n is None else n for n in leaf.shape], leaf.dtype))

            values = nest.map_structure(ones, (args, kwargs))
            return FUNCTIONS[self.function](*values[0], **values[1])

        def symbol(first: Tensor, second: Tensor) -> KerasTensor:
            lengths = zip(first.array.shape, second.array.shape, strict=True)
            return KerasTensor([a if a == b else None for a, b in lengths], first.dtype)

        try:
            both = results(2), results(3)
        except ValueError:
            # A reshape may need a length with more divisors.
            both = results(60), results(120)
        return nest.map_structure(symbol, *both)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "function": self.function}


# Files name functions that the program may not have used yet.
for _function in (getattr(ops, _name) for _name in ops.__all__):
    if callable(_function):
        accepts_symbols(_function)

recorders.append(lambda name, args, kwargs: FunctionCall(name)(*args, **kwargs))
