"""`Steps`: the batches of one epoch after the other."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

from pycollective.data import INFINITE_CARDINALITY


class Steps:
    """The steps of one epoch after the other, of a dataset or distributed dataset.

    An epoch has ``limit`` steps (called ``argument`` in messages), or lasts until the batches end. With
    ``goes_on``, one that is shorter than the batches goes on where the last one stopped. ``total`` has
    the steps of an epoch, if they are known. Batches that never end need a limit.
    """

    def __init__(
        self, batches: Any, limit: int | None, argument: str, goes_on: bool = False
    ) -> None:
        if limit is not None and (isinstance(limit, bool) or limit < 1):
            raise ValueError(f"`{argument}` must be a positive integer, got {limit!r}")
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
        self._argument = argument
        self._goes_on = goes_on and limit is not None and limit != size
        self._iterator: Iterator[Any] | None = None
        self.total = limit if limit is not None else (size if size >= 0 else None)

    def epoch(self, at_once: int, begin: int = 0) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number of a step and ``at_once`` batches, its own first, for one epoch.

        The first ``begin`` batches are passed over. Fewer batches than the limit are warned of.
        """
        iterator = iter(self._batches) if self._iterator is None else self._iterator
        self._iterator = None
        done = sum(1 for _ in itertools.islice(iterator, begin))
        while self._limit is None or done < self._limit:
            wanted = at_once if self._limit is None else min(at_once, self._limit - done)
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
        if self._goes_on:
            self._iterator = iterator
