"""Interleaving, padding, rebatching, files and options, compared with ``tf.data``.

TensorFlow 2.21 printed the expected values.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import leftovers
import numpy as np
import pytest
from leftovers import assert_no_threads, threads
from test_dataset import values

import pycollective as tf
from pycollective.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    Options,
    TensorSpec,
    TextLineDataset,
)
from pycollective.data.experimental import (
    SHARD_HINT,
    AutoShardPolicy,
    DistributeOptions,
    Optional,
    assert_cardinality,
    get_next_as_optional,
)
from pycollective.tensor import Tensor


def numbers(start: Any, count: int) -> Dataset:
    return Dataset.range(int(start) * 10, int(start) * 10 + count)


def ragged(count: int = 3) -> Iterator[list[int]]:
    for n in range(1, count + 1):
        yield list(range(1, n + 1))


def of_ragged() -> Dataset:
    return Dataset.from_generator(ragged, output_signature=TensorSpec((None,), tf.int32))


# Interleave


@pytest.mark.parametrize("calls", [None, 2, tf.data.AUTOTUNE])
def test_interleave_takes_turns(calls: int | None) -> None:
    six = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6),
        cycle_length=2,
        block_length=4,
        num_parallel_calls=calls,
    )
    expected = [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4, 5, 5, 5, 5]
    assert values(six) == [*expected, 5, 5]
    three = Dataset.range(3).interleave(lambda x: numbers(x, int(x) + 1), 3, 1, calls)
    assert values(three) == [0, 10, 20, 11, 21, 22]
    refilled = Dataset.range(4).interleave(lambda x: numbers(x, int(x) + 1), 2, 1, calls)
    assert values(refilled) == [0, 10, 11, 20, 21, 30, 22, 31, 32, 33]
    lengths = [2, 8, 1]
    short = Dataset.range(3).interleave(lambda x: numbers(x, lengths[int(x)]), 2, 4, calls)
    assert values(short) == [0, 1, 10, 11, 12, 13, 20, 14, 15, 16, 17]
    assert refilled.cardinality() == UNKNOWN_CARDINALITY
    assert refilled.element_spec == TensorSpec((), np.int64)
    assert_no_threads()


def test_flat_map_joins_datasets_and_takes_functions_of_tuples() -> None:
    assert values(Dataset.range(3).flat_map(lambda x: Dataset.range(int(x)))) == [0, 0, 1]
    pairs = Dataset.zip(Dataset.range(2), Dataset.range(5, 7))
    assert values(pairs.flat_map(lambda a, b: Dataset.from_tensors((b, a)))) == [(5, 0), (6, 1)]


def test_interleave_opens_no_more_than_it_needs() -> None:
    opened = []

    def make(x: Any) -> Dataset:
        opened.append(int(x))
        return numbers(x, 2)

    iterator = Dataset.range(100).interleave(make, cycle_length=2)._iter()
    assert [next(iterator).item() for _ in range(3)] == [0, 10, 1]
    assert opened == [0, 1]


def test_interleave_reads_ahead_in_threads_that_end() -> None:
    others = threading.Barrier(2, timeout=20)

    def endless(x: Any) -> Dataset:
        def read() -> Iterator[int]:
            yield int(x)
            others.wait()  # breaks unless both read their second elements at the same time
            while True:
                yield int(x)

        return Dataset.from_generator(read, output_signature=TensorSpec((), tf.int32))

    assert_no_threads()
    pipeline = Dataset.range(2).interleave(endless, 2, num_parallel_calls=2)
    iterator = iter(pipeline)
    assert [int(next(iterator)) for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    assert threads() == ["pycollective-prefetch"] * 2
    del iterator
    assert_no_threads()


def test_error_in_interleave_comes_after_earlier_elements_and_ends_threads() -> None:
    def broken(x: Any) -> Dataset:
        def read() -> Iterator[int]:
            yield 7
            raise OSError("the disk is gone")

        return Dataset.from_generator(read)

    for calls in (None, 2):
        got = []
        with pytest.raises(OSError, match="the disk is gone"):
            for x in Dataset.range(3).interleave(broken, 2, num_parallel_calls=calls):
                got.append(int(x))
        assert got == [7, 7]
    assert_no_threads()
    with pytest.raises(
        TypeError, match="must return a `Dataset` object, <lambda> returned a Tensor"
    ):
        list(Dataset.range(3).flat_map(lambda x: x))
    for wrong in (
        {"cycle_length": 0},
        {"block_length": 0},
        {"num_parallel_calls": 0},
        {"map_func": 3},
    ):
        with pytest.raises((ValueError, TypeError), match=r"must be|needs a function"):
            Dataset.range(3).interleave(**{"map_func": lambda x: Dataset.range(2), **wrong})


# Padded batches


def test_padded_batch_pads_to_the_longest_or_a_shape() -> None:
    ds = of_ragged()
    assert values(ds.padded_batch(2)) == [[[1, 0], [1, 2]], [[1, 2, 3]]]
    wide = ds.padded_batch(2, padded_shapes=[4], padding_values=-1)
    assert values(wide) == [[[1, -1, -1, -1], [1, 2, -1, -1]], [[1, 2, 3, -1]]]
    dropped = ds.padded_batch(2, drop_remainder=True)
    assert values(dropped) == [[[1, 0], [1, 2]]]
    assert dropped.element_spec == TensorSpec((2, None), np.int32)
    assert ds.padded_batch(2).element_spec == TensorSpec((None, None), np.int32)
    assert wide.element_spec == TensorSpec((None, 4), np.int32)
    assert ds.padded_batch(2, padded_shapes=(None,)).element_spec.shape == (None, None)
    assert Dataset.range(5).padded_batch(2).cardinality() == 3
    assert Dataset.range(5).padded_batch(2, drop_remainder=True).cardinality() == 2
    assert values(Dataset.range(3).padded_batch(2)) == [[0, 1], [2]]


def test_padded_batch_of_nests_pads_each_component() -> None:
    pairs = Dataset.zip(of_ragged(), Dataset.range(3))
    padded = pairs.padded_batch(2, padded_shapes=([3], []), padding_values=(-1, None))
    assert values(padded) == [([[1, -1, -1], [1, 2, -1]], [0, 1]), ([[1, 2, 3]], [2])]
    named = pairs.map(lambda a, b: {"a": a, "b": b})
    assert values(named.padded_batch(3, {"b": [], "a": [None]}))[0]["a"] == [
        [1, 0, 0],
        [1, 2, 0],
        [1, 2, 3],
    ]
    unknown = Dataset.from_generator(ragged)
    assert values(unknown.padded_batch(2)) == [[[1, 0], [1, 2]], [[1, 2, 3]]]
    two_axes = Dataset.from_tensors(np.ones((1, 2))).concatenate(
        Dataset.from_tensors(np.ones((2, 1)))
    )
    assert values(two_axes.padded_batch(2)) == [[[[1, 1], [0, 0]], [[1, 0], [1, 0]]]]


def test_padded_batch_wrong_shapes_or_values_raise() -> None:
    ds = of_ragged()
    with pytest.raises(
        tf.errors.DataLossError, match="Attempted to pad to a smaller size than the input element"
    ):
        list(ds.padded_batch(2, padded_shapes=[1]))
    with pytest.raises(
        ValueError, match=r"The padded shape \(1, 2\) is not compatible with the shape"
    ):
        ds.padded_batch(2, padded_shapes=[1, 2])
    with pytest.raises(
        TypeError, match="Invalid `padding_values`. `padding_values` values type float"
    ):
        ds.padded_batch(2, padding_values=1.5)
    pairs = Dataset.zip(ds, Dataset.range(3))
    with pytest.raises(ValueError, match="does not have the structure of the elements"):
        pairs.padded_batch(2, padded_shapes=([3],))
    mixed = Dataset.from_generator(lambda: [1, 2.5])
    with pytest.raises(TypeError, match="int32 and float32"):
        list(mixed.padded_batch(2))


# Rebatching


def test_rebatch_cuts_rows_into_the_given_sizes() -> None:
    threes = Dataset.range(8).batch(3)
    assert values(threes.rebatch(2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert values(threes.rebatch([2, 1])) == [[0, 1], [2], [3, 4], [5], [6, 7]]
    assert values(threes.rebatch([2, 0]))[:4] == [[0, 1], [], [2, 3], []]
    assert values(Dataset.range(7).batch(3).rebatch(2, drop_remainder=True)) == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert values(Dataset.range(7).batch(2).rebatch(5)) == [[0, 1, 2, 3, 4], [5, 6]]
    assert threes.rebatch(2).element_spec == TensorSpec((None,), np.int64)
    assert threes.rebatch(2, drop_remainder=True).element_spec == TensorSpec((2,), np.int64)
    full = Dataset.range(8).batch(4, drop_remainder=True)
    assert full.rebatch(2).element_spec == TensorSpec((2,), np.int64)
    assert full.rebatch(3).element_spec == TensorSpec((None,), np.int64)
    assert threes.rebatch(2).cardinality() == UNKNOWN_CARDINALITY
    assert values(Dataset.range(3).batch(2).rebatch([0, 0, 1, 1])) == [
        [],
        [],
        [0],
        [1],
        [],
        [],
        [2],
    ]
    for wrong in (0, -1, [0, 0], [1, -1], []):
        with pytest.raises(ValueError, match="batch_size must be"):
            threes.rebatch(wrong)
    with pytest.raises(ValueError, match="Expected dataset with rank of >= 1"):
        Dataset.range(3).rebatch(2)


def test_rebatch_shares_memory_where_a_batch_is_not_crossed() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    whole = Dataset.from_tensors(rows)
    for part in whole.rebatch(2)._iter():
        assert np.shares_memory(part, rows)
    assert all(np.shares_memory(part, rows) for part in whole.repeat(2).rebatch(3)._iter())
    crossing = list(whole.repeat(2).rebatch(4)._iter())
    assert [np.shares_memory(part, rows) for part in crossing] == [True, False, True]


def test_rebatch_of_components_that_do_not_match_raises() -> None:
    uneven = Dataset.from_generator(lambda: iter([{"x": np.zeros(2), "y": np.zeros(3)}]))
    with pytest.raises(ValueError, match=r"element\['x'\] has 2, element\['y'\] has 3"):
        list(uneven.rebatch(1))
    scalar = Dataset.from_generator(lambda: iter([(np.zeros(2), 1.0)]))
    with pytest.raises(ValueError, match=r"not batched\? Component element\[1\] is scalar"):
        list(scalar.rebatch(1))
    other = Dataset.from_generator(lambda: iter([np.zeros((1, 2)), np.zeros((1, 3))]))
    with pytest.raises(ValueError, match="cannot join rows of different kinds"):
        list(other.rebatch(2))
    kinds = Dataset.from_generator(lambda: iter([np.zeros(1), np.zeros(1, np.int32)]))
    with pytest.raises(ValueError, match="cannot join rows of different kinds.*float64.*int32"):
        list(kinds.rebatch(2))


def test_lengths_that_depend_on_values_are_unknown() -> None:
    ds = Dataset.range(1, 5).map(lambda x: tf.fill([x], x))
    assert ds.element_spec == TensorSpec((None,), np.int64)
    assert ds.padded_batch(2).element_spec == TensorSpec((None, None), np.int64)
    rows = ds.unbatch()
    assert values(rows.take(3)) == [1, 2, 2]
    assert values(rows.take(20)) == values(rows) == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert rows.cardinality() == UNKNOWN_CARDINALITY
    assert rows.repeat().cardinality() == INFINITE_CARDINALITY
    assert len(values(rows.repeat(2).take(12))) == 12
    more = Dataset.range(3).map(lambda x: tf.range(x + 1)).unbatch()
    assert values(more.take(4)) == [0, 0, 1, 0]
    assert more.cardinality() == UNKNOWN_CARDINALITY
    flat = Dataset.range(3).flat_map(lambda x: Dataset.from_tensors(tf.fill([x], x)))
    assert flat.element_spec == TensorSpec((None,), np.int64)
    same = Dataset.range(3).map(lambda x: tf.fill([2], x))
    assert same.element_spec == TensorSpec((2,), np.int64)
    assert same.unbatch().cardinality() == 6


def test_take_ends_at_its_count_if_the_source_has_more_than_it_says() -> None:
    ds = assert_cardinality(2)(Dataset.range(2)).map(lambda x: x)
    assert values(ds.take(2)) == [0, 1]
    table = np.arange(4)[None]
    one_row = Dataset.range(1).map(lambda x: table[int(x)])  # fails for 1
    assert one_row.element_spec == TensorSpec((4,), np.int64)


def test_unbatch_and_batch_slice_arrays_and_keep_cardinality() -> None:
    """Rows in memory are used directly; other batches are sliced, not split into rows."""
    ds = Dataset.from_tensor_slices(np.arange(20)).batch(6).unbatch()
    assert ds._rows() is not None
    assert values(ds.batch(8)) == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    dropped = Dataset.range(20).batch(6, drop_remainder=True).unbatch()
    assert values(dropped) == list(range(18))
    assert values(dropped.batch(20)) == [list(range(18))]
    assert dropped.cardinality() == 18
    assert Dataset.range(20).batch(6).unbatch().cardinality() == 20
    for times, rows in ((0, 0), (1, 4), (3, 12), (-1, INFINITE_CARDINALITY)):
        batches = Dataset.from_tensors(np.zeros((4, 2))).repeat(times)
        assert batches.unbatch().cardinality() == rows
    assert Dataset.range(4).batch(4, drop_remainder=True).unbatch().cardinality() == 4
    whole = np.arange(12)
    mapped = Dataset.from_tensors(whole).unbatch().batch(4)
    assert all(np.shares_memory(batch, whole) for batch in mapped._iter())
    assert values(mapped) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_batch_of_ragged_elements_error_names_the_component() -> None:
    pairs = Dataset.zip(Dataset.range(3), of_ragged())
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"Cannot batch tensors with different shapes in component element\[1\]. First element "
        r"had shape \[1\] and element 1 had shape \[2\]",
    ):
        list(pairs.batch(2))


# Generators


def test_from_generator_takes_output_types_and_shapes() -> None:
    def pairs() -> Iterator[tuple[int, list[float]]]:
        yield 1, [2.0, 3.0]

    ds = Dataset.from_generator(pairs, (tf.int32, tf.float32), ((), (2,)))
    assert ds.element_spec == (TensorSpec((), tf.int32), TensorSpec((2,), tf.float32))
    ds = Dataset.from_generator(pairs, (tf.int64, tf.float32))
    assert ds.element_spec == (TensorSpec(None, tf.int64), TensorSpec(None, tf.float32))
    assert next(ds._iter())[0].dtype == np.int64
    named = Dataset.from_generator(
        lambda: [{"a": 1}], output_types={"a": tf.int32}, output_shapes={"a": []}
    )
    assert named.element_spec == {"a": TensorSpec((), tf.int32)}
    assert values(Dataset.from_generator(ragged, tf.int32, args=(2,))) == [[1], [1, 2]]
    assert values(Dataset.from_generator(lambda n: range(n), tf.int32, args=(tf.constant(2),))) == [
        0,
        1,
    ]


def test_from_generator_wrong_signature_raises() -> None:
    with pytest.raises(TypeError, match="The `output_types` argument can not be used together"):
        Dataset.from_generator(ragged, tf.int32, output_signature=TensorSpec((None,)))
    with pytest.raises(
        TypeError, match="To specify the output signature you need to provide either"
    ):
        Dataset.from_generator(ragged, output_shapes=(None,))
    with pytest.raises(TypeError, match="do not have the structure"):
        Dataset.from_generator(ragged, (tf.int32, tf.int32), ((),))
    with pytest.raises(
        TypeError,
        match=r"shape \(2,\) and dtype int32 where an element of shape \(1,\) was expected",
    ):
        list(Dataset.from_generator(ragged, tf.int32, (1,)))
    nested = TensorSpec((), tf.int32)
    with pytest.raises(TypeError, match=r"element 0: element\['y'\]\[0\]: `generator` yielded"):
        list(
            Dataset.from_generator(
                lambda: [{"x": 1, "y": ([1],)}], output_signature={"x": nested, "y": (nested,)}
            )
        )


# Zip, reduce, apply


def test_zip_takes_each_form_of_arguments() -> None:
    two, three = Dataset.range(2), Dataset.range(3)
    for ds in (
        Dataset.zip(two, three),
        Dataset.zip((two, three)),
        Dataset.zip(datasets=(two, three)),
    ):
        assert values(ds) == [(0, 0), (1, 1)]
    assert values(Dataset.zip({"a": two, "b": three})) == [{"a": 0, "b": 0}, {"a": 1, "b": 1}]
    with pytest.raises(TypeError, match=r"Both `\*args` and `datasets` cannot be set"):
        Dataset.zip(two, datasets=three)
    with pytest.raises(TypeError, match="Python `list` is not supported"):
        Dataset.zip([two, three])
    with pytest.raises(TypeError, match="Must pass at least one dataset to `zip`"):
        Dataset.zip()


def test_reduce_folds_elements_and_checks_the_state() -> None:
    assert int(Dataset.range(5).reduce(np.int64(0), lambda state, x: state + x)) == 10
    total, count = Dataset.range(5).reduce(
        (np.int64(0), 0.0), lambda state, x: (state[0] + x, state[1] + 1.0)
    )
    assert (int(total), float(count)) == (10, 5.0)
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3))
    assert int(pairs.reduce(np.int64(0), lambda state, x: state + x[1])) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\(initial_state=1, output=2\)"):
        Dataset.range(3).reduce(np.int64(0), lambda state, x: (state, x))
    with pytest.raises(TypeError, match="state was int64, but reduce_func returned float32"):
        Dataset.range(3).reduce(np.int64(0), lambda state, x: 1.0)


def test_apply_needs_a_dataset_as_result() -> None:
    assert values(Dataset.range(5).apply(lambda ds: ds.take(2))) == [0, 1]
    with pytest.raises(
        TypeError, match="`transformation_func` must return a `tf.data.Dataset` object"
    ):
        Dataset.range(5).apply(lambda ds: 3)  # type: ignore[arg-type,return-value]


def test_assert_cardinality_other_number_raises() -> None:
    ds = Dataset.range(5).filter(lambda x: True)
    assert ds.apply(assert_cardinality(5)).cardinality() == 5
    assert values(ds.apply(assert_cardinality(5))) == [0, 1, 2, 3, 4]
    for count, says in (
        (7, "expected to contain 7 elements but contained only 5 elements"),
        (3, "expected to contain 3 elements but contained at least 4 elements"),
        (-1, "expected to contain an infinite number of elements but contained only 5 elements"),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match=says):
            list(ds.apply(assert_cardinality(count)))


def test_shard_hint_without_a_strategy_and_wrong_index_raise() -> None:
    hinted = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT)
    assert hinted.cardinality() == UNKNOWN_CARDINALITY
    for ds in (hinted, hinted.batch(2), hinted.map(lambda x: x)):
        with pytest.raises(tf.errors.FailedPreconditionError, match="AutoShardPolicy.HINT"):
            list(ds)
    for index in (-1, 5):
        with pytest.raises(ValueError, match=rf"between 0 and 1 \(currently index = {index}\)"):
            Dataset.range(3).shard(2, index)


# Files and strings


@pytest.fixture
def folder(tmp_path: Any) -> str:
    for i in (2, 0, 3, 1):
        (tmp_path / f"f{i}.txt").write_bytes(b"a%d\nb\r\n\nlast" % i)
    (tmp_path / "sub").mkdir()
    return str(tmp_path)


def base_names(dataset: Dataset) -> list[bytes]:
    return [os.path.basename(name) for name in dataset.as_numpy_iterator()]


def test_list_files_sorts_or_shuffles_names(folder: str) -> None:
    every = [b"f0.txt", b"f1.txt", b"f2.txt", b"f3.txt"]
    assert base_names(Dataset.list_files(folder + "/*.txt", shuffle=False)) == every
    some = Dataset.list_files([folder + "/f3*", folder + "/f1*"], shuffle=False)
    assert base_names(some) == [b"f1.txt", b"f3.txt"]
    assert some.element_spec == TensorSpec((), tf.string)
    orders = [base_names(Dataset.list_files(folder + "/*.txt", seed=1)) for _ in range(2)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == every
    shuffled = Dataset.list_files(folder + "/*.txt")
    assert len({tuple(base_names(shuffled)) for _ in range(30)}) > 1
    assert Dataset.list_files(folder + "/f*").cardinality() == 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="No files matched pattern: .*nope"):
        Dataset.list_files(folder + "/*.nope")


def test_text_lines_have_no_line_ends(folder: str) -> None:
    one = TextLineDataset(folder + "/f0.txt")
    assert values(one) == [b"a0", b"b", b"", b"last"]
    with open(folder + "/returns", "wb") as file:
        file.write(b"a\rb\r\nx\r\r\ny\r")
    assert values(TextLineDataset(folder + "/returns")) == [b"ab", b"x", b"y"]
    two = TextLineDataset([folder + "/f0.txt", folder + "/f1.txt"])
    assert values(two.batch(3)) == [[b"a0", b"b", b""], [b"last", b"a1", b"b"], [b"", b"last"]]
    names = Dataset.list_files(folder + "/*", shuffle=False).filter(lambda n: b".txt" in n.numpy())
    assert values(TextLineDataset(names).shard(4, 0)) == [b"a0", b"a1", b"a2", b"a3"]
    lines = names.interleave(TextLineDataset, cycle_length=2, num_parallel_calls=2)
    assert values(lines.take(4)) == [b"a0", b"a1", b"b", b"b"]
    assert lines.element_spec == TensorSpec((), tf.string)
    with pytest.raises(FileNotFoundError):
        list(TextLineDataset(folder + "/nope"))
    with pytest.raises(TypeError, match="needs names of files"):
        TextLineDataset(Dataset.range(2))


def test_strings_are_bytes_as_in_tensorflow() -> None:
    ds = Dataset.from_tensor_slices((["a", "ü"], np.arange(2)))
    assert values(ds) == [(b"a", 0), ("ü".encode(), 1)]
    assert ds.element_spec[0] == TensorSpec((), tf.string) == TensorSpec((), "string")
    assert values(ds.batch(2)) == [([b"a", "ü".encode()], [0, 1])]
    assert next(iter(ds))[0].numpy() == b"a"
    typed = Dataset.from_generator(lambda: ["x"], output_signature=TensorSpec((), tf.string))
    assert values(typed.map(lambda s: s.numpy() + b"y")) == [b"xy"]
    padded = Dataset.from_generator(lambda: [["x"], ["y", "zz"]], tf.string, (None,)).padded_batch(
        2
    )
    assert values(padded) == [[[b"x", b""], [b"y", b"zz"]]]
    with pytest.raises(TypeError, match="NoneType cannot become a tensor of strings"):
        Dataset.from_tensors(["a", None])


def test_map_of_lengths_that_depend_on_values_has_unknown_lengths() -> None:
    """TensorFlow's specs; the lengths are equal if all values are 0, or all are 1."""
    numbers = Dataset.from_tensor_slices(np.arange(20).reshape(5, 4))
    floats = Dataset.from_generator(
        lambda: iter([np.ones(20, np.float32)]), output_signature=TensorSpec((None,), np.float32)
    )
    cases = [
        (numbers, lambda v: tf.gather(v, tf.where(v % 3 == 2)[:, 0]), (None,)),
        (Dataset.range(10), lambda i: tf.range(i // 2), (None,)),
        (Dataset.range(5), lambda i: tf.range(tf.maximum(i, 2)), (None,)),
        (floats, lambda x: tf.pad(x, [[0, (-tf.shape(x)[0]) % 8]]), (None,)),
        (floats, lambda x: tf.reshape(x[: tf.shape(x)[0] // 4 * 4], [-1, 4]), (None, 4)),
        (numbers, lambda v: tf.reshape(v, [tf.shape(v)[0], 1]), (4, 1)),
        (numbers, lambda v: tf.gather(tf.constant([5, 6]), v), (4,)),  # it refuses other numbers
    ]
    for dataset, function, shape in cases:
        assert dataset.map(function).element_spec.shape == shape
    assert numbers.map(cases[0][1]).unbatch().cardinality() == -2


# Options


def test_options_are_merged_through_transformations() -> None:
    options = Options()
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    assert options.deterministic is None
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    faster = Options()
    faster.deterministic = False
    faster.threading.private_threadpool_size = 2
    faster.experimental_optimization.map_parallelization = True
    faster.autotune.enabled = True
    ds = Dataset.range(3).with_options(options).map(lambda x: x).with_options(faster).batch(2)
    assert values(ds) == [[0, 1], [2]]
    assert ds.options().deterministic is False
    assert ds.options().threading.private_threadpool_size == 2
    assert ds.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    assert ds.with_options(Options()).options() == ds.options()
    beside = Dataset.zip(Dataset.range(3).with_options(options), Dataset.range(3))
    assert beside.options() == options != Options()
    options.experimental_distribute.auto_shard_policy = (
        AutoShardPolicy.FILE
    )  # changes the program's object only
    assert ds.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    assert [*AutoShardPolicy] == [-1, 0, 1, 2, 3]
    assert SHARD_HINT == -1


def test_unknown_options_and_wrong_values_raise() -> None:
    options = Options()
    with pytest.raises(AttributeError, match="Cannot set the property foo on Options"):
        options.foo = 1
    with pytest.raises(AttributeError, match="has no property foo"):
        _ = options.foo
    for wrong in (3, "x"):
        with pytest.raises(TypeError, match='Property "auto_shard_policy" must be of type'):
            options.experimental_distribute.auto_shard_policy = wrong
    with pytest.raises(TypeError, match='Property "deterministic" must be of type'):
        options.deterministic = "x"
    with pytest.raises(TypeError, match="DistributeOptions"):
        options.experimental_distribute = 3
    options.experimental_distribute = DistributeOptions()
    with pytest.raises(TypeError, match=r"with_options needs tf.data.Options, not int"):
        Dataset.range(3).with_options(3)  # type: ignore[arg-type]


# Optional


def test_get_next_as_optional_has_no_value_at_the_end() -> None:
    iterator = iter(Dataset.range(1))
    first = iterator.get_next_as_optional()
    assert bool(first.has_value())
    assert int(first.get_value()) == 0
    assert first.element_spec == iterator.element_spec == TensorSpec((), np.int64)
    for nothing in (get_next_as_optional(iterator), Optional.empty(TensorSpec(()))):
        assert nothing.has_value().dtype == np.bool_
        assert not nothing.has_value()
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="The given optional does not have a value"
        ):
            nothing.get_value()
    given = Optional.from_value((1, 2.0))
    assert [float(v) for v in given.get_value()] == [1.0, 2.0]
    assert given.element_spec == (TensorSpec((), tf.int32), TensorSpec((), tf.float32))


def test_get_next_at_the_end_raises_out_of_range_error() -> None:
    iterator = iter(Dataset.range(0))
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


# Threads and random numbers


def test_random_numbers_of_a_prefetching_thread_follow_from_the_seed() -> None:
    def run(thread_pauses: float, loop_pauses: float) -> list[Any]:
        def draw(x: Tensor) -> Tensor:
            time.sleep(thread_pauses)
            return tf.random.uniform(())

        tf.random.set_seed(3)
        drawn = []
        for x in Dataset.range(6).map(draw).prefetch(2):
            time.sleep(loop_pauses)
            drawn.append((float(x), float(tf.random.uniform(()))))
        return drawn

    assert run(0, 0.01) == run(0.01, 0)
    tf.random.set_seed(3)
    alone = [float(tf.random.uniform(())) for _ in range(6)]
    assert [in_loop for _, in_loop in run(0, 0)] == alone


def test_waiting_prefetch_thread_ends_when_the_iterator_is_closed() -> None:
    assert_no_threads()
    iterator = iter(Dataset.range(100).prefetch(1))
    next(iterator)
    (worker,) = (
        t
        for t in threading.enumerate()
        if t not in leftovers.before and t.name == "pycollective-prefetch"
    )
    iterator.close()
    worker.join(10)
    assert not worker.is_alive()


def test_map_that_returns_a_list_makes_a_tuple() -> None:
    ds = Dataset.range(3).map(lambda x: [x, x * 2])
    assert ds.element_spec == (TensorSpec((), np.int64), TensorSpec((), np.int64))
    assert [tuple(map(int, pair)) for pair in ds] == [(0, 0), (1, 2), (2, 4)]
    assert all(type(pair) is tuple for pair in ds)
    summed = ds.map(lambda one, two: one + two, num_parallel_calls=2)
    assert values(summed) == [0, 3, 6]
    ragged = Dataset.range(2).map(lambda x: [x, tf.zeros([3])])
    assert [[p.shape for p in pair] for pair in ragged] == [[(), (3,)]] * 2
    stacked = Dataset.range(2).map(lambda x: tf.stack([x, x]))
    assert values(stacked) == [[0, 0], [1, 1]]
    inner = Dataset.range(2).map(
        lambda x: {"pair": [x, x]}
    )  # only the returned list itself becomes a tuple
    assert [element["pair"].numpy().tolist() for element in inner] == [[0, 0], [1, 1]]


def test_padded_batch_takes_padding_values_of_any_structure():
    rows = tf.data.Dataset.from_generator(lambda: iter([np.ones(1, "f4"), np.ones(2, "f4")]))
    (batch,) = rows.padded_batch(2, padding_values=0.1).as_numpy_iterator()
    assert batch.tolist() == [[1, np.float32(0.1)], [1, 1]]
    named = tf.data.Dataset.from_tensor_slices({"a": [[1]], "b": [[1.0]]})
    values = named.padded_batch(2, {"a": [2], "b": [3]}, {"a": 7, "b": 5.0})
    (batch,) = values.as_numpy_iterator()
    assert {k: v.tolist() for k, v in batch.items()} == {"a": [[1, 7]], "b": [[1, 5, 5]]}
    nested = tf.data.Dataset.from_tensors((([1], [2]), [1.0]))
    assert len(list(nested.padded_batch(2, padding_values=((7, 8), 5.0)))) == 1


def test_padded_batch_of_wrong_padding_values_raises():
    def pad(elements, value):
        dataset = tf.data.Dataset.from_generator(lambda: iter(elements))
        return list(dataset.padded_batch(2, padding_values=value))

    with pytest.raises(TypeError, match="padding_values"):
        pad([np.ones(1, "i4"), np.ones(2, "i4")], float("nan"))
    with pytest.raises(TypeError, match="padding_values"):
        pad([["a"], ["b", "c"]], 1)
    named = tf.data.Dataset.from_tensor_slices({"a": [[1]], "b": [[1.0]]})
    with pytest.raises(ValueError, match="structure of the elements"):
        named.padded_batch(2, padded_shapes={"x": [2], "y": [2]})


def test_datasets_as_elements_raise_type_errors_or_have_an_unknown_spec():
    windows = tf.data.Dataset.range(4).window(2)
    with pytest.raises(TypeError, match="cannot batch datasets"):
        list(windows.batch(2))
    with pytest.raises(TypeError, match="needs arrays, not a dataset"):
        tf.data.Dataset.from_tensor_slices(tf.data.Dataset.range(3))
    assert len(list(windows.window(2))) == 1
    assert tf.data.Dataset.from_tensors(tf.data.Dataset.range(3)).element_spec is not None
