"""`PyDataset`: batches by their number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pycollective.tensor.random import default_generator


class PyDataset:
    """Base class: one of your own overrides ``__len__`` and ``__getitem__``.

    ``dataset[i]`` is the batch with the number ``i``, ``(x, y)`` or ``(x, y, sample_weight)``, of all
    replicas together.

    Parameters
    ----------
    workers, use_multiprocessing, max_queue_size
        Accepted for Keras's sake: one thread reads ahead.
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
        """How many batches there are; None: they never end."""
        return len(self) if hasattr(self, "__len__") else None

    def on_epoch_begin(self) -> None:
        """Hear that an epoch's first batch is about to be made."""

    def on_epoch_end(self) -> None:
        """Hear that an epoch's last batch was made."""

    def passes(self, shuffle: bool) -> Iterator[Any]:
        """Yield the batches of an epoch, in a new order if wanted."""
        self.on_epoch_begin()
        count = self.num_batches
        if count is None:
            yield from (self[i] for i in itertools.count())
        else:
            numbers = default_generator().permutation(count) if shuffle else range(count)
            yield from (self[int(i)] for i in numbers)
        self.on_epoch_end()
