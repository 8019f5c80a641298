"""Callbacks that write files."""

from __future__ import annotations

import os
from typing import Any

from pycollective.distribute.unavailable import Unavailable
from pycollective.keras.callbacks.control import Monitor
from pycollective.train.checkpoint import Checkpoint
from pycollective.train.state import add_to_state

__all__ = ["BackupAndRestore", "ModelCheckpoint"]

Logs = dict[str, Any]


class ModelCheckpoint(Monitor):
    """Writes a checkpoint of the model and its optimizer, which `train.Checkpoint` restores.

    ``tf.train.Checkpoint(model=model).restore(tf.train.latest_checkpoint(directory))``

    Parameters
    ----------
    filepath
        Where to; ``{epoch}`` (counted from 1) and the names of the epoch's numbers are filled in.
    monitor, mode
        As `Monitor`, with ``save_best_only``.
    verbose
        1: say so.
    save_best_only
        Whether to write only when the number has become better.
    save_weights_only
        Must be True: a checkpoint has the variables, not the layers.
    save_freq
        ``"epoch"``, or after how many batches.
    initial_value_threshold
        What the number must be better than at first.

    Raises
    ------
    ValueError
        For ``save_weights_only=False``, a path with the ending of another format, and a
        ``save_freq`` that is neither ``"epoch"`` nor positive.
    KeyError
        Later, if a name in ``filepath`` is none of the numbers'.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        self.filepath = os.fspath(filepath)
        if not save_weights_only or self.filepath.endswith((".keras", ".h5")):
            raise ValueError(
                f"ModelCheckpoint({self.filepath!r}): what is written is a checkpoint of the "
                "variables, for tf.train.Checkpoint; give save_weights_only=True, and a path without "
                ".keras or .h5"
            )
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a positive integer, got {save_freq!r}")
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_freq = save_freq
        self.best = initial_value_threshold
        self._batches = 0
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Write a checkpoint if it is time."""
        self._batches += 1
        if self.save_freq != "epoch" and self._batches % int(self.save_freq) == 0:
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write a checkpoint if it is time."""
        if self.save_freq == "epoch":
            self._save(logs)

    def _save(self, logs: Logs | None) -> None:
        if self.save_best_only:
            value = self.value_in(logs)
            if value is None or not self.is_better(value, self.best):
                return
            self.best = value
        path = self.filepath.format(epoch=self._epoch + 1, **(logs or {}))
        Checkpoint(model=self.model).write(path)
        if self.model.distribute_strategy.extended.should_checkpoint:
            add_to_state(path)
        if self.verbose:
            print(f"\nEpoch {self._epoch + 1}: saving model to {path}")


class BackupAndRestore(Unavailable):
    """Saves training as it goes on, and goes on from there after an interruption."""

    instead = (
        "save with ModelCheckpoint, restore tf.train.latest_checkpoint at the start of the program, "
        "and give Model.fit the initial_epoch to go on from"
    )
