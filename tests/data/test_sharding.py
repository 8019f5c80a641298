"""The elements that each worker reads; TensorFlow 2.21 printed the expected values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataset import values

import pycollective as tf
from pycollective.data import Dataset, Options, TensorSpec, TextLineDataset
from pycollective.data.experimental import SHARD_HINT, AutoShardPolicy, assert_cardinality
from pycollective.data.sharding import (
    batch_size_of,
    batch_sizes_for_worker,
    describe,
    share_of_worker,
)


def under(dataset: Dataset, policy: str) -> Dataset:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    return dataset.with_options(options)


def shares(make: Callable[[], Dataset], workers: int, replicas: int) -> list[Any]:
    """Return every worker's mini-batches; each worker makes its own dataset, as processes do."""
    return [
        values(share_of_worker(make(), workers, w, workers * replicas).dataset)
        for w in range(workers)
    ]


@pytest.mark.parametrize(
    ("batch", "workers", "replicas", "expected"),
    [
        (7, 2, 2, [[2, 2, 2, 1], [2, 1, 2, 2]]),
        (8, 3, 2, [[2, 2, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 1, 1]]),
        (2, 2, 2, [[1, 1, 0, 0], [0, 0, 1, 1]]),
        (4, 1, 3, [[2, 1, 1]]),
    ],
)
def test_batch_sizes_for_worker_are_those_of_the_table(
    batch: int, workers: int, replicas: int, expected: list[list[int]]
) -> None:
    got = [batch_sizes_for_worker(batch, workers, replicas, w) for w in range(workers)]
    assert got == expected


# Policies


@pytest.mark.parametrize("policy", ["AUTO", "DATA"])
def test_data_deals_the_mini_batches_round_robin(policy: str) -> None:
    fifteen = shares(lambda: under(Dataset.range(15).batch(4), policy), 2, 2)
    assert fifteen == [
        [[0], [2], [4], [6], [8], [10], [12], [14]],
        [[1], [3], [5], [7], [9], [11], [13], []],
    ]
    assert shares(lambda: under(Dataset.range(10).batch(6), policy), 3, 1) == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], []],
    ]
    assert shares(lambda: under(Dataset.range(3).batch(1), policy), 2, 2) == [
        [[0], [], [1], [], [2], []],
        [[], [], [], [], [], []],
    ]


def test_off_gives_everything_to_everyone() -> None:
    got = shares(lambda: under(Dataset.range(15).batch(4), "OFF"), 2, 2)
    assert got == [[[i] for i in range(15)]] * 2
    assert shares(lambda: under(Dataset.range(3).batch(1), "OFF"), 2, 2) == [
        [[0], [], [], [], [1], [], [], [], [2], [], [], []],
        [[], [], [0], [], [], [], [1], [], [], [], [2], [], [], []],
    ]


def test_off_with_batches_of_unknown_size_cuts_each_by_itself() -> None:
    def generated() -> Dataset:
        return Dataset.from_generator(
            lambda: iter([np.arange(4), np.arange(2)]),
            output_signature=TensorSpec((None,), tf.int64),
        )

    assert shares(lambda: under(generated(), "OFF"), 2, 1) == [[[0, 1], [2, 3], [0], [1]]] * 2
    mapped = shares(lambda: under(Dataset.range(6).batch(4).map(lambda x: x * 2), "OFF"), 2, 1)
    assert mapped == [[[0, 2], [4, 6], [8], [10]]] * 2
    nested = shares(lambda: under(Dataset.range(12).batch(2).batch(2), "OFF"), 2, 1)
    assert nested == [[[[i, i + 1]] for i in range(0, 12, 2)]] * 2


def test_hint_shards_at_the_marked_place() -> None:
    def hinted() -> Dataset:
        return Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(2)

    assert shares(lambda: under(hinted(), "HINT"), 2, 1) == [
        [[0], [2], [4], [6]],
        [[1], [3], [5], [7]],
    ]
    without = shares(lambda: under(Dataset.range(8).batch(2), "HINT"), 2, 1)
    assert without == [[[i] for i in range(8)]] * 2
    with pytest.raises(tf.errors.FailedPreconditionError, match="AutoShardPolicy.HINT"):
        shares(hinted, 2, 1)
    assert shares(lambda: under(hinted(), "HINT"), 1, 2) == [[[i] for i in range(8)]]


@pytest.fixture
def folder(tmp_path: Any) -> str:
    for i in range(5):
        (tmp_path / f"f{i}.txt").write_text("".join(f"{i}{j}\n" for j in range(3)))
    return str(tmp_path)


def number(line: Any) -> np.ndarray:
    return np.asarray(int(line.numpy() or 0), np.int32)


def lines(folder: str, count: int, cycle: int = 1, shuffle: bool = False) -> Dataset:
    names = Dataset.list_files([f"{folder}/f{i}.txt" for i in range(count)], shuffle=shuffle)
    block = 2 if cycle > 1 else 1
    return names.interleave(TextLineDataset, cycle, block).map(number)


@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
def test_file_gives_each_worker_files_of_its_own(folder: str, policy: str) -> None:
    assert shares(lambda: under(lines(folder, 5, cycle=2).batch(4), policy), 2, 1) == [
        [[0, 1], [20, 21], [2, 22], [40, 41], [42]],
        [[10, 11], [30, 31], [12, 32]],
    ]
    assert shares(lambda: under(lines(folder, 5).batch(4), policy), 3, 1) == [
        [[0, 1], [2], [30], [31, 32]],
        [[10], [11], [12, 40], [41], [42]],
        [[20], [21, 22]],
    ]
    assert shares(lambda: under(lines(folder, 2).repeat(2).batch(4), policy), 2, 1) == [
        [[0, 1], [2, 0], [1, 2]],
        [[10, 11], [12, 10], [11, 12]],
    ]


def test_file_shards_each_of_several_joined_datasets(folder: str) -> None:
    def joined() -> Dataset:
        return lines(folder, 2).concatenate(lines(folder, 2))

    assert shares(lambda: under(joined().batch(4), "FILE"), 2, 1) == [
        [[0, 1], [2, 0], [1, 2]],
        [[10, 11], [12, 10], [11, 12]],
    ]

    def beside() -> Dataset:
        return Dataset.zip(lines(folder, 2), lines(folder, 2)).map(lambda a, b: a + b)

    assert shares(lambda: under(beside().batch(4), "FILE"), 2, 1) == [
        [[0, 2], [4]],
        [[20, 22], [24]],
    ]
    direct = shares(lambda: TextLineDataset([f"{folder}/f{i}.txt" for i in (0, 1)]).batch(2), 2, 1)
    assert direct == [[[b"00"], [b"01"], [b"02"]], [[b"10"], [b"11"], [b"12"]]]
    names = [f"{folder}/f{i}.txt" for i in range(3)]
    listed = Dataset.from_tensor_slices(names).flat_map(TextLineDataset).map(number)
    assert shares(lambda: listed.batch(2), 2, 1) == [
        [[0], [1], [2], [20], [21], [22]],
        [[10], [11], [12]],
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_shares_of_differently_shuffled_files_have_every_line_once(
    folder: str, workers: int
) -> None:
    def make() -> Dataset:
        return lines(folder, 5, cycle=2, shuffle=True).cache().shuffle(4).batch(6).prefetch(1)

    for _ in range(5):
        got = shares(make, workers, 1)
        assert sorted(n for share in got for batch in share for n in batch) == sorted(
            10 * i + j for i in range(5) for j in range(3)
        )


@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
@pytest.mark.parametrize("count", [1, 2])
def test_too_few_files_are_the_same_error_on_every_worker(
    folder: str, policy: str, count: int
) -> None:
    for worker in range(3):
        ds = under(lines(folder, count).batch(4), policy)
        share = share_of_worker(ds, 3, worker, 3)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=rf"Could not apply FILE based sharding: the dataset only has {count} file\(s\), which "
            "is not enough for the required 3 shards/workers.*DATA or OFF",
        ):
            values(share.dataset)


def test_file_without_files_raises_not_found_error() -> None:
    for worker in range(2):
        with pytest.raises(tf.errors.NotFoundError, match="Found an unshardable source dataset"):
            share_of_worker(under(Dataset.range(15).batch(4), "FILE"), 2, worker, 4)
    names = Dataset.from_tensor_slices(["a", "b"]).map(lambda name: 1.0)
    with pytest.raises(tf.errors.NotFoundError, match="AutoShardPolicy.DATA"):
        share_of_worker(under(names.batch(2), "FILE"), 2, 0, 2)

    class CustomDataset(Dataset):
        def _make_spec(self) -> Any:
            return TensorSpec((None,), tf.int32)

    with pytest.raises(
        tf.errors.NotFoundError,
        match="Did not find a shardable source, walked to a node which is not a dataset: .*Consider "
        "either turning off auto-sharding or switching the auto_shard_policy to DATA",
    ):
        share_of_worker(under(CustomDataset(), "FILE"), 2, 0, 2)
    assert share_of_worker(CustomDataset(), 2, 0, 2).policy is AutoShardPolicy.DATA
    # With one worker, the policy is not needed.
    alone = share_of_worker(under(Dataset.range(6).batch(4), "FILE"), 1, 0, 2)
    assert values(alone.dataset) == [[0, 1], [2, 3], [4, 5]]


def test_asserted_cardinalities_do_not_hold_for_a_share(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Dataset:
        return under(lines(folder, 5).apply(assert_cardinality(15)).batch(4), "FILE")

    with caplog.at_level(logging.WARNING, "pycollective"):
        got = shares(make, 2, 1)
    assert sum(len(batch) for share in got for batch in share) == 15
    assert "assert_cardinality(15) is left out" in caplog.text
    caplog.clear()
    share_of_worker(under(make(), "AUTO"), 1, 0, 2)
    assert not caplog.records


# The two rules, and their conditions


def test_policies_with_one_worker_cut_batches_for_its_replicas(folder: str) -> None:
    def cut(dataset: Dataset, replicas: int = 2) -> Any:
        return values(share_of_worker(dataset, 1, 0, replicas).dataset)

    six = Dataset.range(6).batch(4)
    for policy in ("AUTO", "DATA"):
        assert cut(under(six, policy)) == [[0, 1], [2, 3], [4], [5]]
    for policy in ("OFF", "FILE", "HINT"):
        assert cut(under(six, policy)) == [[0, 1], [2, 3], [4, 5]]
    assert cut(lines(folder, 2).batch(4)) == [[0, 1], [2, 10], [11, 12]]  # AUTO finds files
    ten = Dataset.range(10).batch(4)
    assert cut(under(ten, "OFF"), 3) == [[0, 1], [2], [3], [4, 5], [6], [7], [8, 9]]
    assert cut(ten, 3) == [[0, 1], [2, 3], [], [4, 5], [6, 7], [], [8], [9], []]
    assert cut(under(Dataset.range(3).batch(2).repeat(2), "OFF")) == [[0], [1], [2], [0], [1], [2]]
    # Each component is cut by itself, independent of the others' lengths.
    uneven = Dataset.from_tensors((np.arange(4), np.arange(3)))
    for policy in ("OFF", "AUTO"):
        assert cut(under(uneven, policy)) == [([0, 1], [0, 1]), ([2, 3], [2])]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: d.batch(2), 2),
        (lambda d: d.batch(2).filter(lambda x: True), 2),
        (lambda d: d.batch(2).map(lambda x: x[:2]), None),
        (lambda d: d.flat_map(lambda x: Dataset.range(4).batch(2)), None),
        (lambda d: Dataset.zip(d.batch(2), d.batch(2)), 2),
        (lambda d: Dataset.zip(d.batch(2), d.batch(3)), None),
        (lambda d: d.batch(2).concatenate(d.batch(3)), None),
        (lambda d: d.padded_batch(2), 2),
        (lambda d: Dataset.from_tensors(np.zeros((4, 2))), 4),
        (lambda d: Dataset.from_tensors((np.zeros((4, 2)), np.zeros(3))), None),
        (lambda d: d.batch(2, drop_remainder=True).map(lambda x: tf.concat([x, x], 0)), 4),
        (
            lambda d: (
                d.batch(2).cache().shuffle(2).repeat(2).prefetch(1).take(2).skip(1).shard(2, 0)
            ),
            2,
        ),
    ],
)
def test_batch_size_of_a_dataset_is_its_known_number_of_rows_or_none(
    make: Callable[[Dataset], Dataset], expected: int | None
) -> None:
    assert batch_size_of(make(Dataset.range(4))) == expected


def test_share_of_a_worker_has_spec_and_number_of_steps() -> None:
    def share(dataset: Dataset, workers: int = 1, replicas: int = 2) -> Any:
        return share_of_worker(dataset, workers, 0, workers * replicas)

    six = Dataset.range(6).batch(4)
    assert share(six).dataset.element_spec == TensorSpec((None,), np.int64)
    assert share(six).cardinality == share(under(six, "OFF")).cardinality == 2
    assert share(under(six.repeat(2), "OFF")).cardinality == -2
    assert share(under(six.repeat(), "OFF")).cardinality == -1
    assert share(under(six.cache().prefetch(1), "OFF")).cardinality == 2
    assert share(six, workers=2).cardinality == 2
    assert share(under(six, "OFF"), workers=2).cardinality == -2
    full = Dataset.range(8).batch(4, drop_remainder=True)
    for policy in ("AUTO", "OFF"):
        assert share(under(full, policy)).dataset.element_spec == TensorSpec((2,), np.int64)
        assert share(under(full, policy)).cardinality == 2
    thirds = Dataset.range(8).batch(3, drop_remainder=True)
    assert share(thirds).dataset.element_spec == TensorSpec((None,), np.int64)
    assert share(six, replicas=1).dataset is six


def test_cut_parts_share_memory_with_the_batch() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    for policy in ("AUTO", "OFF"):
        share = share_of_worker(under(Dataset.from_tensors(rows), policy), 1, 0, 3)
        assert all(np.shares_memory(part, rows) for part in share.dataset._iter())


def test_datasets_that_cannot_be_sharded_are_refused() -> None:
    batches = Dataset.range(6).batch(4)
    with pytest.raises(
        ValueError,
        match=r"expects every worker to have the same number of replicas. However, encountered "
        r"`num_replicas_in_sync` \(3\) that cannot be divided by `num_workers` \(2\)",
    ):
        share_of_worker(batches, 2, 0, 3)
    with pytest.raises(
        ValueError,
        match=r"element\['b'\].*not batched\? Call the `batch` method.*across 2 replicas",
    ):
        share_of_worker(Dataset.from_tensors({"a": np.zeros(2), "b": 1.0}), 1, 0, 2)
    unknown = Dataset.from_generator(lambda: iter([1.0, 2.0]))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="Cannot rebatch dataset: All components must have at least one dimension. Perhaps your "
        "input dataset is not batched",
    ):
        values(share_of_worker(unknown, 1, 0, 2).dataset)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 30),
    batch=st.integers(1, 9),
    workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
    drop=st.booleans(),
)
def test_data_shares_hold_every_row_once(
    rows: int, batch: int, workers: int, replicas: int, drop: bool
) -> None:
    """One step of all workers has the rows of one global batch."""
    ds = Dataset.range(rows).batch(batch, drop)
    got = shares(lambda: ds, workers, replicas)
    assert len({len(share) for share in got}) == 1
    if workers * replicas == 1:
        assert got[0] == values(ds)
        return
    steps = [
        sorted(
            n for share in got for part in share[k * replicas : (k + 1) * replicas] for n in part
        )
        for k in range(len(got[0]) // replicas)
    ]
    assert steps == values(ds)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 30),
    batch=st.integers(1, 9),
    workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
)
def test_the_stream_rule_keeps_the_order(
    rows: int, batch: int, workers: int, replicas: int
) -> None:
    for worker in range(workers):
        ds = under(Dataset.range(rows).batch(batch), "OFF")
        share = share_of_worker(ds, workers, worker, workers * replicas)
        parts = values(share.dataset)
        assert [n for part in parts for n in part] == list(range(rows))
        for part, size in zip(parts, (share.sizes or []) * (rows + 1), strict=False):
            assert len(part) == size or part is [p for p in parts if p][-1]


# Description


def test_describe_lists_the_rows_of_each_replica(folder: str) -> None:
    table = describe(Dataset.range(15).batch(4), 2, 4)
    assert table.splitlines() == [
        "auto_shard_policy AUTO, here DATA; global batches of 4 rows, each cut by itself",
        "worker  replica  reads",
        "     0        0  rows 0 to 0 of each batch",
        "     0        1  rows 2 to 2 of each batch",
        "     1        2  rows 1 to 1 of each batch",
        "     1        3  rows 3 to 3 of each batch",
    ]
    assert describe(lines(folder, 5).batch(3), 2, 4).splitlines() == [
        "auto_shard_policy AUTO, here FILE; global batches of 3 rows, cut as one stream of rows",
        "worker  replica  reads",
        "     0        0  1 row(s) a step of 3 file(s): f0.txt, f2.txt, f4.txt",
        "     0        1  1, 0 row(s) a step in turn of 3 file(s): f0.txt, f2.txt, f4.txt",
        "     1        2  1 row(s) a step of 2 file(s): f1.txt, f3.txt",
        "     1        3  0, 1 row(s) a step in turn of 2 file(s): f1.txt, f3.txt",
    ]
    assert "no rows of each batch" in describe(Dataset.range(4).batch(1), 1, 2)
    alone = describe(under(Dataset.range(4).batch(2), "OFF"), 1, 1)
    assert "auto_shard_policy OFF; global batches of 2 rows, not cut" in alone
    assert "     0        0  all rows of each batch" in alone
    unknown = Dataset.from_generator(lambda: [np.zeros(2)])
    assert "global batches of unknown size" in describe(unknown, 1, 2)
    assert "     0        1  part(s) 1 of 2 of each batch" in describe(unknown, 1, 2)
    off = describe(under(unknown, "OFF"), 2, 4)
    assert "     1        3  part(s) 1, 3 of 4 of each batch" in off
    hint = under(Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(2), "HINT")
    assert "1 row(s) a step of all batches of shard 1 of 2" in describe(hint, 2, 2)


def test_batches_without_rows_give_each_replica_an_empty_part() -> None:
    nothing = Dataset.from_tensors(np.zeros((0, 2)))
    for policy in ("AUTO", "OFF"):
        assert values(share_of_worker(under(nothing, policy), 1, 0, 2).dataset) == [[], []]


def test_filled_hints_keep_the_elements_of_a_cache():
    read = []

    def generate():
        read.append(1)
        yield from range(4)

    cached = Dataset.from_generator(generate, output_signature=TensorSpec((), "int64")).cache()
    list(cached)
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.HINT
    hinted = cached.shard(SHARD_HINT, SHARD_HINT).batch(2).with_options(options)
    assert [x.tolist() for x in share_of_worker(hinted, 2, 0, 2).dataset.as_numpy_iterator()]
    assert read == [1]


def test_cache_file_of_one_worker_is_used_without_a_warning(tmp_path, caplog):
    (tmp_path / "lines").write_text("a\nb\n")
    lines = TextLineDataset(str(tmp_path / "lines")).cache(str(tmp_path / "c")).batch(2)
    with caplog.at_level(logging.WARNING, "pycollective"):
        assert len(list(share_of_worker(lines, 1, 0, 2).dataset)) == 2
    assert not caplog.records
    assert list(tmp_path.glob("c*"))
