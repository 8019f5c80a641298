"""`DTypePolicy`: in which type layers compute, and in which their variables are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollective.dtypes import as_dtype
from pycollective.keras.backend import floatx
from pycollective.keras.registration import public

_MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


@public("keras")
class DTypePolicy:
    """In which type a layer computes, and in which its variables are.

    Parameters
    ----------
    name
        ``"mixed_float16"`` or ``"mixed_bfloat16"``: computed in half precision, from float32
        variables. Otherwise the type of both; by default ``floatx()``.

    Raises
    ------
    ValueError
        For any other name, and for bfloat16 without the package ml_dtypes.
    """

    def __init__(self, name: Any = None) -> None:
        name = floatx() if name is None else name
        mixed = _MIXED.get(name) if isinstance(name, str) else None
        try:
            compute = as_dtype(name if mixed is None else mixed)
        except TypeError as error:
            raise ValueError(
                f"Cannot convert '{name}' to a mixed precision DTypePolicy. Valid policies include "
                f"'mixed_float16', 'mixed_bfloat16', and the name of any dtype: {error}"
            ) from None
        self._compute = compute
        self._variable = compute if mixed is None else as_dtype("float32")
        self._name = str(compute) if mixed is None else name

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """What is computed in."""
        return self._compute

    @property
    def variable_dtype(self) -> np.dtype[Any]:
        """That of the variables."""
        return self._variable

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"name": self._name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DTypePolicy:
        """Return the policy that `get_config` described."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypePolicy) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self._name}">'


_global: DTypePolicy | None = None


def dtype_policy() -> DTypePolicy:
    """Return the policy of layers that are given none: at first the type ``floatx()``."""
    return DTypePolicy() if _global is None else _global


def set_dtype_policy(policy: Any) -> None:
    """Set the policy of layers that are made from now on, and are given none; None: the first one."""
    global _global
    _global = None if policy is None else policy_of(policy)


def policy_of(value: Any) -> DTypePolicy:
    """Return a policy: itself, the global one for None, or one by its name or dictionary."""
    if isinstance(value, DTypePolicy):
        return value
    if isinstance(value, Mapping):
        return DTypePolicy.from_config(value.get("config", value))
    return dtype_policy() if value is None else DTypePolicy(value)
