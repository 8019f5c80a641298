"""`map` of rows in blocks: the same bits as row by row, and only for functions without effects."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
from typing import NamedTuple

import numpy as np
import pytest

import pycollective as tf
from pycollective.data import Dataset, by_rows, functions
from pycollective.data.rows import Rows

SCALE = np.float32(3)
MEAN = np.linspace(0, 1, 4, dtype=np.float32)
SHIFT = tf.constant([1.0, 2.0, 3.0, 4.0])
counter = itertools.count()
seen: list[object] = []


def halved(x):
    return x / 2


def normalized(x, y, by=2.0):
    parts = [halved(x) - MEAN, tf.cast(x > 0.5, tf.float32) * by]
    return tf.concat(parts, -1), y


def branch_on_shape(x, y):
    if x.shape[-1] != 4:
        raise ValueError(f"not 4 columns: {x.shape}")
    return (x if len(x.shape) == 2 else x[None]), y


PURE = {
    "scale": lambda x, y: (x / 255.0 - 0.5, y),
    "constants": lambda x, y: (x * SCALE + SHIFT - MEAN, y),
    "cast": lambda x, y: (tf.cast(x, tf.float64), tf.cast(y, tf.float32)),
    "one_hot": lambda x, y: (x, tf.one_hot(y, 5), tf.one_hot(y, 3, on_value=2, axis=0)),
    "axes": lambda x, y: (x[..., None], tf.expand_dims(x, 0), x[tf.newaxis, :, ::-1], y[None]),
    "shape": lambda x, y: (tf.reshape(x, (-1,)), tf.reshape(x, (4, 3)), tf.transpose(x), y),
    "parts": lambda x, y: (x[1], x[1, 2], x[:2, 1:], tf.squeeze(x[:1], 0), y),
    "broadcast": lambda x, y: (x - tf.cast(y, tf.float32), x + x[0], x * x[:, :1], y),
    "bounds": lambda x, y: (x >= 0.0, tf.clip_by_value(y, 1, 3), y),
    "twice": lambda x, y: (x, x, y),
    "joined": lambda x, y: (tf.stack([x, -x], 1), tf.concat([x, x], 0), tf.stack([y, y]), y),
    "padded": lambda x, y: (tf.pad(x, [[1, 0], [2, 2]]), tf.unstack(x)[0], tf.split(x, 2, 1)[1]),
    "elements": lambda x, y: (tf.sqrt(tf.abs(x)), tf.square(x), tf.sign(x)),
    "rounding": lambda x, y: (tf.floor(x * 3), tf.round(x * 3), x // 2.0, x % 2.0),
    "dict": lambda x, y: {"x": x, "y": (y, 7)},
    "constant result": lambda x, y: (x, 1.5),
    "list": lambda x, y: [x, y],
    "math": lambda x, y: (x * math.pi, sum([y, y])),
    "loop": lambda x, y: tuple(row * i for i, row in enumerate(x)),
    "functions": normalized,
    "branch on shape": branch_on_shape,
    "tf.function": tf.function(lambda x, y: (x + 1.0, y)),
}


def rows():
    x = np.random.default_rng(0).normal(size=(301, 3, 4)).astype(np.float32)
    x[3, 1] = np.nan, np.inf, -np.inf, -0.0
    return x, np.arange(301, dtype=np.int32) % 7 - 1


def bits(dataset):
    """Return the structure, dtypes, shapes and bytes of all elements."""
    return [
        (
            str(tf.nest.map_structure(lambda a: (a.dtype, a.shape), element)),
            [np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(element)],
        )
        for element in dataset
    ]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", PURE)
def test_map_by_rows_gives_the_bits_of_single_rows(name, monkeypatch):
    """Elements and batches, shuffled and mapped twice, are those of calls for each row."""

    def pipelines():
        mapped = Dataset.from_tensor_slices(rows()).map(PURE[name])
        again = mapped.shuffle(40, seed=1).map(lambda *all: all[0] if len(all) == 1 else all[1])
        return mapped, mapped.batch(32), again.batch(7), mapped.skip(290)

    fast = pipelines()
    assert all(dataset._rows() is not None for dataset in (fast[0], fast[3]))
    found = [bits(dataset) for dataset in fast]
    specs = [dataset.element_spec for dataset in fast]
    monkeypatch.setattr(functions, "arrays_read", lambda function: None)
    slow = pipelines()
    assert slow[0]._rows() is None
    assert found == [bits(dataset) for dataset in slow]
    assert specs == [dataset.element_spec for dataset in slow]


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float64", "bool"])
def test_map_by_rows_of_each_dtype_gives_the_bits_of_single_rows(dtype, monkeypatch):
    """The elements include arrays without axes."""
    x = np.arange(300).astype(dtype)

    def pipeline():
        return Dataset.from_tensor_slices(x).map(lambda x: (tf.cast(x, tf.float32) / 255.0, x == x))

    assert pipeline()._rows() is not None
    fast = bits(pipeline())
    monkeypatch.setattr(functions, "arrays_read", lambda function: None)
    assert fast == bits(pipeline())


def stores_global(x, y):
    global SHIFT
    SHIFT = SHIFT + 0.0
    return x, y


def outer():
    total = 0

    def adds(x, y):
        nonlocal total
        total += 1
        return x, y

    return adds


def catches(x, y):
    try:
        return tf.reduce_sum(x), y
    except TypeError:
        return x, y


def imports(x, y):
    import os  # noqa: F401

    return x, y


class Holder:
    calls = 0

    def method(self, x, y):
        self.calls += 1
        return x, y


class Scaled(NamedTuple):
    low: float

    def __call__(self, x):
        return x * random.uniform(self.low, 1.0)


class Loud(float):
    def __radd__(self, other):
        seen.append(1)
        return other


scaled, loud, objects = Scaled(0.5), Loud(1.0), np.array([print])
variable = tf.Variable(1.0)
MAY_HAVE_EFFECTS = {
    "print": lambda x, y: (x, y, print(end=""))[:2],
    "counter": lambda x, y: (x, next(counter)),
    "append": lambda x, y: (x, y, seen.append(1))[:2],
    "random": lambda x, y: (x * random.random(), y),
    "numpy": lambda x, y: (np.sin(x), y),
    "variable": lambda x, y: (x * variable, y),
    "method": Holder().method,
    "partial": functools.partial(normalized, by=3.0),
    "global": stores_global,
    "nonlocal": outer(),
    "try": catches,
    "import": imports,
    "inner function": lambda x, y: (lambda a: (a, next(counter)))(x),
    "named tuple": lambda x, y: (scaled(x), y),
    "subclass of float": lambda x, y: (x + loud, y),
    "array of objects": lambda x, y: (x, y, objects[0])[:2],
    "its own module": lambda x, y: (x, y, tf)[:2],
}


@pytest.mark.parametrize("name", MAY_HAVE_EFFECTS)
def test_arrays_read_of_a_function_that_may_have_effects_is_none(name):
    """The code of such a function shows that rows must be computed one by one."""
    assert by_rows.arrays_read(MAY_HAVE_EFFECTS[name]) is None


NOT_IN_BLOCKS = {
    "random numbers": lambda x, y: (x + tf.random.uniform(x.shape), y),
    "branch": lambda x, y: (x if x[0, 0] > 0 else -x, y),
    "float": lambda x, y: (x, float(y)),
    "index": lambda x, y: (x[y % 3], y),
    "sum": lambda x, y: (tf.reduce_sum(x), y),
    "exp": lambda x, y: (tf.exp(x), y),
    "text": lambda x, y: (x, f"{y}"),
    "numpy()": lambda x, y: (x.numpy() + 1, y),
    "signs of zeros": lambda x, y: (tf.maximum(x, 0.0), y),
    "index by a bool": lambda x, y: (x[True, :, 0], y),
}


@pytest.mark.parametrize("name", NOT_IN_BLOCKS)
def test_map_of_a_function_that_blocks_cannot_compute_calls_it_for_each_row(name):
    """The results, also those of random numbers, equal those of calls with single rows."""
    tf.random.set_seed(5)
    x, y = rows()
    mapped = Dataset.from_tensor_slices((x, y)).map(NOT_IN_BLOCKS[name])
    assert mapped._rows() is None
    tf.random.set_seed(5)
    expected = [
        NOT_IN_BLOCKS[name](tf.constant(a), tf.constant(b)) for a, b in zip(x, y, strict=True)
    ]
    tf.random.set_seed(5)
    for got, want in zip(mapped, expected, strict=True):
        for one, other in zip(got, want, strict=True):
            one, other = np.asarray(one), np.asarray(other)
            assert (
                one == other.item().encode()
                if one.dtype == object
                else np.array_equal(one, other, equal_nan=True)
            )


def test_map_of_a_wrong_function_raises_the_error_of_the_first_row():
    """A block of rows gives no other error."""
    data = Dataset.from_tensor_slices(rows())
    with pytest.raises(ValueError, match=r"a tensor of shape \(3, 4\) has 12 elements"):
        list(data.map(lambda x, y: tf.reshape(x, (5, 5))))
    with pytest.raises(TypeError, match=r"map: <lambda> returned no valid element"):
        list(data.map(lambda x, y: None))


def test_map_of_a_function_that_writes_to_an_array_calls_it_for_each_row():
    """The array counts the calls, so that each row has another result."""
    calls = np.zeros(1, np.int64)

    def counts(x):
        calls[0] += 1
        return x + calls[0]

    assert by_rows.arrays_read(counts) is not None
    mapped = Dataset.range(6).map(counts)
    first, *others = (int(x) for x in mapped)
    assert others == [first + 2 * i for i in range(1, 6)]


def test_map_by_rows_divides_bytes_to_float32():
    mapped = tf.data.Dataset.from_tensor_slices(np.arange(6, dtype=np.uint8)).map(lambda x: x / 255)
    assert mapped._rows() is not None
    assert {x.dtype for x in mapped} == {np.dtype(np.float32)}


def half_of(x):
    return halved(x)


def test_map_examines_its_function_again_in_each_pass(monkeypatch):
    """The function calls another one, for which a third one was replaced between two passes."""
    monkeypatch.setitem(globals(), "halved", lambda x: x / 2)
    mapped = Dataset.from_tensor_slices(np.ones(4, np.float32)).map(lambda x: half_of(x))
    assert {float(x) for x in mapped} == {0.5}
    monkeypatch.setitem(globals(), "halved", lambda x: x * random.random())
    assert len({float(x) for x in mapped}) == 4


def test_cache_of_mapped_rows_keeps_the_results():
    """The function reads an array that changes between two passes."""
    scale = np.ones(3, np.float32)
    kept = Dataset.from_tensor_slices(np.ones((4, 3), np.float32)).map(lambda x: x * scale).cache()
    first = bits(kept)
    scale[...] = 5
    assert bits(kept) == first == bits(kept.shuffle(2).take(4))


def test_map_by_rows_raises_the_error_of_a_row_after_the_rows_before():
    """A block of rows that fails is computed row by row."""
    data = Dataset.from_tensor_slices(np.array([1.0, 2.0, 0.0, 4.0], np.float32)).map(
        lambda x: 1.0 / x
    )
    found = []
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        for x in data:
            found.append(float(x))
    assert found == [1.0, 0.5]


def test_map_by_rows_makes_no_more_results_than_a_block_holds(monkeypatch):
    """Small rows with large results are computed a few at a time."""
    lengths = []
    take = Rows.take
    monkeypatch.setattr(
        Rows, "take", lambda self, indices: lengths.append(len(indices)) or take(self, indices)
    )
    next(iter(Dataset.range(4096).map(lambda i: tf.one_hot(i, 50_000))))
    assert max(lengths) <= 2


@pytest.mark.parametrize("seconds, threads", [(0.0, True), (1e9, False)])
def test_parallel_map_runs_only_long_calls_in_threads(seconds, threads, monkeypatch):
    """After the first calls, short ones run in the caller's thread; the order stays the same."""
    monkeypatch.setattr(functions, "_HAND_OVER_SECONDS", seconds)
    here = threading.current_thread()
    ran = []

    def function(x):
        ran.append(threading.current_thread() is not here)
        return x + 1

    data = Dataset.range(60).map(function, num_parallel_calls=2)
    assert [int(x) for x in data] == [*range(1, 61)]
    assert all(ran[:5])
    assert all(ran[-20:]) is threads
    assert any(ran[-20:]) is threads
