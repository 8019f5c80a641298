"""Saving and loading of models and objects, in the formats of Keras 3 and under its names.

`models` has the public functions. `archive` packs and unpacks ``.keras`` files, `graphs` converts
functional models to configs, and `weights` writes and reads weights in HDF5. `assets` handles the
files of layers with ``save_assets``, and `checkpoints` the format of ``tf.train.Checkpoint``.
"""

from __future__ import annotations

from pycollective.keras import mixed_precision as mixed_precision  # files may name its classes
from pycollective.keras.registration import (
    CustomObjectScope,
    custom_object_scope,
    get_custom_objects,
    get_registered_name,
    get_registered_object,
    register_keras_serializable,
)
from pycollective.keras.saving.models import (
    load_model,
    load_weights,
    model_from_json,
    save_model,
    save_weights,
)
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object

__all__ = [
    "CustomObjectScope",
    "custom_object_scope",
    "deserialize_keras_object",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "load_model",
    "load_weights",
    "model_from_json",
    "register_keras_serializable",
    "save_model",
    "save_weights",
    "serialize_keras_object",
]
