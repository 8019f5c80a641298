"""Objects that are stored by their constructor's arguments, and the objects of one kind by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollective.dtypes import as_dtype
from pycollective.keras.backend import name_of_class
from pycollective.keras.registration import CustomObjectScope, get_registered_object
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object
from pycollective.tensor import Tensor

serialize = serialize_keras_object
deserialize_any = deserialize_keras_object


class Configured:
    """Base of objects that are made again from the arguments of their constructor."""

    #: The arguments, each of which is an attribute too.
    _config_names: tuple[str, ...] = ()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as values that JSON can hold."""
        return {name: plain(getattr(self, name)) for name in self._config_names}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Make an object of what `get_config` returned."""
        return cls(**config)


class Kind:
    """The objects of one kind, such as losses, with the functions that a package of them exports.

    ``known`` are its classes and functions by name; messages have the kind's ``name``, and in
    ``needed`` a description of what may be given besides a name.
    """

    def __init__(self, name: str, known: Mapping[str, Any], needed: str) -> None:
        self.name = name
        self.known = dict(known)
        #: Functions that only descriptions name: `get` finds a class of the same kind instead.
        self.functions: dict[str, Any] = {}
        self.needed = needed

    def serialize(self, obj: Any) -> Any:
        """Return an object, or a function, as a dictionary (None stays None)."""
        return serialize_keras_object(obj)

    def deserialize(self, config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
        """Return the object or function that `serialize` described.

        Raises
        ------
        ValueError
            For an unknown name.
        """
        known = {**self.functions, **self.known}
        return deserialize(config, self.name, known, custom_objects)

    def get(self, identifier: Any) -> Any:
        """Return an object: itself, or one by its name, its class or its dictionary; None for None.

        Raises
        ------
        ValueError
            For an unknown name, or what is neither a name, a dictionary nor callable.
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
            If there is none; the message lists the names.
        """
        found = self.known.get(name)
        if found is None:
            raise ValueError(
                f"unknown {self.name} {name!r}; there are {', '.join(sorted(self.known))}"
            )
        return found


def by_name(*classes: type) -> dict[str, Any]:
    """Return classes by their names, also in small letters with ``_`` between the words."""
    return {name: cls for cls in classes for name in (cls.__name__, name_of_class(cls))}


def plain(value: Any) -> Any:
    """Return a number or an array as Keras's files hold it; anything else as it is."""
    if isinstance(value, Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        content = {"value": value.tolist(), "dtype": value.dtype.name}
        return {"class_name": "__numpy__", "config": content}
    return value.item() if isinstance(value, (np.ndarray, np.generic)) else value


def array_or_number(value: Any) -> Any:
    """Return what `plain` stands for; also a tensor of Keras's."""
    if not isinstance(value, Mapping):
        return value
    if value.get("class_name") not in ("__numpy__", "__tensor__"):
        raise ValueError(f"{value!r} stands for no number and no array")
    content = value["config"]
    return np.asarray(content["value"], as_dtype(content["dtype"]))


def deserialize(
    config: Any,
    kind: str,
    known: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Return the object that a dictionary with ``class_name`` and ``config``, or a name, describes.

    ``known`` are the classes and functions of the kind by name. Registered ones, and
    ``custom_objects``, come first. A name that is not known raises ValueError.
    """

    def found(name: Any, registered: Any) -> Any:
        with CustomObjectScope(custom_objects):
            for each in (registered, name):
                custom = get_registered_object(each) if isinstance(each, str) else None
                if custom is not None:
                    return custom
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(sorted(known))}")
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
