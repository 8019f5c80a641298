"""`Variable`: values, updates, rows, and creators."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import time

import numpy as np
import pytest

import pycollective.tensor as tf
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import VariableAggregation, VariableSynchronization
from pycollective.tensor.variable import creators, update_together


def test_variable_has_value_name_and_modes():
    v = tf.Variable([[1.0, 2.0]], name="w")
    assert (v.shape, v.dtype, v.name, v.trainable, v.ndim) == ((1, 2), np.float32, "w", True, 2)
    assert v.synchronization is VariableSynchronization.AUTO
    assert v.aggregation is VariableAggregation.NONE
    assert v.local() is v
    assert tf.Variable(lambda: np.arange(3)).dtype == np.int64
    assert tf.Variable(1, dtype="float64").dtype == np.float64
    assert tf.Variable(tf.Variable(3.0)).numpy() == 3.0
    assert tf.Variable(0.0, synchronization=VariableSynchronization.ON_READ).trainable is False
    assert repr(v) == (
        "<tf.Variable 'w' shape=(1, 2) dtype=float32, numpy=array([[1., 2.]], dtype=float32)>"
    )


def test_variable_wrong_arguments_raise():
    with pytest.raises(ValueError, match="'w' needs an initial_value"):
        tf.Variable(name="w")
    for shape in (tf.TensorShape(None), [None]):
        with pytest.raises(ValueError, match="'Variable': shape is .* every length must be known"):
            tf.Variable([1.0, 2.0], shape=shape)
    with pytest.raises(
        ValueError, match=r"'w': initial_value has shape \(2,\), but shape is \(3,\)"
    ):
        tf.Variable([1.0, 2.0], shape=(3,), name="w")
    with pytest.raises(ValueError, match="'w' is ON_READ and trainable"):
        tf.Variable(0.0, trainable=True, synchronization=VariableSynchronization.ON_READ, name="w")
    with pytest.raises(ValueError, match=r"synchronization must be .* got 'ON_READ'"):
        tf.Variable(0.0, synchronization="ON_READ")
    with pytest.raises(ValueError, match=r"aggregation must be .* got 'SUM'"):
        tf.Variable(0.0, aggregation="SUM")


def test_variable_copies_its_initial_value():
    array = np.zeros(3)
    v = tf.Variable(array)
    array[:] = 7
    assert v.numpy().tolist() == [0, 0, 0]
    w = tf.Variable(v)
    w.assign_add([1.0, 1.0, 1.0])
    assert v.numpy().tolist() == [0, 0, 0]


def test_assignments_change_the_value():
    v = tf.Variable([1.0, 2.0])
    assert v.assign([3.0, 4.0]) is v
    assert v.assign_add(np.array([1.0, 1.0])) is v  # float64 arrays are converted
    assert v.assign_sub(tf.constant([0.5, 0.5]), read_value=False) is v
    assert v.numpy().tolist() == [3.5, 4.5]
    v.assign(v)
    v.assign(v[::-1])
    assert v.numpy().tolist() == [4.5, 3.5]
    v.assign(v.numpy())
    n = tf.Variable(1)
    n.assign_add(1)
    assert int(n) == 2


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_assign_wrong_values_raise(method):
    v = tf.Variable([1.0, 2.0], name="w")
    with pytest.raises(ValueError, match=rf"{method}: variable 'w' has shape \(2,\).* \(3,\)"):
        getattr(v, method)([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"dtype float32, the value has .* dtype float64"):
        getattr(v, method)(tf.constant(np.zeros(2)))
    with pytest.raises(TypeError, match="without loss"):
        getattr(tf.Variable([1]), method)([1.5])
    assert v.numpy().tolist() == [1.0, 2.0]


def array_of(v):
    """Return the id of the array, without a reference to it."""
    return id(v._tensor.array)


def add_one(array):
    array += 1


UPDATES = {
    "update_inplace": lambda v: v.update_inplace(add_one),
    "assign": lambda v: v.assign(np.ones(3)),
    "assign_add": lambda v: v.assign_add(np.ones(3)),
    "assign_sub": lambda v: v.assign_sub(-np.ones(3)),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_an_update_writes_in_place_when_nobody_holds_the_value(update):
    v = tf.Variable(np.zeros(3))
    before = array_of(v)
    float((v + 1.0)[0])
    v.numpy()
    for _ in range(20):  # also after CPython has specialized the bytecode
        update(v)
        assert array_of(v) == before


HOLDERS = {
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "read": lambda v: v._read(),
    "numpy of value": lambda v: v.value().numpy(),
    "asarray": lambda v: np.asarray(v),
    "view of a view": lambda v: np.asarray(v)[1:][::-1],
    "slice": lambda v: v[1:],
    "reshaped": lambda v: tf.reshape(v, [3, 1]),
    "stop_gradient": lambda v: tf.stop_gradient(v),
    "memoryview": lambda v: memoryview(v.value().numpy()),
    "converted": lambda v: tf.convert_to_tensor(v),
    "array": lambda v: v._read().array,
    "list": lambda v: [v.value()],
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_value_read_before_an_update_stays_the_same(hold, update):
    v = tf.Variable(np.zeros(3))
    held = hold(v)
    before = np.array(held[0] if isinstance(held, list) else held)
    update(v)
    np.testing.assert_array_equal(held[0] if isinstance(held, list) else held, before)
    assert v.numpy().tolist() == [1, 1, 1]
    del held
    again = array_of(v)
    update(v)
    assert array_of(v) == again


def test_a_recorded_operation_holds_the_value_until_the_gradient_is_computed():
    v = tf.Variable(np.array([2.0, 3.0]))
    with tf.GradientTape() as tape:
        y = v * v
        before = array_of(v)
        v.assign_add([1.0, 1.0])
        assert array_of(v) != before
    assert tape.gradient(y, v).numpy().tolist() == [4.0, 6.0]
    before = array_of(v)
    v.assign_add([1.0, 1.0])
    assert array_of(v) == before


def test_array_that_an_update_kept_does_not_change():
    v = tf.Variable(np.zeros(3))
    kept = []
    v.update_inplace(kept.append)
    v.assign_add([1.0, 1.0, 1.0])
    assert kept[0].tolist() == [0, 0, 0]


def test_update_that_fails_keeps_the_value():
    v = tf.Variable(np.zeros(3))

    def fail(array):
        raise KeyError("x")

    with pytest.raises(KeyError):
        v.update_inplace(fail)
    assert v.numpy().tolist() == [0, 0, 0]


def test_reading_inside_an_update_is_an_error_and_no_deadlock():
    v = tf.Variable(np.zeros(3), name="w")
    with pytest.raises(RuntimeError, match="'w' was read by the function that updates it"):
        v.update_inplace(lambda array: v.numpy())
    with pytest.raises(RuntimeError, match="'w' was read"):
        v.update_inplace(lambda array: v.update_inplace(add_one))
    assert v.numpy().tolist() == [0, 0, 0]


def test_value_that_is_part_of_a_larger_array_is_not_changed_in_place():
    v = tf.Variable(np.zeros(3))
    v.set_array(np.zeros(9)[3:6])
    held = v.value().numpy()[1:]
    v.assign_add([1.0, 1.0, 1.0])
    assert held.tolist() == [0, 0]


def test_readers_in_other_threads_see_whole_values():
    v = tf.Variable(np.zeros(2000))
    stop = threading.Event()
    torn = []

    def read():
        while not stop.is_set():
            value = v._read().array
            first = value[0]
            time.sleep(0)
            if not (value == first).all():
                torn.append(value.copy())

    threads = [threading.Thread(target=read) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(300):
        v.update_inplace(add_one)
    stop.set()
    for t in threads:
        t.join()
    assert not torn
    assert v.numpy()[0] == 300


def test_concurrent_updates_all_count():
    v = tf.Variable(np.zeros(10))

    def work():
        for _ in range(200):
            v.assign_add(np.ones(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert v.numpy().tolist() == [800] * 10


def test_variable_computes_like_a_tensor():
    v = tf.Variable([1.0, 2.0])
    assert ((2.0 * v - v / 2.0) ** 2.0).numpy().tolist() == [2.25, 9.0]
    assert (v > 1.0).numpy().tolist() == [False, True]
    assert (np.array([1, 1], np.float32) + v).numpy().tolist() == [2.0, 3.0]
    assert len(v) == 2
    assert [float(t) for t in v] == [1.0, 2.0]
    assert f"{tf.Variable(1.25):.1f}" == "1.2"
    assert bool(tf.Variable(True))
    assert [10, 20][tf.Variable(1)] == 20
    assert {v: 1}[v] == 1
    assert np.asarray(v).flags.writeable is False
    copied = v.numpy()
    copied[0] = 9
    assert v.numpy()[0] == 1


# Rows --------------------------------------------------------------------------------------------

SCATTER = {
    "scatter_add": [6.0 + 2.0 + 3.0, 6.0, 7.0],
    "scatter_sub": [6.0 - 2.0 - 3.0, 6.0, 5.0],
    "scatter_mul": [6.0 * 2.0 * 3.0, 6.0, 6.0],
    "scatter_div": [6.0 / 2.0 / 3.0, 6.0, 6.0],
    "scatter_min": [2.0, 6.0, 1.0],
    "scatter_max": [6.0, 6.0, 6.0],
    "scatter_update": [3.0, 6.0, 1.0],
}


def rows(values, indices, dtype="float32"):
    return tf.IndexedSlices(tf.constant(np.array(values, dtype)), tf.constant(indices))


@pytest.mark.parametrize("method", SCATTER)
def test_scatter_methods_change_rows_in_order(method):
    v = tf.Variable(np.full((3, 2), 6.0, "float32"))
    held = v.value()
    # Equal indices are applied one after the other, in order.
    result = getattr(v, method)(rows([[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]], [0, 2, 0]))
    assert result is v
    np.testing.assert_allclose(v.numpy()[:, 0], SCATTER[method], rtol=1e-6)
    np.testing.assert_array_equal(v.numpy()[:, 0], v.numpy()[:, 1])
    np.testing.assert_array_equal(held.numpy(), 6.0)
    getattr(v, method)(rows(np.zeros((0, 2)), np.zeros(0, "int64")))
    np.testing.assert_allclose(v.numpy()[:, 0], SCATTER[method], rtol=1e-6)


@pytest.mark.parametrize("method", SCATTER)
def test_scatter_methods_refuse_bad_rows(method):
    v = tf.Variable(np.full((3, 2), 6.0, "float32"), name="w")
    write = getattr(v, method)
    with pytest.raises(TypeError, match=f"{method}: sparse_delta is not IndexedSlices: 3"):
        write(3)
    with pytest.raises(ValueError, match=rf"{method}: variable 'w' has shape \(3, 2\).*\(1, 3\)"):
        write(rows([[1.0, 2.0, 3.0]], [0]))
    with pytest.raises(ValueError, match="dtype float32, the rows have .* dtype float64"):
        write(rows([[1.0, 2.0]], [0], "float64"))
    for index in (-1, 3):
        with pytest.raises(
            ValueError, match=rf"indices from {index} to {index} are not all in 0 to 2"
        ):
            write(rows([[1.0, 2.0]], [index]))
    with pytest.raises(ValueError, match=r"has shape \(\)"):
        getattr(tf.Variable(1.0), method)(rows([1.0], [0]))
    assert v.numpy().tolist() == [[6.0, 6.0]] * 3


def test_scatter_add_of_ints_adds_repeated_rows():
    v = tf.Variable([6, 6], dtype="int64")
    v.scatter_add(rows([5, 5], [1, 1], "int64"))
    assert v.numpy().tolist() == [6, 16]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_scatter_div_of_ints_rounds_towards_zero(dtype):
    v = tf.Variable(np.array([7, 100, 5], dtype))
    assert v.scatter_div(rows([2, 3, 3], [0, 1, 1], dtype)) is v
    assert v.dtype == dtype
    assert v.numpy().tolist() == [3, 11, 5]
    with pytest.raises(InvalidArgumentError, match="Integer division by zero.* have a 0"):
        v.scatter_div(rows([0], [1], dtype))
    if dtype.startswith("int"):
        least = int(np.iinfo(dtype).min)
        v = tf.Variable(np.array([-7, 7, -7, least, least], dtype))
        v.scatter_div(rows([2, -2, -2, 2, 1], [0, 1, 2, 3, 4], dtype))
        assert v.numpy().tolist() == [-3, -3, 3, least // 2, least]
    v = tf.Variable(np.array([[7, 8], [9, 10]], dtype))
    v.scatter_div(rows([[2, 4]], [1], dtype))
    assert v.numpy().tolist() == [[7, 8], [4, 2]]


def test_scatter_div_of_bools_is_refused():
    v = tf.Variable([True, False])
    with pytest.raises(TypeError, match="has dtype bool; only numbers can be divided"):
        v.scatter_div(rows([True], [1], "bool"))


# Creation ----------------------------------------------------------------------------------------


def test_creators_are_called_from_the_inside_out():
    calls = []

    def creator(tag):
        def create(next_creator, **kwargs):
            calls.append((tag, sorted(kwargs)))
            kwargs["name"] = tag + kwargs["name"]
            return next_creator(**kwargs)

        return create

    with tf.creator_scope(creator("a")), tf.creator_scope(creator("b")):
        v = tf.Variable(1.0, False, name="x")
    keys = ["initial_value", "name", "trainable"]
    assert calls == [("b", keys), ("a", keys)]
    assert v.name == "abx"
    assert v.trainable is False
    assert tf.Variable(1.0, name="y").name == "y"


def test_a_creator_may_make_something_else_and_subclasses_bypass_it():
    class Mirrored(tf.Variable):
        pass

    def create(next_creator, **kwargs):
        return (next_creator(**kwargs), Mirrored(kwargs["initial_value"]))

    with tf.creator_scope(create):
        first, second = tf.Variable(2.0)
    assert type(first) is tf.Variable
    assert type(second) is Mirrored


def test_creators_belong_to_their_thread():
    variables = []
    with tf.creator_scope(lambda next_creator, **kwargs: None):
        thread = threading.Thread(target=lambda: variables.append(tf.Variable(1.0)))
        thread.start()
        thread.join()
    assert isinstance(variables[0], tf.Variable)


def test_a_creator_scope_ends_with_an_exception():
    with pytest.raises(KeyError), tf.creator_scope(lambda next_creator, **kwargs: None):
        raise KeyError
    assert isinstance(tf.Variable(1.0), tf.Variable)


def test_creator_scopes_left_out_of_order_raise():
    def same(next_creator, **kwargs):
        return next_creator(**kwargs)

    outer, inner = tf.creator_scope(same), tf.creator_scope(same)
    outer.__enter__()
    inner.__enter__()
    for scope in (outer, inner):
        with pytest.raises(
            RuntimeError, match="Exiting variable_creator_scope without proper nest"
        ):
            scope.__exit__(None, None, None)
        assert creators.stack == ()


def test_a_deep_copy_is_a_variable_of_its_own():
    v = tf.Variable([1.0, 2.0], trainable=False, name="w")
    with tf.creator_scope(lambda next_creator, **kwargs: None):
        w, again = copy.deepcopy([v, v])
    assert w is again
    v.assign([0.0, 0.0])
    assert w.numpy().tolist() == [1.0, 2.0]
    assert (type(w), w.name, w.trainable) == (tf.Variable, "w", False)


def test_unknown_arguments_are_errors_with_and_without_creators():
    with pytest.raises(TypeError, match="colour"):
        tf.Variable(1.0, colour=1)
    with (
        tf.creator_scope(lambda next_creator, **kwargs: next_creator(**kwargs)),
        pytest.raises(TypeError, match="colour"),
    ):
        tf.Variable(1.0, colour=1)


def test_update_together_changes_all_variables_also_if_the_function_raises():
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([3])
    before = a.read_value()

    def update(arrays):
        x, y = arrays
        x *= 2
        y += 1
        raise KeyError

    with pytest.raises(KeyError):
        update_together([a, b], update)
    assert a.numpy().tolist() == [2.0, 4.0]
    assert b.numpy().tolist() == [4]
    assert before.numpy().tolist() == [1.0, 2.0]  # a value that was read does not change
    with pytest.raises(RuntimeError):
        update_together([a, b, a], update)
    assert [a.numpy().tolist(), b.numpy().tolist()] == [[2.0, 4.0], [4]]


def test_updates_of_the_same_variables_in_opposite_orders_do_not_deadlock():
    a, b = tf.Variable(0.0), tf.Variable(0.0)

    def add(arrays):
        for array in arrays:
            array += 1

    def work(variables):
        for _ in range(300):
            update_together(variables, add)

    threads = [threading.Thread(target=work, args=(v,)) for v in ([a, b], [b, a])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [float(a), float(b)] == [600.0, 600.0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("shape", [(5,), (300, 200)])
def test_assign_add_and_sub_change_small_and_large_variables_but_no_read_value(dtype, shape):
    start = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    variable = tf.Variable(start)
    before = variable.value()
    variable.assign_add(tf.ones(shape, dtype))
    assert np.array_equal(variable.numpy(), start + 1)
    variable.assign_sub(start)
    variable.assign_sub(variable)
    assert not variable.numpy().any()
    assert np.array_equal(before.numpy(), start)  # a value that was read does not change


def test_large_ones_do_not_share_memory():
    one, other = tf.ones((300, 200)), tf.ones((300, 200))
    assert (one.numpy() == 1).all() and not np.shares_memory(one.array, other.array)


def test_variable_is_pickled_with_its_attributes():
    v = tf.Variable(np.arange(3, dtype=np.float16), trainable=False, name="counts")
    copied = pickle.loads(pickle.dumps(v))
    assert (copied.name, copied.trainable, copied.dtype) == (v.name, False, v.dtype)
    copied.assign_add([1, 1, 1])
    assert v.numpy().tolist() == [0, 1, 2]
    assert copied.numpy().tolist() == [1, 2, 3]


@pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "**="])
def test_operator_in_place_raises_and_names_the_assignment(operator):
    variable = tf.Variable(2.0, name="v")
    with pytest.raises(
        RuntimeError, match=r"would replace the variable 'v' .* use `variable.assign"
    ):
        exec(f"variable {operator} 3.0", {"variable": variable})
    assert float(variable) == 2


def test_references_are_equal_for_one_variable_only():
    one, other = tf.Variable(1.0), tf.Variable(1.0)
    assert {one.ref(): "one", other.ref(): "other"}[one.ref()] == "one"
    assert one.ref().deref() is one and one.ref() != other.ref()
