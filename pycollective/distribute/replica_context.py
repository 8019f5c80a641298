"""What a function that runs for one replica can ask and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import Mode, entered, get_replica_context
from pycollective.distribute.cross_device_ops import CommunicationOptions
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_threads import ReplicaRun
from pycollective.distribute.values import regroup, select_replica
from pycollective.tensor import Tensor, Variable, as_tensor, record

if TYPE_CHECKING:
    from pycollective.distribute.strategy import Strategy

__all__ = ["ReplicaContext", "ValueContext"]


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
