"""The default strategy, outside every scope: one replica and plain values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pycollective.distribute.all_reduce_ops import ReductionToOneDevice
from pycollective.distribute.context import (
    Scope,
    current_mode,
    has_strategy,
    mixing_message,
)
from pycollective.distribute.devices import Device
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.strategy import Strategy
from pycollective.tensor import Variable

_SINGLE = "Should only create a single instance of _DefaultDistributionStrategy"
_lock = threading.Lock()
_instance: _DefaultStrategy | None = None


class _DefaultExtended(StrategyExtended):
    is_default = True
    groups_values = False

    def __init__(self) -> None:
        super().__init__([Device("CPU", 0)], ReductionToOneDevice())

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a plain variable; raise an error in a scope of another strategy."""
        mode = current_mode()
        if mode is not None and has_strategy():
            raise RuntimeError(mixing_message(mode.strategy, self.strategy))
        return next_creator(**kwargs)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        raise RuntimeError("the default strategy has no worker_devices: create a strategy first")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        raise RuntimeError("the default strategy has no parameter_devices: create a strategy first")

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Return the first variable by name, because there are no devices."""
        return min(var_list, key=lambda v: v.name)

    def __deepcopy__(self, memo: object) -> StrategyExtended:
        raise RuntimeError(_SINGLE)

    def variable_created_in_scope(self, v: object) -> bool:
        """Return True if a variable was created outside every other strategy."""
        return getattr(v, "_distribute_strategy", None) is None


class _DefaultStrategy(Strategy):
    def __init__(self) -> None:
        if _instance is not None:
            raise RuntimeError(_SINGLE)
        super().__init__(_DefaultExtended())
        self.context = ReplicaContext(self, 0, None)

    def scope(self) -> Scope:
        """Return a scope in which no other strategy creates variables."""
        return Scope(self, self.extended.create_variable, changes_mode=False)

    def __deepcopy__(self, memo: object) -> Strategy:
        raise RuntimeError(_SINGLE)

    def __repr__(self) -> str:
        return "<default strategy>"


def default_strategy() -> _DefaultStrategy:
    """Return the one default strategy."""
    global _instance
    if _instance is None:
        with _lock:
            if _instance is None:
                _instance = _DefaultStrategy()
    return _instance


def get_strategy() -> Strategy:
    """Return the current strategy: the default one outside every scope."""
    mode: Any = current_mode()  # the fields of a mode are typed by protocols
    strategy: Strategy = default_strategy() if mode is None else mode.strategy
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the current replica context, or None in cross-replica context."""
    mode: Any = current_mode()
    context: ReplicaContext | None = (
        default_strategy().context if mode is None else mode.replica_context
    )
    return context
