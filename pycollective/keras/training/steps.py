"""`Steps`: the batches of each epoch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

from pycollective.data import INFINITE_CARDINALITY


class Steps:
    """The steps of each epoch, from a dataset or distributed dataset.

    An epoch has ``limit`` steps; if ``limit`` is None, it ends with the batches. Infinite batches need
    a limit, which messages call ``argument``. If the limit ends an epoch before the batches end, the
    next epoch starts at the next batch with ``resumes``, and otherwise at the first. ``total`` is the
    number of steps of an epoch, or None while it is unknown.
    """

    def __init__(
        self, batches: Any, limit: int | None, argument: str, resumes: bool = False
    ) -> None:
        if limit is not None:
            whole_number = not isinstance(limit, bool) and limit >= 1 and int(limit) == limit
            if not whole_number:
                raise ValueError(f"`{argument}` must be a positive integer, got {limit!r}")
            limit = int(limit)
        count = batches.cardinality
        size = int(count() if callable(count) else count)
        if limit is None and size == INFINITE_CARDINALITY:
            raise ValueError(
                f"When passing an infinitely repeating dataset, please specify a `{argument}` value "
                "so that epoch level callbacks continue to work. The value can be arbitrary, or a "
                "number that you think correctly defines the size of the dataset."
            )
        self._batches = batches
        self._limit = limit
        self._ends = limit == size
        self._argument = argument
        self._resumes = resumes and limit is not None and limit != size
        self._iterator: Iterator[Any] | None = None
        self.total = limit if limit is not None else (size if size >= 0 else None)

    def epoch(self, per_execution: int, begin: int = 0) -> Iterator[tuple[int, list[Any]]]:
        """Yield the steps of one epoch, in groups of at most ``per_execution`` steps.

        A group is the number of its first step, from 0, and a batch for each of its steps. Skip the
        first ``begin`` batches. Warn if the batches end before the limit.
        """
        iterator = iter(self._batches) if self._iterator is None else self._iterator
        self._iterator = None
        done = sum(1 for _ in itertools.islice(iterator, begin))
        while self._limit is None or done < self._limit:
            wanted = (
                per_execution if self._limit is None else min(per_execution, self._limit - done)
            )
            batches = list(itertools.islice(iterator, wanted))
            if batches:
                yield done, batches
                done += len(batches)
            if len(batches) < wanted:
                if self._limit is None:
                    self.total = done
                else:
                    warnings.warn(
                        "Your input ran out of data; interrupting training. Make sure that your "
                        f"dataset or generator can generate at least `{self._argument} * epochs` "
                        f"batches: there was none for step {done + 1} of {self._limit}. You may need "
                        "to use the `.repeat()` function when building your dataset.",
                        stacklevel=3,
                    )
                return
        if self._resumes:
            self._iterator = iterator
        elif self._ends:
            next(iterator, None)  # the input learns that the epoch ends: `PyDataset.on_epoch_end`
