"""Which strategy is in force, and in which context: the strategy stack of each thread.

A thread's stack holds modes; a mode is a strategy and either a replica context (inside a function
that `Strategy.run` runs) or none (cross-replica: in a scope, or in a merge function). With an empty
stack the default strategy is in force, in its replica context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pycollective.distribute.replica_context import ReplicaContext
    from pycollective.distribute.strategy import Strategy

__all__ = [
    "created_once",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class Mode(NamedTuple):
    """What holds in a part of a thread's stack."""

    strategy: Strategy
    replica_context: ReplicaContext | None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.creating_once = 0


_state = _ThreadState()


def _default() -> Strategy:
    from pycollective.distribute.default import default_strategy

    return default_strategy()


def get_strategy() -> Strategy:
    """Return the strategy in force: the default one outside every scope."""
    return _state.modes[-1].strategy if _state.modes else _default()


def has_strategy() -> bool:
    """Whether a strategy other than the default one is in force."""
    return bool(_state.modes) and _state.modes[-1].strategy is not _default()


def get_replica_context() -> ReplicaContext | None:
    """Return the replica context, or None in cross-replica context."""
    if _state.modes:
        return _state.modes[-1].replica_context
    return _default().extended.default_replica_context()


def in_cross_replica_context() -> bool:
    """Whether the code runs for all replicas at once: in a scope or a merge function."""
    return bool(_state.modes) and _state.modes[-1].replica_context is None


def current_mode() -> Mode | None:
    """Return this thread's innermost mode, or None outside everything."""
    return _state.modes[-1] if _state.modes else None


@contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """Put a mode on this thread's stack for the length of a block."""
    modes = _state.modes
    modes.append(mode)
    try:
        yield
    finally:
        if modes[-1] is not mode:
            raise RuntimeError(
                "Device scope nesting error: scopes of strategies must be left in the order in which "
                "they were entered"
            )
        modes.pop()


def require_cross_replica(strategy: Strategy) -> None:
    """Raise unless code for all replicas of ``strategy`` may run here."""
    mode = current_mode()
    if mode is None:
        return
    if mode.strategy is not strategy:
        raise RuntimeError(mixing_message(mode.strategy, strategy))
    if mode.replica_context is not None:
        raise RuntimeError(
            "Method requires being in cross-replica context, use get_replica_context().merge_call()"
        )


def mixing_message(one: object, other: object) -> str:
    """Return TensorFlow's text for two strategies that meet."""
    return f"Mixing different tf.distribute.Strategy objects: {one} is not {other}"


_locks_guard = threading.Lock()


@contextmanager
def created_once(owner: Any) -> Iterator[None]:
    """Create an object's variables once for all replicas, whichever replica comes first.

    Replicas run at the same time and share layers, optimizers and metrics. The block holds the
    owner's re-entrant lock; variables made in it belong to all replicas at once, so the one thread
    that is inside makes them for everybody::

        with created_once(self):
            if not self.built:
                self.build(shape)
                self.built = True
    """
    with _locks_guard:
        lock = owner.__dict__.setdefault("_creation_lock", threading.RLock())
    with lock:
        _state.creating_once += 1
        try:
            yield
        finally:
            _state.creating_once -= 1


def is_creating_once() -> bool:
    """Whether this thread is inside `created_once`."""
    return _state.creating_once > 0
