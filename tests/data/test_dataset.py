"""Elements of datasets, compared with those of ``tf.data``."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import assert_no_threads, threads

import pycollective as tf
from pycollective import nest
from pycollective.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    TensorSpec,
)
from pycollective.data.background import Prefetcher
from pycollective.tensor import Tensor


class Pair(NamedTuple):
    a: Any
    b: Any


def values(dataset: Dataset) -> list[Any]:
    """Return the elements of one pass as lists of Python's numbers."""
    return [nest.map_structure(lambda a: a.tolist(), e) for e in dataset._iter()]


def slow_path(dataset: Dataset) -> Dataset:
    """Return a dataset of the same elements that are not known to be rows of arrays."""
    rows = itertools.count()
    return dataset.map(lambda *e: (next(rows), e if len(e) > 1 else e[0])[1])


# Sources


def test_from_tensor_slices_keeps_structure_and_gives_rows() -> None:
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3, dtype=np.int8)
    ds = Dataset.from_tensor_slices({"x": x, "y": (y,)})
    assert values(ds)[1] == {"x": [2.0, 3.0], "y": (1,)}
    assert ds.element_spec == {
        "x": TensorSpec((2,), np.float64),
        "y": (TensorSpec((), np.int8),),
    }
    assert len(ds) == 3
    first = next(iter(ds))
    assert isinstance(first["x"], Tensor)
    assert first["y"][0].shape == ()


def test_rows_are_arrays_also_without_axes() -> None:
    for ds in (Dataset.range(2), slow_path(Dataset.range(2)), Dataset.range(2).batch(2).unbatch()):
        assert all(type(e) is np.ndarray for e in ds._iter())


def test_lists_are_one_tensor() -> None:
    assert Dataset.from_tensor_slices([1, 2]).element_spec == TensorSpec((), np.int32)
    assert Dataset.from_tensor_slices([[1.0], [2.0]]).element_spec == TensorSpec((1,), np.float32)
    assert values(Dataset.from_tensors(([1.0], [2.0]))) == [([1.0], [2.0])]


def test_arrays_of_any_memory_order_have_the_same_rows() -> None:
    x = np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0)
    np.testing.assert_array_equal(next(Dataset.from_tensor_slices(x).batch(3)._iter()), x)


def test_components_of_different_length_are_both_named() -> None:
    with pytest.raises(ValueError, match=r"3 \(shape \(3, 2\)\) and 4 \(shape \(4,\)\)"):
        Dataset.from_tensor_slices((np.zeros((3, 2)), np.zeros(4)))


@pytest.mark.parametrize("wrong", [3, (np.zeros(2), 1.0), (), {}])
def test_from_tensor_slices_of_scalars_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="from_tensor_slices"):
        Dataset.from_tensor_slices(wrong)


@pytest.mark.parametrize("wrong", [None, 3j, np.array([None, "a"]), (np.zeros(2), None)])
def test_values_that_are_no_tensors_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="tensor"):
        Dataset.from_tensor_slices(wrong)


@pytest.mark.parametrize("args", [(5,), (2, 7), (7, 2, -2), (0,), (3, 3), (-4, 9, 5)])
def test_range_has_the_numbers_of_python(args: tuple[int, ...]) -> None:
    ds = Dataset.range(*args)
    assert values(ds) == list(range(*args))
    assert len(ds) == len(range(*args))
    assert ds.element_spec == TensorSpec((), np.int64)


def test_range_checks_its_numbers_and_its_output_type() -> None:
    assert Dataset.range(3, output_type=np.float32).element_spec.dtype == np.float32
    with pytest.raises(ValueError, match=r"299.* does not fit dtype uint8"):
        Dataset.range(300, output_type=np.uint8)
    with pytest.raises(ValueError, match=r"-2.* does not fit dtype uint8"):
        Dataset.range(-2, 2, output_type=np.uint8)
    for args in ((), (1, 2, 3, 4), (2.5,)):
        with pytest.raises(TypeError):
            Dataset.range(*args)
    with pytest.raises(ValueError):
        Dataset.range(1, 5, 0)


def test_from_generator_calls_the_function_for_each_pass() -> None:
    calls = []

    def count(stop: int) -> Iterator[int]:
        calls.append(stop)
        yield from range(stop)

    ds = Dataset.from_generator(count, args=(3,))
    assert ds.element_spec == TensorSpec(None, None)
    assert calls == []
    assert values(ds) == values(ds) == [0, 1, 2]
    assert calls == [3, 3]
    assert ds.cardinality() == UNKNOWN_CARDINALITY


def test_a_generator_may_use_its_array_again() -> None:
    def fill() -> Iterator[np.ndarray]:
        array = np.zeros(2, np.float32)
        for i in range(3):
            array[:] = i
            yield array

    spec = TensorSpec((2,))
    for ds in (Dataset.from_generator(fill), Dataset.from_generator(fill, output_signature=spec)):
        assert values(ds.batch(3)) == [[[0, 0], [1, 1], [2, 2]]]


def test_function_of_map_may_reuse_its_array() -> None:
    array = np.zeros(2)

    def fill(x: Tensor) -> np.ndarray:
        array[:] = x.numpy()
        return array

    assert values(Dataset.range(3).map(fill).batch(3)) == [[[0, 0], [1, 1], [2, 2]]]


def test_output_signature_converts_without_loss() -> None:
    signature = (TensorSpec((None,), np.float32), TensorSpec((), np.uint8))
    ds = Dataset.from_generator(
        lambda: iter([([1, 2], 3), (np.zeros(1), 255)]), output_signature=signature
    )
    assert ds.element_spec == signature
    elements = list(ds._iter())
    assert [(a.dtype, b.dtype) for a, b in elements] == [(np.float32, np.uint8)] * 2
    assert elements[0][0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("spec", "value", "says"),
    [
        (TensorSpec((), np.int32), 2.5, "int32"),
        (TensorSpec((), np.uint8), 300, "300"),
        (TensorSpec((2,)), [1.0, 2.0, 3.0], r"\(3,\).*\(2,\)"),
        ((TensorSpec(()), TensorSpec(())), (1.0, 2.0, 3.0), "differ"),
        (TensorSpec(()), None, "None"),
    ],
)
def test_elements_that_do_not_fit_the_signature_raise_type_error(
    spec: Any, value: Any, says: str
) -> None:
    ds = Dataset.from_generator(lambda: iter([value]), output_signature=spec)
    with pytest.raises(TypeError, match=f"element 0: (.|\n)*{says}"):
        list(ds)


def test_from_generator_wants_a_function_and_specs() -> None:
    with pytest.raises(TypeError, match="list"):
        Dataset.from_generator([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TensorSpec"):
        Dataset.from_generator(lambda: [1], output_signature=np.int32)
    with pytest.raises(TypeError, match="iter"):
        list(Dataset.from_generator(lambda: 5))


def test_errors_of_generators_and_functions_arrive() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    def wrong(x: Tensor) -> Tensor:
        if int(x) == 1:
            raise OSError("disk")
        return x

    for ds in (
        Dataset.from_generator(broken),
        Dataset.range(3).map(wrong),
        Dataset.range(3).map(wrong, num_parallel_calls=2),
    ):
        for pipeline in (ds, ds.prefetch(1), ds.batch(1).prefetch(3)):
            got = 0
            with pytest.raises(OSError, match="disk"):
                for _ in pipeline:
                    got += 1
            assert got == 1
    assert_no_threads()


def test_threads_that_share_an_iterator_get_each_element_once_and_end() -> None:
    def slowly() -> Iterator[int]:
        for i in range(40):
            time.sleep(0.001)  # so that other threads ask meanwhile
            yield i

    source = Dataset.from_generator(slowly, output_signature=TensorSpec((), "int64"))
    for ds in (source, source.prefetch(2), source.prefetch(1).map(lambda x: x)):
        iterator, got = iter(ds), []
        takers = [
            threading.Thread(target=lambda: got.extend(int(x) for x in iterator), daemon=True)  # noqa: B023
            for _ in range(3)
        ]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join(20)
            assert not taker.is_alive()
        assert sorted(got) == list(range(40))


def test_prefetched_elements_of_several_threads_end_for_each() -> None:
    """The threads use the prefetcher itself, without the lock of a dataset's iterator."""
    elements = Prefetcher(lambda: iter(range(3)), 1)
    takers = [threading.Thread(target=list, args=(elements,), daemon=True) for _ in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(20)
        assert not taker.is_alive()


def test_stop_iteration_in_a_function_is_an_error() -> None:
    for workers in (None, 2):
        ds = Dataset.range(3).map(lambda x: next(iter(())), num_parallel_calls=workers)
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(ds)


# Selections


def both(dataset: Dataset) -> list[Any]:
    """Return `values`, which must be the same one by one and in batches."""
    alone = values(dataset)
    assert list(itertools.chain(*values(dataset.batch(4)))) == alone
    return alone


@pytest.mark.parametrize("ds", [Dataset.range(10), slow_path(Dataset.range(10))])
def test_take_skip_repeat_and_shard_select_elements(ds: Dataset) -> None:
    numbers = list(range(10))
    assert both(ds.take(3)) == numbers[:3]
    assert both(ds.take(99)) == both(ds.take(-1)) == numbers
    assert both(ds.take(0)) == both(ds.skip(99)) == both(ds.skip(-1)) == []
    assert both(ds.skip(4)) == numbers[4:]
    assert both(ds.repeat(2)) == numbers * 2
    assert both(ds.repeat(0)) == []
    assert both(ds.repeat().take(25)) == (numbers * 3)[:25]
    assert both(ds.repeat(-1).skip(5).take(7)) == [*numbers[5:], 0, 1]
    assert both(ds.shard(3, 1)) == numbers[1::3]
    assert both(ds.repeat(3).shard(7, 4)) == (numbers * 3)[4::7]


def test_repeating_nothing_ends() -> None:
    for empty in (Dataset.range(0), Dataset.from_generator(lambda: [])):
        assert values(empty.repeat()) == []


def test_shuffle_gives_each_element_once_and_other_orders() -> None:
    ds = Dataset.range(50).shuffle(50)
    orders = [values(ds) for _ in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != list(range(50))


def test_shuffle_equal_seeds_give_equal_orders() -> None:
    def pipeline(seed: int) -> list[Any]:
        ds = Dataset.range(30).shuffle(30, seed=seed)
        return [values(ds), values(ds)]

    first = pipeline(1)
    assert pipeline(1) == first
    assert first[0] != first[1]
    assert pipeline(2) != first
    again = Dataset.range(30).shuffle(30, seed=1, reshuffle_each_iteration=False)
    assert values(again) == values(again) == first[0]
    twice = values(Dataset.range(30).shuffle(30, seed=1).repeat(2))
    assert [twice[:30], twice[30:]] == first


def test_set_seed_decides_where_no_seed_is_given() -> None:
    def order() -> list[Any]:
        tf.random.set_seed(5)
        return values(Dataset.range(30).shuffle(30))

    assert order() == order()


def test_shuffle_draws_from_the_buffer_only() -> None:
    assert values(Dataset.range(9).shuffle(1, seed=0)) == list(range(9))
    for seed in range(20):
        order = values(Dataset.range(40).shuffle(5, seed=seed))
        assert sorted(order) == list(range(40))
        assert all(value < place + 5 for place, value in enumerate(order))


def test_all_orders_are_equally_likely() -> None:
    ds = Dataset.range(3).shuffle(3, seed=0)
    counts = {order: 0 for order in itertools.permutations(range(3))}
    for _ in range(1200):
        counts[tuple(values(ds))] += 1
    assert all(140 < n < 260 for n in counts.values())


def test_asking_for_the_spec_has_no_effect() -> None:
    """The spec changes neither the order of a shuffle nor a generator."""
    orders = []
    for ask in (True, False):
        ds = Dataset.range(20).shuffle(20, seed=3).map(lambda x: x + 1)
        if ask:
            assert ds.element_spec == TensorSpec((), np.int64)
        orders.append(values(ds))
    assert orders[0] == orders[1]
    only = iter([1, 2, 3])
    ds = Dataset.from_generator(lambda: only)
    assert ds.element_spec == TensorSpec(None, None)
    assert values(ds) == [1, 2, 3]


def test_cache_is_filled_by_a_complete_pass_only() -> None:
    calls = []

    def count(x: Tensor) -> Tensor:
        calls.append(int(x))
        return x

    ds = Dataset.range(4).map(count).cache()
    assert values(ds.take(2)) == [0, 1]  # the pass was not complete, so nothing is kept
    calls.clear()
    assert values(ds) == values(ds) == [0, 1, 2, 3]
    assert calls == [0, 1, 2, 3]


def test_cache_keeps_the_order_however_it_is_read() -> None:
    ds = Dataset.range(30).shuffle(30).cache()
    order = values(ds)
    assert values(ds) == order
    assert values(ds.batch(30)) == [order]
    ds = Dataset.range(30).shuffle(30).cache()
    assert list(itertools.chain(*values(ds.batch(7)))) == values(ds)


def test_filter_keeps_elements_and_needs_a_bool() -> None:
    pairs = Dataset.from_tensor_slices((np.arange(6), np.arange(6)[::-1].copy()))
    assert values(pairs.filter(lambda a, b: a < b)) == [(0, 5), (1, 4), (2, 3)]
    assert pairs.filter(lambda a, b: True).cardinality() == UNKNOWN_CARDINALITY
    for wrong in (lambda x: x, lambda x: [True, False]):
        with pytest.raises(TypeError, match="one bool"):
            list(Dataset.range(3).filter(wrong))
    with pytest.raises(TypeError):
        list(Dataset.range(3).filter(lambda x: None))


# Batches


def test_batch_joins_elements_and_may_drop_the_rest() -> None:
    for ds in (Dataset.range(5), slow_path(Dataset.range(5))):
        assert values(ds.batch(2)) == [[0, 1], [2, 3], [4]]
        assert values(ds.batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
        assert values(ds.batch(9)) == [[0, 1, 2, 3, 4]]
        assert values(ds.batch(9, drop_remainder=True)) == []
        assert values(ds.batch(2).batch(2, drop_remainder=True)) == [[[0, 1], [2, 3]]]
        assert values(ds.repeat(2).batch(4)) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]
        assert values(ds.batch(2).repeat(2))[2:4] == [[4], [0, 1]]


def test_batch_of_unlike_elements_raises() -> None:
    ragged = Dataset.from_generator(lambda: [[1.0], [1.0, 2.0]]).batch(2)
    with pytest.raises(ValueError, match=r"\(1,\) and \(2,\)"):
        list(ragged)
    with pytest.raises(TypeError, match="int32 and float32"):
        list(Dataset.from_generator(lambda: [1, 2.5]).batch(2))
    with pytest.raises(ValueError, match="keys"):
        list(Dataset.from_generator(lambda: [{"a": 1}, {"b": 1}]).batch(2))
    with pytest.raises(ValueError, match="structures"):
        list(Dataset.from_generator(lambda: [1, (1, 2)]).batch(2))
    swapped = Dataset.from_generator(lambda: [{"a": 1, "b": 2}, {"b": 20, "a": 10}])
    assert values(swapped.batch(2)) == [{"a": [1, 10], "b": [2, 20]}]


def test_unbatch_gives_the_rows_of_batches() -> None:
    ds = Dataset.from_tensor_slices((np.arange(5), np.arange(10).reshape(5, 2)))
    assert values(ds.batch(2).unbatch()) == values(ds)
    assert ds.batch(2).unbatch().element_spec == ds.element_spec
    with pytest.raises(ValueError, match=r"Cannot unbatch .* scalar components: element\[0\]"):
        ds.unbatch()
    with pytest.raises(ValueError, match=r"element\[0\] has 2, element\[1\] has 3"):
        list(Dataset.from_tensors((np.zeros(2), np.zeros(3))).unbatch())


def test_map_takes_apart_plain_tuples_only() -> None:
    x = np.arange(3)
    assert values(Dataset.from_tensor_slices((x, x)).map(lambda a, b: a + b)) == [0, 2, 4]
    assert values(Dataset.from_tensor_slices({"a": x}).map(lambda e: e["a"])) == [0, 1, 2]
    pair = Pair(x, x)
    assert values(Dataset.from_tensor_slices(pair).map(lambda p: p.a + p.b)) == [0, 2, 4]


def test_map_may_return_tensors_arrays_and_numbers() -> None:
    ds = Dataset.range(2).map(lambda x: {"t": x, "a": np.ones(2), "n": 1.5, "l": [1, 2]})
    assert values(ds)[1] == {"t": 1, "a": [1.0, 1.0], "n": 1.5, "l": [1, 2]}
    assert ds.element_spec == {
        "t": TensorSpec((), np.int64),
        "a": TensorSpec((2,), np.float64),
        "n": TensorSpec((), np.float32),
        "l": TensorSpec((2,), np.int32),
    }
    with pytest.raises(TypeError, match=r"map: <lambda> returned no valid element: None"):
        list(Dataset.range(2).map(lambda x: None))


def test_parallel_map_keeps_the_order_and_works_in_several_threads() -> None:
    names = set()
    both = threading.Barrier(2)

    def meet(x: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        both.wait(10)  # breaks if the calls came one after the other
        time.sleep(0.002 * (int(x) % 3))
        return x * 2

    ds = Dataset.range(20).map(meet, num_parallel_calls=2)
    assert values(ds) == [2 * i for i in range(20)]
    assert len(names) == 2
    assert_no_threads()
    assert values(Dataset.range(9).map(lambda x: -x, num_parallel_calls=AUTOTUNE))[-1] == -8


def test_parallel_map_gives_the_elements_before_an_error() -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise OSError("disk")

    got = []
    with pytest.raises(OSError, match="disk"):
        for x in Dataset.from_generator(source).map(lambda x: x, num_parallel_calls=8):
            got.append(int(x))
    assert got == [0, 1, 2]


def test_zip_concatenate_and_enumerate_join_datasets() -> None:
    a, b = Dataset.range(3), Dataset.from_tensor_slices(np.arange(4.0))
    assert values(Dataset.zip(a, b)) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert values(Dataset.zip((a, {"b": b})))[2] == (2, {"b": 2.0})
    assert Dataset.zip(a, b).element_spec == (a.element_spec, b.element_spec)
    assert values(a.concatenate(Dataset.range(7, 9))) == [0, 1, 2, 7, 8]
    assert values(b.enumerate(start=5))[:2] == [(5, 0.0), (6, 1.0)]
    assert b.enumerate().element_spec == (TensorSpec((), np.int64), b.element_spec)
    with pytest.raises(TypeError, match="datasets"):
        Dataset.zip(a, 3)
    for wrong in (3, b, Dataset.zip(a, a)):
        with pytest.raises(TypeError, match="concatenate"):
            a.concatenate(wrong)  # type: ignore[arg-type]


def test_concatenate_different_shapes_have_a_common_spec() -> None:
    a, b = Dataset.from_tensors(np.zeros((2, 3))), Dataset.from_tensors(np.zeros((4, 3)))
    assert a.concatenate(b).element_spec == TensorSpec((None, 3), np.float64)


# Properties without a pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: d, 10),
        (lambda d: d.shuffle(3), 10),
        (lambda d: d.take(4), 4),
        (lambda d: d.take(40), 10),
        (lambda d: d.skip(4), 6),
        (lambda d: d.skip(40), 0),
        (lambda d: d.skip(-1), 0),
        (lambda d: d.shard(3, 0), 4),
        (lambda d: d.shard(3, 2), 3),
        (lambda d: d.batch(4), 3),
        (lambda d: d.batch(4, drop_remainder=True), 2),
        (lambda d: d.repeat(3), 30),
        (lambda d: d.repeat(0), 0),
        (lambda d: d.repeat().take(7), 7),
        (lambda d: d.cache().prefetch(2).map(lambda x: x).enumerate(), 10),
        (lambda d: d.concatenate(d), 20),
        (lambda d: Dataset.zip(d, d.take(3), d.repeat()), 3),
    ],
)
def test_cardinality_is_the_number_of_elements(
    make: Callable[[Dataset], Dataset], expected: int
) -> None:
    ds = make(Dataset.range(10))
    assert ds.cardinality() == len(ds) == expected == len(values(ds))
    assert tf.data.experimental.cardinality(ds) == expected


def test_cardinality_infinite_or_unknown_has_no_length() -> None:
    infinite = Dataset.range(3).repeat()
    unknown = Dataset.from_generator(lambda: [1])
    for ds in (infinite, infinite.batch(2), infinite.skip(4), infinite.concatenate(infinite)):
        assert ds.cardinality() == INFINITE_CARDINALITY
        with pytest.raises(TypeError, match="infinite"):
            len(ds)
    for ds in (unknown, unknown.take(1), unknown.batch(1), Dataset.zip(infinite, unknown)):
        assert ds.cardinality() == UNKNOWN_CARDINALITY
        with pytest.raises(TypeError, match="unknown"):
            len(ds)
    assert Dataset.range(0).repeat().cardinality() == 0
    assert bool(Dataset.range(0))


def test_element_spec_has_structure_shapes_and_dtypes() -> None:
    ds = Dataset.from_tensor_slices((np.zeros((6, 28, 28), np.float32), np.zeros(6, np.uint8)))
    batched = ds.batch(4)
    assert batched.element_spec == (
        TensorSpec((None, 28, 28), np.float32),
        TensorSpec((None,), np.uint8),
    )
    assert ds.batch(4, drop_remainder=True).element_spec[1] == TensorSpec((4,), np.uint8)
    changed = batched.map(lambda x, y: (x[:, :2], tf.cast(y, tf.int32), 1.0))
    assert changed.element_spec == (
        TensorSpec((None, 2, 28), np.float32),
        TensorSpec((None,), np.int32),
        TensorSpec((), np.float32),
    )


def test_spec_has_none_for_lengths_that_depend_on_the_batch() -> None:
    batches = Dataset.range(5).batch(2)
    for length in (2, 3, 9):
        assert batches.map(lambda x, n=length: x[:n]).element_spec.shape == (None,)
    pairs = batches.map(lambda x: tf.stack([x, x], axis=1))
    assert pairs.element_spec.shape == (None, 2)
    assert batches.map(lambda x: tf.squeeze(x)).element_spec.shape == (None,)


def test_spec_of_a_function_that_fails_on_zeros_is_unknown() -> None:
    ds = Dataset.range(1, 3).map(lambda x: x if int(x) else 1 // 0)
    assert ds.element_spec == TensorSpec(None, None)
    assert values(ds.batch(2)) == [[1, 2]]
    assert ds.batch(2).element_spec == TensorSpec(None, None)


def test_the_spec_draws_no_random_numbers() -> None:
    ds = Dataset.range(3).map(lambda x: tf.random.uniform(()))
    drawn = []
    for ask in (True, False):
        tf.random.set_seed(1)
        if ask:
            assert ds.map(lambda x: x).element_spec == TensorSpec((), np.float32)
        drawn.append(values(ds))
    assert drawn[0] == drawn[1]


def test_batch_size_is_known_after_batch_only() -> None:
    ds = Dataset.range(10)
    assert ds._batch_size() is None
    assert ds.batch(4)._batch_size() == 4
    assert ds.batch(4).shuffle(2).repeat().prefetch(1).take(2).shard(2, 0)._batch_size() == 4
    assert ds.batch(4).unbatch()._batch_size() is None
    assert ds.batch(4).concatenate(ds.batch(3))._batch_size() is None


def test_tensor_spec_converts_and_checks_its_arguments() -> None:
    spec = TensorSpec([None, np.int64(2)], "float64", name="x")  # type: ignore[arg-type]
    assert spec.shape == (None, 2)
    assert spec.dtype == np.float64
    assert TensorSpec(()).dtype == np.float32
    assert spec.accepts(np.zeros((5, 2)))
    for wrong in (np.zeros((5, 3)), np.zeros(2), np.zeros((5, 2), np.float32)):
        assert not spec.accepts(wrong)
    assert TensorSpec(None, None).accepts(np.zeros((5, 3)))
    with pytest.raises(ValueError, match="-1"):
        TensorSpec((-1,))
    with pytest.raises(TypeError, match="shape"):
        TensorSpec((1.5,))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        TensorSpec((), "text")


# Wrong arguments


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.batch(0),
        lambda d: d.batch(-1),
        lambda d: d.batch(2.5),
        lambda d: d.batch(True),
        lambda d: d.shuffle(0),
        lambda d: d.shuffle(-5),
        lambda d: d.take(-2),
        lambda d: d.skip(-2),
        lambda d: d.repeat(-2),
        lambda d: d.prefetch(-2),
        lambda d: d.shard(0, 0),
        lambda d: d.shard(2, 2),
        lambda d: d.shard(2, -1),
        lambda d: d.map(3),
        lambda d: d.map(lambda x: x, num_parallel_calls=0),
        lambda d: d.map(lambda x: x, num_parallel_calls=-2),
        lambda d: d.filter(3),
    ],
)
def test_wrong_arguments_are_found_at_once(call: Callable[[Dataset], Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"must be|needs a function"):
        call(Dataset.range(3))


# Iterators and threads


def test_each_loop_starts_anew_and_iterators_are_independent() -> None:
    ds = Dataset.range(4).batch(2)
    first, second = iter(ds), iter(ds)
    assert next(first).numpy().tolist() == [0, 1]
    assert first.get_next().numpy().tolist() == [2, 3]
    assert next(second).numpy().tolist() == [0, 1]
    with pytest.raises(StopIteration):
        next(first)


def test_as_numpy_iterator_gives_read_only_arrays() -> None:
    batch = next(Dataset.range(4).batch(2).as_numpy_iterator())
    assert type(batch) is np.ndarray
    assert not batch.flags.writeable
    assert list(Dataset.range(2).as_numpy_iterator()) == [0, 1]


def test_prefetch_gives_the_same_elements_and_runs_ahead() -> None:
    callers = []

    def count(x: Tensor) -> Tensor:
        callers.append(threading.current_thread())
        return x

    ds = Dataset.range(20).map(count).prefetch(3)
    iterator = iter(ds)
    assert int(next(iterator)) == 0
    end = time.monotonic() + 10
    while len(callers) < 4 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)
    assert 4 <= len(callers) <= 5  # three elements wait, and the thread may compute one more
    assert threading.current_thread() not in callers
    assert [int(x) for x in iterator] == list(range(1, 20))
    assert_no_threads()
    for size in (0, 1, AUTOTUNE):
        assert values(Dataset.range(5).prefetch(size)) == list(range(5))


def infinite() -> Dataset:
    return (
        Dataset.range(100)
        .repeat()
        .map(lambda x: x, num_parallel_calls=2)
        .prefetch(1)
        .batch(2)
        .prefetch(2)
    )


def test_threads_end_when_the_iterator_is_closed() -> None:
    iterator = iter(infinite())
    next(iterator)
    assert threads()
    iterator.close()
    assert_no_threads()
    with pytest.raises(StopIteration):
        next(iterator)


def test_threads_end_when_the_iterator_is_dropped() -> None:
    iterator = iter(infinite())
    next(iterator)
    assert threads()
    del iterator
    assert_no_threads()


def test_no_call_is_left_when_a_parallel_map_is_closed() -> None:
    running = []

    def slow(x: Tensor) -> Tensor:
        running.append(x)
        time.sleep(0.05)
        running.pop()
        return x

    iterator = iter(Dataset.range(100).map(slow, num_parallel_calls=2))
    next(iterator)
    assert threads()
    iterator.close()
    assert running == []
    assert threads() == []


def test_threads_end_when_the_loop_is_left() -> None:
    for _ in infinite():
        break
    assert_no_threads()

    def work() -> None:
        for _ in infinite():
            raise KeyError("the body of the loop")

    with pytest.raises(KeyError):
        work()
    assert_no_threads()


def test_threads_end_after_the_last_element() -> None:
    assert len(values(infinite().take(5))) == 5
    assert_no_threads()


def test_a_generator_is_closed_with_its_pass() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    for ds in (Dataset.from_generator(source), Dataset.from_generator(source).prefetch(1)):
        closed.clear()
        for _ in ds:
            break
        assert closed.wait(10)


def test_several_threads_may_iterate_at_once() -> None:
    ds = Dataset.range(500).shuffle(500, seed=1).batch(10).prefetch(2)
    results: list[list[int]] = [[], [], []]

    def work(i: int) -> None:
        results[i] = list(itertools.chain(*values(ds)))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [sorted(r) for r in results] == [list(range(500))] * 3
    assert_no_threads()


# The fast path gives the same elements as the slow one


STEP = st.one_of(
    st.tuples(st.just("shuffle"), st.integers(1, 12), st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(-1, 30)),
    st.tuples(st.just("skip"), st.integers(0, 6)),
    st.tuples(st.just("repeat"), st.integers(0, 3)),
    st.tuples(st.just("shard"), st.integers(2, 3), st.integers(0, 1)),
    st.tuples(st.just("cache")),
)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(0, 12),
    steps=st.lists(STEP, max_size=5),
    size=st.integers(1, 7),
    drop=st.booleans(),
)
def test_fast_path_equals_slow_path(
    n: int, steps: list[tuple[Any, ...]], size: int, drop: bool
) -> None:
    def pipeline(source: Dataset) -> Dataset:
        for name, *arguments in steps:
            source = getattr(source, name)(*arguments)
        return source.batch(size, drop)

    arrays = np.arange(n), np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    fast = pipeline(Dataset.from_tensor_slices(arrays))
    slow = pipeline(slow_path(Dataset.from_tensor_slices(arrays)))
    assert fast._source._rows() is not None  # type: ignore[attr-defined]
    assert slow._source._rows() is None  # type: ignore[attr-defined]
    for _ in range(2):  # the second pass has its own orders
        assert values(fast) == values(slow)
    assert len(values(fast)) == len(fast) == len(slow)


@pytest.mark.parametrize("path", [lambda source: source, slow_path])
def test_take_from_a_shuffled_cache_leaves_the_cache_empty(
    path: Callable[[Dataset], Dataset],
) -> None:
    cached = path(Dataset.range(2)).shuffle(2, seed=3).cache()
    first = cached.shuffle(1, seed=0).take(1).batch(1)
    assert [values(first) for _ in range(2)] == [[[1]], [[0]]]


def test_take_within_a_repetition_begins_no_other_repetition() -> None:
    def passes(source: Dataset) -> list[Any]:
        ds = source.shuffle(9, seed=1).repeat(2).take(9).batch(9)
        return [values(ds) for _ in range(3)]

    assert passes(Dataset.range(9)) == passes(slow_path(Dataset.range(9)))


def test_shuffled_mnist_has_every_image_once(mnist_dir: Any) -> None:
    (x, y), _ = tf.keras.datasets.mnist.load_data(mnist_dir)
    ds = Dataset.from_tensor_slices((x, y)).shuffle(60000, seed=0).batch(128).prefetch(2)
    counts = np.zeros(10, int)
    total = 0
    for images, labels in ds._iter():
        assert images.shape[1:] == (28, 28)
        counts += np.bincount(labels, minlength=10)
        total += int(images.sum(dtype=np.int64))
    np.testing.assert_array_equal(counts, np.bincount(y))
    assert total == int(x.sum(dtype=np.int64))


def test_padded_shape_of_one_axis_may_be_a_number() -> None:
    ds = Dataset.range(1, 5, output_type="int32").map(lambda x: tf.fill([x], x))
    padded = ds.padded_batch(2, padded_shapes=5, padding_values=-1)
    assert values(padded) == [
        [[1, -1, -1, -1, -1], [2, 2, -1, -1, -1]],
        [[3, 3, 3, -1, -1], [4, 4, 4, 4, -1]],
    ]
    assert padded.element_spec == TensorSpec((None, 5), np.int32)


def keys_in_alternating_order(i: Any) -> dict[str, Any]:
    """Return a dict whose keys have another order for odd numbers."""
    parts = {"a": tf.fill([i + 1], i), "b": tf.fill([i + 1], 10 * i)}
    return parts if int(i) % 2 == 0 else dict(reversed(parts.items()))


def test_padded_batch_of_dicts_in_other_orders_keeps_the_keys() -> None:
    (batch,) = Dataset.range(2).map(keys_in_alternating_order).padded_batch(2)
    assert batch["a"].numpy().tolist() == [[0, 0], [1, 1]]
    assert batch["b"].numpy().tolist() == [[0, 0], [10, 10]]


def test_cache_in_a_file_of_dicts_in_other_orders_keeps_the_keys(tmp_path: Any) -> None:
    cached = Dataset.range(2).map(keys_in_alternating_order).cache(tmp_path / "kept")
    for _ in range(2):
        assert [int(element["b"][0]) for element in cached] == [0, 10]


def test_reduce_state_in_another_order_keeps_the_keys() -> None:
    state = {"sum": np.int64(0), "half": np.float32(0)}
    found = Dataset.range(4).reduce(
        state, lambda s, x: {"half": s["half"] + 0.5, "sum": s["sum"] + x}
    )
    assert int(found["sum"]) == 6 and float(found["half"]) == 2.0


@pytest.mark.parametrize("one", [{"a": [1, 2]}, ([1, 2],)])
def test_rows_of_a_structure_with_one_array_keep_the_structure(one: Any) -> None:
    slices = Dataset.from_tensor_slices((one, [3, 4]))
    for ds in (slices, slices.map(lambda x, y: (x, y)), slices.batch(2).unbatch()):
        for (x, y), a, b in zip(ds, (1, 2), (3, 4), strict=True):
            assert type(x) is type(one) and len(x) == 1
            assert int(x["a"] if isinstance(x, dict) else x[0]) == a and int(y) == b


def test_long_range_takes_little_memory():
    """The numbers of a range of 2^40 are made in parts."""
    numbers = tf.data.Dataset.range(3, 1 << 40, 2, output_type="int64")
    assert len(numbers) == ((1 << 40) - 3 + 1) // 2
    first = list(numbers.skip(65_534).take(4).as_numpy_iterator())
    assert first == [3 + 2 * n for n in range(65_534, 65_538)]
    assert next(iter(numbers.batch(3))).numpy().tolist() == [3, 5, 7]
    assert numbers.element_spec == tf.TensorSpec((), "int64")
    assert next(iter(numbers.shard(4, 1).map(lambda n: n * 2))).numpy() == 10


def test_counters_keep_their_keys_in_a_structure():
    counts = Counter(a=2, b=3)
    doubled = nest.map_structure(lambda n: 2 * n, counts)
    assert type(doubled) is Counter
    assert doubled == Counter(a=4, b=6)
    assert nest.pack_as(counts, [0, -1]) == {"a": 0, "b": -1}


def test_cardinality_is_a_tensor_of_int64():
    count = Dataset.range(3).cardinality()
    assert count.numpy() == 3 and count.dtype == "int64"
    endless = tf.data.experimental.cardinality(Dataset.range(3).repeat())
    assert endless.numpy() == tf.data.INFINITE_CARDINALITY
