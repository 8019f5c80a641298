"""An iterator that runs ahead in a thread of its own."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Prefetcher"]

_END = object()


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _produce(source: Iterator[Any], ready: queue.Queue[Any], stopped: threading.Event) -> None:
    """Put the elements of ``source`` into a bounded queue until it ends or nobody wants them."""

    def put(item: Any) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in source:
            if not put(item):
                break
        else:
            put(_END)
    except BaseException as error:
        put(_Failed(error))
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


class Prefetcher:
    """Elements of an iterator, made ahead of time in a thread.

    The thread ends when the elements are exhausted, when the iterator raises (the error arrives in
    the consumer), when `close` is called, or when this object is dropped.

    Parameters
    ----------
    make : callable
        Returns the iterator.
    size : int
        How many elements are kept ready.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], size: int) -> None:
        self._ready: queue.Queue[Any] = queue.Queue(size)
        stopped = threading.Event()
        self._thread = threading.Thread(
            target=_produce,
            args=(make(), self._ready, stopped),
            name="pycollective-prefetch",
            daemon=True,
        )
        self.close = weakref.finalize(self, _stop, stopped, self._ready)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.close.alive:
            raise StopIteration
        item = self._ready.get()
        if item is _END:
            self.close()
            raise StopIteration
        if isinstance(item, _Failed):
            self.close()
            raise item.error
        return item


def _stop(stopped: threading.Event, ready: queue.Queue[Any]) -> None:
    stopped.set()
    try:
        while True:  # wake a producer that waits for room
            ready.get_nowait()
    except queue.Empty:
        pass
