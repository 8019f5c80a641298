"""Sharding: the part of a dataset that each worker of a strategy reads.

There are ``num_workers`` input pipelines, each of which feeds the same number of replicas. A *global
batch* is an element of the user's dataset: the rows of one step of all replicas. A *mini-batch* is one
replica's part of a global batch.

There are two rules for the cut. For N replicas, the batch rule cuts each global batch of b rows
into N mini-batches of ceil(b/N) rows, the last ones shorter or empty. The stream rule takes the
rows of all batches one after the other, in the sizes of `batch_sizes_for_worker`. The docstring of
`share_of_worker` says when each rule applies.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pycollective import nest
from pycollective.data.batching import Rebatch, RebatchByBatch, Unbatch
from pycollective.data.cache import Cache, FileCache
from pycollective.data.dataset import Dataset
from pycollective.data.files import TextLineDataset
from pycollective.data.functions import Interleave
from pycollective.data.options import AutoShardPolicy
from pycollective.data.ordering import Shard, Shuffle
from pycollective.data.rows import Rows
from pycollective.data.sources import Generated, SingleElement, TensorSlices
from pycollective.data.spec import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    TensorSpec,
    component_names,
)
from pycollective.data.transformations import AssertCardinality, Prefetch, WithOptions
from pycollective.dtypes import string
from pycollective.errors import InvalidArgumentError, NotFoundError

_log = logging.getLogger("pycollective")

_ADVICE = (
    "Consider either turning off auto-sharding or switching the auto_shard_policy to DATA to shard this "
    "dataset. You can do this by creating a new `tf.data.Options()` object then setting "
    "`options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA` before applying the "
    "options object to the dataset via `dataset.with_options(options)`."
)


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> list[int]:
    """Return the sizes of a worker's mini-batches, which it uses in turn.

    All workers' sizes of one step add up to the global batch. The workers take turns in getting the rows
    that remain after the division.
    """
    replicas = num_workers * num_replicas_per_worker
    least, extra = divmod(global_batch_size, replicas)
    sizes = [least + 1] * extra + [least] * (replicas - extra)
    first = worker_index * num_replicas_per_worker
    return sizes[first:] + sizes[:first]


def rows_of_batches(dataset: Dataset) -> int | None:
    """Return the number of rows of each element if `Dataset.batch` made the elements, else None."""
    return dataset._batch_size()


def batch_size_of(dataset: Dataset) -> int | None:
    """Return the number of rows of a dataset's elements, or None if it is not known in advance."""
    lengths = [
        s.shape[0] if s.shape is not None and len(s.shape) else None
        for s in nest.flatten(dataset.element_spec)
    ]
    if None in lengths:
        return dataset._batch_size()
    return lengths[0] if len(set(lengths)) == 1 else None


class ShardOfFiles(Shard):
    """A worker's files; if there are too few, every worker raises the same error."""

    def _rows(self) -> Rows | None:
        return None  # so that all elements come from _iter

    def _iter(self) -> Iterator[Any]:
        names = self._source._iter()
        first = list(itertools.islice(names, self._step))
        if len(first) < self._step:
            raise InvalidArgumentError(
                f"Could not apply FILE based sharding: the dataset only has {len(first)} file(s), which "
                f"is not enough for the required {self._step} shards/workers. If you are using datasets "
                "with distribution strategy, consider setting the auto sharding policy to either DATA "
                "or OFF using the `experimental_distribute.auto_shard_policy` option of "
                "`tf.data.Options()`."
            )
        return itertools.islice(itertools.chain(first, names), self._first, None, self._step)


def shard_by_file(dataset: Dataset, num_workers: int, worker_index: int) -> Dataset:
    """Return the dataset limited to a worker's files; raise NotFoundError if it reads no files.

    Files are names that go into `TextLineDataset`, or strings that go into the function of
    `Dataset.interleave` or `Dataset.flat_map`. A shuffle of the names is moved after the selection,
    so that workers need not agree on the order.
    """
    if isinstance(dataset, AssertCardinality):
        if num_workers > 1:
            _log.warning(
                "assert_cardinality(%d) is left out: the files are shared out among %d workers",
                dataset._known_length(),
                num_workers,
            )
        return shard_by_file(dataset._source, num_workers, worker_index)
    if num_workers == 1 and isinstance(dataset, FileCache):  # `_shared` only asks for files
        shard_by_file(dataset._source, num_workers, worker_index)
        return dataset
    inputs = dataset._inputs()
    if _reads_files(dataset):
        shuffles: list[Shuffle] = []
        names = _without_shuffles(inputs[0], shuffles)
        files: Dataset = ShardOfFiles(names, num_workers, worker_index)
        if shuffles:
            files = shuffles[0]._with_inputs([files])
        return dataset._with_inputs([files])
    if isinstance(dataset, (TensorSlices, SingleElement, Generated)):
        raise NotFoundError(f"Found an unshardable source dataset: {dataset!r}. {_ADVICE}")
    if not inputs:
        raise NotFoundError(
            "Did not find a shardable source, walked to a node which is not a dataset: "
            f"{dataset!r}. {_ADVICE}"
        )
    return dataset._with_inputs([shard_by_file(i, num_workers, worker_index) for i in inputs])


def _reads_files(dataset: Dataset) -> bool:
    if isinstance(dataset, TextLineDataset):
        return True
    text = TensorSpec((), string)
    return isinstance(dataset, Interleave) and dataset._inputs()[0].element_spec == text


def _without_shuffles(dataset: Dataset, found: list[Shuffle]) -> Dataset:
    if isinstance(dataset, Shuffle):
        found.append(dataset)
        return _without_shuffles(dataset._source, found)
    inputs = dataset._inputs()
    return (
        dataset._with_inputs([_without_shuffles(i, found) for i in inputs]) if inputs else dataset
    )


def fill_in_hints(dataset: Dataset, num_workers: int, worker_index: int) -> Dataset:
    """Return the dataset with the values of every ``shard(SHARD_HINT, SHARD_HINT)`` filled in."""
    before = dataset._inputs()
    inputs = [fill_in_hints(i, num_workers, worker_index) for i in before]
    if isinstance(dataset, Shard) and dataset._is_hint:
        return Shard(inputs[0], num_workers, worker_index)
    changed = any(new is not old for new, old in zip(inputs, before, strict=True))
    return dataset._with_inputs(inputs) if changed else dataset  # a cache keeps its elements


@dataclass(frozen=True)
class Share:
    """The part of a dataset that one worker reads.

    The dataset yields the worker's mini-batches, one for each of its replicas and steps. The policy is
    never AUTO. Under the stream rule, ``sizes`` are the rows of the mini-batches, used in turn; else
    None. The batch size is the number of rows of a global batch, if known, and the cardinality the
    number of steps.
    """

    dataset: Dataset
    policy: AutoShardPolicy
    sizes: list[int] | None
    batch_size: int | None
    cardinality: int


def share_of_worker(
    dataset: Dataset, num_workers: int, worker_index: int, num_replicas_in_sync: int
) -> Share:
    """Return the part of a dataset of global batches that worker ``worker_index`` (w) of W reads.

    The dataset's `AutoShardPolicy` determines the part, as in TensorFlow. OFF: everything. FILE: the
    worker's own files. HINT: the part that ``shard(SHARD_HINT, SHARD_HINT)`` selects. DATA: the
    mini-batches with the numbers w, w + W, w + 2 W and so on. AUTO: FILE if the dataset reads files,
    else DATA.

    Rows are cut by batch under DATA (also with one worker) and if the batch size is not known in
    advance, else as a stream.
    """
    if num_replicas_in_sync % num_workers:
        raise ValueError(
            "tf.distribute expects every worker to have the same number of replicas. However, "
            f"encountered `num_replicas_in_sync` ({num_replicas_in_sync}) that cannot be divided by "
            f"`num_workers` ({num_workers})"
        )
    if num_replicas_in_sync > 1:
        _check_batched(dataset.element_spec, num_replicas_in_sync)
    policy, part = _shared(dataset, num_workers, worker_index)
    size = batch_size_of(dataset)
    steps = dataset._known_length()
    sizes = None
    if num_replicas_in_sync > 1:
        per_worker = num_replicas_in_sync // num_workers
        if policy is AutoShardPolicy.DATA or not size:
            part = RebatchByBatch(part, num_replicas_in_sync)
        else:
            sizes = batch_sizes_for_worker(size, num_workers, per_worker, worker_index)
            part = Rebatch(part, sizes, False)
        if policy is AutoShardPolicy.DATA and num_workers > 1:
            part = Shard(part, num_workers, worker_index)
        elif steps != INFINITE_CARDINALITY and (sizes is not None or num_workers > 1):
            # The number of steps depends on the number of rows, which is unknown for files.
            rows = _total_rows(dataset) if num_workers == 1 else UNKNOWN_CARDINALITY
            steps = rows if rows < 0 else -(-rows // (size or 1))
    return Share(part, policy, sizes, size, steps)


def _shared(dataset: Dataset, num_workers: int, worker: int) -> tuple[AutoShardPolicy, Dataset]:
    """Return the policy that applies, and the part of the dataset that it selects before the cut."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy is AutoShardPolicy.HINT:
        return policy, fill_in_hints(dataset, num_workers, worker)
    if policy is AutoShardPolicy.AUTO or (policy is AutoShardPolicy.FILE and num_workers > 1):
        try:
            part = shard_by_file(dataset, num_workers, worker)
        except NotFoundError:
            if policy is AutoShardPolicy.FILE:
                raise
            return AutoShardPolicy.DATA, dataset
        return AutoShardPolicy.FILE, part if num_workers > 1 else dataset
    return policy, dataset


def _total_rows(batches: Dataset) -> int:
    """Return the number of rows of all batches, -1 if infinite, -2 if unknown."""
    while isinstance(batches, (Cache, FileCache, Prefetch, Shuffle, WithOptions)):
        batches = batches._source
    return Unbatch(batches)._known_length()


def _check_batched(spec: Any, replicas: int) -> None:
    for name, leaf in zip(nest.flatten(component_names(spec)), nest.flatten(spec), strict=True):
        if leaf.shape == ():
            raise ValueError(
                f"Unable to split a dataset whose elements are scalars: {name} is one. Perhaps your "
                "input dataset is not batched? Call the `batch` method on the input Dataset in order to "
                f"be able to split your input across {replicas} replicas."
            )


def empty_batches_warning(share: Share, num_workers: int, worker_index: int, replicas: int) -> str:
    """Return a text about a worker that gets empty batches only, or an empty string."""
    size = share.batch_size
    if share.policy is not AutoShardPolicy.DATA or num_workers == 1 or not size:
        return ""
    rows = -(-size // replicas)
    parts = -(-size // rows)
    if worker_index < parts:
        return ""
    return (
        f"worker {worker_index} of {num_workers} gets empty batches only. Each global batch of "
        f"{size} rows is cut into mini-batches of {rows} row(s), and these {parts} go to workers "
        f"0 to {parts - 1}. Use batches of {replicas} rows or a multiple of it."
    )


def describe(dataset: Dataset, num_workers: int, num_replicas_in_sync: int) -> str:
    """Return a table of the rows and files that each replica reads."""
    shares = [
        share_of_worker(dataset, num_workers, w, num_replicas_in_sync) for w in range(num_workers)
    ]
    asked = dataset.options().experimental_distribute.auto_shard_policy
    first = shares[0]
    policy = asked.name if asked is first.policy else f"{asked.name}, here {first.policy.name}"
    size = "of unknown size" if first.batch_size is None else f"of {first.batch_size} rows"
    by = "not cut" if num_replicas_in_sync == 1 else "each cut by itself"
    lines = [
        f"auto_shard_policy {policy}; global batches {size}, "
        + ("cut as one stream of rows" if first.sizes else by)
    ]
    table = [("worker", "replica", "reads")]
    per_worker = num_replicas_in_sync // num_workers
    for worker, share in enumerate(shares):
        source = _source(share, num_workers, worker)
        for replica in range(per_worker):
            number = worker * per_worker + replica
            reads = _rows_read(share, num_workers, worker, replica, num_replicas_in_sync)
            table.append((str(worker), str(number), f"{reads} of {source}"))
    return "\n".join(lines + [f"{a:>6}  {b:>7}  {c}" for a, b, c in table])


def _source(share: Share, num_workers: int, worker: int) -> str:
    batches = "all batches" if share.sizes else "each batch"
    if share.policy is AutoShardPolicy.HINT:
        return f"{batches} of shard {worker} of {num_workers}"
    lists = _files_of(share.dataset) if share.policy is AutoShardPolicy.FILE else []
    if not lists:
        return batches
    names = [n for files in lists for n in files]
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} file(s): {shown}"


def _files_of(dataset: Dataset) -> list[list[str]]:
    """Return the names of a worker's files, one list for each place where files are shared."""
    if isinstance(dataset, ShardOfFiles):
        return [[os.path.basename(os.fsdecode(name.item())) for name in dataset._iter()]]
    return [files for i in dataset._inputs() for files in _files_of(i)]


def _rows_read(share: Share, num_workers: int, worker: int, replica: int, replicas: int) -> str:
    if replicas == 1:
        return "all rows"
    per_worker = replicas // num_workers
    if share.sizes:
        turns = share.sizes[replica::per_worker]
        if len(set(turns)) == 1:
            return f"{turns[0]} row(s) a step"
        return f"{', '.join(map(str, turns))} row(s) a step in turn"
    parts = range(replica, replicas, per_worker)
    if share.policy is AutoShardPolicy.DATA:
        parts = range(worker + num_workers * replica, replicas, replicas)
    if len(parts) > 1 or not share.batch_size:
        return f"part(s) {', '.join(map(str, parts))} of {replicas}"
    size = -(-share.batch_size // replicas)
    begin, end = parts[0] * size, min((parts[0] + 1) * size, share.batch_size)
    return f"rows {begin} to {end - 1}" if begin < end else "no rows"
