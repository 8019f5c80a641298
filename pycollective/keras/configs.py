"""Objects of one kind as dictionaries: what ``serialize`` and ``deserialize`` of the rooms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["deserialize", "deserialize_any", "serialize"]


def serialize(obj: Any) -> Any:
    """Return an object, or a function, as what JSON can hold; as ``serialize_keras_object``."""
    # That room knows all others.
    from pycollective.keras.saving.objects import serialize_keras_object

    return serialize_keras_object(obj)


def deserialize_any(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return an object of any kind; as ``deserialize_keras_object``."""
    from pycollective.keras.saving.objects import deserialize_keras_object

    return deserialize_keras_object(config, custom_objects)


def deserialize(
    config: Any,
    kind: str,
    known: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Return the object of one kind that `serialize` described.

    Parameters
    ----------
    config
        A dictionary with ``class_name`` and ``config``, or the name of a class or function.
    kind
        What it is to be, for messages.
    known
        By name the classes and functions there are.
    custom_objects
        Further ones, which come first; so do those that are registered.

    Raises
    ------
    ValueError
        For a name that is not known, or what is no such dictionary.
    """
    if isinstance(config, str):
        return _found(config, config, kind, known, custom_objects)
    if not isinstance(config, Mapping) or not isinstance(config.get("class_name"), str):
        raise ValueError(f"{config!r} describes no {kind}: a dict with 'class_name' is needed")
    name, arguments = config["class_name"], config.get("config") or {}
    if name == "function":
        return _found(arguments, arguments, kind, known, custom_objects)
    cls = _found(name, config.get("registered_name"), kind, known, custom_objects)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{kind} {name!r}: 'config' must be a dict")
    return cls.from_config(dict(arguments))


def _found(
    name: Any,
    registered: Any,
    kind: str,
    known: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None,
) -> Any:
    from pycollective.keras.saving.registration import CustomObjectScope, get_registered_object

    with CustomObjectScope(custom_objects):
        for each in (registered, name):
            found = get_registered_object(each) if isinstance(each, str) else None
            if found is not None:
                return found
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(sorted(known))}")
    return known[name]
