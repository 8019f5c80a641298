"""Distributed datasets, whose elements have a mini-batch for each replica.

`pycollective.data.sharding` chooses the rows of each worker. This module groups the worker's
mini-batches into arguments for `Strategy.run`, and prefetches them in a thread.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data import INFINITE_CARDINALITY, Dataset, TensorSpec
from pycollective.data.background import Prefetcher
from pycollective.data.dataset import elements, is_cheap
from pycollective.data.optional import NextElements
from pycollective.data.sharding import describe, empty_batches_warning, share_of_worker
from pycollective.distribute.context import current_mode, has_strategy
from pycollective.distribute.devices import Device, Uploads
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    PerReplicaSpec,
    check_options,
    goes_to_devices,
    steps_ahead,
)
from pycollective.distribute.values import PerReplica
from pycollective.tensor import Tensor


class _Parts:
    """The mini-batches of this worker, before the workers agree on the end of the data.

    Parameters
    ----------
    extended : StrategyExtended
        The replicas.
    pipelines : list of Dataset
        One dataset for all local replicas, or one for each.
    ahead : int
        The number of steps that a thread prefetches; 0: there is no thread.
    keep_rest : bool
        True if a last step without data for some replicas counts, even if all shapes are static.
    to_devices : bool
        True if mini-batches are copied to the replicas' GPUs.
    """

    def __init__(
        self,
        extended: StrategyExtended,
        pipelines: list[Dataset],
        ahead: int,
        keep_rest: bool,
        to_devices: bool,
    ) -> None:
        self.extended = extended
        self._copies = to_devices and any(d.kind == "GPU" for d in extended.devices)
        self.pipelines = pipelines
        self.ahead = ahead
        workers, _ = extended.input_pipeline
        self.across_workers = workers > 1
        finite = all(p.cardinality() != INFINITE_CARDINALITY for p in pipelines)
        self.fills_up = (
            extended.enable_partial_batch_handling
            and finite
            and (keep_rest or self.across_workers or not all(map(_is_static, self.specs)))
        )

    @property
    def specs(self) -> list[Any]:
        """The specs of the mini-batches of each pipeline."""
        return [p.element_spec for p in self.pipelines]

    @property
    def element_spec(self) -> Any:
        """The spec of an element."""
        count = self.extended.num_local_replicas // len(self.pipelines)
        specs = [spec for spec in self.specs for _ in range(count)]
        if self.across_workers and self.fills_up:
            specs = [nest.map_structure(_of_any_length, spec) for spec in specs]
        if len(specs) == 1 and not self.across_workers:
            return specs[0]
        return nest.map_structure(lambda *leaves: PerReplicaSpec(leaves), *specs)

    def start(self) -> Iterator[list[Any]]:
        """Return the steps of one pass: mini-batches in replica order, None for a missing one."""
        cheap = not self._copies and all(is_cheap(p) for p in self.pipelines)
        if self.ahead and not cheap:
            return iter(Prefetcher(partial(self._steps, Uploads().place), self.ahead))
        return self._steps(Device.place)

    def place(self, replica: int, part: Any, how: Callable[[Device, Any], Any]) -> Any:
        """Return a mini-batch, or None, on the device of a replica."""
        if part is None or not self._copies:
            return part
        return nest.map_structure(partial(how, self.extended.devices[replica]), part)

    def _steps(self, how: Callable[[Device, Any], Any]) -> Iterator[list[Any]]:
        sources = [elements(p) for p in self.pipelines]
        count = self.extended.num_local_replicas // len(sources)
        if self.extended.num_local_replicas == 1:
            for part in sources[0]:
                yield [self.place(0, part, how) if self._copies else part]
            return
        while True:
            parts: list[Any] = []
            for source in sources:
                taken = list(itertools.islice(source, count))
                parts += taken + [None] * (count - len(taken))
            if all(part is None for part in parts):
                return
            if self._copies:
                parts = [self.place(replica, part, how) for replica, part in enumerate(parts)]
            yield parts


def _is_static(spec: Any) -> bool:
    return all(s.shape is not None and None not in s.shape for s in nest.flatten(spec))


def _of_any_length(spec: TensorSpec) -> TensorSpec:
    return (
        TensorSpec((None, *spec.shape[1:]), spec.dtype)
        if spec.shape is not None and len(spec.shape)
        else spec
    )


def _empty(spec: Any, like: Any) -> Any:
    """Return a mini-batch without rows, for a replica without data; unknown lengths are 0."""

    def of_spec(s: TensorSpec) -> Any:
        return np.zeros(
            [0 if n is None or axis == 0 else n for axis, n in enumerate(s.shape or ())], s.dtype
        )

    if all(s.shape is not None and s.dtype is not None for s in nest.flatten(spec)):
        return nest.map_structure(of_spec, spec)
    if like is None:
        raise ValueError(
            "a worker without data cannot find the shapes of batches: give from_generator() an "
            "output_signature, and give map() a function that accepts zeros"
        )
    return like


def _without_rows(array: Any) -> Any:
    """Return a new array of the same row shape and dtype, without rows."""
    return np.zeros((0, *array.shape[1:]) if array.ndim else (), array.dtype)


class DistributedIterator(NextElements):
    """One pass over a `DistributedDataset`; its elements are arguments of `Strategy.run`.

    `close`, or deleting the iterator, ends its thread.
    """

    def __init__(self, parts: _Parts, after_pass: Callable[[int, int], None]) -> None:
        self._parts = parts
        self._steps: Iterator[list[Any]] | None = parts.start()
        self._like: Any = None
        self._after_pass = after_pass
        self._counts = [0, 0]  # steps and rows of this worker

    def __iter__(self) -> DistributedIterator:
        return self

    @property
    def element_spec(self) -> Any:
        """The spec of the elements, as in the dataset."""
        return self._parts.element_spec

    def __next__(self) -> Any:
        """Return the next element.

        Raises
        ------
        StopIteration
            No replica of any worker has data, or one has none and incomplete steps are dropped.
        ValueError
            This is a replica function.
        """
        mode = current_mode()
        if mode is not None and mode.replica_context is not None and has_strategy():
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        if self._steps is None:
            raise StopIteration
        size = self._parts.extended.num_local_replicas
        try:
            parts = next(self._steps, [None] * size)
        except BaseException as error:
            self.close()
            # The other workers wait for this worker's count.
            self._parts.extended.workers.abort(f"its input failed: {type(error).__name__}: {error}")
            raise
        given = [part for part in parts if part is not None]
        have = len(given)
        if self._parts.fills_up:
            have = self._parts.extended.sum_over_workers(have)
        if have == 0 or (have < size and not self._parts.fills_up):
            self.close()
            self._after_pass(*self._counts)
            raise StopIteration
        return self._element(parts, given)

    def _element(self, parts: list[Any], given: list[Any]) -> Any:
        """Return an argument for `Strategy.run`, from mini-batches in replica order."""
        if self._parts.across_workers:
            self._counts[0] += 1
            self._counts[1] += sum(map(_rows, given))
        if self._like is None and given:
            self._like = nest.map_structure(_without_rows, given[0])
        if len(given) < len(parts):
            specs = self._parts.specs
            count = len(parts) // len(specs)
            for replica, part in enumerate(parts):
                if part is None:
                    empty = _empty(specs[replica // count], self._like)
                    parts[replica] = self._parts.place(replica, empty, Device.place)
        if len(parts) == 1 and not self._parts.across_workers:
            return _mapped(Tensor, parts)
        return _mapped(lambda *leaves: PerReplica(tuple(map(Tensor, leaves))), parts)

    def close(self) -> None:
        """End the pass."""
        self._steps = None


def _mapped(function: Callable[..., Any], parts: Sequence[Any]) -> Any:
    """Return ``nest.map_structure(function, *parts)``, fast for tuples of arrays."""
    first = parts[0]
    if first.__class__ is tuple and all([leaf.__class__ is np.ndarray for leaf in first]):
        return tuple([function(*leaves) for leaves in zip(*parts, strict=True)])
    return nest.map_structure(function, *parts)


def _rows(part: Any) -> int:
    return max(len(leaf) if leaf.ndim else 1 for leaf in nest.flatten(part))


class DistributedDataset:
    """A dataset whose elements have a component for each replica.

    `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function` return
    it. It has no transformations: transform the dataset before it is distributed.
    """

    def __init__(
        self,
        parts: _Parts,
        cardinality: Callable[[], int],
        description: Callable[[], str],
        after_pass: Callable[[int, int], None],
    ) -> None:
        self._parts = parts
        self._cardinality = cardinality
        self._description = description
        self._after_pass = after_pass

    @property
    def extended(self) -> StrategyExtended:
        """The `StrategyExtended` of the strategy that distributed the dataset."""
        return self._parts.extended

    def __iter__(self) -> DistributedIterator:
        self._parts.extended.begin_pass()
        return DistributedIterator(self._parts, self._after_pass)

    @property
    def element_spec(self) -> Any:
        """The spec of the elements, with `PerReplicaSpec` for several replicas."""
        return self._parts.element_spec

    @property
    def cardinality(self) -> int:
        """The number of steps; -1: infinite, -2: unknown."""
        return self._cardinality()

    def __len__(self) -> int:
        length = self._cardinality()
        if length < 0:
            raise TypeError("the dataset's length is infinite or unknown")
        return length

    def __bool__(self) -> bool:
        return True

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return ``reduce_func(state, element)`` of all elements, one after the other."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def describe_sharding(self) -> str:
        """Return a table of the rows that each replica of each worker reads."""
        return self._description()

    def __repr__(self) -> str:
        return f"<DistributedDataset of {self._cardinality()} elements of {self.element_spec}>"


def distribute_dataset(
    extended: StrategyExtended, dataset: Any, options: InputOptions | None
) -> Any:
    """Divide a dataset of global batches among the workers, and its batches among the replicas."""
    _check_dataset(dataset)
    if extended.is_default:
        return dataset
    check_options(options)
    if options and options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`."
        )
    workers, worker = extended.input_pipeline
    replicas = extended.num_replicas_in_sync
    share = share_of_worker(dataset, workers, worker, replicas)
    warning = empty_batches_warning(share, workers, worker, replicas)
    if warning:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return DistributedDataset(
        _Parts(extended, [share.dataset], 1 + steps_ahead(options), True, goes_to_devices(options)),
        lambda: share.cardinality,
        partial(describe, dataset, workers, replicas),
        _starvation_check(workers, worker, warned=bool(warning)),
    )


def _starvation_check(workers: int, worker: int, warned: bool) -> Callable[[int, int], None]:
    """Return a function that warns once, after a pass without rows for this worker."""

    def check(steps: int, rows: int) -> None:
        nonlocal warned
        if workers > 1 and steps and not rows and not warned:
            warned = True
            warnings.warn(
                f"worker {worker} of {workers} got only empty batches in {steps} step(s): use larger "
                "batches, or another auto_shard_policy",
                RuntimeWarning,
                stacklevel=3,
            )

    return check


def distribute_from_function(
    extended: StrategyExtended,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
) -> Any:
    """Distribute the datasets that ``dataset_fn`` returns, an element for each replica."""
    workers, worker = extended.input_pipeline
    replicas = extended.num_replicas_in_sync
    contexts = [InputContext(workers, worker, replicas)]
    if not extended.is_default:
        check_options(options)
        if options:
            local = extended.num_local_replicas
            contexts = _contexts(options, extended, contexts, local)
    datasets = [dataset_fn(context) for context in contexts]
    for dataset in datasets:
        _check_dataset(dataset)
    if extended.is_default:
        return datasets[0]
    per_step = extended.num_local_replicas // len(datasets)

    parts = _Parts(extended, datasets, steps_ahead(options), False, goes_to_devices(options))

    def cardinality() -> int:
        counts = [int(d.cardinality()) for d in datasets]
        if min(counts) < 0:
            return min(counts)
        # Without partial batches, the first replica without data ends the pass.
        return -(-max(counts) // per_step) if parts.fills_up else min(counts) // per_step

    def description() -> str:
        lines = [f"{c}: {per_step} element(s) a step" for c in contexts]
        return "\n".join(["datasets from a function, called with", *lines])

    return DistributedDataset(
        parts,
        cardinality,
        description,
        _starvation_check(workers, worker, warned=False),
    )


def _contexts(
    options: InputOptions,
    extended: StrategyExtended,
    for_worker: list[InputContext],
    replicas: int,
) -> list[InputContext]:
    """Return the arguments of the calls of ``dataset_fn``; raise an error for wrong options."""
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and not extended.input_per_replica:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function` of tf.distribute.MirroredStrategy"
        )
    if options.experimental_place_dataset_on_device:
        if not per_replica:
            raise ValueError(
                "When `experimental_place_dataset_on_device` is set for dataset placement, you must "
                "also specify `PER_REPLICA` for the replication mode"
            )
        if options.experimental_fetch_to_device:
            raise ValueError(
                "`experimental_place_dataset_on_device` can not be set to True when "
                "experimental_fetch_to_device is True and replication mode is set to `PER_REPLICA`"
            )
    if not per_replica:
        return for_worker
    return [InputContext(replicas, r, for_worker[0].num_replicas_in_sync) for r in range(replicas)]


def _check_dataset(dataset: Any) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"expected a pycollective.data.Dataset, got {type(dataset).__name__}; for arrays use "
            "Dataset.from_tensor_slices(arrays).batch(n)"
        )
