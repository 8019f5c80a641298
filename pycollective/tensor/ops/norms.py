"""Norms of tensors, and clipping by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import InvalidArgumentError
from ..indexed_slices import IndexedSlices
from ..tensor import Tensor, as_tensor
from .elementwise import abs, divide, maximum, multiply, pow, sqrt, square, where
from .reductions import add_n, reduce_max, reduce_sum

__all__ = ["clip_by_global_norm", "clip_by_norm", "global_norm", "norm"]


def norm(
    tensor: Any,
    ord: Any = "euclidean",
    axis: Any = None,
    keepdims: bool | None = None,
    name: str | None = None,
) -> Tensor:
    """Return the vector norm over ``axis``, by default of all elements.

    Parameters
    ----------
    tensor
        A floating-point tensor.
    ord : {"euclidean"} or number
        "euclidean", or a positive order; ``np.inf`` for the largest absolute value. Orders of
        matrices other than "euclidean" are not supported.
    axis : int, optional
        The axis of the vectors.
    keepdims : bool, optional
        True: keep the axes that are reduced, with length 1.

    Raises
    ------
    ValueError
        The order is not positive, or ``axis`` has two axes and the order is a number.
    """
    x, keepdims = as_tensor(tensor), bool(keepdims)
    if ord == "euclidean" or (ord == 2 and np.ndim(axis) == 0):
        return sqrt(reduce_sum(square(x), axis, keepdims))
    if not isinstance(ord, (int, float)) or not ord > 0 or np.ndim(axis) > 0:
        raise InvalidArgumentError(
            f"norm: ord is {ord!r}: give 'euclidean', or a positive number and at most one axis"
        )
    if np.isinf(ord):
        return reduce_max(abs(x), axis, keepdims)
    return pow(reduce_sum(pow(abs(x), ord), axis, keepdims), 1.0 / ord)


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> Any:
    """Return ``t``, scaled so that its Euclidean norm over ``axes`` is at most ``clip_norm``."""
    if isinstance(t, IndexedSlices):
        return IndexedSlices(clip_by_norm(t.values, clip_norm, axes), t.indices, t.dense_shape)
    x = as_tensor(t)
    squares = reduce_sum(square(x), axes, True)
    # The square root of zeros has no gradient.
    safe = where(squares > 0, squares, as_tensor(1.0, like=x))
    length = where(squares > 0, sqrt(safe), squares)
    return divide(multiply(x, clip_norm), maximum(length, clip_norm))


def global_norm(t_list: Sequence[Any], name: str | None = None) -> Tensor | None:
    """Return the Euclidean norm of all tensors together; None stands for no tensor."""
    values = [t.values if isinstance(t, IndexedSlices) else as_tensor(t) for t in _given(t_list)]
    return sqrt(add_n([reduce_sum(square(value)) for value in values])) if values else None


def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> tuple[list[Any], Tensor]:
    """Return tensors, scaled by one factor so that `global_norm` is at most ``clip_norm``.

    Parameters
    ----------
    t_list
        Tensors and `IndexedSlices`, such as gradients. None stays None.
    clip_norm
        The largest norm.
    use_norm
        The norm, if it is known.

    Returns
    -------
    list, Tensor
        The scaled tensors, and the norm before. A norm that is not finite makes all elements NaN.
    """
    whole = global_norm(t_list) if use_norm is None else as_tensor(use_norm)
    if whole is None:
        return list(t_list), as_tensor(0.0)
    factor = clip_norm / maximum(whole, clip_norm)
    is_finite = Tensor(np.isfinite(whole.array))
    factor = where(is_finite, factor, as_tensor(np.nan, like=factor))

    def scaled(t: Any) -> Any:
        if t is None:
            return None
        if isinstance(t, IndexedSlices):
            return IndexedSlices(multiply(t.values, factor), t.indices, t.dense_shape)
        return multiply(t, factor)

    return [scaled(t) for t in t_list], whole


def _given(t_list: Sequence[Any]) -> list[Any]:
    if isinstance(t_list, Tensor) or not isinstance(t_list, (list, tuple)):
        raise TypeError("t_list should be a sequence of tensors")
    return [t for t in t_list if t is not None]
