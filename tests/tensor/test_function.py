"""`tf.function`: signatures, `input_signature`, variables, methods and concrete functions.

The expected counts and the classes of errors are those of TensorFlow 2.21, unless a comment names the
difference.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import logging
import pickle
import weakref
from collections import OrderedDict

import numpy as np
import pytest

import pycollective as tf

SCALAR = tf.TensorSpec((), tf.float32)
PAIRS = tf.TensorSpec((None, 2), tf.float32)


@tf.function
def double(x):
    """Return twice x."""
    return x * 2


def count_of(*calls, **options):
    """Return the number of signatures after these calls; a call is its positional arguments."""
    f = tf.function(lambda *args: None, **options)
    for args in calls:
        f(*args)
    return f.experimental_get_tracing_count()


def ones(*shape, dtype=tf.float32):
    return tf.ones(shape, dtype)


V, W, PAIR = tf.Variable(1.0), tf.Variable(2.0), tf.Variable([1.0, 2.0])


class Plain:
    pass


ONE = Plain()


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(ones(2),), (ones(2) * 3,)], 1),
        ([(ones(2),), (ones(3),)], 2),
        ([(ones(2),), (ones(2, dtype=tf.int32),)], 2),
        ([(ones(2),), (np.ones(2, np.float32),)], 1),
        ([(np.float32(1),), (np.float32(2),)], 1),
        ([(1,), (2,), (1,)], 2),
        ([(1,), (True,), (1.0,)], 1),
        ([(float("nan"),), (float("nan"),)], 1),
        ([("a",), (b"a",), ("a",), (None,)], 3),
        ([([1],), ((1,),)], 2),
        ([([ones(2), 1],), ([ones(2), 1],), ([ones(2), 2],)], 2),
        ([({"a": 1, "b": 2},), ({"b": 2, "a": 1},), ({"a": 1},)], 2),
        ([(OrderedDict(a=1),), ({"a": 1},)], 1),
        ([(ones(1), ones(2)), ([ones(1), ones(2)],)], 2),
        ([(V,), (W,)], 1),
        ([(V,), (PAIR,)], 2),
        ([(V, W), (W, V), (V, V)], 2),
        ([(V,), (tf.constant(1.0),)], 2),
        ([(ONE,), (ONE,), (Plain(),)], 2),
        ([(tf.float32,), (tf.int32,)], 2),
        ([(slice(1, 2),), (bytearray(b"1"),)], 2),
        ([(range(3),), (range(3),), (range(4),)], 2),
    ],
    ids=str,
)
def test_tracing_count_is_number_of_signatures(calls, expected):
    assert count_of(*calls) == expected


def test_tracing_count_iterators_of_one_class_are_alike():
    data = tf.data.Dataset.range(3)
    assert count_of((iter(data),), (iter(data),)) == 1
    assert count_of((data,), (tf.data.Dataset.range(4),)) == 1


def test_tracing_count_keyword_and_default_arguments_are_alike():
    @tf.function
    def f(x=3, y=4, *, z=5, **rest):
        return x

    for args, kwargs in [((), {}), ((3,), {}), ((), {"x": 3}), ((3, 4), {"z": 5})]:
        assert f(*args, **kwargs) == 3
    assert f.experimental_get_tracing_count() == 1
    f(3, z=6)
    f(3, w=6)
    f({"w": 6})
    assert f.experimental_get_tracing_count() == 4


def test_tracing_count_dead_object_does_not_equal_a_later_one():
    f = tf.function(lambda x: None)
    for _ in range(3):
        f(Plain())  # these may have one address
    assert f.experimental_get_tracing_count() == 3


@pytest.mark.parametrize(
    ("calls", "counts"),
    [
        ([(ones(1),), (ones(2),), (ones(3),), (ones(2, 2),), (ones(2, 2, 2),)], [1, 2, 2, 3, 3]),
        ([(1,), (2,), (3,)], [1, 2, 3]),
        ([(1, ones(1)), (2, ones(2)), (2, ones(3)), (2, ones(4))], [1, 2, 3, 3]),
    ],
)
@pytest.mark.parametrize("option", ["reduce_retracing", "experimental_relax_shapes"])
def test_reduce_retracing_joins_signatures_of_several_shapes(calls, counts, option):
    f = tf.function(lambda *args: None, **{option: True})
    found = []
    for args in calls:
        f(*args)
        found.append(f.experimental_get_tracing_count())
    assert found == counts


def test_tracing_count_failed_call_does_not_count():
    @tf.function
    def f(x):
        if x == 1:
            raise ZeroDivisionError
        return x

    with pytest.raises(ZeroDivisionError):
        f(1)
    assert f.experimental_get_tracing_count() == 0
    f(2)
    assert f.experimental_get_tracing_count() == 1


def test_wrong_arguments_raise_type_error_with_the_function_name():
    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"x": 1}), ((1,), {"y": 1})]:
        with pytest.raises(TypeError, match=r"double\(\)"):
            double(*args, **kwargs)


def test_python_function_runs_at_every_call():
    # TensorFlow calls it once for each signature.
    calls = []
    f = tf.function(lambda x: calls.append(x))
    for _ in range(3):
        f(1)
    assert calls == [1, 1, 1]


def test_end_of_an_iterator_in_a_function_is_out_of_range():
    """Outside of functions it is a StopIteration, as in TensorFlow."""
    iterator = iter(tf.data.Dataset.range(2))

    @tf.function
    def step(iterator):
        return next(iterator) * 2

    found = []
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        while True:
            found.append(int(step(iterator)))
    assert found == [0, 2]
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(3).batch(2)))
    train = tf.function(
        lambda: strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(next(batches),)), None)
    )
    assert [int(train()), int(train())] == [1, 2]
    with pytest.raises(tf.errors.OutOfRangeError):
        train()


def test_signature_of_a_distributed_dataset():
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = np.arange(5, dtype=np.float32)
    source = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(4)
    dataset = strategy.experimental_distribute_dataset(source)

    @tf.function(input_signature=[dataset.element_spec])
    def total(pair):
        per_replica = strategy.run(lambda x, y: tf.reduce_sum(x + y), args=pair)
        return strategy.experimental_local_results(per_replica)

    assert [[float(v) for v in total(pair)] for pair in dataset] == [[2.0, 10.0], [8.0, 0.0]]
    for wrong in (
        tf.constant(rows),
        next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4)))),
    ):
        with pytest.raises(TypeError, match="must fit"):
            total((wrong, wrong))


def test_many_signatures_are_counted_and_not_kept(monkeypatch):
    module = inspect.getmodule(type(double))
    monkeypatch.setattr(module, "_MOST_SIGNATURES", 3)
    f = tf.function(lambda x: None)
    for n in range(5):
        f(n)
    f(0)
    assert f.experimental_get_tracing_count() == 5


class TestInputSignature:
    """`input_signature`."""

    @staticmethod
    def f(**options):
        return tf.function(lambda x: x, input_signature=[PAIRS], **options)

    @pytest.mark.parametrize(
        "value",
        [[[1, 2]], [[1.0, 2.0]], np.ones((1, 2)), np.ones((1, 2), int), ((1, 2),)],
        ids=repr,
    )
    def test_arrays_and_lists_become_tensors_of_the_dtype(self, value):
        result = self.f()(value)
        assert (
            isinstance(result, tf.Tensor) and result.dtype == tf.float32 and result.shape == (1, 2)
        )

    @pytest.mark.parametrize(
        "value",
        [
            ones(3, 3),
            ones(3),
            ones(3, 2, dtype=tf.float64),
            ones(3, 2, dtype=tf.int32),
            tf.Variable([1.0, 2.0]),
            [1.0, 2.0],
            [[1.0], [2.0, 3.0]],
            "a",
            None,
            object(),
            [ones(1, 2)],
        ],
        ids=repr,
    )
    def test_other_shape_or_dtype_raises_type_error(self, value):
        with pytest.raises(TypeError, match="must fit TensorSpec"):
            self.f()(value)

    def test_lengths_of_none_vary_and_all_calls_have_one_signature(self):
        f = self.f()
        for rows in range(8):
            x = ones(rows, 2)
            assert f(x) is x
        f(x=ones(9, 2))
        assert f.experimental_get_tracing_count() == 1
        assert f.input_signature == (PAIRS,)
        assert double.input_signature is None

    def test_unknown_rank_accepts_each_shape(self):
        f = tf.function(lambda x: x, input_signature=[tf.TensorSpec(None, tf.float32)])
        assert f(ones(1, 2, 3)).shape == (1, 2, 3)

    def test_variable_is_read_and_has_a_gradient(self):
        v = tf.Variable([[1.0, 2.0]])
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(self.f()(v) * 3.0)
        np.testing.assert_array_equal(tape.gradient(y, v), [[3.0, 3.0]])

    def test_default_value_without_a_spec_must_stay(self):
        f = tf.function(lambda x, y=2, *, z=3: (y, z), input_signature=[SCALAR])
        assert f(1.0) == f(1.0, 2) == f(1.0, 2, z=3) == (2, 3)
        with pytest.raises(TypeError, match="y must be 2, got 3"):
            f(1.0, 3)
        with pytest.raises(TypeError, match="z must be 3, got 4"):
            f(1.0, z=4)

    def test_nested_specs_check_the_structure(self):
        f = tf.function(lambda d: d["a"][0], input_signature=[{"a": [SCALAR], "b": SCALAR}])
        assert float(f({"b": 1.0, "a": [2.0]})) == 2.0
        for value in ({"a": [1.0]}, {"a": (1.0,), "b": 1.0}, {"a": [1.0, 2.0], "b": 1.0}, [1.0]):
            with pytest.raises(TypeError, match="must have the structure"):
                f(value)
        with pytest.raises(TypeError, match=r"d\['a'\]\[0\] must fit"):
            f({"a": [[1.0]], "b": 1.0})

    def test_variadic_arguments_take_the_rest(self):
        f = tf.function(lambda *x: x[1], input_signature=[SCALAR, SCALAR])
        assert float(f(1.0, 2.0)) == 2.0
        for args in ((1.0,), (1.0, 2.0, 3.0)):
            with pytest.raises(TypeError, match="must have the structure"):
                f(*args)
        g = tf.function(lambda x, **rest: x, input_signature=[SCALAR])
        assert float(g(1.0)) == 1.0
        with pytest.raises(TypeError, match="rest"):
            g(1.0, q=2.0)

    @pytest.mark.parametrize(
        ("f", "signature", "message"),
        [
            (lambda x, y: 1, [SCALAR], "no spec for the argument 'y'"),
            (lambda x, *, y: 1, [SCALAR], "no spec for the argument 'y'"),
            (lambda x: 1, [SCALAR, SCALAR], "1 more specs"),
            (lambda x: 1, [], "no spec for the argument 'x'"),
            (lambda x: 1, [tf.float32], "must consist of TensorSpec"),
            (lambda x: 1, SCALAR, "must be a list or a tuple"),
        ],
    )
    def test_signature_that_does_not_fit_the_function_raises_type_error(
        self, f, signature, message
    ):
        with pytest.raises(TypeError, match=message):
            tf.function(f, input_signature=signature)

    def test_run_functions_eagerly_checks_nothing(self):
        f, x = self.f(), ones(1, dtype=tf.int32)
        tf.config.run_functions_eagerly(True)
        try:
            assert f(x) is x
            assert f.experimental_get_tracing_count() == 0
        finally:
            tf.config.run_functions_eagerly(False)


def test_variable_of_first_call_is_kept_and_of_later_call_raises_value_error():
    kept = {}

    @tf.function
    def f(key):
        if key not in kept:
            kept[key] = tf.Variable(1.0, name="weights")
        return kept[key]

    assert f(1) is f(1)
    with pytest.raises(ValueError, match="variable 'weights' in a call that is not its first"):
        f(2)
    tf.Variable(1.0)  # outside of the call, variables can be created


def test_variable_in_later_call_local_variable_raises_value_error():
    f = tf.function(lambda: tf.Variable(1.0) + 1.0)
    f()  # TensorFlow raises here already
    with pytest.raises(ValueError, match="not its first"):
        f()


def test_variable_in_later_call_layer_optimizer_and_metric_raise_value_error():
    makers = [
        lambda: tf.keras.layers.Dense(2)(ones(1, 2)),
        lambda: tf.keras.optimizers.Adam().apply_gradients([(tf.constant(1.0), V)]),
        lambda: tf.keras.metrics.Mean().update_state(1.0),
    ]
    for make in makers:
        f = tf.function(make)
        f()
        with pytest.raises(ValueError, match="not its first"):
            f()


def test_variable_in_later_call_after_failed_first_call_is_created():
    fails = [True, False]

    @tf.function
    def f():
        if fails.pop(0):
            raise ZeroDivisionError
        return tf.Variable(1.0)

    with pytest.raises(ZeroDivisionError):
        f()
    f()


def test_variable_in_nested_function_outer_later_call_raises_value_error():
    inner = tf.function(lambda: tf.Variable(1.0))
    outer = tf.function(lambda create: inner() if create else None)
    outer(False)
    with pytest.raises(ValueError, match="not its first"):
        outer(True)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("inside", [True, False])
def test_variable_of_replicas_first_run_creates_and_later_raises(replicas, inside):
    strategy = tf.distribute.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])
    kept = {}

    def step(key):
        if key not in kept:
            kept[key] = tf.Variable(1.0, name="w")
        return kept[key] * 1.0

    if inside:
        step = tf.function(step)
        run = functools.partial(strategy.run, step)
    else:
        plain = step
        run = tf.function(lambda args: strategy.run(plain, args))
    run(args=(1,))
    run(args=(1,))
    with pytest.raises(ValueError, match="not its first"):
        run(args=(2,))


def test_run_functions_eagerly_lets_each_call_create_variables():
    f = tf.function(lambda: tf.Variable(1.0))
    tf.config.run_functions_eagerly(True)
    try:
        assert f() is not f()
    finally:
        tf.config.run_functions_eagerly(False)


class Model:
    """An object with methods that are functions."""

    weight = None

    @tf.function
    def add(self, x, y=0.0):
        """Return the sum with the weight."""
        if self.weight is None:
            self.weight = tf.Variable(x)
        return self.weight + x + y

    @tf.function(input_signature=[SCALAR])
    def same(self, x):
        return x

    @classmethod
    @tf.function
    def name(cls):
        return cls.__name__

    @staticmethod
    @tf.function
    def one():
        return 1


class TestMethods:
    """Functions of classes."""

    def test_each_object_has_its_own_first_call(self):
        a, b = Model(), Model()
        assert float(a.add(1.0)) == 2.0 and float(a.add(2.0)) == 3.0 and float(b.add(2.0)) == 4.0
        assert a.add is a.add and a.add is not b.add
        counts = [f.experimental_get_tracing_count() for f in (a.add, b.add, Model.add)]
        assert counts == [2, 1, 0]
        a.weight = None
        with pytest.raises(ValueError, match="not its first"):
            a.add(1.0)
        assert Model().name() == "Model" and Model().one() == Model.one() == 1

    def test_method_of_temporary_object_keeps_the_object(self):
        # TensorFlow raises AttributeError: its methods do not keep their object.
        add = Model().add
        gc.collect()
        assert float(add(4.0)) == 8.0
        assert float(Model().add(4.0)) == 8.0

    def test_objects_are_freed(self):
        model = Model()
        model.add(1.0)
        reference = weakref.ref(model)
        del model
        assert reference() is None

    def test_attributes_and_signature_are_those_of_a_method(self):
        model = Model()
        assert (model.add.__name__, model.add.name) == ("add", "add")
        assert model.add.__doc__ == "Return the sum with the weight."
        assert list(inspect.signature(model.add).parameters) == ["x", "y"]
        assert list(inspect.signature(Model.add).parameters) == ["self", "x", "y"]
        assert model.add.__self__ is model
        assert model.add.python_function.__func__ is Model.add.python_function
        assert model.same.input_signature == (SCALAR,)
        assert float(Model.same(model, 2.0)) == 2.0
        with pytest.raises(TypeError, match="must fit"):
            model.same([1.0])
        assert copy.deepcopy(model.add).__self__ is not model

    def test_object_without_weak_references_is_an_argument(self):
        class Slots:
            __slots__ = ()
            f = tf.function(lambda self, x: x)

        assert Slots().f(3) == 3

    def test_layer_call_and_train_step_are_functions(self):
        class Scale(tf.keras.layers.Layer):
            def build(self, shape):
                self.w = self.add_weight(shape=(), initializer="ones")

            @tf.function
            def call(self, x, training=False):
                return x * self.w * (2.0 if training else 1.0)

        class CustomSequential(tf.keras.Sequential):
            @tf.function
            def train_step(self, data):
                return super().train_step(data)

        layer = Scale()
        assert float(tf.reduce_sum(layer(ones(1, 2), training=True))) == 4.0
        model = CustomSequential([Scale(), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), epochs=2, verbose=0)


def test_attributes_are_those_of_the_python_function():
    assert double.python_function is double.__wrapped__
    assert (double.name, double.__name__, double.__doc__) == ("double", "double", "Return twice x.")
    assert list(inspect.signature(double).parameters) == ["x"]
    assert tf.function(functools.partial(max, 1)).name == "function"
    assert tf.function(max)(1, 2) == 2
    assert "double" in repr(double)
    with pytest.raises(TypeError, match="callable"):
        tf.function(3)


def test_function_of_object_or_function_has_no_attributes_of_it():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    outer = tf.function(model, reduce_retracing=True)
    for rows in range(1, 5):
        assert outer(ones(rows, 2)).shape == (rows, 1)
    assert outer.experimental_get_tracing_count() == 2
    assert not hasattr(outer, "_trainable") and outer.name == "function"

    inner = Model().add
    again = tf.function(inner)
    assert float(again(1.0)) == float(again(1.0)) == 2.0
    assert again.experimental_get_tracing_count() == 1 and again.python_function is inner
    assert not hasattr(again, "__self__") and again.name == "add"


def test_copies_and_pickles_are_the_function_itself():
    assert copy.copy(double) is copy.deepcopy(double) is double
    assert pickle.loads(pickle.dumps(double)) is double


def test_all_arguments_of_tensorflow_are_accepted():
    f = tf.function(
        lambda x: x,
        autograph=False,
        jit_compile=True,
        reduce_retracing=True,
        experimental_implements="name",
        experimental_autograph_options=(),
        experimental_attributes={"disable_acd": True},
        experimental_follow_type_hints=True,
    )
    assert f(1) == 1


class TestWarnings:
    """The warning of many new signatures."""

    def test_many_new_signatures_warn_twice(self, caplog):
        f = tf.function(lambda x: None)
        with caplog.at_level(logging.WARNING, "pycollective"):
            for n in range(4):
                f(n)
            assert not caplog.records
            for n in range(4, 9):
                f(n)
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 2
        assert texts[0].startswith("5 of the last 5 calls of the tf.function <lambda> had new")

    def test_functions_of_a_loop_warn(self, caplog):
        with caplog.at_level(logging.WARNING, "pycollective"):
            for _ in range(5):
                tf.function(lambda x: x)(1)
        assert len(caplog.records) == 1

    def test_few_new_signatures_and_methods_of_many_objects_do_not_warn(self, caplog):
        f = tf.function(lambda x: None)
        with caplog.at_level(logging.WARNING, "pycollective"):
            for n in range(60):
                f(n // 3)
            for _ in range(9):
                Model().add(1.0)
        assert not caplog.records


class TestConcreteFunctions:
    """`get_concrete_function`."""

    def test_concrete_function_is_kept_and_fits_calls(self):
        f = tf.function(lambda x: x + 1.0)
        c = f.get_concrete_function(tf.TensorSpec([None], tf.float32))
        assert f.experimental_get_tracing_count() == 1
        f(ones(3))
        assert f.experimental_get_tracing_count() == 1
        assert f.get_concrete_function(ones(3)) is c is f.get_concrete_function(ones(4))
        f(ones(3, 3))
        assert f.experimental_get_tracing_count() == 2
        np.testing.assert_array_equal(c(ones(5)), 2 * np.ones(5))
        assert f.experimental_get_tracing_count() == 2

    def test_python_values_may_be_left_out(self):
        @tf.function
        def f(x, n=2, *, k=1.0):
            return x * float(n) * k

        c = f.get_concrete_function(tf.TensorSpec([2], tf.float32, "input"), 3)
        assert c.structured_input_signature == (
            (tf.TensorSpec([2], tf.float32, "input"), 3),
            {"k": 1.0},
        )
        assert c.name == "f" and "n=3" in repr(c)
        for result in (c(ones(2)), c(x=ones(2)), c(ones(2), 3, k=1.0), c([1.0, 1.0])):
            np.testing.assert_array_equal(result, [3.0, 3.0])
        # TensorFlow accepts each shape here.
        for args, kwargs in [
            ((), {}),
            ((ones(2), 4), {}),
            ((ones(3),), {}),
            ((ones(2, dtype=tf.int32),), {}),
            ((ones(2), 3, 4), {}),
            ((ones(2),), {"z": 1}),
        ]:
            with pytest.raises(TypeError, match="ConcreteFunction f"):
                c(*args, **kwargs)
        with pytest.raises(TypeError, match=r"f\(\): missing a required argument: 'x'"):
            f.get_concrete_function()

    def test_reduced_signature_has_unknown_lengths(self):
        f = tf.function(lambda x, y: x["b"], reduce_retracing=True)
        f({"b": ones(1, 2), "a": 1}, V)
        c = f.get_concrete_function({"b": ones(2, 2), "a": 1}, V)
        (structure, variable), _ = c.structured_input_signature
        assert structure == {"b": PAIRS, "a": 1} and variable is V
        assert c({"b": ones(7, 2), "a": 1}).shape == (7, 2)

    def test_input_signature_is_the_only_signature(self):
        f = tf.function(lambda x: x, input_signature=[PAIRS])
        c = f.get_concrete_function()
        assert c.structured_input_signature == ((PAIRS,), {})
        assert f.get_concrete_function(ones(3, 2)) is c
        f(ones(4, 2))
        assert f.experimental_get_tracing_count() == 1
        with pytest.raises(TypeError, match="must fit"):
            f.get_concrete_function(tf.TensorSpec((None, 3), tf.float32))
        model = Model()
        assert float(model.same.get_concrete_function()(3.0)) == 3.0
