"""Calls on GPU arrays that go over the host's memory, where nothing else can be had."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pycollective import _core, array_backend

if TYPE_CHECKING:
    from pycollective.communicator.member import Member

__all__ = ["Delivery", "StagedCore"]


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
                return Delivery(task, partial(array_backend.assign, target, host))
            array_backend.assign(target, host)
            return None

        return call

    def close(self) -> None:
        """Nothing is left behind."""

    def finish(self) -> None:
        """Nothing is left behind."""

    def abandon(self) -> None:
        """Nothing is left behind."""


class Delivery:
    """A task of the core, and what brings its result to where it belongs when it is over."""

    def __init__(self, task: _core.Task, deliver: Callable[[], None]) -> None:
        self._task = task
        self._deliver: Callable[[], None] | None = deliver

    @property
    def done(self) -> bool:
        """Whether the call is over, or failed."""
        return self._task.done

    def wait(self, timeout: float) -> bool:
        """Wait so many seconds for that."""
        return self._task.wait(timeout)

    def check(self) -> None:
        """Bring the result to its place, once, or raise why there is none."""
        self._task.check()
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()
