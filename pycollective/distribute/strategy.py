"""`Strategy`, `StrategyExtended` and `ReplicaContext`: what all strategies share.

A strategy is a `StrategyExtended` with the user's methods around it; what differs between
strategies is in their `StrategyExtended`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.blas_threads import shared_among
from pycollective.distribute.context import (
    Mode,
    current_mode,
    entered,
    get_replica_context,
    mixing_message,
    require_cross_replica,
)
from pycollective.distribute.cross_device_ops import CommunicationOptions, CrossDeviceOps
from pycollective.distribute.devices import Device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_threads import ReplicaRun, ReplicaThreads
from pycollective.distribute.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    regroup,
    select_replica,
)
from pycollective.tensor import Tensor, Variable, as_tensor, creator_scope, record

__all__ = ["ReplicaContext", "Strategy", "StrategyExtended", "ValueContext"]


class ValueContext:
    """What a function that makes a replica's value may know.

    Attributes
    ----------
    replica_id_in_sync_group : int
        The replica, 0 to num_replicas_in_sync - 1.
    num_replicas_in_sync : int
        How many there are.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group},  total replicas "
            f"in sync: {self.num_replicas_in_sync})"
        )


class ReplicaContext:
    """What a function that `Strategy.run` runs can ask and do; see `get_replica_context`."""

    def __init__(self, strategy: Strategy, replica: int, run: ReplicaRun | None) -> None:
        self._strategy = strategy
        self._replica = replica
        self._run = run

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are in all."""
        return self._strategy.num_replicas_in_sync

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process runs."""
        return self._strategy.extended.num_local_replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica: an int32 scalar tensor, or the int 0 outside every strategy."""
        if self._strategy.extended.is_default:
            return 0
        return Tensor(np.asarray(self._replica, np.int32))

    @property
    def local_replica_id(self) -> int:
        """This replica among those of this process."""
        return self._replica

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of this replica's device."""
        return (self._strategy.extended.worker_devices[self._replica],)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the replicas' values and give every replica the result. Differentiable.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN.
        value : nest of tensors
            This replica's values; the same shapes and dtypes in every replica.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        nest of Tensor
            The results, in the structure of ``value``.

        Raises
        ------
        MismatchError
            If shapes or dtypes differ between the replicas.
        RuntimeError
            If another replica ends without making this call.
        """
        op = ReduceOp.of(reduce_op)
        self._require_here()
        options = options or CommunicationOptions()
        inputs = tuple(as_tensor(v) for v in nest.flatten(value))
        extended = self._strategy.extended
        reduced = extended.all_reduce_in_replica(self, op, [t.array for t in inputs], options)

        def result(tensor: Tensor, array: Any) -> Tensor:
            # The gradient of a sum over the replicas is the sum of their gradients.
            def vjp(gradient: Any, _need: tuple[bool, ...]) -> Sequence[Any]:
                return extended.all_reduce_in_replica(self, op, [gradient], options)

            return record(array, (tensor,), vjp)

        results = [result(t, a) for t, a in zip(inputs, reduced, strict=True)]
        return nest.pack_as(value, results)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for all replicas, run a function once for all of them, and return this one's part.

        Parameters
        ----------
        merge_fn : callable
            ``merge_fn(strategy, *args, **kwargs)``, run in cross-replica context; its arguments are
            the replicas' arguments, grouped.
        args, kwargs
            This replica's arguments.

        Raises
        ------
        RuntimeError
            If a replica ends without making the call, or this is not this thread's replica context.
        """
        self._require_here()
        kwargs = dict(kwargs or {})
        strategy = self._strategy

        def merge(all_args: list[tuple[Any, ...]], all_kwargs: list[dict[str, Any]]) -> list[Any]:
            with entered(Mode(strategy, None)):
                merged = merge_fn(strategy, *regroup(all_args), **regroup(all_kwargs))
            return [select_replica(r, merged) for r in range(len(all_args))]

        if self._run is None:
            return merge([tuple(args)], [kwargs])[0]
        return self._run.merge(self._replica, merge, tuple(args), kwargs)

    def created_by_first(self, make: Callable[[], Variable]) -> Variable:
        """Return the variable that replica 0 makes at this point of its function."""
        if self._run is None:
            return make()
        variable: Variable = self._run.create(self._replica, make)
        return variable

    def collective(self) -> AbstractContextManager[None]:
        """Bracket a collective call of this replica."""
        return nullcontext() if self._run is None else self._run.collective(self._replica)

    def _require_here(self) -> None:
        current = get_replica_context()
        if current is self:
            return
        if current is None:
            raise RuntimeError("Need to be inside `call_for_each_replica()`")
        if current.strategy is not self._strategy:
            raise RuntimeError(
                f"Mismatching tf.distribute.Strategy objects: {current.strategy} is not "
                f"{self._strategy}"
            )
        raise RuntimeError("Mismatching ReplicaContext.")

    def __repr__(self) -> str:
        return f"<ReplicaContext {self._replica} of {self._strategy!r}>"


class StrategyExtended:
    """What differs between strategies, and the lower-level methods of `Strategy`.

    Parameters
    ----------
    devices : sequence of Device
        A replica runs on each.
    cross_device_ops : CrossDeviceOps
        How values of the replicas are reduced.
    """

    is_default = False

    def __init__(self, devices: Sequence[Device], cross_device_ops: CrossDeviceOps) -> None:
        self._devices = tuple(devices)
        self.cross_device_ops = cross_device_ops
        self._strategy: Strategy | None = None  # set by Strategy
        self._threads: ReplicaThreads | None = None
        self._run_lock = threading.RLock()

    # What a strategy may override ---------------------------------------------------------------

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a variable of this strategy; a plain one unless overridden."""
        return next_creator(**kwargs)

    def all_reduce_in_replica(
        self,
        context: ReplicaContext,
        reduce_op: ReduceOp,
        arrays: list[Any],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Do one replica's part of an all-reduce; with one replica, the arrays are the result."""
        return arrays

    def abort_collectives(self, reason: str) -> None:
        """Wake replicas that are in a collective, because another one has failed."""

    def default_replica_context(self) -> ReplicaContext | None:
        """Return the replica context outside every scope; only the default strategy has one."""
        return None

    # Facts --------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy this belongs to."""
        assert self._strategy is not None
        return self._strategy

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process runs."""
        return len(self._devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the replicas' devices."""
        return tuple(str(d) for d in self._devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables."""
        return self.worker_devices

    def replica_device(self, replica: int) -> AbstractContextManager[Any]:
        """Return the context in which a replica's arrays are made."""
        from pycollective import array_backend

        device = self._devices[replica]
        return array_backend.on_device(device.kind, device.index)

    # Running ------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function once for each replica at the same time, and group the results."""
        size = self.num_local_replicas
        if size == 1:
            context = ReplicaContext(self.strategy, 0, None)
            creators = nullcontext() if self.is_default else creator_scope(self.create_variable)
            with entered(Mode(self.strategy, context)), creators, self.replica_device(0):
                return fn(*select_replica(0, tuple(args)), **select_replica(0, kwargs))

        def replica(number: int, run: ReplicaRun) -> Any:
            context = ReplicaContext(self.strategy, number, run)
            with (
                entered(Mode(self.strategy, context)),
                creator_scope(self.create_variable),
                self.replica_device(number),
            ):
                return fn(*select_replica(number, tuple(args)), **select_replica(number, kwargs))

        with self._run_lock, shared_among(size):
            if self._threads is None:
                self._threads = ReplicaThreads(size)
            return regroup(self._threads.run(replica, self.abort_collectives))

    # Reducing, in cross-replica context ---------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce ``value`` to the devices of ``destinations``.

        Returns a tensor, or a Mirrored value when there are several destinations.
        """
        require_cross_replica(self.strategy)
        op = ReduceOp.of(reduce_op)
        if isinstance(destinations, (list, tuple)):
            raise AssertionError("destinations must be one value or device, not a list or tuple")
        if isinstance(value, Mirrored):
            if op is ReduceOp.MEAN:
                return value
            raise AssertionError("a SUM of a Mirrored value would add the same value to itself")
        if not isinstance(value, DistributedValues):
            return self._reduce_plain(op, value)
        return self.cross_device_ops.reduce(op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in one go; as `reduce_to`."""
        require_cross_replica(self.strategy)
        return self.cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)

    def _reduce_plain(self, op: ReduceOp, value: Any) -> Any:
        """Reduce what is not distributed: the same value on every replica."""
        tensor = as_tensor(value)
        if op is ReduceOp.MEAN or self.num_local_replicas == 1 or not np.any(tensor.numpy()):
            return tensor
        raise ValueError(
            f"A non-DistributedValues value {value} cannot be reduced with the given reduce op {op}."
        )

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(component, *args, **kwargs)`` for every component of a variable.

        Distributed arguments are replaced by the replica's component. Returns the grouped results, or
        a list of them with ``group=False``.
        """
        require_cross_replica(self.strategy)
        components = getattr(var, "values", (var,))
        results = []
        for replica, component in enumerate(components):
            with self.replica_device(replica):
                results.append(
                    fn(
                        component,
                        *select_replica(replica, tuple(args)),
                        **select_replica(replica, dict(kwargs or {})),
                    )
                )
        return regroup(results, Mirrored) if group else results

    def value_container(self, value: Any) -> Any:
        """Return the distributed variable that a component belongs to, or the value itself."""
        reference = getattr(value, "_distributed_container", None)
        container = reference() if reference is not None else None
        return value if container is None else container

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable was created under this strategy."""
        return getattr(v, "_distribute_strategy", None) is self.strategy

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return True


class Strategy:
    """How a model is replicated; see the subclasses.

    Parameters
    ----------
    extended : StrategyExtended
        What differs between strategies.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        extended._strategy = self

    @property
    def extended(self) -> StrategyExtended:
        """The lower-level methods."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""
        return self._extended.num_local_replicas

    @property
    def cluster_resolver(self) -> Any:
        """The description of the cluster, or None where there is no cluster."""
        return None

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the strategy in force: variables created in the block belong to it.

        Raises
        ------
        RuntimeError
            Inside another strategy's scope or in a replica function.
        """
        mode = current_mode()
        if mode is not None:
            if mode.strategy is not self:
                if self._extended.is_default:
                    raise RuntimeError("Must not nest tf.distribute.Strategy scopes.")
                if not mode.strategy.extended.is_default:
                    raise RuntimeError(mixing_message(mode.strategy, self))
            elif mode.replica_context is not None:
                raise RuntimeError(
                    "a replica function is inside its strategy's scope already: do not enter it again"
                )
            else:
                yield self
                return
        with entered(Mode(self, None)), creator_scope(self._extended.create_variable):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Run a function once for each replica, at the same time, and group the results.

        Parameters
        ----------
        fn : callable
            Runs in replica context, in a thread for each replica. Distributed values among its
            arguments are replaced by the replica's component.
        args : list or tuple
            Positional arguments.
        kwargs : dict, optional
            Keyword arguments.
        options : optional
            Accepted for TensorFlow's sake; nothing here needs it.

        Returns
        -------
        nest
            The replicas' results, grouped: a `PerReplica` where they differ, plain with one replica.

        Raises
        ------
        ValueError
            If ``args`` is no list or tuple.
        RuntimeError
            In a replica function, or if the replicas' collective calls do not fit together.
        Exception
            The first exception of any replica; the others are stopped at their next meeting.
        """
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"positional args must be a list or tuple, got {type(args)}")
        require_cross_replica(self)
        return self._extended.call_for_each_replica(fn, args, dict(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Reduce a value across the replicas, and along axes within each, to a plain tensor.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN.
        value : nest of PerReplica or tensors
            For example what `run` returned.
        axis : int, sequence of int, or None
            Axes to reduce within each replica first. A MEAN then weighs each element the same, however
            many a replica holds. None: elements stay, and replicas count the same.

        Returns
        -------
        nest of Tensor
            The result on the host.

        Raises
        ------
        TypeError
            If ``reduce_op`` or ``axis`` is of another kind.
        ValueError
            If an axis is out of range or the replicas' shapes differ.
        """
        require_cross_replica(self)
        op = ReduceOp.of(reduce_op)
        axes = _check_axis(axis)
        return _map_values(lambda v: self._reduce_one(op, v, axes), value)

    def _reduce_one(self, op: ReduceOp, value: Any, axes: tuple[int, ...] | None) -> Any:
        if axes is None:
            return self._reduce_across(op, value)
        components = self.experimental_local_results(value)
        locally = [_sum_within(c, axes) for c in components]
        total = self._reduce_across(ReduceOp.SUM, PerReplica([s for s, _ in locally]))
        if op is ReduceOp.SUM:
            return total
        count = sum(n for _, n in locally)
        with np.errstate(invalid="ignore", divide="ignore"):  # the mean of nothing is NaN
            return Tensor(np.asarray(total.array / np.asarray(count, total.dtype)))

    def _reduce_across(self, op: ReduceOp, value: Any) -> Any:
        if isinstance(value, Variable):
            return as_tensor(value)
        if not isinstance(value, DistributedValues):
            return self._extended._reduce_plain(op, value)
        if isinstance(value, Mirrored):
            return as_tensor(self._extended.reduce_to(op, value, "cpu:0"))
        if len(value.values) == 1:
            return as_tensor(value.values[0])
        return as_tensor(self._extended.cross_device_ops.reduce(op, value, "cpu:0"))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value, one for each local replica.

        A plain value gives ``(value,)``; a nest gives a tuple of nests.
        """
        if isinstance(value, DistributedValues):
            return value.values
        if nest.is_nested(value) and any(
            isinstance(v, DistributedValues) for v in nest.flatten(value)
        ):
            replicas = range(self._extended.num_local_replicas)
            return tuple(select_replica(r, value) for r in replicas)
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Split the batches of a dataset among the replicas.

        Parameters
        ----------
        dataset : Dataset
            Batched by the global batch size: each replica gets an equal part of every batch, the last
            ones a smaller or empty part where the batch cannot be divided.
        options : InputOptions, optional
            Hints.

        Returns
        -------
        DistributedDataset or Dataset
            Iterable; its elements go into `run`. With one replica the dataset itself.
        """
        from pycollective.distribute.input import distribute_dataset

        return distribute_dataset(self, dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Distribute a dataset that is batched for one replica already.

        Parameters
        ----------
        dataset_fn : callable
            ``dataset_fn(InputContext)`` returns a dataset, batched by the batch size of a replica.
        options : InputOptions, optional
            Hints.

        Returns
        -------
        DistributedDataset
            Each step takes as many elements as there are replicas.
        """
        from pycollective.distribute.input import distribute_from_function

        return distribute_from_function(self, dataset_fn)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Call a function for each local replica and return its results as a PerReplica value."""
        size = self._extended.num_local_replicas
        if size == 1 and type(self._extended).__name__ != "MirroredExtended":
            return value_fn(ValueContext(0, self.num_replicas_in_sync))
        values = [value_fn(ValueContext(r, self.num_replicas_in_sync)) for r in range(size)]
        return PerReplica(values)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {', '.join(self._extended.worker_devices)}>"


def _check_axis(axis: Any) -> tuple[int, ...] | None:
    if axis is None:
        return None
    axes = axis if isinstance(axis, (list, tuple)) else (axis,)
    for a in axes:
        if isinstance(a, bool) or not isinstance(a, (int, np.integer)):
            raise TypeError(f"axis must be an int, a list or tuple of ints, or None, not {axis!r}")
    return tuple(int(a) for a in axes)


def _sum_within(component: Any, axes: tuple[int, ...]) -> tuple[Tensor, int]:
    """Return the sum of a component along axes, and how many elements went into each sum."""
    array = as_tensor(component).array
    for a in axes:
        if not -array.ndim <= a < array.ndim:
            raise ValueError(
                f"`axis` = {a} out of range for `value` with rank {array.ndim} and shape "
                f"{array.shape}"
            )
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    return Tensor(np.asarray(array.sum(axis=axes, dtype=array.dtype))), count


def _map_values(function: Callable[[Any], Any], value: Any) -> Any:
    if nest.is_nested(value):
        return nest.map_structure(function, value)
    return function(value)
