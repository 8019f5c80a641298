"""Protocols of strategies, for the modules below `strategy` and `replica_context`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pycollective.array_backend import Array
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.devices import Device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.reducer import GradientReduction
from pycollective.distribute.workers import Workers
from pycollective.tensor import IndexedSlices, Variable

__all__ = ["AnyContext", "AnyExtended", "AnyStrategy"]


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
    def worker_devices(self) -> tuple[str, ...]: ...

    def variable_on(
        self, device: Device, next_creator: Callable[..., Variable], **kwargs: Any
    ) -> Variable: ...

    def reduce_to(self, reduce_op: ReduceOp, value: Any, destinations: Any) -> Any: ...

    def batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Any]: ...

    def reduce_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        arrays: list[Array],
        options: CommunicationOptions,
    ) -> list[Array]: ...

    def reduce_slices_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        slices: Sequence[IndexedSlices],
        options: CommunicationOptions,
    ) -> list[IndexedSlices]: ...

    def gather_in_replica(
        self,
        context: AnyContext,
        arrays: Sequence[Array],
        axis: int,
        options: CommunicationOptions,
    ) -> list[tuple[Array, int]]: ...

    def begin_reduction(
        self,
        context: AnyContext,
        likes: Sequence[Array],
        reduce_op: ReduceOp,
        options: CommunicationOptions,
    ) -> GradientReduction | None: ...

    def abort_collectives(self, reason: str) -> None: ...


class AnyStrategy(Protocol):
    """The part of `Strategy` that contexts, variables and optimizers use."""

    @property
    def extended(self) -> AnyExtended: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    def scope(self) -> AbstractContextManager[Any]: ...

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any: ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...


class AnyContext(Protocol):
    """The part of `ReplicaContext` that variables, strategies and optimizers use."""

    @property
    def strategy(self) -> AnyStrategy: ...

    @property
    def local_replica_id(self) -> int: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def replica_id_in_sync_group(self) -> Any: ...

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any: ...

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any: ...

    def meet(
        self,
        what: str,
        function: Callable[[list[Any]], list[Any]],
        *args: Any,
        timeout: float | None = None,
    ) -> Any: ...

    def created_by_first(self, make: Callable[[], Variable]) -> Variable: ...

    def collective(self) -> AbstractContextManager[None]: ...
