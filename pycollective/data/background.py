"""Iterators that make elements ahead in a thread."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pycollective.tensor import random

_END = object()


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Shared:
    """State that a producer and its consumer share: free slots, and elements that are ready."""

    def __init__(self, size: int) -> None:
        self.ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.free_slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(size):
            self.free_slots.put(None)
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self.free_slots.put(None)  # wakes a producer that waits for a slot


def _produce(source: Iterator[Any], shared: _Shared, generator: np.random.Generator) -> None:
    """Fill slots with the elements of ``source`` until it ends or the consumer stops."""
    item: Any = None
    try:
        with random.generator_scope(generator):
            while item is not _END:
                item = None  # do not keep an element alive while waiting
                shared.free_slots.get()
                if shared.stopped:
                    return
                item = next(source, _END)
                shared.ready.put(item)
    except BaseException as error:
        shared.ready.put(_Failed(error))
    finally:
        shared.ready.put(_END)  # for consumers that still wait after an error or `stop`
        close = getattr(source, "close", None)
        if close is not None:
            close()


class Prefetcher:
    """An iterator that makes up to ``size`` elements of ``make()`` ahead of time in a thread.

    The thread ends after the last element, at an error of the iterator, at `close`, or when this
    object is deleted. The consumer gets the error. Random operations in the thread use their own
    generator, which is derived from the default one. Neither side's random numbers therefore depend
    on timing, or on the use of a thread.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], size: int) -> None:
        shared = self._shared = _Shared(size)
        self._process = os.getpid()
        thread = threading.Thread(
            target=_produce,
            args=(make(), shared, random.spawn(1)[0]),
            name="pycollective-prefetch",
            daemon=True,
        )
        self.close = weakref.finalize(self, shared.stop)
        thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.close.alive:
            raise StopIteration
        if self._process != os.getpid():
            raise RuntimeError(
                "this iterator began before the process forked, and its thread is in the parent; make "
                "a new iterator of the dataset"
            )
        item = self._shared.ready.get()
        self._shared.free_slots.put(None)
        if item is _END:
            self._shared.ready.put(_END)  # other threads may wait for an element, too
            self.close()
            raise StopIteration
        if isinstance(item, _Failed):
            self.close()
            raise item.error
        return item
