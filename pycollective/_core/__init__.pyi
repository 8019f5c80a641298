"""The compiled core; use it through the Python package.

CI compares these stubs with the module: mypy's stubtest compares the names, and
tests/core/test_stub.py the parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from pycollective._core import cuda as cuda
from pycollective._core import device as device
from pycollective._core import nccl as nccl

__version__: str
compiler: str

_Method = TypeVar("_Method", bound=Callable[..., Any])

class _Enum:
    __members__: ClassVar[dict[str, Any]]
    def __init__(self, value: int) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Verb(_Enum):
    send: ClassVar[Verb]
    recv: ClassVar[Verb]
    recv_reduce: ClassVar[Verb]
    copy: ClassVar[Verb]
    reduce: ClassVar[Verb]

class Buffer(_Enum):
    input: ClassVar[Buffer]
    output: ClassVar[Buffer]
    scratch: ClassVar[Buffer]

class Collective(_Enum):
    all_reduce: ClassVar[Collective]
    reduce: ClassVar[Collective]
    reduce_scatter: ClassVar[Collective]
    broadcast: ClassVar[Collective]
    scatter: ClassVar[Collective]
    gather: ClassVar[Collective]
    all_gather: ClassVar[Collective]
    all_to_all: ClassVar[Collective]
    barrier: ClassVar[Collective]
    scan: ClassVar[Collective]
    exscan: ClassVar[Collective]

class Span:
    buffer: Buffer
    first: int
    count: int
    def __init__(self, buffer: Buffer = ..., first: int = 0, count: int = 0) -> None: ...

class Step:
    verb: Verb
    peer: int
    source: Span
    target: Span
    completes: bool
    def __init__(
        self,
        verb: Verb,
        peer: int = -1,
        source: Span = ...,
        target: Span = ...,
        completes: bool = False,
    ) -> None: ...

class Schedule:
    def __init__(
        self,
        collective: Collective,
        chunks: int,
        steps: Sequence[Sequence[Step]],
        scratch: int = 0,
    ) -> None: ...
    @property
    def collective(self) -> Collective: ...
    @property
    def chunks(self) -> int: ...
    @property
    def scratch(self) -> int: ...
    @property
    def steps(self) -> list[list[Step]]: ...

class Algorithm:
    def __init__(self, name: str, schedule: Schedule) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def schedule(self) -> Schedule: ...

def algorithm_names(collective: Collective) -> list[str]: ...
def make_schedule(collective: Collective, algorithm: str, size: int) -> Schedule: ...
def make_hierarchical(hosts: Sequence[int]) -> Schedule: ...
def verify(schedule: Schedule, in_place: bool, filled: int = 0) -> str: ...
def prove(schedule: Schedule) -> str: ...
def verify_many(
    collective: Collective,
    algorithm: str | Schedule,
    size: int,
    marks: bool = True,
    watch: Callable[[float], None] | None = None,
) -> str: ...
def simulate(
    collective: Collective,
    algorithm: str | Schedule,
    bytes: float,
    segment_bytes: float,
    ranks: int,
    places: Sequence[Sequence[int]],
    links: Sequence[tuple[float, float, float, bool, bool, bool]],
    reduce_rate: float,
    copy_rate: float,
    call_overhead: float,
    cores: int,
    watch: Callable[[float], None] | None = None,
) -> tuple[float, NDArray[Any], list[float], list[int], int]: ...

SEGMENT_BYTES: int

class Group:
    @property
    def size(self) -> int: ...
    @property
    def failure(self) -> str | None: ...
    def check(self) -> None: ...
    def abort(
        self,
        message: str,
        peer_lost: bool = False,
        ranks: Sequence[int] = ...,
        call: str | None = None,
    ) -> None: ...
    def fail_as(self, whole: Group, members: Sequence[int]) -> None: ...
    def leave(self, rank: int) -> None: ...
    def close(self, rank: int) -> None: ...
    def abandon(self) -> None: ...
    @property
    def transport(self) -> str: ...
    @property
    def is_oversubscribed(self) -> bool: ...
    @property
    def hosts(self) -> list[int]: ...
    def calls(self, rank: int) -> int: ...
    def send_heartbeat(self) -> None: ...
    def silent(self, seconds: float) -> list[int]: ...
    def address(self, rank: int) -> str: ...
    def title(self, rank: int) -> str: ...
    def set_titles(self, titles: Sequence[str]) -> None: ...
    def describe(self, rank: int | None = None) -> str: ...

class ThreadGroup(Group):
    def __init__(self, size: int) -> None: ...

def exit_in_failure() -> None: ...

class ShmGroup(Group):
    @staticmethod
    def create(size: int, arena: int = ...) -> ShmGroup: ...
    @staticmethod
    def open(descriptor: int) -> ShmGroup: ...
    @property
    def descriptor(self) -> int: ...
    def join(self, rank: int) -> None: ...
    def follow(self, other: ShmGroup) -> None: ...
    def is_in(self, rank: int) -> bool: ...
    @property
    def all_read_remotely(self) -> bool: ...
    @property
    def copy_way(self) -> str: ...
    @property
    def needing_fences(self) -> list[int]: ...

def usable_cores() -> int: ...
def quota_of_cores(root: str) -> float: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def yield_or_change_core() -> bool: ...

class TcpGroup(Group):
    def __init__(
        self, rank: int, streams: Sequence[Sequence[int]], pipes: Sequence[int] = []
    ) -> None: ...
    @property
    def rank(self) -> int: ...

class MixedGroup(Group):
    def __init__(
        self,
        rank: int,
        streams: Sequence[Sequence[int]],
        pipes: Sequence[int],
        memory: ShmGroup,
        hosts: Sequence[int],
    ) -> None: ...

class CommunicatorBase:
    timeout: float
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def _set_place(self, rank: int, size: int, /) -> None: ...
    def _attach(self, core: Communicator, /) -> None: ...
    def _detach(self, /) -> None: ...

ARENA_BYTES: int

def share_arrays() -> object: ...
def set_handler(handler: object) -> object: ...
def use_arena(group: Group) -> bool: ...
def is_shared(array: NDArray[Any]) -> bool: ...
def fast_call(collective: Collective) -> Callable[[_Method], _Method]: ...
def fast_send(method: _Method) -> _Method: ...
def fast_recv(method: _Method) -> _Method: ...
def fast_reduce_many(method: _Method) -> _Method: ...
def use_work(type: type[Any]) -> None: ...

class Task:
    @property
    def done(self) -> bool: ...
    @property
    def times(self) -> tuple[float, float]: ...
    def wait(self, timeout: float) -> bool: ...
    def check(self) -> None: ...

class Communicator:
    def __init__(self, group: Group, rank: int) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def prefer(self, rows: Sequence[tuple[Collective, int, str]]) -> None: ...
    def warn_after(self, seconds: float, warn: Callable[[str], object]) -> None: ...
    def select(self, collective: Collective, bytes: int) -> str: ...
    def run_later(self, call: Callable[[], object]) -> Task: ...
    def collect(self) -> None: ...
    def mark_reported(self) -> None: ...
    def wait_all(self) -> None: ...
    @property
    def outstanding(self) -> int: ...
    def send(
        self,
        input: NDArray[Any],
        dest: int,
        tag: int,
        timeout: float,
        async_op: bool = False,
        label: str = "",
    ) -> Task | None: ...
    def recv(
        self,
        output: NDArray[Any],
        source: int,
        tag: int,
        timeout: float,
        async_op: bool = False,
        label: str = "",
    ) -> Task | None: ...
    def all_reduce(
        self,
        input: NDArray[Any],
        output: NDArray[Any],
        op: str,
        algorithm: str | Algorithm,
        reproducible: bool,
        timeout: float,
        async_op: bool = False,
        shape: Sequence[int] | None = None,
        label: str = "",
    ) -> Task | None: ...
    def reduce(
        self,
        input: NDArray[Any],
        output: NDArray[Any] | None,
        op: str,
        root: int,
        algorithm: str | Algorithm,
        timeout: float,
        async_op: bool = False,
    ) -> Task | None: ...
    def reduce_scatter(
        self,
        input: NDArray[Any],
        output: NDArray[Any],
        op: str,
        algorithm: str | Algorithm,
        timeout: float,
        async_op: bool = False,
    ) -> Task | None: ...
    def scan(
        self,
        input: NDArray[Any],
        output: NDArray[Any] | None,
        op: str,
        exclusive: bool,
        algorithm: str | Algorithm,
        timeout: float,
        async_op: bool = False,
    ) -> Task | None: ...
    def broadcast(
        self,
        input: NDArray[Any],
        output: NDArray[Any],
        root: int,
        algorithm: str | Algorithm,
        timeout: float,
        async_op: bool = False,
        label: str = "",
    ) -> Task | None: ...
    def move_parts(
        self,
        collective: Collective,
        input: NDArray[Any] | None,
        output: NDArray[Any] | None,
        count: int,
        shape: Sequence[int],
        root: int,
        algorithm: str | Algorithm,
        timeout: float,
        async_op: bool = False,
        label: str = "",
    ) -> Task | None: ...
    def move_ragged(
        self,
        collective: Collective,
        input: NDArray[Any] | None,
        output: NDArray[Any] | None,
        counts: Sequence[int],
        shape: Sequence[int],
        root: int,
        algorithm: str | Algorithm,
        timeout: float,
        async_op: bool = False,
    ) -> Task | None: ...
    def all_to_all_ragged(
        self,
        input: NDArray[Any],
        output: NDArray[Any],
        input_counts: Sequence[int],
        output_counts: Sequence[int],
        shape: Sequence[int],
        timeout: float,
        async_op: bool = False,
    ) -> Task | None: ...
    def empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], result: bool = False
    ) -> NDArray[Any]: ...
    def barrier(self, timeout: float, async_op: bool = False) -> Task | None: ...

def all_reduce_together(
    communicators: Sequence[Communicator],
    inputs: Sequence[NDArray[Any]],
    outputs: Sequence[NDArray[Any]],
    op: str,
    algorithm: str | Algorithm,
    timeout: float,
) -> None: ...
def measure_all_reduce(how: str, ranks: int, bytes: int, iterations: int) -> list[float]: ...
def measure_rates(ranks: int, bytes: int, iterations: int) -> tuple[float, float]: ...
def past_cache_from() -> int: ...
def set_past_cache_from(bytes: int) -> None: ...
def past_cache_setting() -> int: ...
def measure_handshake(
    lines: NDArray[Any], rank: int, ranks: int, rounds: int, oversubscribed: bool
) -> float: ...

class Arrivals:
    def __init__(self) -> None: ...
    def add(self) -> None: ...
    def spin_until(self, count: int) -> bool: ...

def reduce_arrays(
    op: str, sources: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]], size: int = 0
) -> None: ...
def combine_arrays(
    op: str, a: NDArray[Any], b: NDArray[Any], output: NDArray[Any], size: int = 0
) -> None: ...
def convert_halves(source: NDArray[Any], output: NDArray[Any], portable: bool = False) -> None: ...
