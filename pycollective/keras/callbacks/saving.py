"""Callbacks that save models and the state of training."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np

from pycollective.arguments import path_of
from pycollective.atomic_files import locked
from pycollective.keras.callbacks.base import Callback
from pycollective.keras.callbacks.control import Monitor
from pycollective.keras.saving.checkpoints import write_checkpoint
from pycollective.tensor import Variable
from pycollective.train.checkpoint import Checkpoint
from pycollective.train.manager import CheckpointManager
from pycollective.train.preemption import PreemptionCheckpointHandler, TerminationConfig
from pycollective.train.state import remove_checkpoints

Logs = dict[str, Any]


class ModelCheckpoint(Monitor):
    """Save the model during training: a ``.keras`` file, its weights, or a checkpoint.

    `Model.save` writes a path that ends with ``.keras``. With ``save_weights_only=True``,
    `Model.save_weights` writes a path that ends with ``.weights.h5``, and any other path is a
    checkpoint of the model and its optimizer, for
    ``model.load_weights(tf.train.latest_checkpoint(directory))``.

    Parameters
    ----------
    filepath : path
        The path. ``{epoch}``, and ``{batch}`` if ``save_freq`` is a number, are replaced by numbers
        counted from 1, and names of results by their values.
    monitor, mode
        As for `Monitor`, with ``save_best_only``.
    verbose : int
        1: print a message.
    save_best_only : bool
        True to save only when the monitored value has improved, or is missing.
    save_weights_only : bool
        True to save the variables without the layers.
    save_freq : str or int
        ``"epoch"``, or a number of batches.
    initial_value_threshold : float, optional
        The value that the first saved model must improve on.

    Raises
    ------
    ValueError
        For a path with a wrong ending, and a ``save_freq`` that is neither ``"epoch"`` nor positive.
    KeyError
        In training, if ``filepath`` contains an unknown name.
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
        self.filepath = path_of("filepath", filepath)
        weights = self.filepath.endswith(".weights.h5")
        other = self.filepath.endswith((".keras", ".h5")) and not weights
        if save_weights_only and other:
            raise ValueError(
                "When using `save_weights_only=True` in `ModelCheckpoint`, the filepath provided must "
                "end in `.weights.h5` (Keras weights format), or have no ending (a checkpoint). "
                f"Received: filepath={self.filepath}"
            )
        if not save_weights_only and not self.filepath.endswith(".keras"):
            raise ValueError(
                "The filepath provided must end in `.keras` (Keras model format). Received: "
                f"filepath={self.filepath}; give save_weights_only=True to save the variables alone"
            )
        _check_frequency(save_freq)
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.best = initial_value_threshold
        self._due = _Due(save_freq)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._due.begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._due.end(batch):
            self._save(logs, batch=batch + 1)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_freq == "epoch":
            self._save(logs)

    def _save(self, logs: Logs | None, **numbers: int) -> None:
        if self.save_best_only:
            value = self.value_in(logs)
            if value is not None:  # as in Keras, a model without the value is saved
                if not self.is_better(value, self.best):
                    return
                self.best = value
        path = self.filepath.format(**{"epoch": self._epoch + 1, **numbers, **(logs or {})})
        if path.endswith((".keras", ".h5")):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if not self.save_weights_only:
            self.model.save(path)
        elif path.endswith(".weights.h5"):
            self.model.save_weights(path)
        else:
            write_checkpoint(self.model, path)
        if self.verbose:
            print(f"\nEpoch {self._epoch + 1}: saving model to {path}")


class BackupAndRestore(Callback):
    """Save the state of training, and resume from it after an interruption.

    The state is a checkpoint of the model, its optimizer, the position of training and, within an
    epoch, its metrics. A checkpoint is written completely or not at all. A program that is started
    again with the same callback restores the state, and resumes after the last saved step. The
    earlier batches of that epoch are read and skipped. So the input should have the same order in each
    epoch: ``shuffle=False``, or a dataset with a seed and ``reshuffle_each_iteration=False``.

    Parameters
    ----------
    backup_dir : path
        The directory, which should hold no other files.
    save_freq : str or int or None
        ``"epoch"``, or a number of batches; None: only with ``save_before_preemption``.
    double_checkpoint : bool
        True to keep the previous checkpoint too.
    delete_checkpoint : bool
        True to delete the checkpoints at the end of training.
    save_before_preemption : bool
        True to handle SIGTERM during `Model.fit`. When any worker gets the signal, all workers save
        after the current step, and exit with code 42. See
        `distribute.experimental.PreemptionCheckpointHandler`.

    Raises
    ------
    ValueError
        Without a directory, for a ``save_freq`` that is neither ``"epoch"`` nor positive, and if
        neither ``save_freq`` nor ``save_before_preemption`` is set.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | None = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ValueError("Empty `backup_dir` argument passed")
        if not save_freq and not save_before_preemption:
            raise ValueError("Either `save_freq` or `save_before_preemption` must be set.")
        if save_freq:
            _check_frequency(save_freq)
        self.backup_dir = path_of("backup_dir", backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self._handler: PreemptionCheckpointHandler | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._due = _Due(self.save_freq or "epoch")
        name = type(self).__name__
        self.model.distribute_strategy.extended.workers.begin_together(name, name)
        self._epoch, self._step = (
            Variable(np.zeros((), np.int64), trainable=False, name=name)
            for name in ("epoch", "step_in_epoch")
        )
        position = {"epoch": self._epoch, "step_in_epoch": self._step}
        self._checkpoint: Any = Checkpoint(model=self.model, **position)
        self._manager = CheckpointManager(
            self._checkpoint, self.backup_dir, 2 if self.double_checkpoint else 1, "backup"
        )
        # A checkpoint holds the state of metrics only if it was saved within an epoch. The saved
        # position tells this, so it is read first.
        latest = self._manager.latest_checkpoint
        if latest is not None:
            Checkpoint(**position).read(latest)
        metrics = self.model.metrics if int(self._step) else []
        self._checkpoint.metrics = metrics
        if self.save_before_preemption:
            # The handler also restores the checkpoint.
            self._handler = PreemptionCheckpointHandler(
                self.model.distribute_strategy.cluster_resolver,
                self._manager,
                termination_config=TerminationConfig(save_fn=self._save),
            )
        else:
            self._manager.restore_or_initialize()
        sums = [variable for metric in metrics for variable in metric.variables]
        self._restored = [(variable, variable.numpy()) for variable in sums]
        if latest is not None:
            self.model._initial_epoch = int(self._epoch)
            self.model._initial_step = int(self._step)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        for variable, value in self._restored:
            variable.assign(value)
        self._restored = []
        self._epoch.assign(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._due.begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._step.assign(batch + 1)
        if batch + 1 == self.params.get("steps"):
            self._begin_epoch(int(self._epoch) + 1)
        if self._due.end(batch):
            self._save()
        if self._handler is not None:
            self._handler.run(lambda: None)  # counts the step, which fit() has already made

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._begin_epoch(epoch + 1)
        if self.save_freq == "epoch":
            self._save()

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch.assign(epoch)
        self._step.assign(0)

    def _save(self) -> None:
        self._checkpoint.metrics = self.model.metrics if int(self._step) else []
        self._manager.save()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._handler is not None:
            # A signal after the last step must also end the program before it uses the model.
            self._handler.save_checkpoint_if_preempted()
        if self.delete_checkpoint:
            # write_once() waits until all workers have finished the last checkpoint.
            workers = self.model.distribute_strategy.extended.workers
            workers.write_once(self.backup_dir, self._delete)
        self._end_watch()

    def abandon(self, error: BaseException) -> None:
        # In an exit the handler remains installed, so that another SIGTERM keeps the exit code.
        if not isinstance(error, SystemExit):
            self._end_watch()

    def _end_watch(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            handler._end_watch()

    def _delete(self) -> None:
        with locked(self.backup_dir):
            remove_checkpoints(self.backup_dir, self._manager.checkpoints)
            with suppress(OSError):  # the directory may hold other files
                os.rmdir(self.backup_dir)


def _check_frequency(save_freq: Any) -> None:
    number = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq >= 1
    if save_freq != "epoch" and not number:
        raise ValueError(f"save_freq must be 'epoch' or a positive integer, got {save_freq!r}")


class _Due:
    """A counter of batches that tells when a multiple of ``save_freq`` batches has ended."""

    def __init__(self, save_freq: str | int) -> None:
        self._every = 0 if save_freq == "epoch" else int(save_freq)
        self._batches = 0
        self._first = 0

    def begin(self, batch: int) -> None:
        """Store the number of the first batch of an execution, which may have several batches."""
        self._first = batch

    def end(self, batch: int) -> bool:
        """Count the batches of an execution up to ``batch``; return True if it is time to save."""
        before = self._batches
        self._batches += batch - self._first + 1
        return self._every > 0 and self._batches // self._every > before // self._every
