"""What steps report: numbers, which stay on their device until somebody looks at them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array, on_host
from pycollective.distribute.values import DistributedValues
from pycollective.tensor import Tensor, as_tensor

#: So many losses on a device are kept before they are looked at.
_WAITING = 1000


class DeviceLogs(dict[str, Any]):
    """A dict of numbers of which some are fetched from a device when the first value is read."""

    def __init__(self, found: Mapping[str, Any], waiting: Mapping[str, list[Tensor]]) -> None:
        super().__init__(found)
        self._waiting = dict(waiting)

    def _fetch(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for name, parts in waiting.items():
            super().__setitem__(name, _number(parts))

    def parts(self, name: str) -> list[Tensor]:
        """Return what a number is the sum of, if that has not been fetched."""
        return self._waiting.get(name, [])

    def __setitem__(self, name: str, value: Any) -> None:
        self._waiting.pop(name, None)
        super().__setitem__(name, value)

    def __iter__(self) -> Any:
        # With a method of its own, dict(numbers) reads the values as any program does.
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _reading(name: str) -> Callable[..., Any]:
    """Return a method of dicts that reads values, behind the fetch of all that wait."""
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
    """Return the dict that a step returned, as floats and arrays; replicas' values are added up.

    Anything but a dict raises a TypeError with the method's ``name``.
    """
    if not isinstance(results, Mapping):
        raise TypeError(
            f"{name}() must return a dict of what is to be reported, got "
            f"{type(results).__name__}: {results!r}"
        )
    found: dict[str, Any] = {}
    waiting: dict[str, list[Tensor]] = {}
    for key, value in results.items():
        given = value.values if isinstance(value, DistributedValues) else (value,)
        parts = [as_tensor(part) for part in given]
        if all(on_host(part.array) for part in parts):
            found[str(key)] = _number(parts)
        else:
            waiting[str(key)] = parts
            found[str(key)] = None
    return DeviceLogs(found, waiting) if waiting else found


def _number(parts: list[Tensor]) -> Any:
    """Return the sum as a float, or as an array if it has several numbers."""
    total: Array = sum(np.asarray(part.numpy()) for part in parts)  # type: ignore[assignment]
    return float(total) if total.size == 1 else total


class LossWatch:
    """Warns, once, of a loss that is no finite number, with its epoch and step.

    A loss on a device is looked at when the epoch ends: asking would be waiting for each step.
    """

    def __init__(self) -> None:
        self._warned = False
        self._waiting: list[tuple[int, int, int, list[Tensor]]] = []

    def look(self, logs: Mapping[str, Any], epoch: int, first: int, last: int) -> None:
        """Take in the numbers of the steps from ``first`` to ``last``."""
        if self._warned:
            return
        parts = logs.parts("loss") if isinstance(logs, DeviceLogs) else []
        if not parts:
            self._judge(logs.get("loss"), epoch, first, last)
            return
        self._waiting.append((epoch, first, last, parts))
        if len(self._waiting) >= _WAITING:
            self.catch_up()

    def catch_up(self) -> None:
        """Look at the losses that lie on a device."""
        waiting, self._waiting = self._waiting, []
        for epoch, first, last, parts in waiting:
            self._judge(_number(parts), epoch, first, last)

    def _judge(self, loss: Any, epoch: int, first: int, last: int) -> None:
        if self._warned or not isinstance(loss, float) or math.isfinite(loss):
            return
        self._warned = True
        where = f"step {first + 1}" if first == last else f"steps {first + 1} to {last + 1}"
        warnings.warn(
            f"the loss is {loss} since {where} of epoch {epoch + 1}: the learning rate may be too "
            "high, or the input hold such numbers; keras.callbacks.TerminateOnNaN() ends training "
            "then",
            RuntimeWarning,
            stacklevel=5,
        )
