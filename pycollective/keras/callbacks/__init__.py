"""Callbacks of training, under the names of ``tf.keras.callbacks``."""

from __future__ import annotations

from pycollective.keras.callbacks.base import Callback
from pycollective.keras.callbacks.control import (
    EarlyStopping,
    LearningRateScheduler,
    ReduceLROnPlateau,
    TerminateOnNaN,
)
from pycollective.keras.callbacks.lists import CallbackList, History, LambdaCallback
from pycollective.keras.callbacks.progress import ProgbarLogger
from pycollective.keras.callbacks.saving import BackupAndRestore, ModelCheckpoint
from pycollective.keras.callbacks.tables import CSVLogger
from pycollective.keras.callbacks.tensorboard import TensorBoard

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
]
