"""Values and errors in the messages between the tasks of a parameter-server cluster.

A value is encoded as a flat list of tokens, with its arrays; nothing is unpickled. The list names
functions and iterators that both programs have made, and holds no code.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective import errors
from pycollective.distribute.task_links import spec_of
from pycollective.launch.handshake import HandshakeError
from pycollective.tensor import IndexedSlices, Tensor

_MOST_TOKENS = 8_192
_LONGEST_TEXT = 32
_MOST_LEVELS = 64

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
        A value is of another type.
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
            or (type(value) is int and abs(value) < 1 << 63)
            or (type(value) is str and len(value) <= _LONGEST_TEXT and value.isprintable())
        ):
            tokens.append(["plain", value])
        elif type(value) is str:
            add("text", np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8))
        elif type(value) is bytes:
            add("bytes", np.frombuffer(value, np.uint8))
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
        elif type(value) is dict:
            tokens.append(["dict", len(value)])
            for key, item in value.items():
                walk(key, level + 1)
                walk(item, level + 1)
        elif type(value) in (list, tuple):
            tokens.append([type(value).__name__, len(value)])
            for item in value:
                walk(item, level + 1)
        else:
            raise TypeError(
                f"a {type(value).__name__} cannot be sent between the processes of a cluster: use "
                "lists, tuples and dicts of tensors, arrays, numbers, texts and None"
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
        if kind in ("dict", "list", "tuple") and (type(last) is not int or last < 0):
            raise HandshakeError("a token of a wrong length")
        if kind == "plain":
            if last is not None and type(last) not in (bool, int, str):
                raise HandshakeError("a token of a wrong value")
            return last
        if kind == "float":
            return float.fromhex(last)
        if kind == "dict":
            return {walk(level + 1): walk(level + 1) for _ in range(last)}
        if kind in ("list", "tuple"):
            items = [walk(level + 1) for _ in range(last)]
            return items if kind == "list" else tuple(items)
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


def error_message(error: BaseException) -> dict[str, Any]:
    """Return an error as a message: the name of its class, and its text."""
    text = str(error)[:10_000].encode("utf-8", "backslashreplace").decode()
    return {"error": type(error).__name__, "text": text}


def error_of(message: dict[str, Any], where: str) -> Exception:
    """Return the error in a message: of a class of Python or of this package, else a RuntimeError."""
    name, text = str(message.get("error")), str(message.get("text"))
    cls = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            return cls(f"{text} (on {where})")
        except TypeError:
            pass
    return RuntimeError(f"{name}: {text} (on {where})")
