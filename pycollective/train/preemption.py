"""`PreemptionCheckpointHandler`: all workers save the same step when one is preempted."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective.cluster import ClusterResolver, GCEClusterResolver
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Variable
from pycollective.train.checkpoint import Checkpoint, workers_of
from pycollective.train.manager import CheckpointManager

_log = logging.getLogger("pycollective")

EXIT_CODE = 42
_ENGINE_EXIT_CODE = 143
_ENGINE_GRACE_SECONDS = 3600.0
_POLL_SECONDS = 1.0
# Steps between the beginning of the last checkpoint and the end of the grace period.
_STEPS_LEFT = 6

_RUNNING, _PREEMPTED, _GRACE_OVER = range(3)


@dataclass(eq=False)
class TerminationConfig:
    """The notice on which a program ends, and the way it ends.

    Parameters
    ----------
    termination_watcher_fn : callable, optional
        Called repeatedly; returns True when the program must end.
    exit_fn : callable, optional
        Called after the checkpoint was saved.
    grace_period : float, optional
        The seconds between the notice and the end.
    save_fn : callable, optional
        Called to save; by default the checkpoint manager's `save`.

    Raises
    ------
    TypeError
        One of the functions is not callable.
    ValueError
        ``grace_period`` is negative.
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"`{name}` must be callable, not {function!r}")
        if self.grace_period is not None and self.grace_period < 0:
            raise ValueError(f"`grace_period` must be >= 0 seconds, got {self.grace_period}")


class PreemptionCheckpointHandler:
    """A handler that saves a checkpoint on all workers after the same step when one is preempted.

    The program calls `run` for each step. After each step the workers agree whether one of them got the
    signal. If one got it, all save and exit with code 42. With a grace period they continue, and
    save again before it ends. A new run of the program restores the checkpoint in the constructor.
    Call `save_checkpoint_if_preempted` after the last step for signals that arrive later.

    Parameters
    ----------
    cluster_resolver : ClusterResolver or None
        The strategy's resolver.
    checkpoint_or_checkpoint_manager : Checkpoint or CheckpointManager
        The checkpoint, which is restored now if a file exists. It gets ``total_run_calls``.
    checkpoint_dir : str, optional
        The directory; required with a `Checkpoint`.
    termination_config : TerminationConfig, optional
        The notice of preemption, and the reaction. The default is SIGTERM, which this object catches,
        and no grace period. The defaults with a `GCEClusterResolver` are the maintenance events of the
        metadata server, exit code 143, and a grace period of an hour.

    Raises
    ------
    InvalidArgumentError
        A checkpoint has no ``checkpoint_dir``.
    NotImplementedError
        The cluster has parameter servers.
    TypeError
        ``checkpoint_or_checkpoint_manager`` has another type.
    ValueError
        This is not the main thread, which alone can catch signals, and there is no
        ``termination_watcher_fn``.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        given = checkpoint_or_checkpoint_manager
        if isinstance(given, Checkpoint):
            if not checkpoint_dir:
                raise InvalidArgumentError(
                    "When a checkpoint is passed, a checkpoint_dir must be passed as well."
                )
            given = CheckpointManager(given, checkpoint_dir, max_to_keep=1)
        if not isinstance(given, CheckpointManager):
            raise TypeError(f"expected a Checkpoint or a CheckpointManager, not {given!r}")
        if cluster_resolver is not None and "ps" in cluster_resolver.cluster_spec().jobs:
            raise NotImplementedError(
                "PreemptionCheckpointHandler does not support usage with "
                "tf.distribute.experimental.ParameterServerStrategy."
            )
        self._manager = given
        self._config = termination_config or TerminationConfig()
        if isinstance(cluster_resolver, GCEClusterResolver):
            self._config = _on_compute_engine(self._config, cluster_resolver)
        self._preempted_at: float | None = None
        self._saved = False
        self._longest = 0.0  # seconds of the longest step
        self._over = threading.Event()
        self._before: Any = signal.SIG_DFL
        self._workers = workers_of(given.checkpoint)
        self._run_calls = Variable(np.int64(0), trainable=False, name="total_run_calls")
        setattr(given.checkpoint, "total_run_calls", self._run_calls)  # noqa: B010  (saved with it)
        given.restore_or_initialize()
        self._watch()

    def _watch(self) -> None:
        watcher = self._config.termination_watcher_fn
        if watcher is None:
            # None means a handler outside of Python, which cannot be restored.
            self._before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
            earlier = getattr(self._before, "__self__", None)
            signal.signal(signal.SIGTERM, self._on_signal)
            if isinstance(earlier, PreemptionCheckpointHandler):  # of a training that was restarted
                self._before = earlier._before
                self._preempted_at = None if earlier._saved else earlier._preempted_at
            return

        threading.Thread(
            target=_poll,
            args=(weakref.ref(self), watcher, self._over),
            name="pycollective-preemption",
            daemon=True,
        ).start()
        weakref.finalize(self, self._over.set)

    def _on_signal(self, _signal: int, _frame: Any) -> None:
        self._preempt("SIGTERM")

    def _end_watch(self) -> None:
        """Stop watching; raise an unhandled signal again, for the earlier handler."""
        self._over.set()
        if self._config.termination_watcher_fn is None:
            signal.signal(signal.SIGTERM, self._before)
            if self._preempted_at is not None:
                signal.raise_signal(signal.SIGTERM)

    def _preempt(self, by: str) -> None:
        if self._preempted_at is None:
            self._preempted_at = time.monotonic()
            _log.warning("worker %d is preempted (%s)", self._workers.index, by)

    @property
    def total_run_calls(self) -> int:
        """The number of steps, including those before a restart."""
        return int(self._run_calls)

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, and save if a worker is preempted.

        Parameters
        ----------
        distributed_train_function : callable
            The step; called with the other arguments.

        Returns
        -------
        any
            The result of the function.

        Raises
        ------
        SystemExit
            The checkpoint was saved; code 42 unless the configuration has another ``exit_fn``.
        Exception
            The function's exception. The other workers raise an error, too.
        """
        with self.watch_preemption_scope():
            begin = time.monotonic()
            result = distributed_train_function(*args, **kwargs)
            self._longest = max(self._longest, time.monotonic() - begin)
            self._run_calls.assign_add(1)
        self.save_checkpoint_if_preempted()
        return result

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Abort the other workers after an error in the block."""
        try:
            yield
        except Exception as error:
            self._workers.abort(f"{type(error).__name__} in its step: {error}")
            raise

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save, and exit, if a worker is preempted; all workers call it after the same step."""
        agreed = self._workers.largest(self._state())
        if agreed == _RUNNING or (agreed == _PREEMPTED and self._saved):
            return
        (self._config.save_fn or self._manager.save)(*args, **kwargs)
        self._saved = True
        _log.warning("saved after step %d, because a worker is preempted", self.total_run_calls)
        if agreed == _GRACE_OVER or not self._config.grace_period:
            (self._config.exit_fn or _exit)()

    def _state(self) -> int:
        """Return the state of this worker: running, preempted, or at the end of its grace period."""
        if self._preempted_at is None:
            return _RUNNING
        end = self._preempted_at + (self._config.grace_period or 0.0)
        return _GRACE_OVER if time.monotonic() > end - _STEPS_LEFT * self._longest else _PREEMPTED


def _poll(
    handler: weakref.ref[PreemptionCheckpointHandler],
    watcher: Callable[[], Any],
    over: threading.Event,
) -> None:
    """Call a watcher until it returns True, or the handler is deleted.

    The thread has a weak reference, because the handler refers to the variables and their strategy.
    """
    warned = False
    while not over.is_set():
        try:
            preempted = watcher()
            warned = False
        except OSError as error:  # the metadata server may answer the next call
            if not warned:
                _log.warning("termination_watcher_fn failed, and will be called again: %s", error)
            warned, preempted = True, False
        alive = handler()
        if alive is None or alive._preempted_at is not None:
            return
        if preempted:
            alive._preempt("termination_watcher_fn")
            return
        del alive
        over.wait(_POLL_SECONDS)


def _on_compute_engine(
    config: TerminationConfig, resolver: GCEClusterResolver
) -> TerminationConfig:
    grace = config.grace_period
    return TerminationConfig(
        config.termination_watcher_fn or resolver.is_to_end,
        config.exit_fn or (lambda: sys.exit(_ENGINE_EXIT_CODE)),
        _ENGINE_GRACE_SECONDS if grace is None else grace,
        config.save_fn,
    )


def _exit() -> None:
    sys.exit(EXIT_CODE)
