"""Models, under the names of ``tf.keras.models``."""

from __future__ import annotations

from pycollective.keras.models.cloning import clone_model
from pycollective.keras.models.model import Functional, Model
from pycollective.keras.models.sequential import Sequential
from pycollective.keras.saving.models import load_model, model_from_json, save_model

__all__ = [
    "Functional",
    "Model",
    "Sequential",
    "clone_model",
    "load_model",
    "model_from_json",
    "save_model",
]
