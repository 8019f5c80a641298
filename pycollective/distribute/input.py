"""Distributed datasets: how batches become parts for replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pycollective import nest
from pycollective.distribute.context import get_replica_context, has_strategy
from pycollective.distribute.values import PerReplica
from pycollective.tensor import Tensor

if TYPE_CHECKING:
    from pycollective.distribute.strategy import Strategy

__all__ = ["DistributedDataset", "DistributedIterator", "InputContext"]


class InputContext:
    """What a function that makes a dataset may know.

    Attributes
    ----------
    num_input_pipelines, input_pipeline_id : int
        How many datasets are made, and which one this is.
    num_replicas_in_sync : int
        How many replicas they feed together.
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """The number of datasets that are made."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Which of them this is."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas they feed."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the share of a replica.

        Raises
        ------
        ValueError
            If the batch cannot be divided.
        """
        if global_batch_size % self._num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self._num_replicas_in_sync!r} "
            )
        return global_batch_size // self._num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self._input_pipeline_id}, total: "
            f"{self._num_input_pipelines})"
        )


class DistributedIterator:
    """One pass over a `DistributedDataset`: ``next(it)`` gives what `Strategy.run` takes."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        context = get_replica_context()
        if context is not None and has_strategy():
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        return next(self._elements)

    def get_next(self) -> Any:
        """Return the next element; at the end raises StopIteration."""
        return next(self)


class DistributedDataset:
    """A dataset whose elements have a component for each replica; iterate over it.

    Attributes
    ----------
    element_spec
        The structure, dtypes and shapes of a replica's part.
    """

    def __init__(self, elements: Callable[[], Iterator[Any]], dataset: Any, length: Any) -> None:
        self._elements = elements
        self._dataset = dataset
        self._length = length

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._elements())

    @property
    def element_spec(self) -> Any:
        """The structure, dtypes and shapes of a replica's part."""
        return self._dataset.element_spec

    def cardinality(self) -> Any:
        """Return the number of steps; -1 infinite, -2 unknown."""
        return self._length()

    def __len__(self) -> int:
        length = int(self._length())
        if length < 0:
            raise TypeError("the dataset's length is infinite or unknown")
        return length


def distribute_dataset(strategy: Strategy, dataset: Any) -> Any:
    """Split each batch of ``dataset`` into a part for each replica."""
    replicas = strategy.extended.num_local_replicas
    if strategy.num_replicas_in_sync == 1:
        return dataset
    _check_dataset(dataset)
    for leaf in nest.flatten(dataset.element_spec):
        if leaf.shape is not None:
            _check_batched(leaf.shape, replicas)

    def elements() -> Iterator[Any]:
        for batch in dataset._iter():
            yield _split(batch, replicas)

    return DistributedDataset(elements, dataset, dataset.cardinality)


def _check_batched(shape: tuple[Any, ...], replicas: int) -> None:
    if len(shape) == 0:
        raise ValueError(
            "Unable to split a dataset whose elements are scalars. Perhaps your input dataset is not "
            "batched? Call the `batch` method on the input Dataset in order to be able to split your "
            f"input across {replicas} replicas."
        )


def _split(batch: Any, replicas: int) -> Any:
    """Cut the rows of a batch into parts of ceil(rows / replicas), the last ones short or empty."""

    def cut(array: Any) -> PerReplica:
        _check_batched(array.shape, replicas)
        part = -(-array.shape[0] // replicas)
        return PerReplica([Tensor(array[r * part : (r + 1) * part]) for r in range(replicas)])

    return nest.map_structure(cut, batch)


def distribute_from_function(strategy: Strategy, dataset_fn: Callable[[InputContext], Any]) -> Any:
    """Give each replica an element of its own of the dataset that ``dataset_fn`` returns."""
    replicas = strategy.extended.num_local_replicas
    dataset = dataset_fn(InputContext(1, 0, strategy.num_replicas_in_sync))
    _check_dataset(dataset)
    if strategy.num_replicas_in_sync == 1:
        return dataset

    def elements() -> Iterator[Any]:
        source = dataset._iter()
        last: Any = None
        while True:
            parts: list[Any] = []
            for part in source:
                parts.append(part)
                if len(parts) == replicas:
                    break
            if not parts:
                return
            last = parts[0] if last is None else last
            # A replica that has run out gets no rows; the step ends when all have.
            empty = nest.map_structure(lambda a: a[:0], last)
            parts += [empty] * (replicas - len(parts))
            yield nest.map_structure(
                lambda *leaves: PerReplica([Tensor(a) for a in leaves]), *parts
            )

    def length() -> int:
        count = int(dataset.cardinality())
        return count if count < 0 else -(-count // replicas)

    return DistributedDataset(elements, dataset, length)


def _check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "_iter"):
        raise TypeError(
            f"expected a pycollective.data.Dataset, got {type(dataset).__name__}; for arrays use "
            "Dataset.from_tensor_slices(arrays).batch(n)"
        )
