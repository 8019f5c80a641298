"""Names that TensorFlow keeps under ``tf.distribute.experimental``."""

from __future__ import annotations

from pycollective.distribute.cross_device_ops import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.replica_context import ValueContext

__all__ = ["CommunicationImplementation", "CommunicationOptions", "ValueContext"]
