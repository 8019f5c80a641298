"""Calls on device arrays, by ranks of one process. Memory and streams are addresses."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective._core import Algorithm, Collective, Communicator, ThreadGroup

class Event: ...

class Runtime:
    def reaches(self, device: int, other: int) -> bool: ...
    def mark(self, device: int, stream: int, timed: bool = False) -> Event: ...
    def wait(self, event: Event, device: int, stream: int) -> None: ...
    def over(self, event: Event) -> bool: ...
    def copy(
        self,
        target: int,
        target_device: int,
        source: int,
        source_device: int,
        bytes: int,
        stream: int,
    ) -> None: ...
    def pack(
        self,
        packed: int,
        packed_dtype: np.dtype[Any],
        pieces: Sequence[tuple[int, int, int]],
        piece_dtype: np.dtype[Any],
        scale: float = 1.0,
        unpacks: bool = False,
        device: int = 0,
        stream: int = 0,
    ) -> None: ...

def cuda_runtime() -> Runtime | None: ...

class EmulatedRuntime(Runtime):
    def __init__(self, cliques: Sequence[int], seed: int = 0) -> None: ...
    def own(self, device: int, address: int, bytes: int) -> None: ...
    def run(self) -> None: ...
    def hold(self, on: bool) -> None: ...
    def fail_after(self, calls: int) -> None: ...
    def break_device(self, device: int) -> None: ...
    def lose_wait_after(self, waits: int) -> None: ...
    @property
    def counts(self) -> dict[str, int]: ...

class Operation:
    def __init__(self) -> None: ...
    @property
    def number(self) -> int: ...

class CallMatcher:
    def __init__(self, group: ThreadGroup, runtime: Runtime) -> None: ...

class Caller:
    def __init__(self, communicator: Communicator, matcher: CallMatcher) -> None: ...
    def call(
        self,
        operation: Operation,
        collective: Collective,
        input: int,
        output: int,
        count: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        op: str | None,
        root: int,
        algorithm: str | Algorithm,
        reproducible: bool,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
        device: int,
        stream: int,
        after: int | None,
        later: bool,
        timed: bool,
        timeout: float,
    ) -> None: ...
    def finish(self, operation: Operation) -> None: ...
    def over(self, operation: Operation) -> bool: ...
    def times(self, operation: Operation, first: Event) -> tuple[float, float] | None: ...
    def order(self, operation: Operation, stream: int) -> None: ...
    def leave(self) -> None: ...
