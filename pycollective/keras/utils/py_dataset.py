"""`PyDataset`: batches by index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pycollective.tensor.random import default_generator


class PyDataset:
    """Base class of sequences of batches; a subclass overrides ``__len__`` and ``__getitem__``.

    ``dataset[i]`` is the global batch ``i``, ``(x, y)`` or ``(x, y, sample_weight)``.

    Parameters
    ----------
    workers, use_multiprocessing, max_queue_size
        Accepted for compatibility with Keras and ignored: one thread prefetches.
    """

    def __init__(
        self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10
    ) -> None:
        self.workers = workers
        self.use_multiprocessing = use_multiprocessing
        self.max_queue_size = max_queue_size

    def __getitem__(self, index: int) -> Any:
        """Return a batch."""
        raise NotImplementedError(f"{type(self).__name__} must override __getitem__()")

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None: infinite."""
        return len(self) if hasattr(self, "__len__") else None

    def on_epoch_begin(self) -> None:
        """Handle the beginning of an epoch, before its first batch."""

    def on_epoch_end(self) -> None:
        """Handle the end of an epoch, after its last batch."""

    def passes(self, shuffle: bool | str) -> Iterator[Any]:
        """Yield the batches of an epoch, in random order with ``shuffle``."""
        self.on_epoch_begin()
        count = self.num_batches
        if count is None:
            yield from (self[i] for i in itertools.count())
        else:
            numbers = default_generator().permutation(count) if shuffle else range(count)
            yield from (self[int(i)] for i in numbers)
        self.on_epoch_end()
