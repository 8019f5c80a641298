"""Configs of objects from their constructor's arguments, and lookup of objects by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pycollective.arguments import suggestion
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import name_of_class
from pycollective.keras.registration import CustomObjectScope, get_registered_object
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object
from pycollective.tensor import Tensor

serialize = serialize_keras_object
deserialize_any = deserialize_keras_object


def parameters_of(cls: type) -> tuple[str, ...]:
    """Return the parameters of a class's own constructor that have a position, without ``self``."""
    if "__init__" not in vars(cls):
        return ()
    given = inspect.signature(vars(cls)["__init__"]).parameters
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(name for name, each in given.items() if each.kind is named)[1:]


class Configured:
    """Base of objects whose config holds the constructor's arguments."""

    #: The arguments in the config; each is an attribute too. For a class of this package, these are
    #: the positional parameters of its constructor, unless the class sets this attribute.
    _config_names: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("pycollective.") and "_config_names" not in vars(cls):
            cls._config_names = parameters_of(cls) or cls._config_names

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values."""
        return {name: plain(getattr(self, name)) for name in self._config_names}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Make an object from the result of `get_config`."""
        return cls(**config)


class Kind:
    """The objects of one kind, such as losses: the functions ``get``, ``serialize`` and so on.

    ``known`` holds the kind's classes and functions by name. ``name`` is the kind's name, and
    ``needed`` describes the accepted values other than names; both are for messages.
    """

    def __init__(self, name: str, known: Mapping[str, Any], needed: str) -> None:
        self.name = name
        self.known = dict(known)
        #: Functions that only `deserialize` finds; for these names `get` finds a class.
        self.functions: dict[str, Any] = {}
        self.needed = needed

    def serialize(self, obj: Any) -> Any:
        """Return the config of an object or a function; None stays None."""
        return serialize_keras_object(obj)

    def deserialize(self, config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
        """Return the object or function from the result of `serialize`.

        Raises
        ------
        ValueError
            For an unknown name.
        """
        known = {**self.functions, **self.known}
        return deserialize(config, self.name, known, custom_objects)

    def get(self, identifier: Any) -> Any:
        """Return an object, given as itself, a name, a class or a config; None stays None.

        Raises
        ------
        ValueError
            For an unknown name, and for a value that is neither a name, a config nor callable.
        """
        found = identifier
        if isinstance(identifier, str):
            found = self.find(identifier)
        elif isinstance(identifier, Mapping):
            found = self.deserialize(identifier)
        if found is not None and not callable(found):
            raise ValueError(f"{identifier!r} is no {self.name}; give a name or {self.needed}")
        return found() if isinstance(found, type) else found

    def find(self, name: str) -> Any:
        """Return the class or function of this name.

        Raises
        ------
        ValueError
            If the name is unknown; the message lists the known names.
        """
        found = self.known.get(name)
        if found is None:
            raise ValueError(_unknown(self.name, name, self.known))
        return found


def _unknown(kind: str, name: Any, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the known names and the one that is most like it."""
    names = sorted(known)
    return (
        f"unknown {kind} {name!r}; known names are {', '.join(names)}{suggestion(str(name), names)}"
    )


def by_name(*classes: type) -> dict[str, Any]:
    """Return classes by their names, and by their names in snake case."""
    return {name: cls for cls in classes for name in (cls.__name__, name_of_class(cls))}


def plain(value: Any) -> Any:
    """Return a number or an array as in Keras's files; return any other value unchanged."""
    if isinstance(value, Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        content = {"value": value.tolist(), "dtype": value.dtype.name}
        return {"class_name": "__numpy__", "config": content}
    return value.item() if isinstance(value, (np.ndarray, np.generic)) else value


def array_or_number(value: Any) -> Any:
    """Return the number or array from the result of `plain`, or from a tensor of Keras."""
    if not isinstance(value, Mapping):
        return value
    if value.get("class_name") not in ("__numpy__", "__tensor__"):
        raise ValueError(f"{value!r} is neither a number nor the config of an array")
    content = value["config"]
    return np.asarray(content["value"], as_dtype(content["dtype"]))


def deserialize(
    config: Any,
    kind: str,
    known: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Return the object of a name, or of a dict with ``class_name`` and ``config``.

    ``known`` holds the classes and functions of the kind by name; ``custom_objects`` and registered
    objects take precedence. Raise ``ValueError`` for an unknown name.
    """

    def found(name: Any, registered: Any) -> Any:
        with CustomObjectScope(custom_objects):
            for each in (registered, name):
                custom = get_registered_object(each) if isinstance(each, str) else None
                if custom is not None:
                    return custom
        if not isinstance(name, str) or name not in known:
            raise ValueError(_unknown(kind, name, known))
        return known[name]

    if isinstance(config, str):
        return found(config, config)
    if not isinstance(config, Mapping) or not isinstance(config.get("class_name"), str):
        raise ValueError(f"{config!r} describes no {kind}: a dict with 'class_name' is needed")
    name, arguments = config["class_name"], config.get("config") or {}
    if name == "function":
        return found(arguments, arguments)
    cls = found(name, config.get("registered_name"))
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{kind} {name!r}: 'config' must be a dict")
    return cls.from_config(dict(arguments))
