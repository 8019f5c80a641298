"""`StrategyExtended`: the lower-level methods of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.context import (
    Mode,
    entered,
    replica_context_of,
    require_cross_replica,
)
from pycollective.distribute.cross_device_ops import (
    check_not_empty,
    checked_pairs,
)
from pycollective.distribute.reduce_op import ReduceOp, check_sum
from pycollective.distribute.replicas import Replicas
from pycollective.distribute.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    regroup,
    select_replica,
)
from pycollective.distribute.variables import DistributedVariable, MirroredVariable
from pycollective.tensor import (
    IndexedSlices,
    Tensor,
    Variable,
    as_tensor,
)


class StrategyExtended(Replicas):
    """The lower-level methods of a strategy, which differ between strategies."""

    # Reducing, in cross-replica context ---------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a value to the devices of ``destinations``.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN.
        value : PerReplica or tensor
            The value. With the same value as ``destinations``, this is an all-reduce.
        destinations : str, variable, tensor or DistributedValues
            The devices of the result.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        Tensor or Mirrored
            Mirrored for several destinations. `IndexedSlices` have the rows of all replicas, in
            replica order.

        Raises
        ------
        AssertionError
            ``destinations`` is a list or tuple, or the SUM of a Mirrored value is asked for.
        ValueError
            A plain value other than 0 is to be summed.
        """
        require_cross_replica(self.strategy)
        op = ReduceOp.of(reduce_op)
        _check_destinations(destinations)
        if isinstance(value, (Mirrored, MirroredVariable)):
            if op is ReduceOp.SUM:
                raise AssertionError(
                    "a SUM of a Mirrored value would count the value once for each replica; use MEAN"
                )
            return value
        if not isinstance(value, DistributedValues):
            return self._over_workers(op, self._reduce_plain(op, value))
        check_sum("reduce_to", op, value.values[0])
        ops = self.cross_device_ops_for(value, destinations)
        return self._over_workers(op, ops.reduce(op, value, destinations, options))

    def reduced_on_host(self, op: ReduceOp, value: Any) -> Tensor | None:
        """Return the result of `reduce_to` for the host, if no reduction is needed, else None."""
        if value.__class__ is Tensor and self.num_replicas_in_sync == 1:
            return value if value.array.__class__ is np.ndarray else None
        return None

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values together; see `reduce_to` for arguments and results.

        As in TensorFlow, the strategy's cross-device operations are used for all destinations.
        """
        require_cross_replica(self.strategy)
        op = ReduceOp.of(reduce_op)
        pairs = checked_pairs(value_destination_pairs)
        differ = [
            i
            for i, (value, _) in enumerate(pairs)
            if isinstance(value, PerReplica)
            and self.cross_device_ops_for(value) is self.cross_device_ops
        ]
        together = [pairs[i] for i in differ]
        reduced = self.cross_device_ops.batch_reduce(op, together, options) if together else []
        reduced = [self._over_workers(op, value) for value in reduced]
        results = dict(zip(differ, reduced, strict=True))
        return [
            results[i] if i in results else self.reduce_to(op, *pair, options)
            for i, pair in enumerate(pairs)
        ]

    def _reduce_plain(self, op: ReduceOp, value: Any) -> Any:
        """Reduce a plain value, which is the same on every replica of this process."""
        slices = isinstance(value, IndexedSlices)
        if op is ReduceOp.MEAN or self.num_local_replicas == 1 or self.workers.count > 1:
            return value if slices else as_tensor(value)
        if not slices and not np.any(as_tensor(value).numpy()):
            return as_tensor(value)
        raise ValueError(
            f"A non-DistributedValues value {value} cannot be reduced with the given reduce op {op}."
        )

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy a tensor to the destinations.

        Python numbers are returned unchanged, so that they take any dtype; so is every tensor under a
        strategy for one device.
        """
        require_cross_replica(self.strategy)
        _check_destinations(destinations)
        if isinstance(tensor, (int, float)) or not self.groups_values:
            return tensor
        return self.cross_device_ops.broadcast(tensor, destinations)

    # Variables ----------------------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(component, *args, **kwargs)`` for every component of a variable.

        Parameters
        ----------
        var : Variable
            A variable of this strategy.
        fn : callable
            Called once for each component; reads and assignments in the call use this component.
        args, kwargs
            Arguments; distributed values are replaced by the replica's component.
        group : bool
            False: return a list of the results.

        Returns
        -------
        nest or list
            The results, Mirrored unless they are the same object.

        Raises
        ------
        ValueError
            The variable was not created in this strategy's scope.

        Notes
        -----
        In a replica function all replicas must make the call. It is a merge point.
        """
        kwargs = dict(kwargs or {})
        context = replica_context_of(self.strategy)
        if context is not None and not self.is_default:
            return context.merge_call(
                lambda _strategy, args, kwargs: self.update(var, fn, args, kwargs, group),
                args=(tuple(args), kwargs),
            )
        require_cross_replica(self.strategy)
        if not self.variable_created_in_scope(var):
            raise ValueError(
                f"update() needs a variable that was created in the scope of {self.strategy}, not "
                f"{var!r}"
            )
        components = var.values if isinstance(var, DistributedVariable) else (var,)
        with var._lock:  # updates of two threads change all components in the same order
            return self._update(fn, [(component, *args) for component in components], kwargs, group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Return the argument of `update_non_slot` for updates on the devices of these variables."""
        return self.worker_devices

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once for each of `non_slot_devices`; as `update`."""
        require_cross_replica(self.strategy)
        times = len(colocate_with) if isinstance(colocate_with, tuple) else 1
        return self._update(fn, [tuple(args)] * times, dict(kwargs or {}), group)

    def _update(
        self,
        fn: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        """Call a function in the update context of each replica, with the replica's arguments."""
        results = []
        for replica, args in enumerate(calls):
            with entered(Mode(self.strategy, None, replica)), self.devices[replica].in_use():
                results.append(
                    fn(*select_replica(replica, args), **select_replica(replica, kwargs))
                )
        return regroup(results, Mirrored) if group else results

    def read_var(self, v: Variable) -> Any:
        """Return the value of a variable; the aggregate of an ``ON_READ`` variable."""
        return as_tensor(v)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Create variables in the block on the devices of a variable of this strategy.

        All variables of a strategy are on the same devices, so this only checks the variable.

        Raises
        ------
        ValueError
            The variable was not created in this strategy's scope.
        """
        if not isinstance(colocate_with_variable, Variable) or not self.variable_created_in_scope(
            colocate_with_variable
        ):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"tf.distribute.Strategy.scope(), not {colocate_with_variable!r}"
            )
        yield

    def value_container(self, value: Any) -> Any:
        """Return the distributed variable of a component, or the value itself."""
        reference = getattr(value, "_distributed_container", None)
        container = reference() if reference is not None else None
        return value if container is None else container

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return True if a variable was created under this strategy."""
        return getattr(v, "_distribute_strategy", None) is self.strategy


def _check_destinations(destinations: Any) -> None:
    if isinstance(destinations, (list, tuple)):
        raise AssertionError("destinations must be one value or device, not a list or tuple")
    check_not_empty(destinations)
