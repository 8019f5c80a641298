"""The default strategy: what is in force outside every scope. One replica, plain values."""

from __future__ import annotations

import threading

from pycollective.distribute.cross_device_ops import ReductionToOneDevice
from pycollective.distribute.devices import Device
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.strategy import Strategy

__all__ = ["default_strategy"]

_lock = threading.Lock()
_instance: _DefaultStrategy | None = None


class _DefaultExtended(StrategyExtended):
    is_default = True

    def __init__(self) -> None:
        super().__init__([Device("CPU", 0)], ReductionToOneDevice())
        self._context: ReplicaContext | None = None

    def default_replica_context(self) -> ReplicaContext:
        """The replica context outside every scope."""
        if self._context is None:
            self._context = ReplicaContext(self.strategy, 0, None)
        return self._context

    @property
    def worker_devices(self) -> tuple[str, ...]:
        raise RuntimeError("the default strategy has no worker_devices: create a strategy first")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        raise RuntimeError("the default strategy has no parameter_devices: create a strategy first")

    def variable_created_in_scope(self, v: object) -> bool:
        """Whether a variable was created outside every other strategy."""
        return getattr(v, "_distribute_strategy", None) is None


class _DefaultStrategy(Strategy):
    def __init__(self) -> None:
        if _instance is not None:
            raise RuntimeError(
                "Should only create a single instance of _DefaultDistributionStrategy"
            )
        super().__init__(_DefaultExtended())

    def __repr__(self) -> str:
        return "<default strategy>"


def default_strategy() -> Strategy:
    """Return the one default strategy."""
    global _instance
    if _instance is None:
        with _lock:
            if _instance is None:
                _instance = _DefaultStrategy()
    return _instance
