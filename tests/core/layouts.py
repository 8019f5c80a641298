"""The same numbers, lying in memory in different ways."""

from __future__ import annotations

import numpy as np

LAYOUTS = ["C", "F", "strided", "backwards", "unaligned"]


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """Return a copy with this layout in memory."""
    if layout == "F":
        return np.array(x, order="F")
    if layout == "strided" and x.ndim:
        memory = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        memory[..., ::2] = x
        return memory[..., ::2]
    if layout == "backwards" and x.ndim:
        return np.ascontiguousarray(x[::-1])[::-1]
    if layout == "unaligned":
        memory = np.zeros(x.nbytes + 1, "u1")
        moved = memory[1:].view(x.dtype).reshape(x.shape)
        moved[...] = x
        return moved
    return x.copy()
