"""The functions of `map`, `filter` and `interleave` keep the values that their variables have.

TensorFlow traces the functions when the datasets are made, with the same effect.
"""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest

import pycollective as tf

Dataset = tf.data.Dataset

factor = 3
calls = 0


def numbers(dataset):
    return [int(x) for x in dataset]


def test_loop_makes_a_dataset_for_each_value_of_its_variable():
    joined = Dataset.range(0)
    for start in (10, 100):
        joined = joined.concatenate(Dataset.range(2).map(lambda x: x + start))  # noqa: B023
    assert numbers(joined) == [10, 11, 100, 101]
    joined = Dataset.range(0)
    for start in (10, 100):
        few = Dataset.range(2).flat_map(lambda x: Dataset.from_tensors(x + start))  # noqa: B023
        joined = joined.concatenate(few)
    assert numbers(joined) == [10, 11, 100, 101]


def test_filter_keeps_the_values_of_closures_and_of_globals(monkeypatch):
    limit = 2
    below = Dataset.range(5).filter(lambda x: x < limit)
    product = Dataset.range(3).map(lambda x: x * factor)
    limit = 4
    monkeypatch.setitem(globals(), "factor", 5)
    assert numbers(below) == [0, 1]
    assert numbers(product) == [0, 3, 6]
    assert numbers(Dataset.range(3).map(lambda x: x * factor)) == [0, 5, 10]


def test_variables_that_the_function_assigns_are_those_of_the_program(monkeypatch):
    monkeypatch.setitem(globals(), "calls", 0)
    local = 0

    def counted(x):
        global calls
        nonlocal local
        calls += 1
        local += 1
        return x

    assert numbers(Dataset.range(3).map(counted)) == [0, 1, 2]
    assert (calls, local) == (3, 3)


def test_function_may_use_a_name_that_is_defined_later(monkeypatch):
    def later(x):
        return local(x) + defined_later(x)  # noqa: F821

    mapped = Dataset.range(3).map(later)
    monkeypatch.setitem(globals(), "defined_later", lambda x: x)

    def local(x):
        return x * x

    assert numbers(mapped) == [0, 2, 6]


def test_objects_stay_shared():
    weights = np.ones(2)
    mapped = Dataset.from_tensors(np.ones(2)).map(lambda x: x * weights)
    weights[...] = 7
    (found,) = mapped
    np.testing.assert_array_equal(found, [7, 7])


def test_function_keeps_its_name_its_defaults_and_its_attributes():
    def scaled(x, by=2, *, plus=1):
        if scaled.fails:
            raise ValueError("scaled fails")
        return x * by + plus

    scaled.fails = False
    mapped = Dataset.range(3).map(scaled)
    assert mapped._function.__name__ == "scaled"
    assert mapped._function.__qualname__ == scaled.__qualname__
    assert numbers(mapped) == [1, 3, 5]
    scaled.fails = True  # the function reads its own name, whose value is an object
    with pytest.raises(ValueError, match="scaled fails"):
        list(mapped)


def test_other_callables_are_called_as_they_are():
    mapped = Dataset.range(3).map(functools.partial(lambda y, x: x + y, 5))
    assert numbers(mapped) == [5, 6, 7]
    assert numbers(Dataset.range(3).map(tf.function(lambda x: x + 1))) == [1, 2, 3]


def test_seeds_of_both_signs_give_different_orders():
    orders = {
        tuple(numbers(Dataset.range(20).shuffle(20, seed=seed))) for seed in (-3, -1, 0, 1, 3)
    }
    assert len(orders) == 5


def test_function_keeps_only_the_globals_that_it_reads():
    class Large:
        pass

    large = globals()["unused"] = Large()
    alive = weakref.ref(large)
    dataset = Dataset.range(2).map(lambda x: x * factor)
    del large, globals()["unused"]
    gc.collect()
    assert alive() is None
    assert numbers(dataset) == [0, 3]


def test_function_may_read_globals_in_other_ways():
    def through_a_class(x):
        class Of:
            value = factor

        return x * Of.value

    def through_the_dict(x):
        return x * globals()["factor"]

    def through_an_import(x):
        from numpy import float64

        return x * int(float64(factor))

    for function in (through_a_class, through_the_dict, through_an_import):
        assert numbers(Dataset.range(2).map(function)) == [0, 3]
