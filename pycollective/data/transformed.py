"""`Transformed`: the base class of datasets that are made from another one.

A subclass defines `_iter`, which makes its elements from those of ``self._source``. A subclass that
changes the number or the spec of the elements also defines `_known_length` or `_make_spec`. A subclass
that changes the number of rows of each element defines `_batch_size`. A subclass that only orders
rows derives from `Ordered`.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator, Sequence
from operator import index
from types import CellType, CodeType, FunctionType
from typing import Any

from pycollective import _core
from pycollective.data.dataset import Dataset, as_tensors
from pycollective.data.spec import AUTOTUNE
from pycollective.errors import InvalidArgumentError


def at_least(value: Any, least: int, name: str) -> int:
    """Return an argument as an int.

    The argument is an int, or an integer tensor, variable or array without axes.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int of at least {least}, not {value!r}") from None
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}, not {number}")
    return number


def number_or_auto(value: Any, name: str) -> int:
    """Return a number of at least 1; AUTOTUNE becomes the number of cores."""
    number = at_least(value, AUTOTUNE, name)
    return _core.usable_cores() if number == AUTOTUNE else at_least(number, 1, name)


#: Functions that read any variable of the module.
_NAMESPACES = frozenset({"globals", "locals", "vars", "dir", "eval", "exec"})
#: Globals that calls and imports need.
_OF_MODULES = frozenset(
    {"__builtins__", "__file__", "__loader__", "__name__", "__package__", "__path__", "__spec__"}
)


def checked_function(name: str, function: Any) -> Any:
    """Return the function of a transformation; raise TypeError if it is not callable.

    The result has the values that the function's variables have now, as in TensorFlow, which traces
    the function now. So a loop may make several datasets with functions of its variable. Variables
    that the function assigns, and globals of which one is not defined yet, stay those of the program.
    """
    if not callable(function):
        raise TypeError(f"{name} needs a function, not {type(function).__name__}")
    if type(function) is not FunctionType:
        return function
    steps = list(_steps_of(function.__code__))
    assigned = {name for step, name in steps if step.startswith(("STORE_", "DELETE_"))}
    closure = function.__closure__ and tuple(
        cell if name in assigned else _copy_of(cell)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    )
    known = function.__globals__
    read = {name for step, name in steps if step == "LOAD_GLOBAL"}
    has_values = read <= known.keys() | vars(builtins).keys() and not read & _NAMESPACES
    if assigned.isdisjoint(read) and has_values:
        # The others would live as long as the dataset.
        names = {name for step, name in steps if "GLOBAL" in step or "NAME" in step}
        needed = _OF_MODULES | names
        known = {name: value for name, value in known.items() if name in needed}
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


def _steps_of(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield each instruction of a function and the functions in it, with its argument."""
    for step in dis.get_instructions(code):
        yield step.opname, step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps_of(constant)


def _copy_of(cell: CellType) -> CellType:
    try:
        return CellType(cell.cell_contents)
    except ValueError:  # the variable has no value yet
        return cell


def called(function: Callable[..., Any], element: Any) -> Any:
    """Return the result of a function for an element; a tuple's items are its arguments."""
    value = as_tensors(element)
    return function(*value) if type(value) is tuple else function(value)


class Transformed(Dataset):
    """A dataset made from another one, with the other one's spec and cardinality by default."""

    def __init__(self, source: Dataset) -> None:
        self._source = source

    def _inputs(self) -> tuple[Dataset, ...]:
        return (self._source,)

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        return self._copy(_source=inputs[0])

    def _make_spec(self) -> Any:
        return self._source.element_spec

    def _known_length(self) -> int:
        return self._source._known_length()

    def _batch_size(self) -> int | None:
        return self._source._batch_size()
