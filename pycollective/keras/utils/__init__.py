"""Utilities, under the names of ``tf.keras.utils``."""

from __future__ import annotations

import importlib
import random as python_random
from typing import Any

import numpy as np

from pycollective.array_backend import Array, to_numpy
from pycollective.keras.backend import floatx
from pycollective.keras.utils import experimental
from pycollective.keras.utils.batches import (
    pack_x_y_sample_weight,
    unpack_x_y_sample_weight,
)
from pycollective.keras.utils.images import image_dataset_from_directory
from pycollective.keras.utils.py_dataset import PyDataset
from pycollective.keras.utils.splitting import split_dataset
from pycollective.tensor import as_tensor
from pycollective.tensor import random as tensor_random

__all__ = [
    "PyDataset",
    "Sequence",
    "CustomObjectScope",
    "custom_object_scope",
    "deserialize_keras_object",
    "experimental",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "image_dataset_from_directory",
    "model_to_dot",
    "pack_x_y_sample_weight",
    "plot_model",
    "register_keras_serializable",
    "serialize_keras_object",
    "set_random_seed",
    "split_dataset",
    "to_categorical",
    "unpack_x_y_sample_weight",
]


#: The older name of `PyDataset`.
Sequence = PyDataset


def set_random_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and this package.

    Parameters
    ----------
    seed : int
        A number from 0 to 2**32 - 1.

    Raises
    ------
    ValueError
        For any other seed.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an int from 0 to 2**32 - 1, got {seed!r}")
    python_random.seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002  (for user code)
    tensor_random.set_seed(int(seed))


def to_categorical(x: Any, num_classes: int | None = None) -> Array:
    """Return the one-hot encoding of class numbers.

    Parameters
    ----------
    x
        Integers from 0, of any shape. A last axis of length 1 is removed, unless it is the only
        axis.
    num_classes : int, optional
        The length of a row; the default is the largest number plus one.

    Returns
    -------
    ndarray
        The shape of ``x`` with ``num_classes`` appended, of dtype ``floatx()``.

    Raises
    ------
    ValueError
        If a number is not an integer from 0 to ``num_classes - 1``.
    """
    numbers = to_numpy(as_tensor(x).array)
    if numbers.ndim > 1 and numbers.shape[-1] == 1:
        numbers = numbers[..., 0]
    whole = numbers.astype(np.int64)
    if num_classes is None:
        num_classes = int(whole.max()) + 1 if whole.size else 0
    wrong = np.argwhere((whole != numbers) | (whole < 0) | (whole >= num_classes))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(
            f"to_categorical: {numbers[place]} at position {place} is not an integer from 0 to "
            f"{num_classes - 1}"
        )
    rows = np.zeros((*whole.shape, num_classes), floatx())
    np.put_along_axis(rows, whole[..., None], 1, axis=-1)
    return rows


#: Names from modules that import this package, directly or through layers. `__getattr__` imports
#: these modules at the first use, because an import here would be circular.
_ELSEWHERE = {
    **dict.fromkeys(("model_to_dot", "plot_model"), "utils.plotting"),
    **dict.fromkeys(
        (
            "CustomObjectScope",
            "custom_object_scope",
            "deserialize_keras_object",
            "get_custom_objects",
            "get_registered_name",
            "get_registered_object",
            "register_keras_serializable",
            "serialize_keras_object",
        ),
        "saving",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pycollective.keras.{_ELSEWHERE[name]}"), name)
