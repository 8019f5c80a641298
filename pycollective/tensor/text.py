"""Arrays of strings, whose items are bytes as in TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective.dtypes import string


def is_text(value: Any) -> bool:
    """Return True for a string, and for a list or an array of strings."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (str, bytes)) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "SUO"
    )


def as_text(value: Any) -> Any:
    """Return strings as an array of dtype `string`, which holds Python's bytes as in TensorFlow."""
    array = np.asarray(value, string)
    items = [v.encode() if isinstance(v, str) else v for v in array.ravel().tolist()]
    for item in items:
        if not isinstance(item, bytes):
            raise TypeError(
                f"a {type(item).__name__} cannot become a tensor of strings: {item!r}; use an array of "
                "numbers or of strings"
            )
    text = np.empty(len(items), string)
    text[:] = items
    return text.reshape(array.shape)
