"""The registry of classes and functions by their names in Keras's files.

Packages publish their classes and functions here. So this module, and the modules that read and
write files, need not import those packages.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, TracebackType
from typing import Any, TypeVar

__all__ = [
    "CustomObjectScope",
    "class_named",
    "custom_object_scope",
    "custom_objects",
    "function_named",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "name_of",
    "public",
    "publish",
    "register_keras_serializable",
]

_T = TypeVar("_T")

#: Modules of Keras whose functions files store by name alone.
_FUNCTIONS = ("keras.activations", "keras.losses", "keras.metrics")
#: The published classes and functions, by Keras's module and name.
_public: dict[tuple[str, str], Any] = {}
#: The module, name and registered name of a published class in files.
_stored: dict[Any, tuple[str, str, str | None]] = {}


def public(module: str, *aliases: str, registered: bool = False) -> Callable[[_T], _T]:
    """Return a decorator that publishes a class by its name and aliases in a module of Keras.

    Files store the first module that a class is published in. With ``registered``, they also store
    the class's name as its registered name.
    """

    def decorate(target: Any) -> Any:
        name = target.__name__
        _stored.setdefault(target, (module, name, name if registered else None))
        for each in (name, *aliases):
            _public[module, each] = target
        return target

    return decorate


def publish(module: str, members: Mapping[str, Any], names: Any) -> None:
    """Publish the classes and functions of ``members`` that have one of these names."""
    for name in names:
        member = members[name]
        if isinstance(member, type) and hasattr(member, "from_config"):
            public(module, name)(member)
        elif isinstance(member, FunctionType):
            _public[module, name] = member


def name_of(cls: type) -> tuple[str, str, str | None] | None:
    """Return the module, name and registered name of a published class in files, or None."""
    return _stored.get(cls)


def class_named(module: str, name: str) -> Any:
    """Return the published class of this name in files, or None.

    A file cannot refer to classes that no package has published.
    """
    # Some versions of Keras store the private module that defines a class.
    found = _public.get((module, name))
    if found is None and module.startswith("keras.src."):
        found = _public.get(("keras", name))
    return found if isinstance(found, type) else None


def function_named(module: str | None, name: str) -> Any:
    """Return the published function of this name in files, or None."""
    for each in _FUNCTIONS if module == "builtins" else (module,):
        found = _public.get((each, name)) if each in _FUNCTIONS else None
        if isinstance(found, FunctionType):
            return found
    return None


_registered: dict[str, Any] = {}
_names: dict[Any, str] = {}


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.objects: Mapping[str, Any] = {}


_scopes = _Scopes()


def register_keras_serializable(
    package: str = "Custom", name: str | None = None
) -> Callable[[_T], _T]:
    """Return a decorator that registers a class or function for loading from files.

    Parameters
    ----------
    package, name
        The parts of the registered name ``package>name``; the default name is the object's name.

    Raises
    ------
    ValueError
        If a class has no ``get_config``.
    """

    def decorate(target: _T) -> _T:
        if inspect.isclass(target) and not hasattr(target, "get_config"):
            raise ValueError(
                f"Cannot register a class that does not have a get_config() method: {target!r}"
            )
        full = f"{package}>{name or getattr(target, '__name__')}"  # noqa: B009
        _registered[full] = target
        _names[target] = full
        return target

    return decorate


def get_custom_objects() -> dict[str, Any]:
    """Return the registered objects by name; changes of this dict change the registry."""
    return _registered


def custom_objects() -> dict[str, Any]:
    """Return the registered objects and the objects of the current scopes, by name."""
    return {**_registered, **_scopes.objects}


def get_registered_name(obj: Any) -> str:
    """Return the registered name of a class or function, or else its own name."""
    try:
        found = _names.get(obj)
    except TypeError:
        found = None
    return str(obj.__name__) if found is None else found


def get_registered_object(
    name: str,
    custom_objects: Mapping[str, Any] | None = None,
    module_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Return the class or function of a name in files, or None.

    Parameters
    ----------
    name : str
        The name in files.
    custom_objects, module_objects : mapping, optional
        Further objects by name; current scopes and registered objects take precedence.
    """
    for known in (_scopes.objects, _registered, custom_objects or {}, module_objects or {}):
        if name in known:
            return known[name]
    return None


class CustomObjectScope:
    """A block in which files may refer to further classes and functions.

    Parameters
    ----------
    custom_objects : mapping or None
        The classes and functions by name.
    """

    def __init__(self, custom_objects: Mapping[str, Any] | None) -> None:
        self.custom_objects = dict(custom_objects or {})
        self._outside: list[Mapping[str, Any]] = []

    def __enter__(self) -> CustomObjectScope:
        """Add the objects to the current scope."""
        self._outside.append(_scopes.objects)
        _scopes.objects = {**_scopes.objects, **self.custom_objects}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous scope."""
        _scopes.objects = self._outside.pop()


custom_object_scope = CustomObjectScope
