"""Operations on some rows of an array, for the ``scatter_…`` methods of variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..array_backend import Array, array_module


def _at(ufunc: str) -> Callable[[Array, Array, Array], Any]:
    """Return a function that applies a ufunc to some rows in place, once for each index."""

    def apply(target: Array, index: Array, rows: Array) -> None:
        getattr(array_module(target), ufunc).at(target, index, rows)

    return apply


_divide_floats = _at("divide")


def _divide(target: Array, index: Array, rows: Array) -> None:
    """Divide rows; quotients of integers are rounded towards zero, by magnitudes and signs."""
    if target.dtype.kind not in "iu":
        _divide_floats(target, index, rows)
        return
    module = array_module(target)
    places, back = module.unique(index, return_inverse=True)
    parts = target[places]
    signs = module.sign(parts)
    module.multiply.at(signs, back, module.sign(rows))
    # The magnitude of the lowest integer does not fit its signed dtype.
    unsigned = np.dtype(f"u{target.itemsize}")
    sizes = module.abs(parts).astype(unsigned)
    module.floor_divide.at(sizes, back, module.abs(rows).astype(unsigned))
    target[places] = sizes.astype(target.dtype) * signs


def _set_rows(target: Array, index: Array, rows: Array) -> None:
    target[index] = rows


SCATTER: dict[str, Callable[[Array, Array, Array], Any]] = {
    "scatter_add": _at("add"),
    "scatter_sub": _at("subtract"),
    "scatter_mul": _at("multiply"),
    "scatter_div": _divide,
    "scatter_min": _at("minimum"),
    "scatter_max": _at("maximum"),
    "scatter_update": _set_rows,
}
