"""`ReplicaContext`: the collectives of a function that runs for one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import Array
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.context import Mode, current_mode, entered
from pycollective.distribute.interfaces import AnyContext, AnyStrategy
from pycollective.distribute.reduce_op import ReduceOp, check_sum
from pycollective.distribute.replica_threads import Collective, ReplicaRun, ReplicaThreads
from pycollective.distribute.values import check_gather_axis, regroup, select_replica
from pycollective.tensor import IndexedSlices, Tensor, Variable, as_tensor, record_many
from pycollective.tensor.tape import paused, recording


@dataclass(eq=False)
class ValueContext:
    """The argument of a function that creates a replica's value.

    Attributes
    ----------
    replica_id_in_sync_group : int
        The replica, 0 to num_replicas_in_sync - 1.
    num_replicas_in_sync : int
        The number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group},  total replicas "
            f"in sync: {self.num_replicas_in_sync})"
        )


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.dtype.kind in "fV"


class ReplicaContext:
    """One replica's numbers and collectives, in a function that `Strategy.run` calls."""

    def __init__(self, strategy: AnyStrategy, replica: int, run: ReplicaRun | None) -> None:
        #: The strategy that runs this replica.
        self.strategy = strategy
        #: This replica's number in its process; TensorFlow's programs use the second name.
        self.local_replica_id = self._replica_id = replica
        self._run = run
        #: The threads of this run's replicas, or None for one replica.
        self.threads: ReplicaThreads | None = None if run is None else run.threads

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all processes."""
        return self.strategy.num_replicas_in_sync

    @property
    def num_local_replicas(self) -> int:
        """The number of replicas of this process."""
        return self.strategy.extended.num_local_replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica: an int32 scalar tensor, or the int 0 outside every strategy."""
        extended = self.strategy.extended
        if extended.is_default:
            return 0
        number = np.asarray(extended.first_replica + self.local_replica_id, np.int32)
        return Tensor(extended.devices[self.local_replica_id].place(number))

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of this replica's device, in a tuple."""
        return (self.strategy.extended.worker_devices[self.local_replica_id],)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the replicas' values; every replica gets the result. Differentiable.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN.
        value : nest of tensors and IndexedSlices
            This replica's values, of the same shapes and dtypes in every replica. The numbers of rows
            of `IndexedSlices` may differ.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        nest of Tensor and IndexedSlices
            The results, in the structure of ``value``. `IndexedSlices` have the rows of all replicas,
            in replica order, with equal indices. A MEAN divides the rows. No gradient goes through
            `IndexedSlices`.

        Raises
        ------
        TypeError
            ``reduce_op`` is not a reduction.
        MismatchError
            Shapes or dtypes differ between the replicas.
        CollectiveTimeoutError
            A replica does not make the call within ``strategy.extended.timeout`` seconds.
        RuntimeError
            Another replica ends without the call, or this object is not this thread's replica context.
        """
        op = ReduceOp.of(reduce_op)
        self._require_here()
        options = options or CommunicationOptions()
        extended = self.strategy.extended
        leaves = nest.flatten(value, by_key=True)
        sparse = [i for i, leaf in enumerate(leaves) if isinstance(leaf, IndexedSlices)]
        dense = [i for i in range(len(leaves)) if i not in sparse]
        inputs = [as_tensor(leaves[i]) for i in dense]
        if op is ReduceOp.SUM:
            for tensor in inputs:
                check_sum("all_reduce", op, tensor)
        reduced = extended.reduce_in_replica(self, op, [t.array for t in inputs], options)

        # The gradient of a sum over the replicas is the sum of the replicas' gradients.
        def backward(context: AnyContext, gradients: list[Array]) -> list[Array]:
            return extended.reduce_in_replica(context, op, gradients, options)

        results: list[Any] = list(leaves)
        for i, result in zip(dense, self._recorded(reduced, inputs, backward), strict=True):
            results[i] = result
        if sparse:
            slices = [leaves[i] for i in sparse]
            summed = extended.reduce_slices_in_replica(self, op, slices, options)
            for i, rows in zip(sparse, summed, strict=True):
                results[i] = rows
        return nest.pack_as(value, results, by_key=True)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the replicas' values along an axis; every replica gets the result. Differentiable.

        Parameters
        ----------
        value : nest of tensors
            This replica's values; shapes may differ between the replicas along ``axis``.
        axis : int
            The axis of the concatenation.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        nest of Tensor
            All replicas' values in replica order, in the structure of ``value``.

        Raises
        ------
        NotImplementedError
            A value is an `IndexedSlices`.
        TypeError, ValueError
            ``axis`` is not an int, or not an axis of a value.
        MismatchError
            Dtypes, or shapes on another axis, differ between the replicas.
        CollectiveTimeoutError, RuntimeError
            As `all_reduce`.
        """
        self._require_here()
        leaves = nest.flatten(value, by_key=True)
        if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            raise NotImplementedError("all_gather does not support IndexedSlices")
        inputs = [as_tensor(leaf) for leaf in leaves]
        for tensor in inputs:
            check_gather_axis(axis, tensor.ndim)
        extended = self.strategy.extended
        options = options or CommunicationOptions()
        gathered = extended.gather_in_replica(self, [t.array for t in inputs], axis, options)
        places = {
            i: (slice(None),) * (axis % t.ndim) + (slice(begin, begin + t.shape[axis]),)
            for i, (t, (_, begin)) in enumerate(zip(inputs, gathered, strict=True))
        }
        floats = [i for i, tensor in enumerate(inputs) if _is_differentiable(tensor)]

        # Every replica's result contains this replica's value, so its gradient is its slice of the sum
        # of all replicas' gradients.
        def backward(context: AnyContext, gradients: list[Array]) -> list[Array]:
            sums = extended.reduce_in_replica(context, ReduceOp.SUM, gradients, options)
            return [total[places[i]] for i, total in zip(floats, sums, strict=True)]

        results = self._recorded([whole for whole, _ in gathered], inputs, backward)
        return nest.pack_as(value, results, by_key=True)

    def _recorded(
        self,
        arrays: Sequence[Array],
        inputs: Sequence[Tensor],
        backward: Callable[[AnyContext, list[Array]], list[Array]],
    ) -> list[Tensor]:
        """Return the results of a collective as tensors whose gradients use a collective, too.

        ``backward(context, gradients)`` gets the gradients of all floating-point results in one call.
        The replicas then make the same calls even if they use different results.
        """
        results = [Tensor(array) for array in arrays]
        floats = [i for i, tensor in enumerate(inputs) if _is_differentiable(tensor)]
        if not floats or not recording():
            return results

        def vjp(gradients: tuple[Array, ...], _need: tuple[bool, ...]) -> Sequence[Any]:
            context = self._current()
            if context is None or context.strategy is not self.strategy:
                raise RuntimeError(
                    "the gradient of a collective needs all replicas: call gradient() in the "
                    "function that Strategy.run calls"
                )
            return backward(context, list(gradients))

        recorded = record_many([arrays[i] for i in floats], tuple(inputs[i] for i in floats), vjp)
        for i, result in zip(floats, recorded, strict=True):
            results[i] = result
        return results

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for all replicas, call a function once, and return this replica's component.

        Parameters
        ----------
        merge_fn : callable
            Called as ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context, with the
            replicas' arguments, grouped. No tape records it.
        args, kwargs
            This replica's arguments.

        Raises
        ------
        CollectiveTimeoutError
            A replica does not make the call within ``strategy.extended.timeout`` seconds.
        RuntimeError
            A replica ends without the call, or makes it with another function, or this object is not
            this thread's replica context.
        """
        self._require_here()
        strategy = self.strategy
        mode = Mode(strategy, None)

        def merge(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
            all_args, all_kwargs = regroup([c[0] for c in calls]), regroup([c[1] for c in calls])
            with entered(mode), nullcontext() if strategy.extended.is_default else paused():
                merged = merge_fn(strategy, *all_args, **all_kwargs)
            return [select_replica(r, merged) for r in range(len(calls))]

        # The replicas' functions are different objects with the same code.
        code = getattr(merge_fn, "__code__", None)
        return self.merge("merge_call()", merge, tuple(args), dict(kwargs or {}), key=code)

    def merge(
        self,
        what: str,
        function: Callable[[list[Any]], list[Any]],
        *args: Any,
        key: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Wait for all replicas, call a function once, and return this replica's result.

        Parameters
        ----------
        what : str
            The name of the call in messages.
        function : callable
            Gets a list of the replicas' ``args``, and returns a list of their results.
        *args
            This replica's arguments.
        key : optional
            A value that must be the same in all replicas.
        timeout : float, optional
            The deadline in seconds; by default the strategy's.
        """
        if self._run is None:
            return function([args])[0]
        return self._run.merge(self.local_replica_id, what, function, args, key, timeout)

    def created_by_first(self, make: Callable[[], Variable]) -> Variable:
        """Return the variable that replica 0 creates at this point of its function."""
        if self._run is None:
            return make()
        variable: Variable = self._run.create(self.local_replica_id, make)
        return variable

    def collective(self) -> AbstractContextManager[None]:
        """Return the context manager of a collective call of this replica."""
        return nullcontext() if self._run is None else Collective(self._run, self.local_replica_id)

    def abort(self, reason: str) -> None:
        """End the collectives of all replicas of this run, because this one makes no more.

        ``Strategy.run`` raises an `AbortedError` with the reason, even if this replica returns.
        """
        if self._run is None:
            self.strategy.extended.abort_collectives(reason)
        else:
            self._run.abort(reason)

    def _current(self) -> AnyContext | None:
        """Return this thread's replica context; outside every scope that of the default strategy."""
        mode = current_mode()
        if mode is None:
            return self if self.strategy.extended.is_default else None
        return mode.replica_context

    def _require_here(self) -> None:
        current, mode = self._current(), current_mode()
        if current is self:
            return
        if mode is not None and current is None:
            raise RuntimeError("Need to be inside `call_for_each_replica()`")
        found = "<default strategy>" if current is None else current.strategy
        if found is not self.strategy:
            raise RuntimeError(
                f"Mismatching tf.distribute.Strategy objects: {found} is not {self.strategy}"
            )
        raise RuntimeError("Mismatching ReplicaContext.")

    def __repr__(self) -> str:
        return f"<ReplicaContext {self.local_replica_id} of {self.strategy!r}>"
