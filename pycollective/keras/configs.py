"""Objects as dictionaries, in the form of Keras 3: class, and what its constructor gets."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

__all__ = ["deserialize", "serialize"]

_ROOT = "pycollective.keras"


def serialize(obj: Any) -> Any:
    """Return an object or function as a dictionary that JSON can hold.

    Parameters
    ----------
    obj
        Something with `get_config`, or a function, which is stored by its name. None stays None.

    Raises
    ------
    TypeError
        For anything else.
    """
    if obj is None:
        return None
    if isinstance(obj, types.FunctionType):
        name = obj.__name__
        return {
            "module": "builtins",
            "class_name": "function",
            "config": name,
            "registered_name": name,
        }
    if not hasattr(obj, "get_config"):
        raise TypeError(f"{obj!r} cannot be stored: it has no get_config()")
    cls = type(obj)
    ours = cls.__module__.startswith(f"{_ROOT}.")
    return {
        "module": _public_module(cls.__module__) if ours else cls.__module__,
        "class_name": cls.__name__,
        "config": obj.get_config(),
        "registered_name": None if ours else cls.__name__,
    }


def _public_module(module: str) -> str:
    """Return where Keras has the classes of one of our modules."""
    parts = module[len(_ROOT) + 1 :].split(".")
    keep = 2 if parts[:2] == ["optimizers", "schedules"] else 1
    return ".".join(["keras", *parts[:keep]])


def deserialize(
    config: Any,
    kind: str,
    known: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Return the object that `serialize` described.

    Parameters
    ----------
    config
        A dictionary with ``class_name`` and ``config``, or the name of a class or function.
    kind
        What it is to be, for messages.
    known
        By name the classes and functions there are.
    custom_objects
        Further ones, which come first.

    Raises
    ------
    ValueError
        For a name that is not known, or what is no such dictionary.
    """
    names = {**known, **(custom_objects or {})}
    if isinstance(config, str):
        return _found(config, kind, names)
    if not isinstance(config, Mapping) or not isinstance(config.get("class_name"), str):
        raise ValueError(f"{config!r} describes no {kind}: a dict with 'class_name' is needed")
    arguments = config.get("config") or {}
    if config["class_name"] == "function":
        return _found(arguments, kind, names)
    cls = _found(config["class_name"], kind, names)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{kind} {config['class_name']!r}: 'config' must be a dict")
    if hasattr(cls, "from_config"):
        return cls.from_config(dict(arguments))
    return cls(**arguments)


def _found(name: Any, kind: str, names: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(sorted(names))}")
    return names[name]
