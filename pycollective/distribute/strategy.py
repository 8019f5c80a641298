"""`Strategy`: the methods that users call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective import array_backend, nest
from pycollective.distribute.context import Scope, require_cross_replica, state
from pycollective.distribute.cross_device_ops import placed_on
from pycollective.distribute.describe import describe
from pycollective.distribute.devices import Device
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.input import distribute_dataset, distribute_from_function
from pycollective.distribute.reduce_op import ReduceOp, check_sum
from pycollective.distribute.replica_context import ValueContext
from pycollective.distribute.values import (
    DistributedValues,
    PerReplica,
    concatenated,
    regroup,
)
from pycollective.distribute.verify import verify_equivalence
from pycollective.tensor import IndexedSlices, Tensor, as_tensor
from pycollective.tensor.compiled import is_half, narrowed

_HOST = Device("CPU", 0)


class Strategy:
    """Base class of strategies, which replicate a model.

    Parameters
    ----------
    extended : StrategyExtended
        The lower-level methods, which differ between strategies.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        #: The lower-level methods.
        self.extended = extended
        extended.belong_to(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all processes."""
        return self.extended.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster, or None without a cluster."""
        return getattr(self.extended, "_cluster_resolver", None)

    def scope(self) -> Scope:
        """Return a context manager that makes this the current strategy.

        Variables created in its block belong to the strategy. The scope of the current strategy can be
        entered again, and the same object can be used again.

        Raises
        ------
        RuntimeError
            On entry: another strategy is the current one, or this is a replica function. On exit:
            scopes are not exited in the reverse order of their entry.
        """
        return Scope(self, self.extended.create_variable)

    def __copy__(self) -> Strategy:
        raise RuntimeError("Must only deepcopy DistributionStrategy.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # Cross-device operations are shared, because they keep no state of a strategy.
        copied.__dict__.update(self.__dict__, extended=copy.deepcopy(self.extended, memo))
        copied.extended.belong_to(copied)
        return copied

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function once for each replica, at the same time, and group the results.

        Parameters
        ----------
        fn : callable
            Called in replica context, in a thread for each replica. Distributed values among the
            arguments are replaced by the replica's component.
        args : list or tuple
            Positional arguments.
        kwargs : dict, optional
            Keyword arguments.
        options : optional
            Ignored; TensorFlow's TPUs need it.

        Returns
        -------
        nest
            The results: a `PerReplica` where they differ, plain values with one replica.

        Raises
        ------
        TypeError
            ``fn`` cannot be called.
        ValueError
            ``args`` is not a list or tuple.
        RuntimeError
            This is a replica function or a merge function, or the replicas make different calls.
        CollectiveTimeoutError
            Others wait for a replica longer than ``extended.timeout`` seconds. The error names the
            replica; its function still runs in its thread.
        Exception
            The first exception of any replica. The others stop at their next merge point.
        """
        if not callable(fn):
            raise TypeError(f"run needs a function, not {fn!r}")
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"positional args must be a list or tuple, got {type(args)}")
        return self.extended.run(self, fn, args, kwargs)

    def verify_equivalence(self, model: Any, batch: Any, loss: Any = None, **options: Any) -> Any:
        """Compare this strategy's gradients with those of one replica; see `verify_equivalence`."""
        return verify_equivalence(model, batch, loss, strategy=self, **options)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Reduce a value over the replicas, and along axes within each, to a plain tensor.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN.
        value : nest of PerReplica or tensors
            For example the result of `run`.
        axis : int, sequence of int, or None
            Axes to reduce within each replica first. A MEAN then has the same weight for each element
            of all replicas, and a plain or Mirrored value counts once for each replica. None: reduce
            over the replicas only, with the same weight for each.

        Returns
        -------
        nest of Tensor
            The result on the host.

        Raises
        ------
        TypeError
            ``reduce_op`` or ``axis`` has another type, or bools are to be summed.
        ValueError
            An axis is out of range, or the replicas' shapes differ. Or a plain value other than 0 is to
            be summed over several replicas without an axis.
        AssertionError
            The SUM of a Mirrored value is asked for without an axis.
        RuntimeError
            This is a replica function; use `ReplicaContext.all_reduce` there.
        """
        if state.modes:
            require_cross_replica(self)
        op = ReduceOp.of(reduce_op)
        if axis is None and (total := self.extended.reduced_on_host(op, value)) is not None:
            check_sum("reduce", op, total)
            return total
        axes = None if axis is None else _check_axis(axis)
        if nest.is_nested(value):
            return nest.map_structure(lambda v: self._reduce_one(op, v, axes), value)
        return self._reduce_one(op, value, axes)

    def _reduce_one(self, op: ReduceOp, value: Any, axes: tuple[int, ...] | None) -> Any:
        if axes is None:
            total = self.extended.reduced_on_host(op, value)
            total = self._reduce_across(op, value) if total is None else total
            check_sum("reduce", op, total)
            return total
        replicas = self.extended.num_local_replicas
        components = value.values if isinstance(value, DistributedValues) else (value,) * replicas
        locally = [_sum_within(c, axes, op) for c in components]
        total = self._reduce_across(ReduceOp.SUM, _per_replica([s for s, _ in locally]))
        dtype = as_tensor(components[0]).dtype
        if op is ReduceOp.MEAN:
            count = self.extended.workers.total(sum(n for _, n in locally))
            with (
                array_backend.beside(total.array),
                np.errstate(invalid="ignore", divide="ignore"),  # the mean of no elements is NaN
            ):
                total = Tensor(array_backend.asarray(total.array / total.dtype.type(count)))
        check_sum("reduce", op, total)
        return Tensor(narrowed(total.array, dtype)) if is_half(dtype) else total

    def _reduce_across(self, op: ReduceOp, value: Any) -> Any:
        reduced = self.extended.reduce_to(op, value, "cpu:0")
        if not isinstance(reduced, IndexedSlices):
            reduced = as_tensor(reduced)
        # With one replica on a GPU, the value is still on that GPU.
        return placed_on(reduced, _HOST) if self.extended.groups_values else reduced

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values along an axis, in replica order, to a plain tensor.

        Parameters
        ----------
        value : nest of PerReplica or tensors
            For example the result of `run`; shapes may differ between the replicas along ``axis``.
        axis : int
            The axis of the concatenation.

        Returns
        -------
        nest of Tensor
            The result on the host.

        Raises
        ------
        NotImplementedError
            A value is an `IndexedSlices`.
        TypeError
            ``axis`` is not an int.
        ValueError
            There is no such axis, or dtypes, or shapes on another axis, differ.
        RuntimeError
            This is a replica function; use `ReplicaContext.all_gather` there.
        """
        require_cross_replica(
            self,
            "tf.distribute.Strategy.gather method requires cross-replica context, use "
            "get_replica_context().all_gather() instead",
        )
        if nest.is_nested(value):
            return nest.map_structure(lambda v: self._gather_one(v, axis), value)
        return self._gather_one(value, axis)

    def _gather_one(self, value: Any, axis: int) -> Tensor:
        components = value.values if isinstance(value, DistributedValues) else (value,)
        if any(isinstance(c, IndexedSlices) for c in components):
            raise NotImplementedError("gather does not support IndexedSlices")
        if len(components) == 1:
            joined = concatenated([as_tensor(components[0]).array], axis)
        else:
            how = self.extended.cross_device_ops_for(value)
            joined = how.gather(PerReplica(components), "cpu:0", axis).array
        return Tensor(self.extended.workers.gather(joined, axis)[0])

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value, one for each local replica.

        A plain value gives ``(value,)``. A nest with distributed values gives a tuple of nests. The
        default strategy and `OneDeviceStrategy` always give ``(value,)``.
        """
        if not self.extended.groups_values:
            return (value,)
        if isinstance(value, DistributedValues):
            return value.values
        if nest.is_nested(value) and any(
            isinstance(v, DistributedValues) for v in nest.flatten(value)
        ):
            replicas = range(self.extended.num_local_replicas)
            return tuple(_components(r, value) for r in replicas)
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Split the batches of a dataset among the replicas.

        Parameters
        ----------
        dataset : Dataset
            A dataset in global batches. Each replica gets an equal part of every batch. If the batch
            cannot be divided, the last replicas get smaller or empty parts.
        options : InputOptions, optional
            Options of prefetching.

        Returns
        -------
        DistributedDataset
            An iterable of arguments for `run`. The dataset itself under the default strategy.

        Raises
        ------
        TypeError
            ``dataset`` or ``options`` has another type.
        ValueError
            Elements have no rows that can be divided.
        NotImplementedError
            The options ask for a dataset for each replica.
        """
        return distribute_dataset(self.extended, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Distribute a dataset in batches for one replica.

        Parameters
        ----------
        dataset_fn : callable
            ``dataset_fn(InputContext)`` returns a dataset in batches for one replica.
        options : InputOptions, optional
            Options of prefetching, and of the calls of the function: for each worker or each replica.

        Returns
        -------
        DistributedDataset
            Each step takes one element for each replica. The dataset itself under the default strategy.

        Raises
        ------
        TypeError
            The function returns something else than a dataset, or ``options`` has another type.
        ValueError
            The options contradict each other.
        NotImplementedError
            The options ask for a dataset for each replica, which only `MirroredStrategy` has.
        """
        return distribute_from_function(self.extended, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Call `distribute_datasets_from_function`, the new name."""
        warnings.warn(
            "experimental_distribute_datasets_from_function is deprecated: rename to "
            "distribute_datasets_from_function",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Call a function for each local replica, and return the results as distributed values.

        Parameters
        ----------
        value_fn : callable
            ``value_fn(ValueContext)`` returns the value, or nest of values, of a replica.

        Returns
        -------
        nest of PerReplica
            Also for equal values. The default strategy and `OneDeviceStrategy` return a plain value.
        """
        size = self.extended.num_local_replicas
        first, replicas = self.extended.first_replica, self.num_replicas_in_sync
        values = []
        for r in range(size):
            with self.extended.devices[r].in_use():
                values.append(value_fn(ValueContext(first + r, replicas)))
        if not self.extended.groups_values:
            return values[0]
        return regroup(values, always_wrap=True)

    def describe(self) -> str:
        """Return a line for each replica: device, threads, cross-device operations and their reason."""
        return describe(self.extended)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Call `experimental_local_results`, the new name."""
        return self.experimental_local_results(value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {', '.join(self.extended.worker_devices)}>"


def _check_axis(axis: Any) -> tuple[int, ...]:
    axes = axis if isinstance(axis, (list, tuple)) else (axis,)
    for a in axes:
        if isinstance(a, bool) or not isinstance(a, (int, np.integer)):
            raise TypeError(f"axis must be an int, a list or tuple of ints, or None, not {axis!r}")
    return tuple(int(a) for a in axes)


def _sum_within(component: Any, axes: tuple[int, ...], op: ReduceOp) -> tuple[Tensor, int]:
    """Return the sum of a component along axes, and the number of elements of each sum."""
    array = as_tensor(component).array
    for a in axes:
        if not -array.ndim <= a < array.ndim:
            raise ValueError(
                f"`axis` = {a} out of range for `value` with rank {array.ndim} and shape "
                f"{array.shape}"
            )
    count = int(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    # The sum of small integers must not overflow before it is divided for a mean. The sum of halves
    # would lose small summands.
    wide = op is ReduceOp.MEAN and array.dtype.kind in "iub"
    dtype = np.float32 if is_half(array.dtype) else None if wide else array.dtype
    with array_backend.beside(array):
        return Tensor(array_backend.asarray(array.sum(axis=axes, dtype=dtype))), count


def _per_replica(components: list[Any]) -> Any:
    return components[0] if len(components) == 1 else PerReplica(components)


def _components(replica: int, value: Any) -> Any:
    """Return a nest with the components of a replica; variables, too, become components."""

    def component(leaf: Any) -> Any:
        return leaf.values[replica] if isinstance(leaf, DistributedValues) else leaf

    return nest.map_structure(component, value)
