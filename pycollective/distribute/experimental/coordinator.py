"""Names of ``tf.distribute.experimental.coordinator``: older ones of `distribute.coordinator`."""

from __future__ import annotations

from pycollective.distribute.coordinator import ClusterCoordinator, PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
