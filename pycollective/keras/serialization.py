"""`serialize_keras_object`, `deserialize_keras_object`: configs of objects in Keras's format.

A config never causes an import or runs code. Its names can only refer to published classes, and to
classes that the program registered or passed as ``custom_objects``.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycollective.dtypes import as_dtype
from pycollective.keras.graph.symbols import KerasTensor
from pycollective.keras.registration import (
    CustomObjectScope,
    class_named,
    function_named,
    get_registered_name,
    get_registered_object,
    name_of,
)
from pycollective.tensor import Tensor
from pycollective.tensor.function import Function

_PLAIN = (str, int, float, bool)
#: Arguments of `compile` that Keras lacks are stored under a key of their own, which Keras ignores.
_EXTRA_KEY = "pycollective_compile_config"
_EXTRA_ARGUMENTS = ("accumulate_steps",)


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Each written object with its number of writes, by id. The reference keeps the object alive,
        #: so that no other object gets its id.
        self.written: dict[int, tuple[Any, int]] | None = None
        #: The ids of objects to mark, because they occur more than once.
        self.marked: frozenset[int] = frozenset()
        #: In `serialize_with_own`: the program's own classes and functions, by name.
        self.own: dict[str, Any] | None = None
        #: In `sharing`: the objects that were read, by their marks.
        self.read: dict[Any, Any] | None = None
        self.safe_mode: bool | None = None


_thread = _Thread()


@contextmanager
def sharing() -> Iterator[None]:
    """Read configs with the same mark as one shared object, inside the block."""
    before, _thread.read = _thread.read, {}
    try:
        yield
    finally:
        _thread.read = before


# To dictionaries ----------------------------------------------------------------------------------


def serialize_keras_object(obj: Any) -> Any:
    """Return an object as a JSON value.

    Parameters
    ----------
    obj
        An object with ``get_config``, such as a layer, model, optimizer or metric, a function, an
        array, a number, a string, or a nest of these.

    Raises
    ------
    TypeError
        If an object has no ``get_config``, or this method returns no dict.
    ValueError
        For a lambda, whose code cannot be stored.
    """
    if obj is None or isinstance(obj, _PLAIN):
        return obj
    if isinstance(obj, (list, tuple)):
        items = [serialize_keras_object(item) for item in obj]
        return tuple(items) if isinstance(obj, tuple) else items
    if isinstance(obj, Mapping):
        return {key: serialize_keras_object(value) for key, value in obj.items()}
    special = _special(obj)
    return _object(obj) if special is None else special


def _special(obj: Any) -> Any:
    """Return the config of a value of a special type, such as bytes, or None."""
    if isinstance(obj, bytes):
        return _named("__bytes__", {"value": obj.decode()})
    if isinstance(obj, slice):
        parts = {name: getattr(obj, name) for name in ("start", "stop", "step")}
        return _named("__slice__", serialize_keras_object(parts))
    if obj is Ellipsis:
        return _named("__ellipsis__", {})
    if isinstance(obj, KerasTensor):
        operation, node_index, tensor_index = obj.history
        return stored_symbol(obj, operation.name, node_index, tensor_index)
    if isinstance(obj, Tensor):
        value = np.asarray(obj.numpy())
        return _named("__tensor__", {"value": value.tolist(), "dtype": value.dtype.name})
    if isinstance(obj, np.ndarray) and obj.ndim:
        return _named("__numpy__", {"value": obj.tolist(), "dtype": obj.dtype.name})
    if isinstance(obj, np.dtype):
        return obj.name
    if isinstance(obj, (np.ndarray, np.generic)):
        return obj.item()
    return None


def _named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"class_name": name, "config": config}


def stored_symbol(
    tensor: KerasTensor, operation: str, node_index: int, tensor_index: int
) -> dict[str, Any]:
    """Return the config of a symbolic tensor: the layer's name, its call, and the result's index."""
    return _named(
        "__keras_tensor__",
        {
            "shape": list(tensor.shape),
            "dtype": tensor.dtype.name,
            "keras_history": [operation, node_index, tensor_index],
        },
    )


def _object(obj: Any) -> dict[str, Any]:
    cls = type(obj)
    if isinstance(obj, (types.FunctionType, types.BuiltinFunctionType, Function)):
        name = _name_of_own(obj)
        if name == "<lambda>":
            raise ValueError(
                f"{obj!r} cannot be stored, because files hold no code. Define a function with def, "
                "and register it with @keras.saving.register_keras_serializable()"
            )
        return {
            "module": "builtins",
            "class_name": "function",
            "config": name,
            "registered_name": "function",
        }
    if not hasattr(obj, "get_config"):
        raise TypeError(
            f"Cannot serialize object {obj!r} of type {cls}. To be serializable, a class must "
            "implement the `get_config()` method."
        )
    config = obj.get_config()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"The `get_config()` method of {obj!r} should return a dict. It returned: {config!r}"
        )
    public = name_of(cls)
    if public is None:
        module = None if cls.__module__ == "__main__" else cls.__module__
        public = module, cls.__name__, _name_of_own(cls)  # type: ignore[assignment]
    assert public is not None
    module, name, registered = public
    stored = {
        "module": module,
        "class_name": name,
        "config": serialize_keras_object(dict(config)),
        "registered_name": registered,
    }
    for part in ("build_config", "compile_config"):
        get = getattr(obj, f"get_{part}", None)
        found = None if get is None else get()
        if found is not None:
            stored[part] = serialize_keras_object(found)
    compiled = stored.get("compile_config") or {}
    extra = {name: compiled.pop(name) for name in _EXTRA_ARGUMENTS if name in compiled}
    if extra:
        stored[_EXTRA_KEY] = extra
    if _thread.written is not None:
        _, times = _thread.written.get(id(obj), (obj, 0))
        _thread.written[id(obj)] = obj, times + 1
    if id(obj) in _thread.marked:
        stored["shared_object_id"] = id(obj)
    return stored


def _name_of_own(obj: Any) -> str:
    """Return the name that configs use for a class or function of the program."""
    if _thread.own is None:
        return get_registered_name(obj)
    for name, known in _thread.own.items():
        if known is obj:
            return name
    # The number distinguishes objects of the same name from two modules.
    name = f"{len(_thread.own)}>{obj.__name__}"
    _thread.own[name] = obj
    return name


def serialize_with_own(obj: Any) -> tuple[Any, dict[str, Any]]:
    """Return the result of `serialize_shared`, and the ``custom_objects`` for reading it.

    The config is for this program only, so that functions need no registration and may be lambdas.
    """
    before, _thread.own = _thread.own, {}
    try:
        return serialize_shared(obj), _thread.own
    finally:
        _thread.own = before


def serialize_shared(obj: Any) -> Any:
    """Return the config of an object, with marks at parts that occur more than once."""
    before = _thread.written, _thread.marked
    _thread.written = {}
    try:
        stored = serialize_keras_object(obj)
        twice = frozenset(key for key, (_, times) in _thread.written.items() if times > 1)
        if twice:
            _thread.marked = twice
            stored = serialize_keras_object(obj)
    finally:
        _thread.written, _thread.marked = before
    return stored


# From dictionaries --------------------------------------------------------------------------------


class StoredSymbol:
    """The config of a symbolic tensor: the layer's name, the call's index, the result's index."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.history = config.get("keras_history")


def deserialize_keras_object(
    config: Any, custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
) -> Any:
    """Return the object of a config from `serialize_keras_object`, of this package or of Keras.

    Parameters
    ----------
    config
        The config.
    custom_objects : mapping, optional
        Custom classes and functions, by name.
    safe_mode : bool
        Accepted for compatibility with Keras: a lambda is an error in any case, because code in files
        is never run.

    Raises
    ------
    TypeError
        If a class or function is unknown, or cannot be made from its config.
    ValueError
        For a lambda, and for settings that a class rejects.
    """
    if _thread.safe_mode is not None:
        safe_mode = _thread.safe_mode
    with CustomObjectScope(custom_objects):
        before, _thread.safe_mode = _thread.safe_mode, safe_mode
        try:
            return _restored(config)
        finally:
            _thread.safe_mode = before


def _restored(config: Any) -> Any:
    if config is None:
        return None
    if isinstance(config, str):
        found = get_registered_object(config)
        return config if found is None else found
    if isinstance(config, _PLAIN):
        return config
    if isinstance(config, (list, tuple)):
        return [_restored(item) for item in config]
    if not isinstance(config, Mapping):
        raise TypeError(f"Could not parse config: {config!r}")
    if "class_name" not in config or "config" not in config:
        return {key: _restored(value) for key, value in config.items()}
    name, inner = config["class_name"], config["config"]
    if not isinstance(name, str):
        raise TypeError(f"Could not parse config: 'class_name' is {name!r}")
    if name == "function":
        return _function(config, inner)
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise TypeError(f"Expected 'config' to be a dict for {name}, instead got {inner!r}")
    if name.startswith("__") and name.endswith("__"):
        return _special_of(name, inner)
    return _instance(config, name, inner)


def _special_of(name: str, inner: Mapping[str, Any]) -> Any:
    if name == "__bytes__":
        return str(inner["value"]).encode()
    if name == "__slice__":
        return slice(*(_restored(inner[part]) for part in ("start", "stop", "step")))
    if name == "__ellipsis__":
        return Ellipsis
    if name == "__keras_tensor__":
        return StoredSymbol(inner)
    if name in ("__numpy__", "__tensor__"):
        value = np.asarray(inner["value"], as_dtype(inner["dtype"]))
        return value if name == "__numpy__" else Tensor(value)
    if name == "__lambda__":
        raise _lambda_refused("a Python lambda")
    raise TypeError(f"Could not parse config: {name!r} is not supported")


def _lambda_refused(what: str) -> ValueError:
    if _thread.safe_mode is not False:
        return ValueError(
            f"Requested the deserialization of {what}. This carries a potential risk of arbitrary "
            "code execution and thus it is disallowed by default. Code in files is not run here at "
            "all: register a named function, and store the model with that"
        )
    return ValueError(
        f"{what} cannot be loaded: code in files is not run here, also with safe_mode=False. "
        "Register a named function, and store the model with that"
    )


def _function(config: Mapping[str, Any], name: Any) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"Expected 'config' to be the name of a function, instead got {name!r}")
    found = get_registered_object(name)
    if found is None:
        found = function_named(config.get("module"), name)
    if found is None:
        raise _unknown("function", name)
    return found


def _unknown(kind: str, name: str) -> TypeError:
    short = name.rsplit(">", 1)[-1]
    return TypeError(
        f"Could not locate {kind} '{name}'. Make sure custom classes and functions are decorated "
        "with `@keras.saving.register_keras_serializable()`, and imported before this; or give them: "
        f"custom_objects={{'{name}': {short}}}"
    )


def _instance(config: Mapping[str, Any], name: str, inner: Mapping[str, Any]) -> Any:
    shared = config.get("shared_object_id")
    if shared is not None and _thread.read is not None and shared in _thread.read:
        return _thread.read[shared]
    cls = _class(config, name)
    if cls is None:
        function = inner.get("function")
        code = isinstance(function, Mapping) and function.get("class_name") == "__lambda__"
        if name == "Lambda" and code:
            raise _lambda_refused("a `Lambda` layer whose `function` is a Python lambda")
        raise _unknown("class", str(config.get("registered_name") or name))
    if isinstance(cls, (types.FunctionType, Function)):
        return cls
    if not hasattr(cls, "from_config"):
        raise TypeError(
            f"Unable to reconstruct an instance of '{name}' because the class is missing a "
            "`from_config()` method."
        )
    try:
        instance = cls.from_config(dict(inner))
    except TypeError as error:
        raise TypeError(
            f"{name} {inner.get('name', '')!r} could not be made from its config: {error}. The "
            "class's `from_config()` must deserialize parts that are objects (layers, models, …)"
        ) from error
    build = config.get("build_config")
    if build and not getattr(instance, "built", True) and hasattr(instance, "build_from_config"):
        instance.build_from_config(dict(build))
    compiled = config.get("compile_config")
    if compiled and hasattr(instance, "compile_from_config"):
        extra = config.get(_EXTRA_KEY) or {}
        instance.compile_from_config({**compiled, **extra})
    if shared is not None and _thread.read is not None:
        _thread.read[shared] = instance
    return instance


def _class(config: Mapping[str, Any], name: str) -> Any:
    # Some versions of Keras store "" as the registered name of an unregistered class.
    module, registered = config.get("module"), config.get("registered_name") or None
    found = class_named(module, name) if isinstance(module, str) else None
    if found is not None and registered in (None, name):
        return found
    for key in (registered, name):
        custom = get_registered_object(key) if isinstance(key, str) else None
        if custom is not None:
            return custom
    return None
