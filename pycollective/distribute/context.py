"""The stack of strategies and contexts of each thread.

The stack holds modes. A mode is a strategy and a replica context. Without a replica context the mode
is cross-replica: a scope, a merge function or an update. With an empty stack, the current strategy is
the default one, in its replica context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from pycollective.distribute.interfaces import AnyContext, AnyStrategy
from pycollective.tensor.variable import creators


class Mode(NamedTuple):
    """A strategy, and the replicas for which the code runs."""

    strategy: AnyStrategy
    replica_context: AnyContext | None
    #: The number of the replica in this process that runs its function, or whose component
    #: `StrategyExtended.update` updates.
    replica: int | None = None


class _Entry(NamedTuple):
    """A scope that was entered, and the state before it."""

    scope: Scope
    mode: Mode | None  # the new mode; None if its strategy was the current one already
    depth: int
    creators_before: tuple[Any, ...]
    creators_inside: tuple[Any, ...]


class _ThreadState(threading.local):
    """Modes and scopes of each thread."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.entries: list[_Entry] = []
        self.set_scope: AbstractContextManager[Any] | None = None  # of experimental_set_strategy
        self.creating_once = 0
        self.sync_on_read = False


state = _ThreadState()


def has_strategy() -> bool:
    """Return True if the current strategy is not the default one."""
    return bool(state.modes) and not state.modes[-1].strategy.extended.is_default


def in_cross_replica_context() -> bool:
    """Return True if the code runs for all replicas at once: in a scope or a merge function."""
    return bool(state.modes) and state.modes[-1].replica_context is None


def current_mode() -> Mode | None:
    """Return this thread's innermost mode, or None outside everything."""
    return state.modes[-1] if state.modes else None


def replica_context_of(strategy: AnyStrategy) -> AnyContext | None:
    """Return the replica context, if this code runs in a replica function of ``strategy``."""
    mode = current_mode()
    return mode.replica_context if mode is not None and mode.strategy is strategy else None


def replica_among(replicas: int) -> int | None:
    """Return the replica, among `replicas` local ones, that runs this code; None for all of them."""
    mode = current_mode()
    if mode is None:
        return 0 if replicas == 1 else None
    return mode.replica if mode.strategy.extended.num_local_replicas == replicas else None


class entered:
    """Put a mode on this thread's stack for the length of a block.

    ``makers`` are the creators of variables in the block, by default the present ones.
    """

    __slots__ = ("_before", "_depth", "_inside", "_mode", "_scopes")

    def __init__(self, mode: Mode, makers: tuple[Callable[..., Any], ...] | None = None) -> None:
        self._mode = mode
        self._inside = makers

    def __enter__(self) -> None:
        modes = state.modes
        self._depth, self._scopes = len(modes), len(state.entries)
        self._before = creators.stack
        if self._inside is not None:
            creators.stack = self._inside
        modes.append(self._mode)

    def __exit__(self, *exc_info: object) -> None:
        modes = state.modes
        proper = len(modes) == self._depth + 1 and modes[-1] is self._mode
        del modes[self._depth :]
        if proper and self._inside is None:
            return
        same = creators.stack is self._inside
        creators.stack = self._before
        if not proper:  # a scope was entered in the block, and not exited
            del state.entries[self._scopes :]
            raise RuntimeError(_nesting_message("Device"))
        if not same:
            raise RuntimeError(_nesting_message("Variable creator"))


def _nesting_message(kind: str) -> str:
    return (
        f"{kind} scope nesting error: move call to tf.distribute.set_strategy() out of `with` scope. "
        "Exit scopes in the reverse order of their entry"
    )


class Scope:
    """The result of `Strategy.scope`: a block in which a strategy is the current one.

    The same object can be entered again, also inside its own block. ``creator`` makes the variables in
    the block. ``changes_mode`` is False for the default strategy.
    """

    def __init__(
        self, strategy: AnyStrategy, creator: Callable[..., Any], changes_mode: bool = True
    ) -> None:
        self._strategy = strategy
        self._creator = creator
        self._changes_mode = changes_mode

    def __enter__(self) -> AnyStrategy:
        mode = None
        before = inside = creators.stack
        if not self._changes_mode:
            if has_strategy():
                raise RuntimeError("Must not nest tf.distribute.Strategy scopes.")
            inside = (*before, self._creator)
        elif has_strategy():
            # The strategy stays the current one until the outer scope ends.
            require_cross_replica(self._strategy)
        else:
            mode = Mode(self._strategy, None)
            inside = (*before, self._creator)
        state.entries.append(_Entry(self, mode, len(state.modes), before, inside))
        if mode is not None:
            state.modes.append(mode)
        creators.stack = inside
        return self._strategy

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._strategy.extended.scope_failed(error)
        entries, modes = state.entries, state.modes
        indices = [i for i, entry in enumerate(entries) if entry.scope is self]
        if not indices:
            raise RuntimeError(
                f"this thread has not entered the scope of {self._strategy}, or an error has ended the "
                "scope. Exit each scope once, in the thread that entered it"
            )
        entry = entries[indices[-1]]
        if entry.creators_inside is entry.creators_before:
            del entries[indices[-1]]
            return
        if entry.mode is not None and modes[-1] is not entry.mode:
            # A replica function exits the scope in which its run began; the run still needs it.
            raise RuntimeError(_nesting_message("Device"))
        proper = creators.stack is entry.creators_inside
        del modes[entry.depth :]
        creators.stack = entry.creators_before
        if proper:
            del entries[indices[-1]]
            return
        # Scopes inside this one end with it, so that no state of theirs remains.
        if any(inner.scope is state.set_scope for inner in entries[indices[-1] :]):
            state.set_scope = None
        del entries[indices[-1] :]
        raise RuntimeError(_nesting_message("Variable creator"))


def experimental_set_strategy(strategy: AnyStrategy | None) -> None:
    """Make a strategy the current one of this thread, without a ``with`` block.

    The strategy replaces the one that was set before. None restores the default strategy.

    Raises
    ------
    RuntimeError
        Inside a ``with strategy.scope()`` block or a replica function.
    """
    before = state.set_scope
    if before is None:
        inside = has_strategy()
    else:
        scopes = [e.scope for e in state.entries if e.scope is not before]
        inside = len(state.modes) > 1 or any(scope._changes_mode for scope in scopes)
    if inside:
        raise RuntimeError("Must not be called inside a `tf.distribute.Strategy` scope.")
    if before is not None:
        state.set_scope = None
        before.__exit__(None, None, None)
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        state.set_scope = scope


def require_cross_replica(strategy: AnyStrategy, message: str | None = None) -> None:
    """Raise an error unless this is cross-replica context of ``strategy``, or outside every scope."""
    mode = current_mode()
    if mode is None:
        return
    if mode.strategy is not strategy:
        raise RuntimeError(mixing_message(mode.strategy, strategy))
    if mode.replica_context is not None:
        raise RuntimeError(
            message
            or "Method requires being in cross-replica context, use get_replica_context().merge_call()"
        )


def mixing_message(one: object, other: object) -> str:
    """Return TensorFlow's text for two strategies in one place."""
    return f"Mixing different tf.distribute.Strategy objects: {one} is not {other}"


@contextmanager
def variable_sync_on_read_context() -> Iterator[None]:
    """Let reads of ``ON_READ`` variables in a replica aggregate over all replicas.

    Every replica must then read the same variables in the same order.
    """
    before, state.sync_on_read = state.sync_on_read, True
    try:
        yield
    finally:
        state.sync_on_read = before


def in_variable_sync_on_read_context() -> bool:
    """Return True inside `variable_sync_on_read_context`."""
    return state.sync_on_read


_locks_guard = threading.Lock()


class _CreationLock:
    """A re-entrant lock of an object; a copy of the object gets a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _CreationLock, ()


@contextmanager
def created_once(owner: Any) -> Iterator[None]:
    """Create an object's variables once for all replicas, in the thread that enters the block first.

    Replicas run at the same time and share layers, optimizers and metrics. The block holds the
    owner's re-entrant lock. Variables made in it belong to all replicas::

        with created_once(self):
            if not self.built:
                self.build(shape)
                self.built = True
    """
    with _locks_guard:
        lock = owner.__dict__.setdefault("_creation_lock", _CreationLock())
    with lock:
        state.creating_once += 1
        try:
            yield
        finally:
            state.creating_once -= 1


def is_creating_once() -> bool:
    """Return True inside `created_once`."""
    return state.creating_once > 0
