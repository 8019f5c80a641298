"""Options of a dataset, including the way in which workers share its elements."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

#: The arguments of `Dataset.shard` that a strategy replaces under `AutoShardPolicy.HINT`.
SHARD_HINT = -1


class AutoShardPolicy(enum.IntEnum):
    """The way in which a strategy's workers share a dataset.

    OFF: every worker reads all elements. FILE: every worker reads its own files. DATA: every worker
    reads all elements and keeps its own rows. AUTO: FILE if the dataset reads files, else
    DATA. HINT: workers share the dataset at ``shard(SHARD_HINT, SHARD_HINT)``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Settings:
    """Named settings, each of one type; None means not set."""

    _types: ClassVar[dict[str, type]]
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})

    def __getattr__(self, name: str) -> Any:
        # Python calls this method only for settings and for unknown names.
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
    """Options for the distribution of a dataset.

    Attributes
    ----------
    auto_shard_policy : AutoShardPolicy
        The way in which workers share the dataset, by default AUTO.
    num_devices : int or None
        Ignored, for TensorFlow's programs.
    """

    _types: ClassVar = {"auto_shard_policy": AutoShardPolicy, "num_devices": int}
    _defaults: ClassVar = {"auto_shard_policy": AutoShardPolicy.AUTO}


class ThreadingOptions(_Settings):
    """Numbers of threads, which are ignored."""

    _types: ClassVar = dict.fromkeys(("max_intra_op_parallelism", "private_threadpool_size"), int)


class AutotuneOptions(_Settings):
    """Limits of TensorFlow's own tuning, which are ignored."""

    _types: ClassVar = {"enabled": bool, "cpu_budget": int, "ram_budget": int}


class OptimizationOptions(_Settings):
    """TensorFlow's changes of the pipeline, which are ignored."""

    _types: ClassVar = dict.fromkeys(
        (
            "apply_default_optimizations",
            "filter_fusion",
            "filter_parallelization",
            "inject_prefetch",
            "map_and_batch_fusion",
            "map_and_filter_fusion",
            "map_fusion",
            "map_parallelization",
            "noop_elimination",
            "parallel_batch",
            "seq_interleave_prefetch",
            "shuffle_and_repeat_fusion",
        ),
        bool,
    )


class Options(_Settings):
    """Options of a dataset, for `Dataset.with_options`.

    Settings that change only TensorFlow's speed are accepted and ignored.

    Attributes
    ----------
    experimental_distribute : DistributeOptions
        Options for the distribution.
    deterministic, experimental_deterministic : bool or None
        Ignored, for TensorFlow's programs: the order of elements never depends on timing.
    """

    _types: ClassVar = {
        "deterministic": bool,
        "experimental_deterministic": bool,
        "experimental_distribute": DistributeOptions,
        "autotune": AutotuneOptions,
        "experimental_optimization": OptimizationOptions,
        "experimental_threading": ThreadingOptions,
        "threading": ThreadingOptions,
        "experimental_slack": bool,
        "experimental_symbolic_checkpoint": bool,
        "experimental_warm_start": bool,
        "dataset_name": str,
    }

    def __init__(self) -> None:
        super().__init__()
        for name, kind in self._types.items():
            if issubclass(kind, _Settings):
                setattr(self, name, kind())

    def merge(self, other: Options) -> Options:
        """Return these options, replaced by those that ``other`` sets."""
        merged = Options()
        for options in (self, other):
            for name, value in options._values.items():
                if isinstance(value, _Settings):
                    merged._values[name]._values.update(value._values)
                else:
                    merged._values[name] = value
        return merged
