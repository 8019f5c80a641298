"""Options, contexts and specs of distributed datasets."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from pycollective.data import TensorSpec


@dataclass(frozen=True)
class InputContext:
    """The number of a dataset among the datasets that a function makes.

    Attributes
    ----------
    num_input_pipelines, input_pipeline_id : int
        The number of datasets, and the index of this one.
    num_replicas_in_sync : int
        The number of replicas that the datasets feed.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of a replica.

        Raises
        ------
        ValueError
            The batch cannot be divided equally.
        """
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync!r} "
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, total: "
            f"{self.num_input_pipelines})"
        )


class InputReplicationMode(enum.Enum):
    """The number of calls of the function of `distribute_datasets_from_function`.

    PER_WORKER: once in each process. PER_REPLICA: once for each replica.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class _InputOptions(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int


class InputOptions(_InputOptions):
    """Options of distributed datasets.

    Attributes
    ----------
    experimental_fetch_to_device : bool, optional
        True, the default: a thread prefetches batches to the replicas' devices. False: batches stay on
        the host, and only `Strategy.experimental_distribute_dataset` prefetches, one step.
    experimental_replication_mode : InputReplicationMode
        The number of calls of the function that makes a dataset: one for each worker or replica.
    experimental_place_dataset_on_device : bool
        True: batches are copied to the replicas' devices without prefetching. Datasets run on the host.
    experimental_per_replica_buffer_size : int
        The number of prefetched batches of each replica.

    Raises
    ------
    ValueError
        ``experimental_per_replica_buffer_size`` is less than 1.
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
    ) -> InputOptions:
        """Return the options; see the class."""
        if experimental_per_replica_buffer_size < 1:
            raise ValueError(
                "experimental_per_replica_buffer_size must be at least 1, not "
                f"{experimental_per_replica_buffer_size}"
            )
        if not isinstance(experimental_replication_mode, InputReplicationMode):
            raise TypeError(
                "experimental_replication_mode must be an InputReplicationMode, not "
                f"{experimental_replication_mode!r}"
            )
        return super().__new__(
            cls,
            experimental_fetch_to_device is None or experimental_fetch_to_device,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
        )


class RunOptions(NamedTuple):
    """Options of `Strategy.run` for TPUs; ignored."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


@dataclass(frozen=True)
class PerReplicaSpec:
    """Specs of the components of a `PerReplica`.

    Attributes
    ----------
    value_specs : tuple of TensorSpec
        A spec for each local replica.
    """

    value_specs: tuple[TensorSpec, ...]

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.value_specs))})"


def steps_ahead(options: InputOptions | None) -> int:
    """Return the number of prefetched steps."""
    options = options or InputOptions()
    fetched = options.experimental_fetch_to_device
    return options.experimental_per_replica_buffer_size if fetched else 0


def goes_to_devices(options: InputOptions | None) -> bool:
    """Return True if batches are copied to the replicas' devices."""
    options = options or InputOptions()
    return options.experimental_fetch_to_device or options.experimental_place_dataset_on_device


def check_options(options: Any) -> None:
    """Raise a TypeError for options of another type."""
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be tf.distribute.InputOptions, not {type(options).__name__}")
