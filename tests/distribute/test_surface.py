"""The names of tf.distribute: their paths, and the errors of those that are not available."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

import pycollective as tf
from pycollective import errors
from pycollective.distribute.unavailable import Unavailable

NAMES = {
    "distribute": """CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
        HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
        MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy ReduceOp
        ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy
        experimental_set_strategy get_replica_context get_strategy has_strategy
        in_cross_replica_context cluster_resolver coordinator experimental""",
    "distribute.experimental": """CentralStorageStrategy CollectiveCommunication CollectiveHints
        CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy
        ParameterServerStrategy PreemptionCheckpointHandler PreemptionWatcher TPUStrategy
        TerminationConfig ValueContext coordinator partitioners rpc""",
    "distribute.coordinator": """ClusterCoordinator PerWorkerValue RemoteValue
        experimental_get_current_worker_index""",
    "distribute.experimental.coordinator": "ClusterCoordinator PerWorkerValues RemoteValue",
    "distribute.experimental.rpc": "Client Server",
    "distribute.cluster_resolver": """ClusterResolver GCEClusterResolver KubernetesClusterResolver
        KubernetesExecutableLocation SimpleClusterResolver SlurmClusterResolver
        TFConfigClusterResolver TPUClusterResolver UnionResolver""",
    "distribute.experimental.partitioners": """Partitioner FixedShardsPartitioner MinSizePartitioner
        MaxSizePartitioner""",
    "types.experimental.distributed": "PerReplica Mirrored",
    "": "VariableSynchronization VariableAggregation GradientTape Variable IndexedSlices function",
    "VariableSynchronization": "AUTO NONE ON_WRITE ON_READ",
    "VariableAggregation": "NONE SUM MEAN ONLY_FIRST_REPLICA",
    "nn": "compute_average_loss embedding_lookup scale_regularization_loss",
    "data.experimental": "AutoShardPolicy DistributeOptions SHARD_HINT",
    "data": "Dataset Options AUTOTUNE experimental",
    "keras.callbacks": "BackupAndRestore",
    "keras.utils.experimental": "DatasetCreator",
    "train": "ClusterSpec Checkpoint CheckpointManager latest_checkpoint",
    "config": """list_physical_devices list_logical_devices PhysicalDevice LogicalDevice
        LogicalDeviceConfiguration get_logical_device_configuration set_logical_device_configuration""",
    "errors": """OpError CancelledError UnknownError InvalidArgumentError DeadlineExceededError
        NotFoundError AlreadyExistsError PermissionDeniedError ResourceExhaustedError
        FailedPreconditionError AbortedError OutOfRangeError UnimplementedError InternalError
        UnavailableError DataLossError UnauthenticatedError""",
}
PATHS = [
    f"{package}.{name}".lstrip(".") for package, names in NAMES.items() for name in names.split()
]


def at(path):
    value = tf
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", PATHS)
def test_name_is_at_its_path(path):
    assert at(path) is not None


@pytest.mark.parametrize("package", [p for p in NAMES if p and p[0].islower()])
def test_packages_are_modules_to_import_and_list_their_names(package):
    module = importlib.import_module(f"pycollective.{package}")
    assert at(package) is module
    assert module.__all__ == [n for n in module.__all__ if getattr(module, n, None) is not None]
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_aliases_are_the_same_objects():
    d, e = tf.distribute, tf.distribute.experimental
    assert e.MultiWorkerMirroredStrategy is d.MultiWorkerMirroredStrategy
    assert e.ParameterServerStrategy is d.ParameterServerStrategy
    assert e.CollectiveCommunication is e.CommunicationImplementation
    assert e.coordinator.ClusterCoordinator is d.coordinator.ClusterCoordinator
    assert e.coordinator.RemoteValue is d.coordinator.RemoteValue
    assert e.coordinator.PerWorkerValues is d.coordinator.PerWorkerValue
    hints = e.CollectiveHints(bytes_per_pack=3, timeout_seconds=2.0)
    assert isinstance(hints, e.CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (3, 2.0)


def every_unavailable():
    classes = {at(path) for path in PATHS if isinstance(_or_none(path), type)}
    return sorted((c for c in classes if issubclass(c, Unavailable)), key=lambda c: c.__name__)


def _or_none(path):
    try:
        return at(path)
    except (AttributeError, ImportError):
        return None


@pytest.mark.parametrize("cls", every_unavailable(), ids=lambda c: c.__name__)
def test_class_that_is_not_available_names_a_replacement(cls):
    for arguments in ((), ("anything", 3)):
        with pytest.raises(
            NotImplementedError, match="is not available in pycollective: .{30}"
        ) as e:
            cls(*arguments)
        assert isinstance(e.value, errors.NotAvailableError)
        assert cls.__name__ in str(e.value)
    if cls.__name__.endswith("Strategy"):
        assert issubclass(cls, tf.distribute.Strategy)


def test_worker_index_outside_of_a_coordinators_function_raises():
    with pytest.raises(RuntimeError, match="Cannot retrieve the worker index"):
        tf.distribute.coordinator.experimental_get_current_worker_index()


def test_import_cluster_loads_no_package_above_it(tmp_path):
    code = (
        "import sys, pycollective as tf; tf.cluster.ClusterSpec({}); tf.errors.OpError;"
        "packages = ('distribute', 'keras', 'tensor', 'train');"
        "bad = [m for m in sys.modules for p in packages if m.startswith('pycollective.' + p)];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


# Data classes -------------------------------------------------------------------------------------


def test_termination_config_checks_its_arguments():
    config = tf.distribute.experimental.TerminationConfig
    empty = config()
    values = (empty.termination_watcher_fn, empty.exit_fn, empty.grace_period, empty.save_fn)
    assert values == (None, None, None, None)
    assert config(print, exit_fn=print, grace_period=3.5, save_fn=print).grace_period == 3.5
    with pytest.raises(ValueError, match="`grace_period` must be >= 0 seconds, got -1"):
        config(grace_period=-1)
    for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
        with pytest.raises(TypeError, match=f"`{name}` must be callable, not 3"):
            config(**{name: 3})


def test_dataset_creator_checks_its_arguments():
    creator = tf.keras.utils.experimental.DatasetCreator(
        lambda context: tf.data.Dataset.range(context.num_replicas_in_sync), input_options="any"
    )
    assert creator.input_options == "any"
    dataset = creator(tf.distribute.InputContext(num_replicas_in_sync=3))
    assert [int(x) for x in dataset] == [0, 1, 2]
    with pytest.raises(TypeError, match="`dataset_fn` for `DatasetCreator` must be a `callable`"):
        tf.keras.utils.experimental.DatasetCreator(3)
    with pytest.raises(TypeError, match="must return a `tf.data.Dataset`. Received: 3"):
        tf.keras.utils.experimental.DatasetCreator(lambda: 3)()


def test_devices_of_this_machine_are_listed_by_type():
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert cpu == ("/physical_device:CPU:0", "CPU")
    assert tf.config.list_physical_devices()[0] is not None
    assert tf.config.list_logical_devices("cpu")[0].name == "/device:CPU:0"
    gpus = tf.config.list_physical_devices("GPU")
    assert [g.device_type for g in gpus] == ["GPU"] * len(gpus)
    assert len(tf.config.list_logical_devices()) == 1 + len(gpus)
    assert tf.config.list_physical_devices("TPU") == []


# Partitioners -------------------------------------------------------------------------------------

P = tf.distribute.experimental.partitioners


@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "axis", "shards"),
    [
        (P.FixedShardsPartitioner(2), (10, 3), "float32", 0, [2, 1]),
        (P.FixedShardsPartitioner(4), (3, 10), "float32", 0, [3, 1]),
        (P.FixedShardsPartitioner(4), (3, 10), "float32", 1, [1, 4]),
        (P.MinSizePartitioner(4, max_shards=2), (6, 1), "float32", 0, [2, 1]),
        (P.MinSizePartitioner(4, max_shards=10), (6, 1), "float32", 0, [6, 1]),
        (P.MinSizePartitioner(10, max_shards=10), (6, 1), "float32", 0, [3, 1]),  # ceil(24 / 10)
        (P.MinSizePartitioner(), (1 << 20, 4), "float32", 0, [1, 1]),
        (P.MinSizePartitioner(max_shards=99), (1 << 16, 8), "float64", 0, [16, 1]),
        (P.MinSizePartitioner(32, 9, bytes_per_string=16), (8,), str, 0, [4]),
        (P.MaxSizePartitioner(4), (6, 1), "float32", 0, [6, 1]),
        (P.MaxSizePartitioner(4, max_shards=2), (6, 1), "float32", 0, [2, 1]),
        (P.MaxSizePartitioner(1024), (6, 1), "float32", 0, [1, 1]),
        (P.MaxSizePartitioner(9), (6, 1), "float32", 0, [3, 1]),  # 2 rows of 4 bytes each
        (P.MaxSizePartitioner(1), (6, 5), np.float64, 0, [6, 1]),  # a row is longer
        (P.MaxSizePartitioner(48), (6, 5), "float32", -1, [1, 3]),
        (P.MaxSizePartitioner(32), (8,), "string", 0, [4]),
        (P.MaxSizePartitioner(32), (0, 4), "float32", 0, [1, 1]),
    ],
)
def test_partitioners_return_shards_of_each_axis(partitioner, shape, dtype, axis, shards):
    assert partitioner(shape, dtype, axis=axis) == shards
    assert isinstance(partitioner, P.Partitioner)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: P.FixedShardsPartitioner(0),
            "Argument `num_shards` must be positive. Received: 0",
        ),
        (
            lambda: P.MinSizePartitioner(0),
            "Argument `min_shard_bytes` must be positive. Received: 0",
        ),
        (
            lambda: P.MinSizePartitioner(max_shards=0),
            "Argument `max_shards` must be positive. Received: 0",
        ),
        (
            lambda: P.MinSizePartitioner(bytes_per_string=0),
            "Argument `bytes_per_string` must be positive. Received: 0",
        ),
        (
            lambda: P.MaxSizePartitioner(0),
            "Argument `max_shard_bytes` must be positive. Received: 0",
        ),
        (
            lambda: P.MaxSizePartitioner(1, max_shards=-1),
            "Argument `max_shards` must be positive. Received: -1",
        ),
        (
            lambda: P.MaxSizePartitioner(1, bytes_per_string=0),
            "Argument `bytes_per_string` must be positive. Received: 0",
        ),
        (lambda: P.FixedShardsPartitioner(1)((), "float32"), "axis 0 is out of range"),
        (lambda: P.FixedShardsPartitioner(1)((2, 2), "float32", axis=2), "axis 2 is out of range"),
        (lambda: P.MinSizePartitioner()((None, 2), "float32"), "every length of the shape must be"),
    ],
)
def test_partitioners_wrong_arguments_raise(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_partitioner_without_shards_raises():
    with pytest.raises(NotImplementedError, match=r"must override shards\(\)"):
        P.Partitioner()((2,), "float32")


# Errors -------------------------------------------------------------------------------------------

PYTHON_CLASSES = {
    "InvalidArgumentError": ValueError,
    "DeadlineExceededError": TimeoutError,
    "NotFoundError": LookupError,
    "ResourceExhaustedError": MemoryError,
    "OutOfRangeError": StopIteration,
    "UnimplementedError": NotImplementedError,
    "InternalError": RuntimeError,
    "UnavailableError": RuntimeError,
    "AbortedError": errors.CollectiveError,
}


@pytest.mark.parametrize("name", NAMES["errors"].split())
def test_errors_are_those_of_tensorflow_and_of_python(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.OpError)
    assert issubclass(error, PYTHON_CLASSES.get(name, Exception))
    for raised in (error("a: message"), error(None, "an op", "a: message")):
        assert str(raised) == raised.message == "a: message"
        again = pickle.loads(pickle.dumps(raised))
        assert type(again) is error
        assert (str(again), again.op) == ("a: message", raised.op)
    assert str(error()) == ""
    for raised in (
        error(None, None, "a: message", 3), error(None, None, message="a: message"),
        error(message="a: message", op=None, node_def=None),
    ):  # fmt: skip
        assert str(raised) == str(pickle.loads(pickle.dumps(raised))) == "a: message"


def test_codes_of_errors_are_tensorflows():
    codes = [getattr(errors, name).error_code for name in NAMES["errors"].split()[1:]]
    assert codes == list(range(1, 17))


def test_errors_of_collectives_are_those_of_tensorflow_too():
    assert issubclass(errors.PeerLostError, errors.UnavailableError)
    assert issubclass(errors.CollectiveTimeoutError, errors.DeadlineExceededError)
    assert issubclass(errors.CollectiveTimeoutError, TimeoutError)
    assert str(errors.PeerLostError("rank 3 of 4: gone")) == "rank 3 of 4: gone"
