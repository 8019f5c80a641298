"""Collective communication for NumPy and CuPy arrays, and data-parallel training on it.

``import pycollective as pc`` for collectives::

    results = pc.spawn(work, 4, *args)        # calls work(comm, *args) in four processes
    comm = pc.init()                          # under `pycollective run`: this process's rank
    for comm in pc.local_group(4): ...        # ranks that are threads
    y = comm.all_reduce(x)

``import pycollective as tf`` for training: the names of TensorFlow's guide stand at the same paths
(`distribute`, `data`, `keras`, `nn`, `train`, `GradientTape`, …). Importing costs little: the packages
of the trainer are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

try:
    from pycollective._core import __version__
except ImportError:
    _core_spec = importlib.util.find_spec("pycollective._core")
    if _core_spec is not None and _core_spec.origin is not None:
        raise
    raise ImportError(
        f"{__path__[0]} is the source of pycollective without its compiled part. Python looks first in "
        "the folder of the program, so put the program in another folder than the clone. "
        "CONTRIBUTING.md says how to build in the source folder"
    ) from None
from pycollective.comm import (
    Communicator,
    Persistent,
    Work,
    local_group,
    shared_arrays,
    timeline,
)
from pycollective.errors import (
    AbortedError,
    CheckpointError,
    CollectiveError,
    CollectiveTimeoutError,
    DataError,
    MismatchError,
    PeerLostError,
    RankError,
)

if TYPE_CHECKING:  # the names that `__getattr__` finds, for type checkers
    from pycollective import algorithms as algorithms
    from pycollective import cluster as cluster
    from pycollective import compat as compat
    from pycollective import config as config
    from pycollective import data as data
    from pycollective import distribute as distribute
    from pycollective import dtypes as dtypes
    from pycollective import errors as errors
    from pycollective import estimator as estimator
    from pycollective import feature_column as feature_column
    from pycollective import keras as keras
    from pycollective import math as math
    from pycollective import nn as nn
    from pycollective import random as random
    from pycollective import train as train
    from pycollective import types as types
    from pycollective.data import TensorSpec as TensorSpec
    from pycollective.distribute.creation import device as device
    from pycollective.dtypes import *  # noqa: F403
    from pycollective.launch import init as init
    from pycollective.launch.spawn import spawn as spawn
    from pycollective.tensor import *  # noqa: F403
    from pycollective.tensor.ops.arrays import *  # noqa: F403
    from pycollective.tensor.ops.elementwise import *  # noqa: F403
    from pycollective.tensor.ops.joining import *  # noqa: F403
    from pycollective.tensor.ops.norms import *  # noqa: F403
    from pycollective.tensor.ops.reductions import *  # noqa: F403

    bool = dtypes.bool_

__all__ = [
    "AbortedError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "DataError",
    "MismatchError",
    "PeerLostError",
    "Persistent",
    "RankError",
    "Work",
    "__version__",
    "init",
    "local_group",
    "shared_arrays",
    "spawn",
    "timeline",
]

_PACKAGES = (
    "algorithms",
    "cluster",
    "compat",
    "config",
    "data",
    "distribute",
    "dtypes",
    "errors",
    "estimator",
    "feature_column",
    "keras",
    "math",
    "nn",
    "random",
    "train",
    "types",
)

#: Names that are loaded at their first use, and the modules that have them.
_ORIGIN = {
    "TensorSpec": "data",
    "device": "distribute.creation",
    "init": "launch",
    "spawn": "launch.spawn",
}

if not TYPE_CHECKING:  # with this function, type checkers would accept every misspelt name

    def __getattr__(name: str) -> Any:
        """Load a package, or a name of `tensor`, `dtypes` or `data`, at its first use."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "bool":  # `dtypes` calls it `bool_`, because that module needs Python's bool
            return _module("dtypes").bool_
        if name in _ORIGIN:
            value = getattr(_module(_ORIGIN[name]), name)
        elif importlib.util.find_spec(f"pycollective.{name}") is not None:
            value = _module(name)
        else:
            for module in ("tensor", "dtypes", "data"):
                if hasattr(_module(module), name):  # the value may be None
                    value = getattr(_module(module), name)
                    if callable(value) and name in _module("tensor.ops").__all__:
                        value = _module("tensor.symbolic").accepts_symbols(value)
                    break
            else:
                raise AttributeError(_no_attribute(name), name=name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    lazy = ("bool", *_ORIGIN, *_module("tensor").__all__, *_module("dtypes").__all__)
    return sorted({*__all__, *_PACKAGES, *lazy})


def _module(name: str) -> Any:
    return importlib.import_module(f"pycollective.{name}")


def _no_attribute(name: str) -> str:
    """Return the message for a missing attribute, with the public name that the caller may mean."""
    if name in _module("other_names").ABSENT:
        instead = "; tf.keras.callbacks.TensorBoard writes summaries" * (name == "summary")
        return (
            f"pycollective has no counterpart of TensorFlow's package tf.{name}{instead}. "
            "docs/reference/coverage.md lists the names that exist"
        )
    calls = {one: f"Communicator.{one}" for one in dir(Communicator) if one[0] != "_"}
    meant = _module("other_names").meant(name, calls | {one: one for one in __dir__()})
    text = f"module 'pycollective' has no attribute {name!r}"
    if meant is None:
        return text
    text += f"; did you mean {meant!r}?"
    is_call = meant.startswith("Communicator.")
    return f"{text} pycollective.init() returns a Communicator" if is_call else text
