"""The results of steps, which stay on their device until a program reads them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array, on_host
from pycollective.distribute.values import DistributedValues
from pycollective.tensor import Tensor, as_tensor

#: The number of losses on a device after which `LossWatch` checks them.
_MOST_PENDING = 1000


class DeviceLogs(dict[str, Any]):
    """A dict of step results that fetches values from a device when the first value is read."""

    def __init__(self, found: Mapping[str, Any], pending: Mapping[str, list[Tensor]]) -> None:
        super().__init__(found)
        self._pending = dict(pending)

    def _fetch(self) -> None:
        pending, self._pending = self._pending, {}
        for name, parts in pending.items():
            super().__setitem__(name, _number(parts))

    def parts(self, name: str) -> list[Tensor]:
        """Return the replicas' values of a number that is still on the device, or an empty list."""
        return self._pending.get(name, [])

    def __setitem__(self, name: str, value: Any) -> None:
        self._pending.pop(name, None)
        super().__setitem__(name, value)

    def __iter__(self) -> Any:
        # Without this override, dict(logs) would copy the values without calling __getitem__.
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _reading(name: str) -> Callable[..., Any]:
    """Return the `dict` method of this name, preceded by the fetch of pending values."""
    method = getattr(dict, name)

    def read(self: DeviceLogs, *args: Any, **kwargs: Any) -> Any:
        self._fetch()
        return method(self, *args, **kwargs)

    read.__name__, read.__doc__ = name, method.__doc__
    return read


for _name in (
    *("__delitem__", "__eq__", "__getitem__", "__ior__", "__ne__", "__or__", "__repr__", "__ror__"),
    *("clear", "copy", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(DeviceLogs, _name, _reading(_name))


def numbers_of(name: str, results: Any) -> dict[str, Any]:
    """Return a step's results as floats and arrays, averaged over the replicas as in Keras.

    Raise ``TypeError``, with the method's ``name``, if ``results`` is not a dict.
    """
    if not isinstance(results, Mapping):
        raise TypeError(
            f"{name}() must return a dict of values to report, got "
            f"{type(results).__name__}: {results!r}"
        )
    found: dict[str, Any] = {}
    pending: dict[str, list[Tensor]] = {}
    for key, value in results.items():
        given = value.values if isinstance(value, DistributedValues) else (value,)
        parts = [as_tensor(part) for part in given]
        if all(on_host(part.array) for part in parts):
            found[str(key)] = _number(parts)
        else:
            pending[str(key)] = parts
            found[str(key)] = None
    return DeviceLogs(found, pending) if pending else found


def _number(parts: list[Tensor]) -> Any:
    """Return the mean as a float, or as an array if it has several elements."""
    total: Array = sum(np.asarray(part.numpy()) for part in parts)  # type: ignore[assignment]
    if len(parts) > 1:
        total = total / len(parts)
    return float(total.item()) if total.size == 1 else total


class LossWatch:
    """A check that warns once, with epoch and step, when the loss is not finite.

    Losses on a device are checked at the end of the epoch, or when 1000 are pending, because reading
    a loss waits for its step.
    """

    def __init__(self) -> None:
        self._warned = False
        self._pending: list[tuple[int, int, int, list[Tensor]]] = []

    def check(self, logs: Mapping[str, Any], epoch: int, first: int, last: int) -> None:
        """Check the loss of the steps ``first`` to ``last``; a loss on a device becomes pending."""
        if self._warned:
            return
        parts = logs.parts("loss") if isinstance(logs, DeviceLogs) else []
        if not parts:
            self._warn_unless_finite(logs.get("loss"), epoch, first, last)
            return
        self._pending.append((epoch, first, last, parts))
        if len(self._pending) >= _MOST_PENDING:
            self.check_pending()

    def check_pending(self) -> None:
        """Check the pending losses, which waits for the device."""
        pending, self._pending = self._pending, []
        for epoch, first, last, parts in pending:
            self._warn_unless_finite(_number(parts), epoch, first, last)

    def _warn_unless_finite(self, loss: Any, epoch: int, first: int, last: int) -> None:
        if self._warned or not isinstance(loss, float) or math.isfinite(loss):
            return
        self._warned = True
        where = f"step {first + 1}" if first == last else f"steps {first + 1} to {last + 1}"
        warnings.warn(
            f"the loss is {loss} since {where} of epoch {epoch + 1}. The learning rate may be too "
            "high, or the input may contain NaN or infinite numbers. Add the callback "
            "keras.callbacks.TerminateOnNaN() to end training when the loss is not finite",
            RuntimeWarning,
            stacklevel=5,
        )
