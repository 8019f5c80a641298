"""Names of ``tf.distribute.experimental``."""

from __future__ import annotations

from pycollective.distribute.central_storage import CentralStorageStrategy
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.experimental import coordinator, partitioners, rpc
from pycollective.distribute.multi_worker import MultiWorkerMirroredStrategy
from pycollective.distribute.preemption import PreemptionCheckpointHandler
from pycollective.distribute.replica_context import ValueContext
from pycollective.distribute.termination import TerminationConfig
from pycollective.distribute.unavailable import (
    ParameterServerStrategy,
    PreemptionWatcher,
    TPUStrategy,
)

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
    "coordinator",
    "partitioners",
    "rpc",
]

CollectiveCommunication = CommunicationImplementation


class CollectiveHints(CommunicationOptions):
    """The older name of `CommunicationOptions`, without an implementation."""

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        super().__init__(bytes_per_pack, timeout_seconds)
