"""Specs: shape and dtype of a dataset's elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective import nest
from pycollective.array_backend import is_array
from pycollective.tensor.spec import TensorSpec as TensorSpec

#: A value for numeric arguments: the library chooses the number.
AUTOTUNE = -1

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


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
    # An element may be a dataset, as those of window() are.
    return nest.map_structure(
        lambda a: TensorSpec(a.shape, a.dtype) if is_array(a) else UNKNOWN_SPEC, element
    )


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
