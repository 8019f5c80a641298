"""Callbacks that write files."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np

from pycollective.keras.callbacks.base import Callback
from pycollective.keras.callbacks.control import Monitor
from pycollective.tensor import Variable
from pycollective.train.checkpoint import Checkpoint
from pycollective.train.files import remove_files
from pycollective.train.manager import CheckpointManager
from pycollective.train.state import STATE_FILE, add_to_state

__all__ = ["BackupAndRestore", "ModelCheckpoint"]

Logs = dict[str, Any]


class ModelCheckpoint(Monitor):
    """Saves the model as training goes on: a ``.keras`` file, its weights, or a checkpoint.

    A path that ends with ``.keras`` is written by `Model.save`. With ``save_weights_only=True`` a path
    that ends with ``.weights.h5`` is written by `Model.save_weights`, and any other one is a
    checkpoint of the model and its optimizer:
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
        Whether the variables are saved without the layers.
    save_freq
        ``"epoch"``, or after how many batches.
    initial_value_threshold
        What the number must be better than at first.

    Raises
    ------
    ValueError
        For a path whose ending is not that of what is saved, and a ``save_freq`` that is neither
        ``"epoch"`` nor positive.
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
        weights = self.filepath.endswith(".weights.h5")
        other = self.filepath.endswith((".keras", ".h5")) and not weights
        if save_weights_only and other:
            raise ValueError(
                "When using `save_weights_only=True` in `ModelCheckpoint`, the filepath provided must "
                "end in `.weights.h5` (Keras weights format), or be that of a checkpoint, without "
                f"such an ending. Received: filepath={self.filepath}"
            )
        if not save_weights_only and not self.filepath.endswith(".keras"):
            raise ValueError(
                "The filepath provided must end in `.keras` (Keras model format). Received: "
                f"filepath={self.filepath}; with save_weights_only=True the variables are saved alone"
            )
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a positive integer, got {save_freq!r}")
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
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
        if path.endswith((".keras", ".h5")):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if not self.save_weights_only:
            self.model.save(path)
        elif path.endswith(".weights.h5"):
            self.model.save_weights(path)
        else:
            Checkpoint(model=self.model).write(path)
            if self.model.distribute_strategy.extended.should_checkpoint:
                add_to_state(path)
        if self.verbose:
            print(f"\nEpoch {self._epoch + 1}: saving model to {path}")


class BackupAndRestore(Callback):
    """Saves training as it goes on, and goes on from there after an interruption.

    What is saved is a checkpoint of the model and its optimizer, and the epoch; it is written whole
    or not at all. A program that is started again with the same callback restores it, and begins
    with the epoch that was interrupted.

    Parameters
    ----------
    backup_dir
        Where to; nothing else should be there.
    save_freq
        ``"epoch"``, or after how many batches.
    double_checkpoint
        Whether the checkpoint before the last one is kept too.
    delete_checkpoint
        Whether the checkpoints are deleted when training ends.

    Raises
    ------
    ValueError
        Without a directory, or for a ``save_freq`` that is neither ``"epoch"`` nor positive.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ValueError("Empty `backup_dir` argument passed")
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a positive integer, got {save_freq!r}")
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._batches = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Restore what was saved, if training was interrupted."""
        self._batches = 0
        self._epoch = Variable(np.zeros((), np.int64), trainable=False, name="epoch")
        checkpoint = Checkpoint(model=self.model, epoch=self._epoch)
        self._manager = CheckpointManager(
            checkpoint, self.backup_dir, 2 if self.double_checkpoint else 1, "backup"
        )
        if self._manager.restore_or_initialize() is not None:
            self.model._initial_epoch = int(self._epoch)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note where training would go on."""
        self._epoch.assign(epoch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save if it is time."""
        self._batches += 1
        if self.save_freq != "epoch" and self._batches % int(self.save_freq) == 0:
            self._manager.save()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save if it is time."""
        self._epoch.assign(epoch + 1)
        if self.save_freq == "epoch":
            self._manager.save()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete what was saved: training is complete."""
        if not self.delete_checkpoint:
            return
        # Others may still be noting the last one.
        self.model.distribute_strategy.extended.workers.barrier()
        for path in self._manager.checkpoints:
            remove_files(path)
        with suppress(OSError):
            os.remove(os.path.join(self.backup_dir, STATE_FILE))
            # Not if there is something of somebody else's.
            os.rmdir(self.backup_dir)
