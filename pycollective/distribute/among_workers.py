"""All-reduces that go beyond this process, begun while the tapes compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pycollective import array_backend
from pycollective.arguments import OpName
from pycollective.communicator import Communicator, Work
from pycollective.distribute.cross_device_ops import ReplicaReduction
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.workers import Workers
from pycollective.nccl import device

__all__ = ["BothLevels", "OnBothLevels", "by_streams", "on_each_device"]


class BothLevels:
    """Stands in the place of replica 0's communicator: its sums go on to the other workers.

    All workers must make their calls in one order, which therefore may not depend on when a sum is
    there. On GPUs a call is begun among the workers at once, and streams wait for the sum; on CPUs when
    the next one comes, and the caller waits for what is not there by then.

    Parameters
    ----------
    own : Communicator
        That of this process's replica 0.
    workers : Workers
        The others.
    stream_of : callable
        Returns a stream of a GPU, in which nothing is computed.
    """

    def __init__(
        self, own: Communicator, workers: Workers, stream_of: Callable[[int], Any]
    ) -> None:
        self._own = own
        self._workers = workers
        self._stream_of = stream_of
        self._next: _Later | None = None
        #: Whether a call has been begun among the workers.
        self.begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def all_reduce(
        self, x: Any, op: OpName, *, out: Any, algorithm: Any, async_op: bool, timeout: float | None
    ) -> _Later:
        """Begin an all-reduce of all replicas into ``out``; return what is to be waited for."""
        self.flush()
        here: Any = self._own.all_reduce(  # type: ignore[call-overload]  # async_op is no literal
            x, op, out=out, algorithm=algorithm, async_op=async_op, timeout=timeout
        )

        def there() -> Work[Any]:
            self.begun = True
            communicator = self._workers.communicator
            assert communicator is not None
            with self._behind(here if async_op else None, out):
                return communicator.all_reduce(
                    out, op, out=out, algorithm=algorithm, async_op=True, timeout=timeout
                )

        self._next = later = _Later(there)
        if array_backend.is_on_gpu(out):
            self.flush()
        return later

    @contextlib.contextmanager
    def _behind(self, here: Work[Any] | None, out: Any) -> Iterator[None]:
        """Let what is done in the block come after a work; on a GPU not after what is computed since."""
        if not array_backend.is_on_gpu(out):
            if here is not None:
                here.wait()
            yield
            return
        gpu = array_backend.device_of(out)[1]
        side = self._stream_of(gpu)
        with device.on(gpu):
            if here is None:
                device.stream_wait(side, [device.event(device.present_stream())])
            with side:
                if here is not None:
                    here.wait()
                yield

    def flush(self) -> None:
        """Begin among the workers what has not been."""
        later, self._next = self._next, None
        if later is not None:
            later.begin()


class _Later:
    """A call on both levels."""

    def __init__(self, there: Callable[[], Work[Any]]) -> None:
        self._begin = there
        self._there: Work[Any] | None = None

    def begin(self) -> None:
        self._there = self._begin()

    def wait(self) -> None:
        """Wait until it is done, which must have been begun among the workers."""
        assert self._there is not None
        self._there.wait()


class OnBothLevels(ReplicaReduction):
    """One replica's part of an all-reduce of all workers' replicas.

    Parameters
    ----------
    context : ReplicaContext
        The replica.
    reduction : ReplicaReduction
        Its part among the replicas of this process.
    both : BothLevels or None
        What replica 0 makes it by.
    likes : sequence of array
        On whose device each result is to be.
    timeout : float or None
        Seconds to wait for the others.
    """

    def __init__(
        self,
        context: ReplicaContext,
        reduction: ReplicaReduction,
        both: BothLevels | None,
        likes: Sequence[Any],
        timeout: float | None,
    ) -> None:
        self._context = context
        self._reduction = reduction
        self._both = both
        self._likes = likes
        self._timeout = timeout

    def add(self, place: int, array: Any) -> None:
        """Give one of the arrays."""
        self._reduction.add(place, array)

    def finish(self) -> list[Any]:
        """Wait until all is reduced among the workers; all replicas get replica 0's results."""
        if self._both is None:
            self._reduction.finish()
        else:
            self._reduction.flush()
            self._both.flush()

        def share(replicas: list[tuple[Sequence[Any]]]) -> list[list[Any]]:
            assert self._both is not None
            results = self._reduction.finish()
            self._both.begun = False
            return on_each_device(results, [likes for (likes,) in replicas])

        totals: list[Any] = self._context.meet(
            "all_reduce", share, self._likes, timeout=self._timeout
        )
        return totals


def on_each_device(results: Sequence[Any], likes: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return results for each replica: themselves, or copies on the GPU of its arrays.

    Only while the replicas meet: a copy that one of them makes later would wait for what replica 0 has
    given its GPU since, which may wait for that replica in NCCL.
    """
    return [
        [
            array_backend.asarray(result, like=like)
            for result, like in zip(results, own, strict=True)
        ]
        for own in likes
    ]


def by_streams(communicator: Communicator | None) -> bool:
    """Whether a communicator is known to make calls on GPU arrays in streams: no host waits for them."""
    return communicator is not None and communicator.has_gpu_streams
