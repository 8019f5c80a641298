"""Batches as tuples: inputs, targets, weights."""

from __future__ import annotations

from typing import Any

from pycollective import nest


def unpack_x_y_sample_weight(data: Any) -> tuple[Any, Any, Any]:
    """Return the inputs, targets and weights of a batch, with None for missing parts.

    Raises
    ------
    ValueError
        If the batch is a tuple or list that does not have 1, 2 or 3 items.
    """
    if isinstance(data, list):
        data = tuple(data)
    if not isinstance(data, tuple):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise ValueError(
            "Data is expected to be in format `x`, `(x,)`, `(x, y)`, or `(x, y, sample_weight)`, "
            f"found: a tuple of {len(data)}"
        )
    x, y, sample_weight = (*data, None, None)[:3]
    return x, y, sample_weight


def pack_x_y_sample_weight(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Return a batch of inputs, with targets and weights if given."""
    if y is None and sample_weight is None:
        # A bare tuple of inputs would be read as inputs and targets.
        return (x,) if nest.is_nested(x) else x
    return (x, y) if sample_weight is None else (x, y, sample_weight)
