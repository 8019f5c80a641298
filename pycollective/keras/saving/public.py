"""Our classes by the names that Keras has for them, and the other way."""

from __future__ import annotations

import importlib
import types
from typing import Any

__all__ = ["class_named", "function_named", "name_of"]

_ROOT = "pycollective.keras"
#: Modules of Keras whose classes a file may name; each has the same name here.
_MODULES = frozenset(
    (
        "constraints",
        "initializers",
        "layers",
        "losses",
        "metrics",
        "mixed_precision",
        "models",
        "optimizers",
        "optimizers.schedules",
        "regularizers",
    )
)
#: Modules whose functions are stored by their names alone.
_FUNCTIONS = ("activations", "losses", "metrics")
#: What Keras has under "keras" itself.
_TOP = {"Sequential": "models", "Model": "models", "Functional": "models"}
#: Where Keras keeps classes that it does not export.
_FUNCTIONAL = "keras.src.models.functional"
_OPERATIONS = "keras.src.ops.numpy"


def name_of(cls: type) -> tuple[str, str, str | None] | None:
    """Return module, name and registered name of one of our classes in Keras, or None."""
    from pycollective.keras.graph.operators import Operation
    from pycollective.keras.models import Functional, Sequential

    if cls is Sequential:
        return "keras", "Sequential", None
    if cls is Functional:
        return _FUNCTIONAL, "Functional", "Functional"
    if not cls.__module__.startswith(f"{_ROOT}."):
        return None
    if issubclass(cls, Operation):
        return _OPERATIONS, cls.__name__, cls.__name__
    parts = cls.__module__[len(_ROOT) + 1 :].split(".")
    module = "optimizers.schedules" if parts[:2] == ["optimizers", "schedules"] else parts[0]
    return (f"keras.{module}", cls.__name__, None) if module in _MODULES else None


def class_named(module: str, name: str) -> Any:
    """Return our class for one of Keras's, or None if there is none.

    Only what a module of ours exports is found: a file cannot name anything else.
    """
    from pycollective.keras.graph.operators import OPERATIONS

    if module == _OPERATIONS:
        return OPERATIONS.get(name)
    if name in _TOP and (module in ("keras", "keras.models") or module.startswith("keras.src.")):
        inside = _TOP[name]
    elif module.startswith("keras.") and module[len("keras.") :] in _MODULES:
        inside = module[len("keras.") :]
    else:
        return None
    found = _exported(inside, name)
    return found if isinstance(found, type) and hasattr(found, "from_config") else None


def function_named(module: str | None, name: str) -> Any:
    """Return our function for one that Keras stores by its name, or None."""
    if module is not None and module.startswith("keras."):
        modules = [module[len("keras.") :]]
    else:
        modules = list(_FUNCTIONS) if module == "builtins" else []
    for each in modules:
        found = _exported(each, name) if each in _FUNCTIONS else None
        if isinstance(found, types.FunctionType):
            return found
    return None


def _exported(module: str, name: str) -> Any:
    try:
        found = importlib.import_module(f"{_ROOT}.{module}")
    except ModuleNotFoundError:
        return None
    return getattr(found, name, None) if name in getattr(found, "__all__", ()) else None
