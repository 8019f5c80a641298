"""Classes and functions of one's own, by the names that files have for them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

__all__ = [
    "CustomObjectScope",
    "custom_object_scope",
    "custom_objects",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "register_keras_serializable",
]

_T = TypeVar("_T")

_registered: dict[str, Any] = {}
_names: dict[Any, str] = {}


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.objects: Mapping[str, Any] = {}


_scopes = _Scopes()


def register_keras_serializable(
    package: str = "Custom", name: str | None = None
) -> Callable[[_T], _T]:
    """Return a decorator by which a class or function can be loaded from files.

    Parameters
    ----------
    package, name
        Files have it under ``package>name``; by default its own name.

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
    """Return what is registered, by name; changes count."""
    return _registered


def custom_objects() -> dict[str, Any]:
    """Return what files may name besides our own classes: registered, and of scopes in force."""
    return {**_registered, **_scopes.objects}


def get_registered_name(obj: Any) -> str:
    """Return the name under which a class or function is registered, else its own."""
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
    """Return what a name stands for, or None.

    Parameters
    ----------
    name
        As files have it.
    custom_objects, module_objects
        Where to look after the scopes in force and what is registered.
    """
    for known in (_scopes.objects, _registered, custom_objects or {}, module_objects or {}):
        if name in known:
            return known[name]
    return None


class CustomObjectScope:
    """A block in which files may name further classes and functions.

    Parameters
    ----------
    custom_objects
        Them by name.
    """

    def __init__(self, custom_objects: Mapping[str, Any] | None) -> None:
        self.custom_objects = dict(custom_objects or {})
        self._outside: list[Mapping[str, Any]] = []

    def __enter__(self) -> CustomObjectScope:
        """Let the names count."""
        self._outside.append(_scopes.objects)
        _scopes.objects = {**_scopes.objects, **self.custom_objects}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let what counted before count again."""
        _scopes.objects = self._outside.pop()


custom_object_scope = CustomObjectScope
