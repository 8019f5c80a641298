"""Optimizers, under the names of ``tf.keras.optimizers``."""

from __future__ import annotations

from pycollective.keras.optimizers import schedules
from pycollective.keras.optimizers.adagrad import Adadelta, Adagrad
from pycollective.keras.optimizers.adam import Adam, AdamW
from pycollective.keras.optimizers.adamax import Adamax, Nadam
from pycollective.keras.optimizers.ftrl import Ftrl
from pycollective.keras.optimizers.loss_scale import LossScaleOptimizer
from pycollective.keras.optimizers.named import KNOWN, deserialize, get, serialize
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.keras.optimizers.rmsprop import RMSprop
from pycollective.keras.optimizers.sgd import SGD
from pycollective.keras.registration import publish

publish("keras.optimizers", globals(), [name for name in globals() if name[0].isupper()])
publish("keras.optimizers.schedules", vars(schedules), schedules.__all__)

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "LossScaleOptimizer",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "deserialize",
    "get",
    "schedules",
    "serialize",
]

KNOWN |= {
    name.lower(): globals()[name] for name in __all__ if name[0].isupper() and name != "Optimizer"
}
