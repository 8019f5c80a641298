"""`Optional`: an element, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data.spec import TensorSpec
from pycollective.errors import InvalidArgumentError, OutOfRangeError
from pycollective.tensor import Tensor, as_tensor

_NOTHING = object()


class Optional:
    """The result of `get_next_as_optional`; `from_value` and `empty` make one too."""

    def __init__(self, spec: Any, value: Any = _NOTHING) -> None:
        self._spec = spec
        self._value = value

    @staticmethod
    def from_value(value: Any) -> Optional:
        """Return an optional that holds a nest of tensors."""
        tensors = nest.map_structure(as_tensor, value)
        return Optional(
            nest.map_structure(lambda t: TensorSpec(t.shape, t.dtype), tensors), tensors
        )

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """Return an optional without a value; the spec describes the missing value."""
        return Optional(element_spec)

    @property
    def element_spec(self) -> Any:
        """The spec of the value, or of the missing value."""
        return self._spec

    def has_value(self) -> Tensor:
        """Return a bool tensor: True if there is a value."""
        return Tensor(np.asarray(self._value is not _NOTHING))

    def get_value(self) -> Any:
        """Return the value.

        Raises
        ------
        InvalidArgumentError
            There is no value.
        """
        if self._value is _NOTHING:
            raise InvalidArgumentError("The given optional does not have a value.")
        return self._value

    def __repr__(self) -> str:
        if self._value is _NOTHING:
            return f"<Optional without a value, of {self._spec}>"
        return f"<Optional {self._value!r}>"


class NextElements:
    """Methods that get the next element of an iterator with an ``element_spec``."""

    @property
    def element_spec(self) -> Any:
        """The spec of the elements."""
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError

    def get_next(self) -> Any:
        """Return the next element; raise OutOfRangeError, a StopIteration, at the end."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("End of sequence") from None

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` of the next element, without a value at the end."""
        try:
            return Optional(self.element_spec, next(self))
        except StopIteration:
            return Optional.empty(self.element_spec)
