"""Data-parallel training in the shape of ``tf.distribute``."""

from __future__ import annotations

from pycollective.distribute import (
    cluster_resolver,
    coordinator,
    experimental,
)
from pycollective.distribute.all_reduce_ops import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from pycollective.distribute.context import (
    created_once,
    experimental_set_strategy,
    has_strategy,
    in_cross_replica_context,
)
from pycollective.distribute.cross_device_ops import CrossDeviceOps
from pycollective.distribute.default import get_replica_context, get_strategy
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.input import DistributedDataset, DistributedIterator
from pycollective.distribute.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
)
from pycollective.distribute.mirrored import MirroredStrategy
from pycollective.distribute.multi_worker import MultiWorkerMirroredStrategy
from pycollective.distribute.one_device import OneDeviceStrategy
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.server import Server
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.unavailable import TPUStrategy
from pycollective.distribute.values import DistributedValues
from pycollective.distribute.verify import verify_equivalence

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
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "cluster_resolver",
    "coordinator",
    "created_once",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "verify_equivalence",
]
