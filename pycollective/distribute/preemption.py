"""`PreemptionCheckpointHandler`: all workers save the same step when one of them is told to end."""

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
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective.cluster import ClusterResolver, GCEClusterResolver
from pycollective.distribute.termination import TerminationConfig
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Variable

if TYPE_CHECKING:
    from pycollective.train.checkpoint import Checkpoint
    from pycollective.train.manager import CheckpointManager

__all__ = ["PreemptionCheckpointHandler"]

_log = logging.getLogger("pycollective")

EXIT_CODE = 42
_ENGINE_EXIT_CODE = 143
_ENGINE_GRACE_SECONDS = 3600.0
_POLL_SECONDS = 1.0
# How many steps before the end of the grace period the last checkpoint is begun.
_STEPS_LEFT = 6

_NOTHING, _TOLD, _OVER = range(3)


class PreemptionCheckpointHandler:
    """Saves a checkpoint on all workers after the same step, when one of them is told to end.

    A program makes its steps by `run`; after each one the workers agree whether any of them has got
    the signal. Then all save, and end with exit code 42; with a grace period they go on, and save once
    more before it is over. Started again, the program restores that checkpoint in the constructor.
    A signal that comes after the last step is answered by one more `save_checkpoint_if_preempted`.

    Parameters
    ----------
    cluster_resolver : ClusterResolver or None
        That of the strategy.
    checkpoint_or_checkpoint_manager : Checkpoint or CheckpointManager
        What is saved, and restored now if it was saved before. It gets ``total_run_calls``.
    checkpoint_dir : str, optional
        Where to; needed with a `Checkpoint`.
    termination_config : TerminationConfig, optional
        How the program learns that it has to end, and what it does then; by default a SIGTERM, which
        this object catches, and no grace period. With a `GCEClusterResolver` what is not given is that
        the machine's metadata server announces maintenance, exit code 143, and an hour.

    Raises
    ------
    InvalidArgumentError
        For a checkpoint without ``checkpoint_dir``.
    NotImplementedError
        For a cluster with parameter servers.
    ValueError
        Outside the main thread, where no signal can be caught, without a ``termination_watcher_fn``.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        from pycollective.train.checkpoint import Checkpoint, workers_of
        from pycollective.train.manager import CheckpointManager

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
        self._told_at: float | None = None
        self._saved = False
        self._longest = 0.0  # seconds of a step
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
            # None: a handler that is not Python's, which cannot be put back.
            self._before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
            earlier = getattr(self._before, "__self__", None)
            signal.signal(signal.SIGTERM, self._hear)
            if isinstance(earlier, PreemptionCheckpointHandler):  # of a training that began anew
                self._before = earlier._before
                self._told_at = None if earlier._saved else earlier._told_at
            return

        threading.Thread(
            target=_poll,
            args=(weakref.ref(self), watcher, self._over),
            name="pycollective-preemption",
            daemon=True,
        ).start()
        weakref.finalize(self, self._over.set)

    def _hear(self, _signal: int, _frame: Any) -> None:
        self._tell("SIGTERM")

    def _end_watch(self) -> None:
        """Watch no more; a signal that no step has answered goes to whoever was to get it before."""
        self._over.set()
        if self._config.termination_watcher_fn is None:
            signal.signal(signal.SIGTERM, self._before)
            if self._told_at is not None:
                signal.raise_signal(signal.SIGTERM)

    def _tell(self, by: str) -> None:
        if self._told_at is None:
            self._told_at = time.monotonic()
            _log.warning("worker %d is told to end (%s)", self._workers.index, by)

    @property
    def total_run_calls(self) -> int:
        """How many steps have been made, those before the program was started again included."""
        return int(self._run_calls)

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a step, and save if a worker has been told to end.

        Parameters
        ----------
        distributed_train_function : callable
            The step; called with what else is given.

        Returns
        -------
        any
            What the function returned.

        Raises
        ------
        SystemExit
            With code 42, after saving, unless the configuration has another ``exit_fn``.
        Exception
            What the function raised; the other workers hear of it and raise, too.
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
        """Let the other workers hear of an error in the block."""
        try:
            yield
        except Exception as error:
            self._workers.abort(f"{type(error).__name__} in its step: {error}")
            raise

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save, and end, if a worker has been told to; all workers call it after the same step."""
        agreed = self._workers.largest(self._state())
        if agreed == _NOTHING or (agreed == _TOLD and self._saved):
            return
        (self._config.save_fn or self._manager.save)(*args, **kwargs)
        self._saved = True
        _log.warning("saved after step %d, as a worker is told to end", self.total_run_calls)
        if agreed == _OVER or not self._config.grace_period:
            (self._config.exit_fn or _exit)()

    def _state(self) -> int:
        """Return what this worker knows: nothing, that it has to end, or that it is time to."""
        if self._told_at is None:
            return _NOTHING
        end = self._told_at + (self._config.grace_period or 0.0)
        return _OVER if time.monotonic() > end - _STEPS_LEFT * self._longest else _TOLD


def _poll(
    handler: weakref.ref[PreemptionCheckpointHandler],
    watcher: Callable[[], Any],
    over: threading.Event,
) -> None:
    """Call a watcher until it says that the program has to end, or nobody wants to know any more.

    The thread does not keep the handler, which keeps the variables and their strategy.
    """
    silent = False
    while not over.is_set():
        try:
            told = watcher()
            silent = False
        except OSError as error:  # what it asks may be back in a moment
            if not silent:
                _log.warning("termination_watcher_fn failed, is called again: %s", error)
            silent, told = True, False
        alive = handler()
        if alive is None or alive._told_at is not None:
            return
        if told:
            alive._tell("termination_watcher_fn")
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
