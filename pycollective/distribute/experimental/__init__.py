"""Names that TensorFlow keeps under ``tf.distribute.experimental``."""

from __future__ import annotations

from pycollective.distribute.cross_device_ops import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.experimental import coordinator, partitioners, rpc
from pycollective.distribute.replica_context import ValueContext
from pycollective.distribute.termination import TerminationConfig
from pycollective.distribute.unavailable import (
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
    PreemptionCheckpointHandler,
    PreemptionWatcher,
)
from pycollective.lazy import lazy_names

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
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


__getattr__ = lazy_names(
    __name__,
    {
        "CentralStorageStrategy": "pycollective.distribute.central_storage",
        "TPUStrategy": "pycollective.distribute.tpu",
    },
)
