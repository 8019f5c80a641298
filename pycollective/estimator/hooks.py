"""Hooks: objects that an estimator calls before and after each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycollective import nest
from pycollective.tensor import Tensor, Variable

_log = logging.getLogger("pycollective")


class SessionRunArgs(NamedTuple):
    """The values that a hook gets after a step.

    Attributes
    ----------
    fetches
        A nest of names (``"global_step"``, in training also ``"loss"``), of variables, and of
        functions without arguments, which are called after the step.
    feed_dict, options
        Must be None: there are no placeholders.
    """

    fetches: Any
    feed_dict: None = None
    options: None = None


class SessionRunValues(NamedTuple):
    """The values of a step: ``results`` has the structure of `SessionRunArgs.fetches`."""

    results: Any
    options: None = None
    run_metadata: None = None


class SessionRunContext:
    """The step that a hook is called for.

    Attributes
    ----------
    original_args : SessionRunArgs
        The names of the values that every step of training has. Other steps have ``"global_step"``
        only.
    session : None
        There are no sessions.
    stop_requested : bool
        True after `request_stop`.
    """

    session = None
    original_args = SessionRunArgs(("loss", "global_step"))

    def __init__(self) -> None:
        self.stop_requested = False

    def request_stop(self) -> None:
        """End the run after this step."""
        self.stop_requested = True


class NanLossDuringTrainingError(RuntimeError):
    """The loss of a training step is NaN."""

    def __str__(self) -> str:
        return "NaN loss during training."


class SessionRunHook:
    """Base class of hooks; a subclass overrides methods.

    The methods run in the thread of the program, outside of the replicas. They may read and assign
    variables.
    """

    def begin(self) -> None:
        """Handle the beginning of a run."""

    def after_create_session(self, session: None, coord: None) -> None:
        """Handle the time after `begin` of all hooks; the arguments are None."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Before a step, return the request for the values that `after_run` gets."""
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Handle the end of a step."""

    def end(self, session: None) -> None:
        """Handle the end of a run without an error; the argument is None."""


class CheckpointSaverListener:
    """Base class of objects that training calls when it saves a checkpoint."""

    def begin(self) -> None:
        """Handle the beginning of training."""

    def before_save(self, session: None, global_step_value: int) -> None:
        """Handle the time before a checkpoint is written."""

    def after_save(self, session: None, global_step_value: int) -> bool | None:
        """Handle a written checkpoint; return True to end training."""
        return None

    def end(self, session: None, global_step_value: int) -> None:
        """Handle the end of training, after the last checkpoint."""


class StopAtStepHook(SessionRunHook):
    """A hook that ends training.

    Parameters
    ----------
    num_steps : int, optional
        The number of steps of each run.
    last_step : int, optional
        The global step after which training ends.

    Raises
    ------
    ValueError
        Neither or both are given.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if num_steps is None and last_step is None:
            raise ValueError("One of num_steps or last_step must be specified.")
        if num_steps is not None and last_step is not None:
            raise ValueError("Only one of num_steps or last_step can be specified.")
        self._num_steps, self._last_step = num_steps, last_step
        self._done = 0

    def begin(self) -> None:
        self._done = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs("global_step")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._done += 1
        over = self._last_step is not None and int(run_values.results) >= self._last_step
        if over or (self._num_steps is not None and self._done >= self._num_steps):
            run_context.request_stop()


class LoggingTensorHook(SessionRunHook):
    """A hook that logs values of steps.

    Parameters
    ----------
    tensors
        A dict of values by label, each as in `SessionRunArgs`, or a list of names.
    every_n_iter, every_n_secs
        The number of steps, or of seconds, between two lines.
    formatter : callable, optional
        A function that returns the line for the dict of values.

    Raises
    ------
    ValueError
        Neither or both numbers are given, or ``every_n_iter`` is less than 1.
    """

    def __init__(
        self,
        tensors: Any,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        if (every_n_iter is None) == (every_n_secs is None):
            raise ValueError("exactly one of every_n_iter and every_n_secs must be provided.")
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}.")
        self._tensors = tensors if isinstance(tensors, dict) else {name: name for name in tensors}
        self._steps, self._seconds, self._formatter = every_n_iter, every_n_secs, formatter
        self._step, self._time = 0, -np.inf

    def begin(self) -> None:
        self._step, self._time = 0, -np.inf

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._tensors)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        now = time.monotonic()
        due = now - self._time >= (self._seconds or 0)
        if self._step % self._steps == 0 if self._steps is not None else due:
            values, self._time = run_values.results, now
            line = ", ".join(f"{name} = {value}" for name, value in values.items())
            _log.info("%s", line if self._formatter is None else self._formatter(values))
        self._step += 1


class HookRun:
    """The calls of several hooks in one run."""

    def __init__(self, hooks: Iterable[SessionRunHook]) -> None:
        self._hooks: list[SessionRunHook] = []
        self._asked: list[tuple[SessionRunHook, Any]] = []
        self._context = SessionRunContext()
        self.add(list(hooks))

    def add(self, hooks: Sequence[SessionRunHook]) -> None:
        """Add hooks, and begin them."""
        for hook in hooks:
            hook.begin()
        for hook in hooks:
            hook.after_create_session(None, None)
        self._hooks += hooks

    def before(self) -> None:
        """Call the hooks before a step."""
        self._context = SessionRunContext()
        self._asked = []
        for hook in self._hooks:
            asked = hook.before_run(self._context)
            if asked is not None and (asked.feed_dict or asked.options):
                raise ValueError(
                    f"{type(hook).__name__}.before_run: there are no placeholders and no run options, "
                    "so that feed_dict and options must be None"
                )
            self._asked.append((hook, None if asked is None else asked.fetches))

    def after(self, values: dict[str, Any]) -> bool:
        """Call the hooks after a step; return True if one of them requested the end of the run."""
        for hook, fetches in self._asked:
            results = nest.map_structure(lambda wanted: _value(wanted, values), fetches)
            hook.after_run(self._context, SessionRunValues(results))
        return self._context.stop_requested

    def end(self) -> None:
        """End the hooks."""
        for hook in self._hooks:
            hook.end(None)


def _value(wanted: Any, values: dict[str, Any]) -> Any:
    """Return the value of a step that a hook asked for."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted not in values:
            raise ValueError(
                f"a hook asks for {wanted!r}; steps have the values {sorted(values)}. Give a variable, "
                "or a function without arguments, for another value"
            )
        return values[wanted]
    found = wanted() if callable(wanted) and not isinstance(wanted, Variable) else wanted
    return found.numpy() if isinstance(found, (Tensor, Variable)) else found
