"""Functions of single rows, called once for a block of rows.

``map(lambda x: x / 255)`` of rows in memory divides a whole block. This needs three things:

1. The function uses only operations that `RowBlock` implements. A call shows this.
2. Its code has no effect but its result, and arrays are the only changeable values that it reads.
   `arrays_read` finds this.
3. A call does not change these arrays. Later calls then do not change them either, because they do the
   same.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import Array
from pycollective.tensor import Tensor, random
from pycollective.tensor.row_block import RowBlock

_OPERATIONS = "pycollective.tensor.ops."
#: The types of constants. Subclasses are not allowed, because their methods could have effects.
_CONSTANTS = frozenset((type(None), bool, int, float, str, bytes, Tensor))
_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        "abs bool dict enumerate float int isinstance len list max min range reversed round slice str "
        "sum tuple zip AssertionError IndexError KeyError TypeError ValueError"
    ).split()
)
#: Prefixes of the instructions that change something outside of the call, or may hide an error.
_EFFECTS = (
    "STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR STORE_NAME LOAD_NAME IMPORT_ LOAD_BUILD_CLASS "
    "SETUP_ BEFORE_ LOAD_SPECIAL PUSH_EXC_INFO LOAD_CLASSDEREF LOAD_FROM_DICT LOAD_SUPER_ATTR"
)
_HAVE_EFFECTS = tuple(_EFFECTS.split())
_MISSING = object()


def arrays_read(function: Any) -> list[Array] | None:
    """Return the arrays outside of a function that it reads; None if it may have an effect.

    The code may use operations of this package, constants, arrays, and functions for which the same
    holds. It stores nothing outside of its own variables and the arrays, and catches no exception.
    """
    arrays: list[Array] = []
    return arrays if _is_pure(function, set(), arrays) else None


def _is_pure(function: Any, seen: set[Any], arrays: list[Array]) -> bool:
    function = getattr(function, "python_function", function)
    if not isinstance(function, FunctionType):
        return False
    if function in seen:
        return True
    seen.add(function)
    code = function.__code__
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable without a value
        return False
    names = {**vars(builtins), **function.__globals__}
    outer = dict(zip(code.co_freevars, cells, strict=True))
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values = [*given, *_values_read(code, names, outer)]
    return all(_may_be_read(value, seen, arrays) for value in values)


def _values_read(code: CodeType, names: dict[str, Any], outer: dict[str, Any]) -> Iterator[Any]:
    """Yield the values from outside that a function reads; `_MISSING` stands for a forbidden step."""
    steps = list(dis.get_instructions(code))
    for number, step in enumerate(steps):
        name = step.argval
        stores_outside = step.opname in ("STORE_DEREF", "DELETE_DEREF") and name in outer
        if stores_outside or step.opname.startswith(_HAVE_EFFECTS):
            yield _MISSING
        elif step.opname == "LOAD_GLOBAL" or (step.opname == "LOAD_DEREF" and name in outer):
            value = (names if step.opname == "LOAD_GLOBAL" else outer).get(name, _MISSING)
            # Only the attribute of a module is used, never the module.
            for following in steps[number + 1 :]:
                if not isinstance(value, ModuleType) or not following.opname.startswith(
                    ("LOAD_ATTR", "LOAD_METHOD")
                ):
                    break
                value = getattr(value, following.argval, _MISSING)
            yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = {name: outer[name] for name in constant.co_freevars if name in outer}
            yield from _values_read(constant, names, inner)


def _may_be_read(value: Any, seen: set[Any], arrays: list[Array]) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(_may_be_read(item, seen, arrays) for item in value)
    if kind is np.ndarray:
        arrays.append(value)
        return value.dtype.kind in "biuf"
    if kind in _CONSTANTS or kind.__module__ in ("numpy", "numpy.dtypes"):
        return isinstance(value, (*_CONSTANTS, np.generic, np.dtype))
    if isinstance(value, type):
        return value in _BUILTINS or (
            value.__module__ in ("numpy", "numpy.dtypes")
            and issubclass(value, (np.generic, np.dtype))
        )
    if isinstance(value, BuiltinFunctionType):
        return value in _BUILTINS or value.__module__ == math.__name__
    if getattr(value, "__module__", "").startswith(_OPERATIONS):
        return True
    return _is_pure(value, seen, arrays)


class _NoGenerator:
    """A stand-in that refuses to draw random numbers: each row would need its own."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError("random numbers in a function of rows")


def result_by_rows(function: Callable[[Any], Any], rows: Any) -> Any:
    """Return a function's results for all rows of a nest of arrays, as a nest of arrays.

    ``function`` takes and returns nests of arrays.
    """
    columns = nest.flatten(rows)
    if not all(type(column) is np.ndarray and column.dtype.kind in "biuf" for column in columns):
        raise TypeError("only numbers on the host are computed in blocks")
    generator: Any = _NoGenerator()
    with random.generator_scope(generator):
        made = function(nest.map_structure(RowBlock, rows))
    count = len(columns[0])
    blocks: list[Array] = []

    def array_of(leaf: Any) -> Any:
        if type(leaf) is np.ndarray:
            return np.repeat(leaf[np.newaxis], count, axis=0)
        if not isinstance(leaf, RowBlock) or len(leaf.block) != count:
            raise TypeError(f"a {type(leaf).__name__} is no result for rows in a block")
        shared = any(leaf.block is block for block in blocks)
        blocks.append(leaf.block)
        return leaf.block.copy() if shared else np.ascontiguousarray(leaf.block)

    return nest.map_structure(array_of, made)
