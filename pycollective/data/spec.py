"""What the elements of a dataset look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import nest

__all__ = ["INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "TensorSpec", "spec_of"]

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Attributes
    ----------
    shape : tuple of (int or None), or None
        None in the tuple: a length that varies. None for the whole: unknown rank.
    dtype : numpy.dtype
        The type of the elements.
    name : str, optional
        A name.
    """

    shape: tuple[int | None, ...] | None
    dtype: Any = np.dtype(np.float32)
    name: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def accepts(self, array: Any) -> bool:
        """Whether an array has this dtype and a shape that fits."""
        if array.dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        return len(array.shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, array.shape, strict=True)
        )


def spec_of(element: Any) -> Any:
    """Return the specs of an element's arrays, in its structure."""
    return nest.map_structure(lambda a: TensorSpec(a.shape, a.dtype), element)
