"""`DTypePolicy`: the compute dtype and the variable dtype of layers."""

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
    """The compute dtype and the variable dtype of a layer.

    Parameters
    ----------
    name : str or dtype-like, optional
        ``"mixed_float16"`` or ``"mixed_bfloat16"``, which compute in half precision from float32
        variables, or the name of one dtype for both. The default is ``floatx()``.

    Raises
    ------
    ValueError
        The name is unknown, or it is bfloat16 without the package ml_dtypes.
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
        """The name of the policy."""
        return self._name

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of computations."""
        return self._compute

    @property
    def variable_dtype(self) -> np.dtype[Any]:
        """The dtype of variables."""
        return self._variable

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"name": self._name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DTypePolicy:
        """Return the policy from the result of `get_config`."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypePolicy) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f'<DTypePolicy "{self._name}">'


_global: DTypePolicy | None = None


def dtype_policy() -> DTypePolicy:
    """Return the global policy, the default of new layers; initially, it is ``floatx()``."""
    return DTypePolicy() if _global is None else _global


def set_dtype_policy(policy: Any) -> None:
    """Set the global policy, the default of new layers; None restores the initial policy."""
    global _global
    _global = None if policy is None else policy_of(policy)


def policy_of(value: Any) -> DTypePolicy:
    """Return a policy, given as itself, a name, a config or None (the global policy)."""
    if isinstance(value, DTypePolicy):
        return value
    if isinstance(value, Mapping):
        return DTypePolicy.from_config(value.get("config", value))
    return dtype_policy() if value is None else DTypePolicy(value)
