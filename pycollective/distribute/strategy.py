"""`Strategy`: the methods that users call; what differs between strategies is its `extended`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import (
    Mode,
    current_mode,
    entered,
    mixing_message,
    require_cross_replica,
)
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_context import ValueContext
from pycollective.distribute.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    select_replica,
)
from pycollective.tensor import Tensor, Variable, as_tensor, creator_scope

__all__ = ["Strategy"]


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

    def verify_equivalence(self, model: Any, batch: Any, loss: Any = None, **options: Any) -> Any:
        """Compare this strategy's gradients with those of one replica; see `verify_equivalence`."""
        from pycollective.distribute.verify import verify_equivalence

        return verify_equivalence(model, batch, loss, strategy=self, **options)

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
        return as_tensor(self._extended.cross_device_ops_for(value).reduce(op, value, "cpu:0"))

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
            How far ahead batches are made.

        Returns
        -------
        DistributedDataset
            Iterable; its elements go into `run`. The dataset itself under the default strategy.

        Raises
        ------
        ValueError
            If elements have no rows that could be split.
        NotImplementedError
            If the options ask for a dataset for each replica.
        """
        from pycollective.distribute.input import distribute_dataset

        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Distribute a dataset that is batched for one replica already.

        Parameters
        ----------
        dataset_fn : callable
            ``dataset_fn(InputContext)`` returns a dataset, batched by the batch size of a replica.
        options : InputOptions, optional
            Whether the function is called for each worker or for each replica, and how far ahead
            batches are made.

        Returns
        -------
        DistributedDataset
            Each step takes as many elements as there are replicas.
        """
        from pycollective.distribute.input import distribute_from_function

        return distribute_from_function(self, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Do as `distribute_datasets_from_function`, which is its new name."""
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
        """Call a function for each local replica and return its results as a PerReplica value."""
        size = self._extended.num_local_replicas
        if size == 1 and type(self._extended).__name__ != "MirroredExtended":
            return value_fn(ValueContext(0, self.num_replicas_in_sync))
        values = [value_fn(ValueContext(r, self.num_replicas_in_sync)) for r in range(size)]
        return PerReplica(values)

    def describe(self) -> str:
        """Return a line for each replica: device, threads, and how values are reduced, and why so."""
        from pycollective.distribute.describe import describe

        return describe(self)

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
