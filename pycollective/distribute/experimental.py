"""Names that TensorFlow keeps under ``tf.distribute.experimental``."""

from __future__ import annotations

from pycollective.distribute.central_storage import CentralStorageStrategy
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.replica_context import ValueContext
from pycollective.distribute.tpu import TPUStrategy

#: TensorFlow's older name.
CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "TPUStrategy",
    "ValueContext",
]
