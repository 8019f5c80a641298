"""Options of a dataset, and how its elements are shared out among workers."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

#: As number of shards and as index in `Dataset.shard`: to be filled in under `AutoShardPolicy.HINT`.
SHARD_HINT = -1


class AutoShardPolicy(enum.IntEnum):
    """How the workers of a strategy share one dataset.

    OFF: every worker reads everything. FILE: every worker reads files of its own. DATA: every worker
    reads everything, and keeps batches of its own. AUTO: FILE where there are files, else DATA. HINT:
    ``shard(SHARD_HINT, SHARD_HINT)`` says where.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Settings:
    """Named settings of one type each; those that are None were not set."""

    _types: ClassVar[dict[str, type]]
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})

    def __getattr__(self, name: str) -> Any:
        # Reached for what is no attribute: a setting, or a name that there is not.
        if name.startswith("_") or name not in self._types:
            raise AttributeError(f"{type(self).__name__} has no property {name}.")
        return self._values.get(name, self._defaults.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._types:
            raise AttributeError(f"Cannot set the property {name} on {type(self).__name__}.")
        if not isinstance(value, self._types[name]):
            raise TypeError(
                f'Property "{name}" must be of type {self._types[name]}, got: {value!r} '
                f"(type: {type(value)})"
            )
        self._values[name] = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._values == self._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({settings})"


class DistributeOptions(_Settings):
    """What concerns the distribution of a dataset.

    Attributes
    ----------
    auto_shard_policy : AutoShardPolicy
        How workers share the dataset; AUTO unless set.
    num_devices : int or None
        Accepted for TensorFlow's sake.
    """

    _types: ClassVar = {"auto_shard_policy": AutoShardPolicy, "num_devices": int}
    _defaults: ClassVar = {"auto_shard_policy": AutoShardPolicy.AUTO}


class Options(_Settings):
    """Options of a dataset, for `Dataset.with_options`.

    Attributes
    ----------
    experimental_distribute : DistributeOptions
        How workers share the dataset.
    deterministic, experimental_deterministic : bool or None
        Accepted for TensorFlow's sake: the order of elements never depends on timing here.
    """

    _types: ClassVar = {
        "deterministic": bool,
        "experimental_deterministic": bool,
        "experimental_distribute": DistributeOptions,
    }

    def __init__(self) -> None:
        super().__init__()
        self.experimental_distribute = DistributeOptions()

    def merge(self, other: Options) -> Options:
        """Return options that have what ``other`` sets, and what these set besides."""
        merged = Options()
        for options in (self, other):
            for name, value in options._values.items():
                if isinstance(value, DistributeOptions):
                    merged.experimental_distribute._values.update(value._values)
                else:
                    merged._values[name] = value
        return merged
