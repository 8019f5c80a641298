"""`cond`, `while_loop`, `print`, `py_function` and `numpy_function`."""

from __future__ import annotations

import io

import numpy as np
import pytest

import pycollective as tf


def test_cond_calls_one_function():
    calls = []
    assert tf.cond(tf.constant(1.0) > 0, lambda: "yes", lambda: calls.append(1)) == "yes"
    assert tf.cond(False, lambda: calls.append(1), lambda: "no") == "no"
    assert calls == []
    with pytest.raises(TypeError, match="'false_fn' must be callable, got None"):
        tf.cond(True, lambda: 1)


def test_while_loop_returns_the_structure_and_its_gradient():
    with tf.GradientTape() as tape:
        x = tf.constant(3.0)
        tape.watch(x)
        n, (power,) = tf.while_loop(
            lambda n, p: n < 4, lambda n, p: (n + 1, (p[0] * x,)), (0, (x,))
        )
    assert int(n) == 4 and float(power) == 3.0**5
    assert float(tape.gradient(power, x)) == 5 * 3.0**4


def test_while_loop_variables_keep_their_keys_in_another_order():
    ((counts),) = tf.while_loop(
        lambda c: c["steps"] < 3,
        lambda c: [{"power": c["power"] * 2, "steps": c["steps"] + 1}],
        [{"steps": 0, "power": 1}],
    )
    assert {key: int(value) for key, value in counts.items()} == {"steps": 3, "power": 8}


def test_while_loop_ends_at_maximum_iterations_and_has_no_gradient_without_back_prop():
    with tf.GradientTape() as tape:
        x = tf.constant(2.0)
        tape.watch(x)
        (y,) = tf.while_loop(
            lambda y: True, lambda y: y * x, [x], maximum_iterations=3, back_prop=False
        )
    assert float(y) == 16.0
    assert tape.gradient(y, x) is None


def test_while_loop_wrong_arguments_and_results_raise():
    with pytest.raises(ValueError, match="'body' returned 1 values for 2 loop variables"):
        tf.while_loop(lambda a, b: True, lambda a, b: a, [1, 2])
    with pytest.raises(ValueError, match="'loop_vars' must be a list or tuple that is not empty"):
        tf.while_loop(lambda: True, lambda: None, [])
    with pytest.raises(TypeError, match="'body' must be callable"):
        tf.while_loop(lambda a: True, 3, [1])


def test_py_function_has_gradients_and_numpy_function_has_none():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        squares = tf.py_function(lambda v: v * v, [x], tf.float32)
        (halves,) = tf.numpy_function(lambda v: v / 2, [x], [np.float32])
    np.testing.assert_array_equal(tape.gradient(squares, x), [2.0, 4.0])
    assert tape.gradient(halves, x) is None
    with pytest.raises(ValueError, match="read-only"):  # it is the variable's memory
        tf.numpy_function(lambda v: v.fill(0), [x], [])
    np.testing.assert_array_equal(halves, [0.5, 1.0])
    assert tf.py_function(lambda v: None, [x], []) == []
    with pytest.raises(ValueError, match="returned 1 results, 'Tout' has 2 dtypes"):
        tf.py_function(lambda v: v, [x], [tf.float32, tf.float32])
    with pytest.raises(TypeError):
        tf.py_function(lambda v: v, [x], tf.int32)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (("loss", tf.constant(0.5)), "loss 0.5\n"),
        ((tf.constant([1.0, 2.5, 1e-9]),), "[1 2.5 1e-09]\n"),
        ((tf.constant([[1, 2], [3, 4]]),), "[[1 2]\n [3 4]]\n"),
        ((np.arange(10),), "[0 1 2 ... 7 8 9]\n"),
        (({"a": [tf.constant(1), "b"], "c": (2,)},), "{'a': [1, 'b'], 'c': (2,)}\n"),
        ((None, True), "None True\n"),
    ],
)
def test_print_writes_values(values, text):
    stream = io.StringIO()
    tf.print(*values, output_stream=stream)
    assert stream.getvalue() == text


def test_print_goes_to_the_standard_error_or_a_file(tmp_path, capsys):
    tf.print("a", tf.constant(range(8)), summarize=-1, end="")
    assert capsys.readouterr() == ("", "a [0 1 2 3 4 5 6 7]")
    for _ in range(2):
        tf.print("line", output_stream=f"file://{tmp_path}/out")
    assert (tmp_path / "out").read_text() == "line\nline\n"
    with pytest.raises(ValueError, match="'output_stream' is a file object"):
        tf.print("a", output_stream="stdout")


def test_run_functions_eagerly_sets_functions_run_eagerly():
    assert not tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        assert tf.config.functions_run_eagerly()
    finally:
        tf.config.run_functions_eagerly(False)
    assert not tf.config.functions_run_eagerly()


def test_printing_function_is_called_for_each_row():
    stream = io.StringIO()

    def show(x):
        tf.print(x, output_stream=stream)
        return x

    assert len(list(tf.data.Dataset.from_tensor_slices([1, 2, 3]).map(show))) == 3
    assert stream.getvalue() == "1\n2\n3\n"


def test_numpy_function_takes_python_types_as_dtypes():
    assert tf.numpy_function(lambda a: a, [np.float32([1])], float).dtype == np.float32
    assert tf.numpy_function(lambda: np.int32(1), [], int).dtype == np.int32
