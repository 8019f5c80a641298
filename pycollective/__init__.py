"""Collective communication for NumPy and CuPy arrays, and data-parallel training on it.

``import pycollective as pc`` for collectives::

    results = pc.spawn(work, 4, *args)        # calls work(comm, *args) in four processes
    comm = pc.init()                          # under `pycollective run`: this process's rank
    for comm in pc.local_group(4): ...        # ranks that are threads
    y = comm.all_reduce(x)

``import pycollective as tf`` for training: the names of TensorFlow's guide stand at the same paths
(`distribute`, `data`, `keras`, `nn`, `train`, `GradientTape`, …). Importing costs little: the rooms of
the trainer are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pycollective._core import __version__
from pycollective.communicator import Communicator, Work, local_group, shared_arrays
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
from pycollective.observe import timeline

_ROOMS = (
    "algorithms",
    "cluster",
    "config",
    "data",
    "distribute",
    "dtypes",
    "errors",
    "keras",
    "nn",
    "random",
    "train",
    "types",
)

__all__ = [
    "AbortedError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "DataError",
    "MismatchError",
    "PeerLostError",
    "RankError",
    "Work",
    "__version__",
    "init",
    "local_group",
    "shared_arrays",
    "spawn",
    "timeline",
]


def __getattr__(name: str) -> Any:
    """Load a room, or a name of the tensor room, at its first use."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "init":
        from pycollective.rendezvous import init

        value: Any = init
    elif name == "spawn":
        from pycollective.rendezvous.spawn import spawn

        value = spawn
    elif name == "bool":  # `bool_` in `dtypes`, where Python's own is needed
        return importlib.import_module("pycollective.dtypes").bool_
    elif name == "device":
        value = importlib.import_module("pycollective.distribute.devices").device
    elif importlib.util.find_spec(f"pycollective.{name}") is not None:
        value = importlib.import_module(f"pycollective.{name}")
    else:
        for module in ("tensor", "dtypes", "data"):
            value = getattr(importlib.import_module(f"pycollective.{module}"), name, None)
            if value is not None or name == "newaxis":
                break
        else:
            raise AttributeError(f"module 'pycollective' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    tensor = importlib.import_module("pycollective.tensor")
    dtypes = importlib.import_module("pycollective.dtypes")
    return sorted({*__all__, "bool", "device", *_ROOMS, *tensor.__all__, *dtypes.__all__})
