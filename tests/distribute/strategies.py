"""Strategies for tests."""

from __future__ import annotations

from pycollective import distribute
from pycollective.cluster import ClusterSpec, SimpleClusterResolver


def mirrored(replicas, ops=None):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], ops)


def workers(replicas):
    """Return a strategy of one worker, whatever the environment says."""
    no_cluster = SimpleClusterResolver(ClusterSpec({}))
    devices = [f"cpu:{i}" for i in range(replicas)]
    return distribute.MultiWorkerMirroredStrategy(no_cluster, devices=devices)


#: Functions that make a new strategy of each kind and size. `test_every_strategy.py` uses them all.
EVERY = {
    "default": distribute.get_strategy,
    "one device": lambda: distribute.OneDeviceStrategy("cpu:0"),
    "mirrored 1": lambda: mirrored(1),
    "mirrored 2": lambda: mirrored(2),
    "mirrored 3": lambda: mirrored(3),
    "mirrored 4": lambda: mirrored(4),
    "workers 1 x 1": lambda: workers(1),
    "workers 1 x 2": lambda: workers(2),
    "central storage 2": lambda: distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def replica_id():
    return distribute.get_replica_context().local_replica_id
