"""From what users pass, yield and return to elements: nests of arrays, and back to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import nest
from ..array_backend import Array, array_module, copy, is_array
from ..tensor import Tensor, as_tensor
from .spec import TensorSpec

__all__ = ["Element", "as_element", "call_with", "named_leaves", "row_of", "stack"]

#: An array, or a tuple or mapping of elements.
Element = Any


def as_element(value: Any, what: str, own: bool = False, where: str = "") -> Element:
    """Return ``value`` as a nest of arrays.

    Tuples and mappings are structure. All else, lists included, becomes one array: Python's floats
    become float32 and its integers int32, arrays keep their dtype.

    Parameters
    ----------
    value
        What a user gave.
    what
        Whose value it is, for error messages.
    own
        Copy arrays, so that whoever made them may write to them again.
    where
        The place of ``value`` in the structure around it.

    Raises
    ------
    TypeError, ValueError
        If a component cannot be an array of a supported dtype.
    """
    if isinstance(value, Mapping):
        items = [as_element(v, what, own, f"{where}[{k!r}]") for k, v in value.items()]
        return nest.rebuild(value, items)
    if isinstance(value, tuple):
        items = [as_element(v, what, own, f"{where}[{i}]") for i, v in enumerate(value)]
        return nest.rebuild(value, items)
    try:
        array = as_tensor(value).array
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        component = f", component {where}" if where else ""
        hint = " (a list is one tensor; components go into a tuple)" if value.__class__ is list else ""
        raise kind(f"{what}{component}: {error}{hint}") from error
    return copy(array) if own and is_array(value) else array


def named_leaves(structure: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves with names that tell people where they are, such as ``[0]['image']``."""
    if not nest.is_nested(structure):
        yield where or "the tensor", structure
        return
    pairs = structure.items() if isinstance(structure, Mapping) else enumerate(structure)
    for key, child in pairs:
        yield from named_leaves(child, f"{where}[{key!r}]")


def call_with(function: Callable[..., Any], element: Element) -> Any:
    """Call a user's function with an element as tensors; a plain tuple becomes its arguments."""
    tensors = nest.map_structure(Tensor, element)
    return function(*tensors) if type(tensors) is tuple else function(tensors)


def row_of(element: Element, i: int) -> Element:
    """Return row ``i`` of each array (a view)."""
    return nest.map_structure(lambda array: array[i, ...], element)


def stack(elements: list[Element]) -> Element:
    """Join elements of one structure along a new first axis.

    Raises
    ------
    ValueError, TypeError
        If the elements differ in structure or shape, or in dtype.
    """
    return nest.map_structure(_stack, *elements)


def _stack(*arrays: Array) -> Array:
    first = arrays[0]
    shape, dtype = first.shape, first.dtype
    for i, array in enumerate(arrays):
        if array.shape != shape:
            raise ValueError(
                f"batch: the elements 0 and {i} of a batch have different shapes {shape} and "
                f"{array.shape}; bring them to one shape with map() first"
            )
        if array.dtype != dtype:
            raise TypeError(
                f"batch: the elements 0 and {i} of a batch have different dtypes {dtype} and "
                f"{array.dtype}; cast() them in map(), or give from_generator an output_signature"
            )
    module = array_module(first)
    joined: Array = module.empty((len(arrays), *shape), dtype)
    return np.stack(arrays, out=joined)


def as_specified(value: Any, signature: Any, what: str) -> Element:
    """Return ``value`` as a nest of arrays of its own that agree with ``signature``.

    Raises
    ------
    TypeError
        If structure or dtype differ from the signature.
    ValueError
        If a shape does, or a number does not fit the dtype.
    """
    if isinstance(value, list) and isinstance(signature, tuple):
        value = tuple(value)

    def convert(spec: TensorSpec, leaf: Any) -> Array:
        array = leaf.array if isinstance(leaf, Tensor) else as_tensor(leaf, spec.dtype).array
        if not spec.is_compatible_with(array):
            raise ValueError(
                f"got an element of shape {array.shape} and dtype {array.dtype} where the "
                f"signature says shape {spec.shape} and dtype {spec.dtype}"
            )
        return copy(array) if is_array(leaf) else array

    try:
        return _map_up_to(signature, convert, value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what}: {error}") from error
