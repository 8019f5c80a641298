"""Digests of scheduled functions: a worker refuses the functions of another program version."""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections import deque
from typing import Any

import numpy as np

from pycollective.tensor.function import Function, functions_made

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
"""The instructions that load a global."""
_STANDARD_LIBRARY = tuple(
    {os.path.join(sysconfig.get_path(key), "") for key in ("stdlib", "platstdlib")}
)
_INSTALLED = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
_MOST_ITEMS = 1000
"""The most items of a list, tuple, set or dict that is compared; a longer one is data."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    type(functools.lru_cache(len)): ("__wrapped__",),
    Function: ("python_function",),
}
"""The attributes with the functions of an object, by the object's type."""


def digest_of(function: Any) -> str:
    """Return a digest of a function and of all that it uses, equal in processes of one program.

    The digest covers the program's own functions and classes that the code names, their default
    arguments, captured values, and globals. Numbers and texts count by value, also in lists, tuples,
    sets and dicts. Other objects count by their type. Libraries are not compared.
    """
    known = getattr(function, "digest", None)
    if isinstance(known, str):
        return known
    text = "\0".join(_Reached(function).texts)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    function.digest = digest
    return digest


def globals_of(function: Any) -> list[str]:
    """Return the names of the globals in a digest that are no functions, classes or modules."""
    return sorted(_Reached(function).globals)


def take_digests() -> None:
    """Take the digests of all functions that ``tf.function`` has returned.

    The chief and the workers call this function at the same place of the program. Later the chief can
    change a global, and the workers do not.
    """
    for function in functions_made():
        digest_of(function)


class _Reached:
    """The code and the values that a function uses.

    Attributes
    ----------
    texts : list of str
        The code and the values as texts, in an order that is equal in all processes.
    globals : set of str
        The names of the globals that are no functions, classes or modules.
    """

    def __init__(self, function: Any) -> None:
        self.texts: list[str] = []
        self.globals: set[str] = set()
        #: The values to add, each with the names that the code uses: attributes of a module.
        self._pending: deque[tuple[Any, tuple[str, ...]]] = deque()
        #: The values that were added, with their numbers. The references keep the ids unique.
        self._known: dict[Any, tuple[int, Any]] = {}
        function = getattr(function, "python_function", function)
        if isinstance(function, types.FunctionType):
            self.texts += map(_text_of, _codes(function.__code__))  # also of a library's function
        self._pending.append((function, ()))
        while self._pending:
            self._add(*self._pending.popleft())

    def _add(self, value: Any, names: tuple[str, ...]) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.texts.append(_constant(value))
            return
        key = (id(value), names if kind is types.ModuleType else ())
        if key in self._known:
            self.texts.append(f"again {self._known[key][0]}")
            return
        self._known[key] = len(self._known), value
        if kind is types.ModuleType:
            self._add_module(value, names)
        elif kind is types.FunctionType:
            self._add_function(value)
        elif kind in (list, set, frozenset, dict) or isinstance(value, tuple):
            self._add_container(value)
        elif isinstance(value, np.generic):
            self.texts.append(f"{value.dtype} {value.tobytes()!r}")
        elif isinstance(value, type):
            self._add_class(value)
        else:
            self._pending.append((kind, ()))
            self._pending.extend((getattr(value, name), ()) for name in _PARTS.get(kind, ()))

    def _add_global(self, namespace: dict[str, Any], name: str, names: tuple[str, ...]) -> None:
        """Add a global if the module has it; `__file__` and the like differ between hosts."""
        if name not in namespace or name.startswith("__"):
            return
        value = namespace[name]
        if not isinstance(value, (types.FunctionType, Function, type, types.ModuleType)):
            self.globals.add(f"{namespace.get('__name__')}.{name}")
        self.texts.append(f"global {name}")
        self._pending.append((value, names))

    def _add_module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        self.texts.append(f"module {module.__name__}")
        namespace = vars(module)
        if _is_of_program(namespace):
            for name in names:
                self._add_global(namespace, name, names)

    def _add_function(self, function: types.FunctionType) -> None:
        self.texts.append(f"function {function.__module__}.{function.__qualname__}")
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._pending.append((wrapped, ()))
        namespace = function.__globals__
        if not _is_of_program(namespace):
            return
        codes = _codes(function.__code__)
        self.texts += map(_text_of, codes)
        names = tuple(dict.fromkeys(name for code in codes for name in code.co_names))
        self._pending.append((function.__defaults__, ()))
        self._pending.append((function.__kwdefaults__, ()))
        for cell in function.__closure__ or ():
            try:
                self._pending.append((cell.cell_contents, names))
            except ValueError:  # the variable has no value yet
                self.texts.append("empty")
        for name in dict.fromkeys(name for code in codes for name in _globals_in(code)):
            self._add_global(namespace, name, names)

    def _add_container(self, value: Any) -> None:
        self.texts.append(f"{type(value).__name__} {len(value)}")
        if len(value) > _MOST_ITEMS:
            return
        if isinstance(value, (set, frozenset)):
            self.texts.append(_constant(value))
            return
        items = [*value, *value.values()] if isinstance(value, dict) else value
        self._pending.extend((item, ()) for item in items)

    def _add_class(self, value: type) -> None:
        self.texts.append(f"class {value.__module__}.{value.__qualname__}")
        module = sys.modules.get(value.__module__)
        if module is None or not _is_of_program(vars(module)):
            return
        self._pending.extend((base, ()) for base in value.__bases__)
        for name, part in sorted(vars(value).items()):
            # Python sets other attributes with underscores, such as those with line numbers.
            if not name.startswith("__") or isinstance(part, (types.FunctionType, *_PARTS)):
                self.texts.append(name)
                self._pending.append((part, ()))


def _is_of_program(namespace: dict[str, Any]) -> bool:
    """Return True if a module is part of the program: no library, and not installed."""
    name, file = namespace.get("__name__"), namespace.get("__file__")
    if name == "__main__":
        return True
    if not isinstance(file, str) or str(name).partition(".")[0] == "pycollective":
        return False
    path = os.path.abspath(file)
    return not path.startswith(_STANDARD_LIBRARY) and not any(part in path for part in _INSTALLED)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Return a function's code, and the codes of the functions and classes inside."""
    found = [code]
    for outer in found:  # the list grows meanwhile
        found += [value for value in outer.co_consts if isinstance(value, types.CodeType)]
    return found


@functools.lru_cache(maxsize=1024)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the globals that a code loads, in their order."""
    loads = (i.argval for i in dis.get_instructions(code) if i.opname in _LOADS)
    return tuple(dict.fromkeys(loads))


@functools.lru_cache(maxsize=1024)
def _text_of(code: types.CodeType) -> str:
    """Return a code object as a text, without its path and line numbers."""
    if "__firstlineno__" in code.co_names:  # the body of a class, which sets its line number
        return repr(code.co_names)
    parts = (
        code.co_code,
        getattr(code, "co_exceptiontable", b""),
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        _constant(code.co_consts),
    )
    return repr(parts)


def _constant(value: Any) -> str:
    """Return a constant of a code as a text."""
    if isinstance(value, types.CodeType):
        return "code"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, (set, frozenset)):  # in another order in each process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    if type(value) is int:
        return hex(value)
    return repr(value) if type(value) in (*_PLAIN, slice) else type(value).__qualname__
