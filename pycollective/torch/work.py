"""The work of PyTorch for a call of this package."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycollective import comm
from pycollective.errors import CollectiveError, PeerLostError, RendezvousError

_NO_TIMEOUT = timedelta(0)


@contextlib.contextmanager
def torch_errors() -> Iterator[None]:
    """Raise this package's errors as those of ``torch.distributed``, with the same message."""
    try:
        yield
    except (CollectiveError, TimeoutError) as error:
        raise torch_error(error) from error


def torch_error(error: BaseException) -> Exception:
    """Return the error of ``torch.distributed`` for an error of this package."""
    is_network = isinstance(error, (PeerLostError, RendezvousError))
    text = f"the timeout passed: {error}" if isinstance(error, TimeoutError) else str(error)
    kind: type[Exception] = dist.DistNetworkError if is_network else dist.DistBackendError
    return kind(text)


class Watcher:
    """A thread that waits for the works of a process group whose futures a program wants.

    C++ code such as DDP's reducer waits for a future itself, so that another thread must complete it.
    The thread starts with the first future.

    The watcher also keeps the calls whose results are copied to tensors after their end. A program need
    not wait for a call if it waits for a later one.
    """

    def __init__(self) -> None:
        self._copying: deque[comm.Work[Any]] = deque()
        self._lock = threading.Lock()  # several threads may wait
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def keep(self, work: comm.Work[Any]) -> None:
        """Keep a call that copies its result, for the waits of later calls."""
        with self._lock:
            self._copying.append(work)

    def copy_ended(self) -> None:
        """Copy the results of the calls that have ended: of all calls before one that has."""
        if not self._copying:
            return
        with self._lock:
            while self._copying and self._copying[0].done():  # it copies
                self._copying.popleft()

    def copy_all(self) -> None:
        """Wait for all calls that copy their results."""
        for work in tuple(self._copying):
            with contextlib.suppress(CollectiveError):
                work.wait()

    def add(self, complete: Callable[[], None], in_order: bool = True) -> None:
        """Call a function, which may wait, in the thread.

        Collectives end in their order, so that one thread can wait for them. A message may end after
        later calls, and gets a thread of its own. So does a call whose future a callback asks for,
        because the callback may wait in the thread.
        """
        if not in_order or threading.current_thread() is self._thread:
            threading.Thread(target=complete, name="pycollective", daemon=True).start()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pycollective", daemon=True)
            self._thread.start()
        self._works.put(complete)

    def at_end(self, work: Work, end: Callable[[], None]) -> None:
        """Call a function in the thread when a work ends, before the work is done for others."""
        if work._work is not None:
            work._end = end
            work.get_future()
            return
        ended = threading.Event()

        def last() -> None:
            end()
            ended.set()

        self.add(last)
        ended.wait()

    def _run(self) -> None:
        while (complete := self._works.get()) is not None:
            complete()

    def close(self) -> None:
        """End the thread after the works that it has."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()
            self._thread = None


class Work(dist.Work):  # type: ignore[misc]
    """A call of a process group.

    Parameters
    ----------
    result : list
        The tensors that the call writes, as PyTorch's hooks expect them.
    work : comm.Work, optional
        The asynchronous call; None for a call that is done.
    watcher : Watcher, optional
        The group's watcher, for an asynchronous call.
    source : callable, optional
        Returns the rank that sent the message, after a receive.
    in_order : bool
        False for a message, which may end after later calls.
    """

    _future: Any = None
    _ended: threading.Event | None = None  # set by the watcher
    _error: Exception | None = None
    _end: Callable[[], None] | None = None  # called by the watcher

    def __init__(
        self,
        result: Any,
        work: comm.Work[Any] | None = None,
        watcher: Watcher | None = None,
        source: Callable[[], int] | None = None,
        in_order: bool = True,
    ) -> None:
        dist.Work.__init__(self)
        self._result, self._work, self._watcher = result, work, watcher
        self._source, self._in_order = source, in_order

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the call, at most for the timeout; raise its error."""
        if self._work is None:
            return True
        seconds = timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        if self._ended is None:
            with torch_errors():
                self._work.wait(seconds)
            self._copy_ended()
            return True
        if not self._ended.wait(seconds):
            raise dist.DistBackendError(f"the call is not done after {seconds:g} s; it still runs")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the call has ended, and its tensors hold the result."""
        if self._ended is not None:
            return self._ended.is_set()
        if self._work is None:
            return True
        if not self._work.done():
            return False
        with contextlib.suppress(Exception):  # `wait` raises the error
            self._work.result()  # copies the result to the tensors, if it is elsewhere
        self._copy_ended()
        return True

    def _copy_ended(self) -> None:
        """Copy the results of the calls before this one, which have ended too."""
        if self._watcher is not None:
            self._watcher.copy_ended()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a call that is done, or None."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        if self._source is None:
            raise RuntimeError("source_rank() is for receives only")
        self.wait()
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return the future of the call, with the tensors that it writes."""
        if self._future is not None:
            return self._future
        done: Any = torch.futures.Future()

        def value(_: object) -> Any:
            if self._error is not None:
                raise self._error
            return self._result

        # C++ code sees the error of a callback, but takes that of set_exception() for a value.
        self._future = done.then(value)
        if self._watcher is None:
            done.set_result(None)
            return self._future
        work, ended = self._work, threading.Event()
        assert work is not None

        def complete() -> None:
            try:
                work.wait()
            except Exception as error:
                ours = isinstance(error, (CollectiveError, TimeoutError))
                self._error = torch_error(error) if ours else error
            self._copy_ended()
            if self._end is not None:
                self._end()
            ended.set()
            done.set_result(None)

        self._ended = ended
        if self._end is None and work.done():  # the last rank to call waits for no other
            complete()
        else:
            self._watcher.add(complete, self._in_order)
        return self._future
