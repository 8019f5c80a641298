"""`InputSpec`: the inputs that a layer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollective.dtypes import as_dtype

__all__ = ["InputSpec"]


class InputSpec:
    """The dtype, number of axes and lengths that an input of a layer must have.

    A layer of one's own sets the attribute ``input_spec`` to one of these, or to a list or dict of
    them for several inputs. Calls with other inputs are refused.

    Parameters
    ----------
    dtype
        The dtype.
    shape
        The lengths of all axes; None: any length.
    ndim, max_ndim, min_ndim
        The number of axes, or the largest or smallest one.
    axes
        The lengths of some axes, by their numbers, which may be negative.
    allow_last_axis_squeeze
        Whether a last axis of length 1 may be there, or be missing, in spite of ``shape``.
    name
        The key of the input, if the inputs are in a dict.
    optional
        Only for Keras's sake: no input may be missing.
    """

    def __init__(
        self,
        dtype: Any = None,
        shape: Sequence[int | None] | None = None,
        ndim: int | None = None,
        max_ndim: int | None = None,
        min_ndim: int | None = None,
        axes: Mapping[int, int | None] | None = None,
        allow_last_axis_squeeze: bool = False,
        name: str | None = None,
        optional: bool = False,
    ) -> None:
        self.dtype = None if dtype is None else as_dtype(dtype)
        self.shape = None if shape is None else tuple(shape)
        self.ndim = ndim if self.shape is None else len(self.shape)
        self.max_ndim = max_ndim
        self.min_ndim = min_ndim
        self.axes = {int(axis): length for axis, length in (axes or {}).items()}
        self.allow_last_axis_squeeze = bool(allow_last_axis_squeeze)
        self.name = name
        self.optional = bool(optional)
        most = self.max_ndim if self.ndim is None else self.ndim
        if self.axes and most is not None and max(self.axes) >= most:
            raise ValueError(
                f"Axis {max(self.axes)} is greater than the maximum allowed value: {most}"
            )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as what JSON can hold."""
        return {
            "dtype": None if self.dtype is None else self.dtype.name,
            "shape": self.shape,
            "ndim": self.ndim,
            "max_ndim": self.max_ndim,
            "min_ndim": self.min_ndim,
            "axes": self.axes,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> InputSpec:
        """Make one of what `get_config` returned."""
        return cls(**config)

    def __repr__(self) -> str:
        given = {key: value for key, value in self.get_config().items() if value not in (None, {})}
        return f"InputSpec({', '.join(f'{key}={value}' for key, value in given.items())})"

    def refusal(self, value: Any) -> str | None:
        """Return the problem of a tensor that does not fit, or None."""
        shape = tuple(value.shape)
        wanted = self.shape
        if wanted is not None and self.allow_last_axis_squeeze:
            if wanted and wanted[-1] == 1:
                wanted = wanted[:-1]
            if shape and shape[-1] == 1:
                shape = shape[:-1]
        count, ndim = len(shape), self.ndim if wanted is None else len(wanted)
        if ndim is not None and count != ndim:
            return f"expected ndim={ndim}, found ndim={count}"
        if self.max_ndim is not None and count > self.max_ndim:
            return f"expected max_ndim={self.max_ndim}, found ndim={count}"
        if self.min_ndim is not None and count < self.min_ndim:
            return f"expected min_ndim={self.min_ndim}, found ndim={count}"
        if self.dtype is not None and value.dtype != self.dtype:
            return f"expected dtype={self.dtype}, found dtype={value.dtype}"
        for axis, length in self.axes.items():
            there = -count <= axis < count
            if length is not None and (not there or shape[axis] not in (length, None)):
                return f"expected axis {axis} of input shape to have value {length}"
        if wanted is not None and not all(
            n is None or m is None or n == m for n, m in zip(wanted, shape, strict=True)
        ):
            return f"expected shape={self.shape}"
        return None
