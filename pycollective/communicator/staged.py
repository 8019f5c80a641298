"""Calls on GPU arrays that go over the host's memory, where nothing else can be had."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pycollective import _core, array_backend
from pycollective.communicator.arrays import Array

if TYPE_CHECKING:
    from pycollective.communicator.member import Member

__all__ = ["StagedCore"]


class StagedCore:
    """A rank's calls on GPU arrays, on copies of them in the host's memory."""

    #: Where the result stands among the arguments of the core's methods.
    _TARGETS: ClassVar = {
        "all_reduce": 1, "reduce": 1, "reduce_scatter": 1, "broadcast": 1, "move_parts": 2,
        "move_ragged": 2, "all_to_all_ragged": 1, "recv": 0,
    }  # fmt: skip

    def __init__(self, member: Member) -> None:
        self._member = weakref.ref(member)  # which has this

    def __getattr__(self, name: str) -> Callable[..., Any]:
        member = self._member()
        assert member is not None
        method = getattr(member._core, name)  # calls may be watched from any time on
        place = self._TARGETS.get(name)

        def call(*args: Any) -> Any:
            given = list(args)
            target = given[place] if place is not None else None
            for i, value in enumerate(given):
                if i != place and array_backend.is_array(value):
                    given[i] = array_backend.to_numpy(value)
            if target is not None and place is not None:
                given[place] = np.empty(target.shape, target.dtype)
            task = method(*given)
            if target is None or place is None:
                return task
            host = given[place]
            if task is not None:
                return _StagedTask(task, host, target)
            array_backend.assign(target, host)
            return None

        return call

    def close(self) -> None:
        """Nothing is left behind."""

    def finish(self) -> None:
        """Nothing is left behind."""

    def abandon(self) -> None:
        """Nothing is left behind."""


class _StagedTask:
    """A call of the core that is under way, whose result is then brought to a GPU."""

    def __init__(self, task: _core.Task, host: Array, target: Array) -> None:
        self._task = task
        self._host: Array | None = host
        self._target = target

    @property
    def done(self) -> bool:
        return self._task.done

    def wait(self, timeout: float) -> bool:
        return self._task.wait(timeout)

    def check(self) -> None:
        self._task.check()
        host, self._host = self._host, None
        if host is not None:
            array_backend.assign(self._target, host)
