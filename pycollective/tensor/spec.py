"""`TensorSpec`: the shape and dtype of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from ..dtypes import as_dtype, float32, string
from .shape import TensorShape


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Attributes
    ----------
    shape : TensorShape, or None
        A length is None if it varies; the shape is None if the rank is unknown.
    dtype : numpy.dtype or None
        The dtype of the tensor, None if unknown.
    name : str, optional
        A name.

    Raises
    ------
    TypeError
        The shape is neither None nor a sequence of integers and None.
    ValueError
        A length is negative.
    """

    shape: tuple[int | None, ...] | None
    dtype: Any = float32
    name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.shape, TensorShape) and self.shape.rank is None:
            object.__setattr__(self, "shape", None)
        if self.shape is not None:
            try:
                shape = tuple(None if n is None else index(n) for n in self.shape)
            except TypeError:
                raise TypeError(
                    f"TensorSpec: shape must be a tuple of integers and None, not {self.shape!r}"
                ) from None
            if any(n is not None and n < 0 for n in shape):
                raise ValueError(f"TensorSpec: a length in the shape {shape} is negative")
            object.__setattr__(self, "shape", TensorShape(shape))
        if self.dtype is not None:
            text = any(self.dtype is t for t in (string, str)) or (
                isinstance(self.dtype, str) and self.dtype == "string"
            )
            object.__setattr__(self, "dtype", string if text else as_dtype(self.dtype))

    @classmethod
    def from_tensor(cls, tensor: Any, name: str | None = None) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tensor.shape, tensor.dtype, name)

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Return True if a tensor, or tensors of another spec, can have this spec."""
        shape = TensorShape(spec_or_value.shape)
        return spec_or_value.dtype == self.dtype and shape.is_compatible_with(self.shape)

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype!r}, name={self.name!r})"

    def accepts(self, array: Any) -> bool:
        """Return True if an array has this dtype and a matching shape."""
        if self.dtype is not None and array.dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        return len(array.shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, array.shape, strict=True)
        )
