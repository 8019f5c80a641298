"""Training with a model function, under the names of ``tf.estimator``.

An `Estimator` keeps the checkpoints of a model, and continues from the newest one. The names are those
of TensorFlow 2 up to 2.15.
"""

from __future__ import annotations

from pycollective.estimator.canned import (
    DNNClassifier,
    DNNRegressor,
    LinearClassifier,
    LinearRegressor,
)
from pycollective.estimator.config import RunConfig
from pycollective.estimator.estimator import Estimator
from pycollective.estimator.hooks import (
    CheckpointSaverListener,
    LoggingTensorHook,
    NanLossDuringTrainingError,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from pycollective.estimator.specs import EstimatorSpec, EvalSpec, Exporter, ModeKeys, TrainSpec
from pycollective.estimator.training import train_and_evaluate

__all__ = [
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "LinearClassifier",
    "LinearRegressor",
    "LoggingTensorHook",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "RunConfig",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StopAtStepHook",
    "TrainSpec",
    "train_and_evaluate",
]
