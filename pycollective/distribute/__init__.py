"""Data-parallel training in the shape of ``tf.distribute``."""

from __future__ import annotations

from pycollective.distribute import experimental
from pycollective.distribute.context import (
    created_once,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from pycollective.distribute.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.input import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
)
from pycollective.distribute.mirrored import MirroredStrategy
from pycollective.distribute.one_device import OneDeviceStrategy
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.values import DistributedValues

__all__ = [
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "created_once",
    "experimental",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
