"""Protocols of strategies, for the modules that `strategy` and `replica_context` import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pycollective.array_backend import Array
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.devices import Device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.reducer import GradientReduction
from pycollective.distribute.replica_threads import ReplicaThreads
from pycollective.distribute.workers import Workers
from pycollective.tensor import IndexedSlices, Variable


class AnyExtended(Protocol):
    """The part of `StrategyExtended` that contexts, variables and optimizers use."""

    is_default: bool
    updates_variables_once: bool
    gradient_options: CommunicationOptions
    devices: tuple[Device, ...]
    workers: Workers
    num_local_replicas: int
    num_replicas_in_sync: int
    first_replica: int

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Return the names of the replicas' devices."""

    def variable_on(
        self, device: Device, next_creator: Callable[..., Variable], **kwargs: Any
    ) -> Variable:
        """Create a variable on a device."""

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Create variables in the block on the devices of a variable."""

    def reduce_to(self, reduce_op: ReduceOp, value: Any, destinations: Any) -> Any:
        """Reduce a value over the replicas."""

    def batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Reduce several values over the replicas."""

    def reduce_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        arrays: list[Array],
        options: CommunicationOptions,
    ) -> list[Array]:
        """Take part in an all-reduce of arrays."""

    def reduce_slices_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        slices: Sequence[IndexedSlices],
        options: CommunicationOptions,
    ) -> list[IndexedSlices]:
        """Take part in an all-reduce of `IndexedSlices`."""

    def gather_in_replica(
        self,
        context: AnyContext,
        arrays: Sequence[Array],
        axis: int,
        options: CommunicationOptions,
    ) -> list[tuple[Array, int]]:
        """Take part in an all-gather; return each result, and the offset of this replica's part."""

    def begin_reduction(
        self,
        context: AnyContext,
        likes: Sequence[Array],
        reduce_op: ReduceOp,
        options: CommunicationOptions,
    ) -> GradientReduction | None:
        """Begin an all-reduce whose arrays follow one by one, if the strategy can."""

    def scope_failed(self, error: BaseException) -> None:
        """Note an error that ended the block of a scope."""

    def abort_collectives(self, reason: str, threads: ReplicaThreads | None = None) -> None:
        """Abort the collectives of the replicas in some threads."""


class AnyStrategy(Protocol):
    """The part of `Strategy` that contexts, variables and optimizers use."""

    @property
    def extended(self) -> AnyExtended:
        """The lower-level methods."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all processes."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this the current strategy."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Run a function once for each replica."""

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value."""


class AnyContext(Protocol):
    """The part of `ReplicaContext` that variables, strategies and optimizers use."""

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy that runs the replica."""

    @property
    def threads(self) -> ReplicaThreads | None:
        """The threads of this run's replicas, or None for one replica."""

    @property
    def local_replica_id(self) -> int:
        """The number of the replica in its process."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all processes."""

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of the replica among all."""

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Reduce a value over the replicas."""

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """Run a function once for all replicas, and return this replica's component."""

    def merge(
        self,
        what: str,
        function: Callable[[list[Any]], list[Any]],
        *args: Any,
        key: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Run a function once on all replicas' arguments, and return this replica's result."""

    def created_by_first(self, make: Callable[[], Variable]) -> Variable:
        """Return the variable that replica 0 creates at this point."""

    def collective(self) -> AbstractContextManager[None]:
        """Return the block of a collective call."""

    def abort(self, reason: str) -> None:
        """End the collectives of all replicas of this run."""
