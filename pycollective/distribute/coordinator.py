"""Names of ``tf.distribute.coordinator``; the classes are not available, see `unavailable`."""

from __future__ import annotations

from pycollective.distribute.unavailable import ClusterCoordinator, PerWorkerValue, RemoteValue

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]


def experimental_get_current_worker_index() -> int:
    """Return the number of the worker that runs a scheduled function.

    Raises
    ------
    RuntimeError
        Always: pycollective has no coordinator.
    """
    raise RuntimeError(
        "Cannot retrieve the worker index. `get_worker_idx_and_num_workers` should be called from "
        "within a tf.function being executed on a worker: there is no coordinator here"
    )
