"""`Described`: the conversion of layers to configs and back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pycollective.keras import activations, constraints, initializers, regularizers
from pycollective.keras.configs import parameters_of, plain
from pycollective.keras.copying import CopiedByConfig
from pycollective.keras.policy import DTypePolicy

if TYPE_CHECKING:
    from typing_extensions import Self

#: The package that resolves and serializes a setting, by the suffix of the setting's name.
_PACKAGES: dict[str, Any] = {
    "activation": activations,
    "constraint": constraints,
    "initializer": initializers,
    "regularizer": regularizers,
}


class Described(CopiedByConfig):
    """Base of `Layer`: converts the constructor's arguments to a config."""

    #: The attributes in the config; None: the constructor's arguments. For a layer of this package,
    #: the default is all positional parameters of its constructor.
    _config_names: tuple[str, ...] | None = None
    #: Settings of Keras, each with the only supported value.
    _fixed: tuple[tuple[str, Any], ...] = ()
    _name: str
    _trainable: bool
    _policy: DTypePolicy
    activity_regularizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        in_package = cls.__module__.startswith("pycollective.keras.layers.")
        if in_package and "_config_names" not in vars(cls):
            cls._config_names = parameters_of(cls) or cls._config_names

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls, *args, **kwargs)
        if cls._config_names is None and cls.get_config.__module__.startswith(
            "pycollective.keras."
        ):
            object.__setattr__(self, "_arguments", (args, kwargs))
        return self

    def _set(self, **settings: Any) -> None:
        """Set attributes; initializers, activations and the like may be given by name."""
        for name, value in settings.items():
            for kind, package in _PACKAGES.items():
                if name.endswith(kind):
                    value = package.get(value)
            setattr(self, name, value)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values, under Keras 3's names.

        A subclass whose arguments are numbers, strings, and lists or dicts of them need not override
        this method. The config omits ``name``, ``trainable`` or ``dtype`` if the subclass's constructor
        does not accept it.

        Raises
        ------
        NotImplementedError
            If an argument is not a JSON value and the subclass does not override this method.
        """
        names = self._config_names
        if names is None:
            arguments = self._given()
        else:
            arguments = {name: self._stored(name) for name in names}
        config = {
            "name": self._name,
            "trainable": self._trainable,
            "dtype": {
                "module": "keras",
                "class_name": "DTypePolicy",
                "config": self._policy.get_config(),
                "registered_name": None,
            },
            **arguments,
        }
        if "_arguments" in self.__dict__:
            taken = inspect.signature(type(self).__init__).parameters
            if all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
                config = {name: value for name, value in config.items() if name in taken}
        if self.activity_regularizer is not None:
            config["activity_regularizer"] = regularizers.serialize(self.activity_regularizer)
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Make a layer from the result of `get_config`, of this package or of Keras.

        Raises
        ------
        ValueError
            If a setting of Keras has a value that this package does not support.
        """
        given = dict(config)
        for name, only in cls._fixed:
            value = given.pop(name, only)
            if value != only:
                raise ValueError(
                    f"{cls.__name__}: {name}={value!r} is not supported; only {only!r} is"
                )
        return cls(**given)

    def _stored(self, name: str) -> Any:
        """Return an attribute's config value; the suffix of the name selects the serializer."""
        value = getattr(self, name)
        for kind, package in _PACKAGES.items():
            if name.endswith(kind):
                return package.serialize(value)
        return plain(value)

    def _given(self) -> dict[str, Any]:
        """Return the constructor's arguments and defaults, without the parameters of `Layer`."""
        if "_arguments" not in self.__dict__:
            return {}
        args, kwargs = self.__dict__["_arguments"]
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        given = dict(list(bound.arguments.items())[1:])
        for name, parameter in list(bound.signature.parameters.items())[1:]:
            if _is_plain(parameter.default):  # a file keeps the default of its time
                given.setdefault(name, parameter.default)
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        for name in ("activity_regularizer", "dtype", "input_shape", "name", "trainable"):
            given.pop(name, None)
        for name, value in given.items():
            if not _is_plain(value):
                raise NotImplementedError(
                    f"{type(self).__name__} must override get_config(): its argument {name!r} is a "
                    f"{type(value).__name__}, which is no JSON value"
                )
        return given


def _is_plain(value: Any) -> bool:
    """Return True if a value can be stored in JSON."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
