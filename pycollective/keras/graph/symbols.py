"""`KerasTensor`, a tensor without values, and `Node`, the recorded call that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pycollective import nest
from pycollective.dtypes import as_dtype_or_string
from pycollective.keras.backend import unique_name
from pycollective.keras.registration import class_named
from pycollective.tensor.symbolic import SymbolError, recorders

Shape = tuple[int | None, ...]
#: The module that Keras's files name for operations.
MODULE = "keras.src.ops.numpy"


class History(NamedTuple):
    """The layer or operation that computes a tensor, and the indices of the call and the result."""

    operation: Any
    node_index: int
    tensor_index: int


def _operation(name: str) -> Any:
    """Return a new operation of this name from the registry, which `operators` fills."""
    return class_named(MODULE, name)()


def _operators(name: str) -> tuple[Any, Any]:
    """Return the methods of a binary operator for the left and for the right operand."""

    def left(self: KerasTensor, other: Any) -> Any:
        return _operation(name)(self, other)

    def right(self: KerasTensor, other: Any) -> Any:
        return _operation(name)(other, self)

    return left, right


class KerasTensor:
    """A symbolic tensor: it has a shape and a dtype, but no values. `Input` returns one.

    A layer called on a symbolic tensor records the call and returns a symbolic result. A `Model`
    consists of the calls between its inputs and outputs. ``+ - * / // % ** @``, ``abs``,
    ``x[...]`` and functions such as ``tf.reduce_mean`` are recorded too.

    Parameters
    ----------
    shape : sequence of int or None
        The lengths of the axes; None stands for any length.
    dtype : dtype-like
        The dtype of the elements.
    name : str, optional
        The name; the default is ``keras_tensor`` with a number.
    """

    # If the left operand is an array, NumPy must leave the operator to this class.
    __array_ufunc__ = None

    def __init__(self, shape: Any, dtype: Any = "float32", name: str | None = None) -> None:
        self.shape: Shape = tuple(None if n is None else int(n) for n in shape)
        self.dtype = as_dtype_or_string(dtype)
        self.name = unique_name("keras_tensor") if name is None else str(name)
        self._keras_history: History | None = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def history(self) -> History:
        """The layer or operation that computes this tensor, as a `History`.

        Raises
        ------
        ValueError
            If the tensor comes neither from `Input` nor from the call of a layer.
        """
        if self._keras_history is None:
            raise ValueError(f"{self} does not come from Input() or the call of a layer")
        return self._keras_history

    @property
    def node(self) -> Node:
        """The call that computes this tensor."""
        operation, node_index, _ = self.history
        node: Node = operation.inbound_nodes[node_index]
        return node

    def __repr__(self) -> str:
        return f"<KerasTensor shape={self.shape}, dtype={self.dtype}, name={self.name}>"

    # Without values ---------------------------------------------------------------------------

    def _refuse(self, use: str) -> SymbolError:
        return SymbolError(
            f"{self} is symbolic: it has no values, so it cannot be used {use}. Do this in the "
            "call() of a layer, and call the layer on the tensor"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise self._refuse("as an array or in an operation on tensors")

    def __tensor__(self) -> Any:
        raise self._refuse("as an array or in an operation on tensors")

    def __bool__(self) -> bool:
        raise self._refuse("as a condition")

    def __float__(self) -> float:
        raise self._refuse("as a number")

    def __int__(self) -> int:
        raise self._refuse("as a number")

    def __len__(self) -> int:
        raise self._refuse("where a length is asked for")

    def __iter__(self) -> Iterator[Any]:
        raise self._refuse("in a loop")

    # Operators --------------------------------------------------------------------------------

    __add__, __radd__ = _operators("Add")
    __sub__, __rsub__ = _operators("Subtract")
    __mul__, __rmul__ = _operators("Multiply")
    __truediv__, __rtruediv__ = _operators("TrueDivide")
    __floordiv__, __rfloordiv__ = _operators("FloorDivide")
    __mod__, __rmod__ = _operators("Mod")
    __pow__, __rpow__ = _operators("Power")
    __matmul__, __rmatmul__ = _operators("Matmul")

    def __ne__(self, other: object) -> Any:
        return True if other is None else recorders[0]("not_equal", (self, other), {})

    def __eq__(self, other: object) -> Any:
        # Two symbolic tensors are compared by identity, as in Keras 3, so that lists can be searched.
        if other is None or isinstance(other, KerasTensor):
            return self is other
        return recorders[0]("equal", (self, other), {})

    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return _operation("Negative")(self)

    def __abs__(self) -> Any:
        return _operation("Absolute")(self)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, list):
            # GetItem reads a list as a tuple, because files store tuples as lists. NumPy does not.
            raise TypeError(
                f"{self} can be indexed by integers, slices, ... and None, not by {key}"
            )
        return _operation("GetItem")(self, key)


class Node:
    """A recorded call of a layer or operation on symbolic tensors.

    The arguments are nests that contain symbolic tensors. ``outputs`` is a nest of symbolic results,
    whose history is set to this call.
    """

    def __init__(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.input_tensors = symbols_in((args, kwargs))
        self.output_tensors: list[KerasTensor] = leaves_of(outputs)
        number = len(operation.inbound_nodes)
        operation.inbound_nodes.append(self)
        for index, tensor in enumerate(self.output_tensors):
            tensor._keras_history = History(operation, number, index)

    @property
    def is_input(self) -> bool:
        """True if the node is an input of a graph: no symbolic tensor is among its arguments."""
        return not self.input_tensors

    def __repr__(self) -> str:
        return f"<Node operation={self.operation.name}>"


def leaves_of(structure: Any) -> list[Any]:
    """Return the leaves of a nest in Keras's order, in which the keys of dicts are sorted."""
    if isinstance(structure, Mapping):
        return [leaf for key in sorted(structure) for leaf in leaves_of(structure[key])]
    if isinstance(structure, (list, tuple)):
        return [leaf for item in structure for leaf in leaves_of(item)]
    return [structure]


def symbols_in(structure: Any) -> list[KerasTensor]:
    """Return the symbolic tensors in a nest."""
    return [leaf for leaf in leaves_of(structure) if isinstance(leaf, KerasTensor)]


def has_symbols(value: Any) -> bool:
    """Return True if a nest contains a symbolic tensor."""
    if isinstance(value, (list, tuple)):
        return any(map(has_symbols, value))
    if isinstance(value, Mapping):
        return any(map(has_symbols, value.values()))
    return isinstance(value, KerasTensor)


def map_symbols(function: Callable[[KerasTensor], Any], structure: Any) -> Any:
    """Apply ``function`` to each symbolic tensor of a nest."""
    return nest.map_structure(
        lambda leaf: function(leaf) if isinstance(leaf, KerasTensor) else leaf, structure
    )


def shape_of(value: Any) -> Shape:
    """Return the shape of a symbolic tensor, an array or a number."""
    shape = getattr(value, "shape", None)
    return tuple(np.shape(value) if shape is None else shape)
