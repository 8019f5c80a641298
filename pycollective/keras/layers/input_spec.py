"""`InputSpec`: the inputs that a layer accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollective.dtypes import as_dtype

__all__ = ["InputSpec"]


class InputSpec:
    """The dtype, number of axes and lengths that an input of a layer must have.

    A custom layer sets its attribute ``input_spec`` to an `InputSpec`, or to a list or dict of them
    for several inputs. A call with other inputs raises ``ValueError``.

    Parameters
    ----------
    dtype
        The dtype.
    shape
        The lengths of all axes; None is any length.
    ndim, max_ndim, min_ndim : int, optional
        The exact, largest and smallest number of axes.
    axes
        The lengths of some axes, by axis number, which may be negative.
    allow_last_axis_squeeze : bool
        True to allow a last axis of length 1 to be added or omitted, regardless of ``shape``.
    name : str, optional
        Accepted for compatibility with Keras and ignored. For inputs in a dict, set ``input_spec``
        to a dict with the same keys.
    optional : bool
        Accepted for compatibility with Keras and ignored: every input is required.

    Raises
    ------
    ValueError
        An axis in ``axes`` is greater than the last axis that ``ndim``, ``shape`` or ``max_ndim``
        allows.
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
                f"Axis {max(self.axes)} is greater than the maximum allowed value: {most - 1}"
            )

    def get_config(self) -> dict[str, Any]:
        """Return the dtype, the lengths and the numbers of axes as JSON values.

        The config omits ``allow_last_axis_squeeze``, ``name`` and ``optional``.
        """
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
        """Make an `InputSpec` from the result of `get_config`."""
        return cls(**config)

    def __repr__(self) -> str:
        given = {key: value for key, value in self.get_config().items() if value not in (None, {})}
        return f"InputSpec({', '.join(f'{key}={value}' for key, value in given.items())})"

    def refusal(self, value: Any) -> str | None:
        """Return the reason why a tensor does not fit, or None if it fits."""
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
