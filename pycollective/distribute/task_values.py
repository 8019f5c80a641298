"""Values and errors in the messages between the tasks of a parameter-server cluster.

A value is encoded as a flat list of tokens, with its arrays; nothing is unpickled. The list names
functions, iterators and classes that both programs have made, and holds no code. Decoding imports
no module, and calls no code of a class that the message names.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np

from pycollective import errors
from pycollective.distribute.task_links import spec_of
from pycollective.distribute.values import PerReplica
from pycollective.errors import NotFoundError
from pycollective.launch.handshake import HandshakeError
from pycollective.tensor import IndexedSlices, Tensor

_MOST_TOKENS = 8_192
_LONGEST_TEXT = 32
_MOST_LEVELS = 64
_LONGEST_ERROR = 10_000
_MOST_CHARACTERS = 50_000
_MOST_ATTRIBUTES = 100
"""The most arguments and attributes of an error, and characters in them; a message has 1 MiB."""

Special = Callable[[Any], list[Any] | None]
"""Return the token of a value that the programs know by name, else None."""


def _sendable(array: Any) -> Any:
    """Return an array whose dtype can be sent; raise TypeError if there is none."""
    spec_of(array)
    return array if array.dtype.itemsize else array.astype(f"{array.dtype.kind}1")


def encode(value: Any, special: Special) -> tuple[list[Any], list[Any]]:
    """Return a nest of tensors, arrays and plain values as tokens and arrays.

    Raises
    ------
    TypeError
        A value is of another type, or a named tuple whose class is not at the top of its module.
    ValueError
        There are too many values.
    """
    if value.__class__ is Tensor:
        return [["tensor"]], [_sendable(value.numpy())]
    tokens: list[Any] = []
    arrays: list[Any] = []

    def add(kind: str, *found: Any) -> None:
        tokens.append([kind])
        arrays.extend(_sendable(np.asarray(array)) for array in found)

    def walk(value: Any, level: int) -> None:
        if len(tokens) > _MOST_TOKENS or level > _MOST_LEVELS:
            raise ValueError(
                f"a function's arguments or results have more than {_MOST_TOKENS} values or "
                f"{_MOST_LEVELS} levels: join them to fewer arrays"
            )
        token = special(value)
        if token is not None:
            tokens.append(token)
        elif (
            value is None
            or type(value) is bool
            or _is_int64(value)
            or (type(value) is str and len(value) <= _LONGEST_TEXT and value.isprintable())
        ):
            tokens.append(["plain", value])
        elif type(value) is str:
            add("text", np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8))
        elif type(value) is bytes:
            add("bytes", np.frombuffer(value, np.uint8))
        elif type(value) is int:
            tokens.append(["int", hex(value)])
        elif type(value) is float:
            tokens.append(["float", value.hex()])
        elif type(value) is complex:
            add("complex", np.complex128(value))
        elif isinstance(value, Tensor):
            add("tensor", value.numpy())
        elif isinstance(value, IndexedSlices):
            add("slices", value.values.numpy(), value.indices.numpy())
            shape = value.dense_shape
            tokens[-1].append(None if shape is None else list(shape))
        elif isinstance(value, np.generic):
            add("scalar", value)
        elif isinstance(value, np.ndarray):
            add("array", value)
        elif type(value) in (dict, OrderedDict):
            tokens.append(["dict" if type(value) is dict else "OrderedDict", len(value)])
            for key, item in value.items():
                walk(key, level + 1)
                walk(item, level + 1)
        elif isinstance(value, (list, tuple)) and (kind := _kind_of(type(value))):
            tokens.append([*kind, len(value)])
            for item in value:
                walk(item, level + 1)
        elif isinstance(value, PerReplica):
            tokens.append(["replicas", len(value.values)])
            for item in value.values:
                walk(item, level + 1)
        else:
            raise TypeError(
                f"a {type(value).__name__} cannot be sent between the processes of a cluster: use "
                "lists, tuples and dicts of tensors, arrays, numbers, texts and None. The class of a "
                "named tuple must be at the top level of a module"
            )

    walk(value, 0)
    return tokens, arrays


def decode(tokens: Any, arrays: list[Any], special: Callable[[list[Any]], Any]) -> Any:
    """Return the value of `encode`; ``special`` returns the values that have names."""
    if not isinstance(tokens, list):
        raise HandshakeError("a message without tokens")
    if tokens == [["tensor"]] and arrays:
        return Tensor(arrays[0])
    rest, data = iter(tokens), iter(arrays)

    def walk(level: int) -> Any:
        token = next(rest)
        if level > _MOST_LEVELS or not isinstance(token, list) or not token:
            raise HandshakeError("a wrong token")
        kind, last = token[0], token[-1]
        if kind in _CONTAINERS and (type(last) is not int or last < 0):
            raise HandshakeError("a token of a wrong length")
        if kind == "plain":
            if last is not None and type(last) not in (bool, int, str):
                raise HandshakeError("a token of a wrong value")
            return last
        if kind == "int":
            return int(last, 16)
        if kind == "float":
            return float.fromhex(last)
        if kind in ("dict", "OrderedDict"):
            items = [(walk(level + 1), walk(level + 1)) for _ in range(last)]
            return dict(items) if kind == "dict" else OrderedDict(items)
        if kind in ("list", "tuple"):
            values = [walk(level + 1) for _ in range(last)]
            return values if kind == "list" else tuple(values)
        if kind == "replicas":
            return PerReplica([walk(level + 1) for _ in range(last)])
        if kind == "namedtuple":
            cls = _named_tuple(token[1:-1], last)
            return tuple.__new__(cls, [walk(level + 1) for _ in range(last)])
        if kind == "tensor":
            return Tensor(next(data))
        if kind == "slices":
            return IndexedSlices(next(data), next(data), last)
        if kind == "array":
            return next(data)
        if kind == "scalar":
            return next(data).reshape(())[()]
        if kind == "complex":
            return complex(next(data))
        if kind == "bytes":
            return next(data).tobytes()
        if kind == "text":
            return next(data).tobytes().decode("utf-8", "surrogatepass")
        return special(token)

    try:
        value = walk(0)
        if next(rest, None) is not None:
            raise HandshakeError("more tokens than a value has")
        return value
    except (StopIteration, TypeError, ValueError, ArithmeticError) as error:
        raise HandshakeError(f"tokens that mean nothing: {error}") from None


_CONTAINERS = ("dict", "OrderedDict", "list", "tuple", "replicas", "namedtuple")


def _kind_of(cls: type) -> list[str]:
    """Return the token of a list or a tuple without its length; [] if its class cannot be sent."""
    if cls in (list, tuple):
        return [cls.__name__]
    name = _name_of(cls) if issubclass(cls, tuple) and hasattr(cls, "_fields") else None
    return [] if name is None else ["namedtuple", *name]


def _named_tuple(name: Any, length: int) -> Any:
    """Return the class of a named tuple in a message."""
    cls = _class_of(name)
    fields = getattr(cls, "_fields", None)
    if cls is None or not issubclass(cls, tuple) or not isinstance(fields, tuple):
        fields = ()
    if not fields or len(fields) != length:
        raise NotFoundError(
            f"the named tuple {'.'.join(map(str, name))!r} with {length} fields is not known to this "
            "task. Define it at the top level of a module, and import the module on all tasks before "
            "the first ClusterCoordinator.schedule()"
        )
    return cls


# Classes of the program -----------------------------------------------------------------------------


def _class_of(name: Any) -> type | None:
    """Return a class by its module and its qualified name, if this process has imported the module.

    Only dictionaries are read, because attributes of a module can be functions that import others.
    """
    if not isinstance(name, list) or [type(part) for part in name] != [str, str]:
        return None
    found: Any = sys.modules.get(name[0])
    if type(found) is not ModuleType:
        return None
    for part in name[1].split("."):
        found = vars(found).get(part)
        if not isinstance(found, type):
            return None
    return found  # type: ignore[no-any-return]


def _name_of(cls: type) -> list[str] | None:
    """Return the name of a class for `_class_of`, or None if the class is not there."""
    name = [cls.__module__, cls.__qualname__]
    return name if _class_of(name) is cls else None


# Errors ---------------------------------------------------------------------------------------------


def error_message(error: BaseException) -> dict[str, Any]:
    """Return an error as a message: the name of its class, and its text.

    For a class of Python or of the program, the message has the module and the name of the class, and
    the arguments and attributes. All of them must be plain: without some of them, methods of the class
    could fail.
    """
    text = _encodable(str(error)[:_LONGEST_ERROR])
    message: dict[str, Any] = {"error": type(error).__name__, "text": text}
    # The args of an OSError lack the file's name.
    name, args = _name_of(type(error)), [*_python_base(type(error)).__reduce__(error)[1]]
    attributes = {k: v for k, v in vars(error).items() if not k.startswith("__")}
    if name is not None and _error_class(name) is not None and _are_plain(args, attributes):
        message |= {"class": name, "args": args, "attributes": attributes}
    return message


def error_of(message: dict[str, Any], where: str) -> Exception:
    """Return the error in a message.

    Its class is one of Python or of this package, or one of the program in a module that this process
    has imported. Else the error is a RuntimeError.
    """
    name, text = str(message.get("error")), str(message.get("text"))
    try:
        cls: Any = _error_class(message.get("class"))
        if cls is not None:
            return _error_with_arguments(cls, message, text, where)
    except TypeError:
        pass
    cls = getattr(errors, name, None) or getattr(builtins, name, None)
    # A UnicodeDecodeError takes no text, but its base UnicodeError does.
    for base in getattr(cls, "__mro__", ()):
        with contextlib.suppress(TypeError):
            if issubclass(base, Exception) and base is not Exception:
                return cast(Exception, base(f"{text} (on {where})"))
    return RuntimeError(f"{name}: {text} (on {where})")


def _error_class(name: Any) -> type[Exception] | None:
    """Return the class of an error that is not one of this package."""
    cls = _class_of(name)
    if cls is None or not issubclass(cls, Exception):
        return None
    return None if name[0].partition(".")[0] == "pycollective" else cls


def _python_base(cls: Any) -> Any:
    """Return the class of Python that the class of an error is or extends."""
    return next(c for c in cls.__mro__ if vars(builtins).get(c.__name__) is c)


def _error_with_arguments(cls: Any, message: dict[str, Any], text: str, where: str) -> Exception:
    """Return an error with the arguments in a message, made by the class of Python that it extends."""
    args: Any = message.get("args")
    attributes: Any = message.get("attributes")
    if not _are_plain(args, attributes):
        raise TypeError("the error has no plain arguments and attributes")
    if args == [text]:
        args = [f"{text} (on {where})"]
    base = _python_base(cls)
    error: Exception = base.__new__(cls, *args)
    base.__init__(error, *args)
    error.__dict__.update(attributes)
    return error


def _are_plain(args: Any, attributes: Any) -> bool:
    """Return True if a message can have the arguments and the attributes of an error."""
    if not isinstance(args, list) or not isinstance(attributes, dict):
        return False
    if any(name.startswith("__") or not name.isidentifier() for name in attributes):
        return False
    values = [*args, *attributes.values()]
    texts = [value for value in values if type(value) is str]
    rest = [value for value in values if type(value) is not str]
    return (
        all(value is None or type(value) in (bool, float) or _is_int64(value) for value in rest)
        and all(_encodable(value) == value for value in texts)
        and sum(map(len, texts)) <= _MOST_CHARACTERS
        and len(values) <= _MOST_ATTRIBUTES
    )


def _is_int64(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which no message can have."""
    return text.encode("utf-8", "backslashreplace").decode()
