"""`GradientTape`: sources, nested tapes, memory, and custom gradients."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import pycollective.tensor as tf
from pycollective.tensor.tape import thread_state


def value(gradient):
    return None if gradient is None else gradient.numpy().tolist()


def test_variables_are_watched_when_they_are_read():
    w, b = tf.Variable([[1.0], [2.0]]), tf.Variable([3.0])
    frozen = tf.Variable([5.0], trainable=False)
    with tf.GradientTape() as tape:
        y = tf.constant([[1.0, 4.0]]) @ w + b * frozen
    assert tape.watched_variables() == (w, b)
    dw, (db, none) = tape.gradient(y, [w, (b, frozen)])
    assert value(dw) == [[1.0], [4.0]]
    assert value(db) == [5.0]
    assert none is None
    assert tape.watched_variables() == (w, b)


def test_variable_whose_value_is_watched_is_watched_too_when_it_is_read():
    variable = tf.Variable(2.0)
    value = tf.convert_to_tensor(variable)
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = variable * 3.0
    assert float(tape.gradient(result, variable)) == 3.0


def test_watch_accessed_variables_false_watches_no_variable_by_itself():
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(b)
        y = a * b
    assert [value(g) for g in tape.gradient(y, [a, b])] == [None, 2.0]


def test_structure_of_sources_is_kept():
    v = {"a": tf.Variable(2.0), "b": [tf.Variable(3.0)]}
    with tf.GradientTape() as tape:
        y = v["a"] * v["b"][0]
    gradients = tape.gradient(y, v)
    assert value(gradients["a"]) == 3.0
    assert value(gradients["b"][0]) == 2.0


def test_gradient_of_several_targets_is_their_sum_weighted_by_output_gradients():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        y, z = x * x, x * 3.0
    assert value(tape.gradient([y, z], x)) == [5.0, 7.0]
    assert value(tape.gradient([y, y], x)) == [4.0, 8.0]
    weights = [[10.0, 1.0], [0.0, 1.0]]
    weights = [tf.constant(w) for w in weights]
    assert value(tape.gradient([y, z], x, output_gradients=weights)) == [20.0, 7.0]
    with pytest.raises(ValueError, match=r"shape \(3,\).*has \(2,\)"):
        tape.gradient(y, x, output_gradients=tf.constant([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="1 values for 2 targets"):
        tape.gradient([y, z], x, output_gradients=[tf.constant([1.0, 2.0])])


def test_source_is_the_target_or_an_intermediate_result():
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
        z = y * y + y
    assert [value(g) for g in tape.gradient(z, [x, y, z])] == [114.0, 19.0, 1.0]


def test_variable_that_is_source_and_target_has_gradient_one():
    x = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
    assert value(tape.gradient(x, x)) == [1.0, 1.0]


def test_unconnected_sources_have_none_or_zeros():
    x, y = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    with tf.GradientTape(persistent=True) as tape:
        z = y * 2.0
        tf.reduce_sum(x)
    assert tape.gradient(z, x) is None
    assert value(tape.gradient(z, x, unconnected_gradients="zero")) == [0.0, 0.0]
    assert tape.gradient(tf.constant(1.0), y) is None
    with pytest.raises(ValueError, match="'none' or 'zero', got 'ones'"):
        tape.gradient(z, x, unconnected_gradients="ones")


def test_constants_are_not_recorded_until_watched():
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        before = x * x
        tape.watch(x)
        after = x * x
    assert value(tape.gradient([before, after], x)) == 4.0


def test_integers_and_bools_are_not_recorded():
    x = tf.Variable([1.5, -2.5])
    with tf.GradientTape(persistent=True) as tape:
        whole = tf.cast(x, np.int32)
        back = tf.cast(whole, np.float32)
        sign = tf.cast(x > 0, np.float32)
    assert tape.gradient(back, x) is None
    assert tape.gradient(sign, x) is None
    with pytest.raises(TypeError, match=r"floating-point tensor, got dtype int32"):
        tape.watch(tf.constant([1, 2]))
    count = tf.Variable(1)
    with tf.GradientTape() as tape:
        y = count + 1
    assert tape.gradient(y, count) is None


def test_gradient_called_twice_raises_unless_persistent():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = x * x
    tape.gradient(y, x)
    with pytest.raises(RuntimeError, match="A non-persistent GradientTape can only be used to"):
        tape.gradient(y, x)
    with tape:
        y = x * x * x
    assert value(tape.gradient(y, x)) == 12.0


def test_entering_twice_is_an_error():
    tape = tf.GradientTape()
    with tape, pytest.raises(ValueError, match="already records"):
        tape.__enter__()
    assert not thread_state.tapes


def test_gradient_inside_of_the_block_is_right():
    x = tf.Variable(3.0)
    with tf.GradientTape(persistent=True) as tape:
        y = x * x
        assert value(tape.gradient(y, x)) == 6.0
        z = y * x
    assert value(tape.gradient(z, x)) == 27.0
    with tf.GradientTape() as tape:
        y = x * x
        assert value(tape.gradient(y, x)) == 6.0
        assert not thread_state.tapes


def test_an_exception_ends_the_recording():
    with pytest.raises(KeyError), tf.GradientTape():
        raise KeyError
    assert not thread_state.tapes


def test_stop_recording_and_stop_gradient_cut_gradients():
    x = tf.Variable(3.0)
    with tf.GradientTape(persistent=True) as tape:
        with tape.stop_recording():
            a = x * x
        b = x * 2.0
        c = tf.stop_gradient(x) * x
    assert tape.gradient(a, x) is None
    assert value(tape.gradient(b, x)) == 2.0
    assert value(tape.gradient(c, x)) == 3.0
    with pytest.raises(ValueError, match="that records"), tape.stop_recording():
        pass


def test_reset_deletes_the_record():
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
        tape.reset()
        z = x * 2.0
    assert value(tape.gradient([y, z], x)) == 2.0


def test_nested_tapes_each_see_what_they_watch():
    x, y = tf.Variable(2.0), tf.Variable(5.0)
    with tf.GradientTape() as outer:
        a = x * y
        with tf.GradientTape() as inner:
            b = x * x
        c = a + b
    assert value(inner.gradient(b, x)) == 4.0
    assert value(outer.gradient(c, x)) == 9.0


def test_overlapping_tapes_record_independently():
    x = tf.Variable(2.0)
    with tf.GradientTape() as first, tf.GradientTape() as second:
        y = x * x
        first.gradient(y, x)
        z = y * x
    assert value(second.gradient(z, x)) == 12.0


def test_second_derivative_raises_not_implemented_error():
    x = tf.Variable(3.0)
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            y = x * x * x
        dy = inner.gradient(y, x)
        penalty = tf.stop_gradient(dy) * x
    assert value(dy) == 27.0
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        outer.gradient(dy, x)
    assert value(outer.gradient(penalty, x)) == 27.0


def test_gradient_that_was_made_before_an_outer_tape_is_no_constant_to_it():
    x = tf.constant(2.0)
    with tf.GradientTape(persistent=True) as inner:
        inner.watch(x)
        y = x * x * x
    with tf.GradientTape() as outer:
        outer.watch(x)
        z = inner.gradient(y, x) * x
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        outer.gradient(z, x)


def test_gradient_of_rows_is_indexed_slices_also_while_a_tape_records():
    x = tf.Variable(tf.ones([3, 2]))
    with tf.GradientTape(persistent=True) as tape:
        y = tf.gather(x, [0, 2]) * 2.0
        inside = tape.gradient(y, x)
        total = tf.reduce_sum(inside.values)
    outside = tape.gradient(y, x)
    for found in (inside, outside):
        assert isinstance(found, tf.IndexedSlices)
        assert value(found.values) == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        tape.gradient(total, x)


def test_a_variable_assigned_between_reads_counts_both():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = x * x
        x.assign(10.0)
        y = y + x * x
    assert value(tape.gradient(y, x)) == 24.0


def test_tensor_several_times_in_one_operation_adds_its_gradients():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.add_n([x, x, x]) + (x + x)
    assert value(tape.gradient(y, x)) == [5.0, 5.0]


def test_accumulation_does_not_change_output_gradients():
    x = tf.Variable(np.arange(3.0))
    seed = tf.constant(np.ones(3))
    with tf.GradientTape() as tape:
        y = tf.identity(x)
        z = tf.add_n([y, y, y]) + y
    dy, dx = tape.gradient(z, [y, x], output_gradients=seed)
    assert value(seed) == [1.0] * 3
    assert value(dy) == value(dx) == [4.0] * 3


def test_vjp_closures_keep_their_arrays():
    """A gradient that a vjp returned for two inputs must not be changed in place."""
    x = tf.Variable([1.0, 2.0])
    y = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        shared = x + y  # gives both inputs the same gradient array
        total = shared + x + x
    gx, gy = tape.gradient(total, [x, y])
    assert value(gx) == [3.0, 3.0]
    assert value(gy) == [1.0, 1.0]


def test_gradients_are_contiguous_and_writable():
    x = tf.Variable(np.ones((3, 4)))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(x)
    array = tape.gradient(y, x).array
    assert array.flags.c_contiguous and array.flags.writeable
    assert array.strides == (32, 8)


def test_gradient_computes_only_paths_to_the_sources():
    asked = []

    def op(a, b):
        def vjp(g, need):
            asked.append(need)
            return [g if n else None for n in need]

        return tf.record(a.array + b.array, (a, b), vjp)

    w, x = tf.Variable(1.0), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        aside = op(w._read(), w._read())
        y = op(aside, x._read())
    assert value(tape.gradient(y, x)) == 1.0
    assert asked == [(False, True)]


class _Canary(np.ndarray):
    pass


def _tracked_op(x, log, name):
    array = x.array * 1.0
    canary = np.zeros(1).view(_Canary)
    weakref.finalize(canary, log.append, name)
    return tf.record(array, (x,), lambda g, _need, canary=canary: (g,))


@pytest.mark.parametrize("persistent", [False, True])
def test_gradient_frees_the_closures_that_it_has_called(persistent):
    """Closures of later operations are freed before earlier ones are called."""
    log = []
    x = tf.Variable(1.0)
    with tf.GradientTape(persistent=persistent) as tape:
        first = tf.record(
            x._read().array * 1.0, (x._read(),), lambda g, _n: (log.append("asked"), (g,))[1]
        )
        last = _tracked_op(first, log, "freed")
    tape.gradient(last, x)
    assert log == (["asked"] if persistent else ["freed", "asked"])


def test_values_that_are_not_needed_are_not_kept():
    x = tf.Variable(np.ones(1000))
    with tf.GradientTape() as tape:
        a = x + 1.0
        ref = weakref.ref(a.array)
        b = a + 1.0
        del a
        assert ref() is None
    assert tape.gradient(b, x).shape == (1000,)


def test_a_tape_makes_no_reference_cycles():
    x = tf.Variable(np.ones(10))
    gc.collect()
    gc.disable()
    try:
        with tf.GradientTape() as tape:
            y = tf.reduce_mean(tf.tanh(x * x))
        ref = weakref.ref(y.array)
        tape.gradient(y, x)
        del y, tape
        assert ref() is None
    finally:
        gc.enable()


def test_threads_have_their_own_tapes():
    x = tf.Variable(3.0)
    results, barrier = [], threading.Barrier(4)

    def replica(k):
        for _ in range(50):
            barrier.wait()
            with tf.GradientTape() as tape:
                y = x * x * float(k)
            results.append((k, value(tape.gradient(y, x))))

    with tf.GradientTape() as tape:
        threads = [threading.Thread(target=replica, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert tape.watched_variables() == ()
    assert len(results) == 200
    assert all(g == 6.0 * k for k, g in results)


def test_sources_of_wrong_type_raise_type_error():
    with tf.GradientTape() as tape:
        pass
    with pytest.raises(TypeError, match=r"gradient\(\) needs tensors and variables, got ndarray"):
        tape.gradient(tf.constant(1.0), np.ones(3))
    with pytest.raises(TypeError, match=r"watch\(\) needs tensors and variables, got float"):
        tape.watch(1.0)


def test_sources_that_stand_for_a_replicas_variable_have_its_gradient():
    component = tf.Variable(3.0)

    class Distributed:
        def local(self):
            return component

    class Value:
        def __tensor__(self):
            return tensor

    tensor = tf.constant(5.0)
    with tf.GradientTape() as tape:
        tape.watch(Value())
        y = component * component + Value().__tensor__() * 2.0
    assert [value(g) for g in tape.gradient(y, [Distributed(), Value()])] == [6.0, 2.0]


# custom_gradient ---------------------------------------------------------------------------------


def test_custom_gradient_replaces_the_recorded_one():
    @tf.custom_gradient
    def log1pexp(x):
        """Doc."""
        e = tf.exp(x)
        return tf.log(1.0 + e), lambda upstream: upstream * (1.0 - 1.0 / (1.0 + e))

    assert log1pexp.__doc__ == "Doc."
    x = tf.Variable([0.0, 100.0], dtype=np.float64)
    with np.errstate(over="ignore"), tf.GradientTape() as tape:
        y = log1pexp(x) * 2.0
    assert value(tape.gradient(y, x)) == pytest.approx([1.0, 2.0])


def test_custom_gradient_of_several_values_gets_all_upstream_gradients():
    seen = []

    @tf.custom_gradient
    def swap(a, b):
        def grad(da, db):
            seen.append((value(da), value(db)))
            return db * 10.0, da * 100.0

        return [b * 1.0, a * 1.0], grad

    a, b = tf.Variable([1.0]), tf.Variable([2.0])
    with tf.GradientTape() as tape:
        p, _q = swap(a, b)
        y = p * 3.0
    assert [value(g) for g in tape.gradient(y, [a, b])] == [[0.0], [300.0]]
    assert seen == [([3.0], [0.0])]


def test_custom_gradient_with_variables_gives_their_gradients():
    w = tf.Variable(4.0)

    @tf.custom_gradient
    def scaled(x):
        def grad(dy, variables=None):
            assert variables == [w]
            return dy * 7.0, [dy * 8.0]

        return x * w, grad

    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = scaled(x)
    assert [value(g) for g in tape.gradient(y, [x, w])] == [7.0, 8.0]

    @tf.custom_gradient
    def careless(x):
        return x * w, lambda dy: dy

    with pytest.raises(TypeError, match=r"careless reads trainable variables \(Variable\)"):
        careless(x)


def test_custom_gradient_of_wrong_number_or_shape_raises_value_error():
    @tf.custom_gradient
    def too_few(x, y):
        return x + y, lambda dy: dy

    @tf.custom_gradient
    def wrong_shape(x):
        return x * 1.0, lambda dy: tf.reduce_sum(dy)

    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        a, b = too_few(x, x), wrong_shape(x)
    with pytest.raises(ValueError, match="returned 1 gradients for 2"):
        tape.gradient(a, x)
    with pytest.raises(ValueError, match=r"returned shape \(\) .* of shape \(2,\)"):
        tape.gradient(b, x)


def test_custom_gradient_of_another_precision_is_converted():
    @tf.custom_gradient
    def double(x):
        return x * 2.0, lambda dy: tf.cast(dy * 2.0, "float32")

    v = tf.Variable(np.array([1.0, 2.0]))
    with tf.GradientTape() as tape:
        y = double(v * 3.0)
    gradient = tape.gradient(y, v)
    assert gradient.dtype == np.float64
    assert gradient.numpy().tolist() == [6.0, 6.0]


def test_output_gradients_belong_to_the_targets_of_their_keys():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        targets = {"square": x * x, "triple": x * 3.0}
    weights = {"triple": tf.zeros([2]), "square": tf.ones([2])}
    np.testing.assert_array_equal(tape.gradient(targets, x, weights), [2.0, 4.0])
