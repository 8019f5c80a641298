"""Callbacks that end training or change the learning rate."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.keras.callbacks.base import Callback
from pycollective.keras.metrics import direction_of

Logs = dict[str, Any]


class TerminateOnNaN(Callback):
    """End training when the loss is not finite.

    Parameters
    ----------
    raise_error : bool
        True to raise an error, False to print a message and end training after the current step.

    Raises
    ------
    RuntimeError
        In training, with ``raise_error``.
    """

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            if self.raise_error:
                raise RuntimeError(
                    f"NaN or Inf loss encountered at batch {batch}. Loss value: {loss}. Terminating "
                    "training immediately."
                )
            print(f"Batch {batch}: Invalid loss, terminating training")
            self.model.stop_training = True


class LearningRateScheduler(Callback):
    """Set the learning rate at the beginning of each epoch.

    Parameters
    ----------
    schedule : callable
        ``schedule(epoch, learning_rate)``, or ``schedule(epoch)``, returns the learning rate.
    verbose : int
        1: print the learning rate.

    Raises
    ------
    TypeError
        If the schedule is not callable.
    ValueError
        In training, if the schedule returns no number.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        super().__init__()
        if not callable(schedule):
            raise TypeError(f"LearningRateScheduler: schedule must be callable, got {schedule!r}")
        self.schedule = schedule
        self.verbose = verbose
        try:
            inspect.signature(schedule).bind(0, 0.0)
            self._takes_rate = True
        except TypeError:
            self._takes_rate = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        optimizer = self.model.optimizer
        arguments = (epoch, float(optimizer.learning_rate)) if self._takes_rate else (epoch,)
        rate = self.schedule(*arguments)
        if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)):
            raise ValueError(
                f'The output of the "schedule" function should be float. Got: {rate!r}'
            )
        optimizer.learning_rate = float(rate)
        if self.verbose > 0:
            print(
                f"\nEpoch {epoch + 1}: LearningRateScheduler setting learning rate to {float(rate)}."
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)


class Monitor(Callback):
    """Base of callbacks that monitor a value in the logs.

    Parameters
    ----------
    monitor : str
        The name of the value.
    mode : str
        ``"min"``: smaller is better. ``"max"``: larger is better. ``"auto"``: the metric decides.
    min_delta : float
        The smallest change that counts as an improvement.

    Raises
    ------
    ValueError
        For another mode; in training, if ``mode="auto"`` and the metric's direction is unknown.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        super().__init__()
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
        self.monitor = monitor
        self.mode = mode
        self.min_delta = abs(float(min_delta))

    def is_better(self, value: float, than: float | None) -> bool:
        """Return True if ``value`` is better than ``than``; any number is better than None."""
        if than is None:
            return not math.isnan(value)
        if self.mode == "min":
            return value < than - self.min_delta
        return value > than + self.min_delta

    def _mode_of(self, name: str) -> str:
        """Return ``"max"`` or ``"min"``, by the metric of this name or else by the name itself."""
        known = {
            self.model.reported_name(m): m.direction for m in getattr(self.model, "metrics", ())
        }
        direction = known.get(name) or direction_of(name)
        if direction is None and (name == "loss" or name.endswith("_loss")):
            direction = "down"
        if direction is None and ("acc" in name or "auc" in name.lower()):
            direction = "up"
        if direction is None:
            raise ValueError(
                f"{type(self).__name__} callback received monitor={self.monitor}, whose direction is "
                f"unknown: correct the name, which may be one of {', '.join(['loss', *known])}, or "
                "pass `mode='max'` or `mode='min'`"
            )
        return {"up": "max", "down": "min"}[direction]

    def value_in(self, logs: Logs | None) -> float | None:
        """Return the monitored value; if it is missing, warn and return None.

        The first call chooses the direction.
        """
        if self.mode == "auto":
            self.mode = self._mode_of(self.monitor.removeprefix("val_"))
        value = (logs or {}).get(self.monitor)
        if value is None:
            warnings.warn(
                f"{type(self).__name__} is conditioned on metric `{self.monitor}` which is not "
                f"available. Available metrics are: {','.join(logs or {})}",
                stacklevel=2,
            )
        return value


class EarlyStopping(Monitor):
    """End training when the monitored value has not improved for some epochs.

    Parameters
    ----------
    monitor, min_delta, mode
        As for `Monitor`.
    patience : int
        The number of epochs without an improvement after which training ends.
    verbose : int
        1: print a message.
    baseline : float, optional
        A value that an improvement must also beat to reset the count of epochs. As in Keras, an epoch
        with an improvement does not end training.
    restore_best_weights : bool
        True to restore the weights of the best epoch at the end.
    start_from_epoch : int
        The first epoch that counts.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.stopped_epoch = 0
        self.best: float | None = None
        self.best_epoch = 0
        self.best_weights: list[Any] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self.value_in(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        self.wait += 1
        if self.is_better(value, self.best):
            self.best, self.best_epoch = value, epoch
            if self.restore_best_weights:
                self.best_weights = self.model.get_weights()
            # An improvement that does not beat the baseline keeps the count, but never ends training.
            if self.baseline is None or self.is_better(value, self.baseline):
                self.wait = 0
            return
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self.stopped_epoch and self.verbose:
            print(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is not None:
            if self.verbose:
                print(f"Restoring model weights from the best epoch: {self.best_epoch + 1}.")
            self.model.set_weights(self.best_weights)


class ReduceLROnPlateau(Monitor):
    """Reduce the learning rate when the monitored value has not improved for some epochs.

    Parameters
    ----------
    monitor, mode, min_delta
        As for `Monitor`.
    factor : float
        The factor of the learning rate.
    patience : int
        The number of epochs without an improvement before a reduction.
    verbose : int
        1: print a message.
    cooldown : int
        The number of epochs after a reduction that do not count.
    min_lr : float
        The smallest learning rate.

    Raises
    ------
    ValueError
        If ``factor`` is negative, or not below 1.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 <= factor < 1:
            raise ValueError(
                f"ReduceLROnPlateau does not support a factor >= 1.0. Received factor={factor}"
            )
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.cooldown_counter = 0
        self.wait = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        optimizer = self.model.optimizer
        rate = float(optimizer.learning_rate)
        if logs is not None:
            logs["learning_rate"] = rate
        value = self.value_in(logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.is_better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter <= 0:
            self.wait += 1
            # The optimizer stores the rate as float32, which may round `min_lr` up. So the test rounds
            # `min_lr` too: otherwise the rate would be reduced to `min_lr` again and again.
            if self.wait >= self.patience and rate > np.float32(self.min_lr):
                lower = max(rate * self.factor, self.min_lr)
                optimizer.learning_rate = lower
                if self.verbose > 0:
                    print(
                        f"\nEpoch {epoch + 1}: ReduceLROnPlateau reducing learning rate to {lower}."
                    )
                self.cooldown_counter = self.cooldown
                self.wait = 0
