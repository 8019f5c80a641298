"""Names of ``tf.distribute.experimental``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pycollective.distribute.central_storage import CentralStorageStrategy
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.experimental import coordinator, partitioners, rpc
from pycollective.distribute.multi_worker import MultiWorkerMirroredStrategy
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.replica_context import ValueContext
from pycollective.distribute.unavailable import PreemptionWatcher, TPUStrategy
from pycollective.distribute.worker_threads import cache_variable_reads

if TYPE_CHECKING:
    from pycollective.train.preemption import PreemptionCheckpointHandler, TerminationConfig

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "cache_variable_reads",
    "coordinator",
    "partitioners",
    "rpc",
]

CollectiveCommunication = CommunicationImplementation


class CollectiveHints(CommunicationOptions):
    """The older name of `CommunicationOptions`, without an implementation."""

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        super().__init__(bytes_per_pack, timeout_seconds)


def __getattr__(name: str) -> Any:
    # These classes need checkpoints; the package of checkpoints imports this one.
    if name in ("PreemptionCheckpointHandler", "TerminationConfig"):
        globals()[name] = getattr(importlib.import_module("pycollective.train.preemption"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
