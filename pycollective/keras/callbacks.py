"""Names of ``tf.keras.callbacks``."""

from __future__ import annotations

from pycollective.distribute.unavailable import Unavailable

__all__ = ["BackupAndRestore"]


class BackupAndRestore(Unavailable):
    """Saves training as it goes on, and goes on from there after an interruption."""

    instead = (
        "it belongs to Model.fit; in a loop of your own save with tf.train.CheckpointManager, and "
        "restore its latest_checkpoint at the start of the program"
    )
