"""Specs: shape and dtype of a dataset's elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from pycollective import nest
from pycollective.dtypes import as_dtype, float32, string
from pycollective.tensor import TensorShape

#: A value for numeric arguments: the library chooses the number.
AUTOTUNE = -1

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


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


#: The spec of elements whose structure is unknown.
UNKNOWN_SPEC = TensorSpec(None, None)


def common_spec(one: Any, other: Any) -> Any:
    """Return the common part of two specs, in which different lengths and dtypes are unknown."""

    def common(a: TensorSpec, b: Any) -> TensorSpec:
        if not isinstance(b, TensorSpec):
            raise ValueError(f"structures differ: {a} and {b}")
        dtype = a.dtype if a.dtype == b.dtype else None
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return TensorSpec(None, dtype)
        pairs = zip(a.shape, b.shape, strict=True)
        return TensorSpec(tuple(n if n == m else None for n, m in pairs), dtype)

    return nest.map_structure(common, one, other)


def spec_of(element: Any) -> Any:
    """Return the specs of an element's arrays, in its structure."""
    return nest.map_structure(lambda a: TensorSpec(a.shape, a.dtype), element)


def component_names(structure: Any, name: str = "element") -> Any:
    """Return names for the leaves of a structure, such as ``element['x'][0]``, in that structure."""
    if not nest.is_nested(structure):
        return name
    keys = structure.keys() if isinstance(structure, Mapping) else range(len(structure))
    children = structure.values() if isinstance(structure, Mapping) else structure
    names = (component_names(c, f"{name}[{k!r}]") for k, c in zip(keys, children, strict=True))
    return nest.rebuild(structure, names)


def signature_of(types: Any, shapes: Any, signature: Any) -> Any:
    """Return the signature from the arguments of `Dataset.from_generator`, old or new ones."""
    if types is None and shapes is None:
        return signature
    if signature is not None:
        name = "output_types" if types is not None else "output_shapes"
        raise TypeError(
            f"The `{name}` argument can not be used together with the `output_signature` argument."
        )
    if types is None:
        raise TypeError(
            "To specify the output signature you need to provide either the `output_signature` "
            "argument or the `output_types` argument."
        )

    def specs(kind: Any, shape: Any) -> Any:
        if not isinstance(kind, (tuple, dict)):
            return TensorSpec(shape, kind)
        keys = list(kind) if isinstance(kind, dict) else range(len(kind))
        if shape is not None and len(shape) != len(kind):
            raise TypeError(
                f"from_generator: output_shapes {shapes!r} do not have the structure of output_types "
                f"{types!r}"
            )
        return nest.rebuild(
            kind, [specs(kind[k], None if shape is None else shape[k]) for k in keys]
        )

    return specs(types, shapes)
