"""Mirrored and sync-on-read variables: each method, aggregation and context."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
from strategies import mirrored, replica_id

import pycollective as tf
from pycollective import distribute as d
from pycollective.distribute.context import variable_sync_on_read_context
from pycollective.distribute.values import Mirrored, PerReplica
from pycollective.distribute.variables import MirroredVariable, SyncOnReadVariable
from pycollective.train.trackable import Trackable

ON_READ = tf.VariableSynchronization.ON_READ
AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
METHODS = ["assign", "assign_add", "assign_sub"]
ARITHMETIC = ["scatter_add", "scatter_sub", "scatter_mul", "scatter_div"]
NOT_AGGREGATED = ["scatter_min", "scatter_max", "scatter_update"]


def variable(strategy, initial, aggregation="NONE", **kwargs):
    with strategy.scope():
        return tf.Variable(initial, aggregation=tf.VariableAggregation[aggregation], **kwargs)


def components(v):
    return [c.numpy().tolist() for c in v.values]


def slices(rows, indices, dtype="float64"):
    return tf.IndexedSlices(tf.constant(np.array(rows, dtype)), tf.constant(indices))


def after(method, value, start=8.0):
    return {"assign": value, "assign_add": start + value, "assign_sub": start - value}[method]


# Creation -------------------------------------------------------------------------------------


def test_variables_in_scope_have_classes_names_and_modes(two):
    v = variable(two, 1.0, name="foo")
    assert type(v) is MirroredVariable
    assert [c.name for c in v.values] == ["foo", "foo/replica_1"]
    assert v._values[1] is v.values[1]
    assert v.synchronization is tf.VariableSynchronization.ON_WRITE
    assert v.trainable
    w = variable(two, 1.0, "SUM", synchronization=ON_READ)
    assert type(w) is SyncOnReadVariable
    assert (w.trainable, w.aggregation) == (False, tf.VariableAggregation.SUM)
    assert isinstance(v, d.DistributedValues)
    assert repr(v).startswith("MirroredVariable:{\n  0: <tf.Variable 'foo'")


def test_wrong_modes_raise(two):
    with two.scope():
        with pytest.raises(
            ValueError,
            match="`NONE` variable synchronization mode is not supported with tf.distribute strategy."
            " Please change the `synchronization` for variable: foo",
        ):
            tf.Variable(1.0, synchronization=tf.VariableSynchronization.NONE, name="foo")
        with pytest.raises(
            ValueError, match="Invalid variable synchronization mode: ON_READ for variable: foo"
        ):
            tf.Variable(1.0, synchronization="ON_READ", name="foo")
        with pytest.raises(
            ValueError, match="Invalid variable aggregation mode: MAX for variable: foo"
        ):
            tf.Variable(1.0, aggregation="MAX", name="foo")
        for initial in (1, True):
            with pytest.raises(
                ValueError,
                match="creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype "
                "is not supported, please use a different aggregation or dtype",
            ):
                tf.Variable(initial, aggregation=tf.VariableAggregation.MEAN)
        with pytest.raises(ValueError, match="ON_READ and trainable"):
            tf.Variable(1.0, trainable=True, synchronization=ON_READ)
    with pytest.raises(ValueError, match="creating distributed tf.Variable with aggregation=MEAN"):
        two.run(lambda: tf.Variable(1, aggregation=tf.VariableAggregation.MEAN))


def test_creation_in_replicas_is_matched_by_order(strategy):
    calls = []

    def replica():
        def initial():
            calls.append(replica_id())
            return np.random.default_rng().random(3)

        first = tf.Variable(initial, name="first")
        second = tf.Variable(initial, name="second", synchronization=ON_READ)
        return first, second, float(first[0])

    first, second, read = strategy.run(replica)
    assert calls == [0, 0]
    assert (first.name, second.name) == ("first", "second")
    assert type(second) is SyncOnReadVariable
    for v in (first, second):
        assert len(v.values) == strategy.num_replicas_in_sync
        assert len({c.numpy().tobytes() for c in v.values}) == 1
    assert set(strategy.experimental_local_results(read)) == {float(first.values[0].numpy()[0])}


def test_a_copy_keeps_its_strategy(two):
    v = variable(two, [1.0, 2.0], name="v")
    w = variable(two, 3.0, "SUM", synchronization=ON_READ)
    both = copy.deepcopy({"v": v, "w": w, "again": v})
    assert both["again"] is both["v"]
    assert two.extended.variable_created_in_scope(both["v"])
    assert two.extended.value_container(both["v"].values[1]) is both["v"]
    v.assign([0.0, 0.0])
    assert components(both["v"]) == [[1.0, 2.0]] * 2
    assert float(both["w"]) == 6.0
    assert both["w"].synchronization is ON_READ


# Mirrored variables ---------------------------------------------------------------------------


def test_handle_is_one_component(two):
    v = variable(two, 0.0)
    with pytest.raises(
        ValueError, match="handle is not available outside the replica context or a"
    ):
        v.handle  # noqa: B018
    handles = two.run(lambda: [v.handle])
    for (handle,), component in zip(two.experimental_local_results(handles), v.values, strict=True):
        assert handle is component
    two.extended.update(v, lambda component: component.assign(v.handle is component))
    assert components(v) == [1.0, 1.0]


def test_reading_gives_the_replicas_component(two):
    v = variable(two, 0.0)
    for r, component in enumerate(v.values):
        component.assign(10.0 * (r + 1))
    assert float(v) == float(v.read_value()) == float(v + 0.0) == 10.0
    assert two.run(lambda: float(v)).values == (10.0, 20.0)
    assert two.run(lambda: float(v.numpy())).values == (10.0, 20.0)
    assert [float(x) for x in two.run(lambda: v.value()).values] == [10.0, 20.0]
    assert two.extended.update(v, lambda c: float(v), group=False) == [10.0, 20.0]
    assert two.extended.update(v, lambda c: float(c), group=False) == [10.0, 20.0]
    assert float(two.extended.read_var(v)) == 10.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_assignment_across_replicas_sets_all_components(strategy, method, aggregation):
    n = strategy.num_replicas_in_sync
    v = variable(strategy, 8.0, aggregation)
    for value in (2.0, Mirrored([tf.constant(2.0)] * n), np.float32(2.0)):
        v.assign(8.0)
        assert getattr(v, method)(value) is v
        assert components(v) == [after(method, 2.0)] * n
    v.assign(8.0)
    with strategy.scope():
        getattr(v, method)(2.0)
    assert components(v) == [after(method, 2.0)] * n
    if n > 1:
        with pytest.raises(ValueError, match="It looks like you are using a PerReplica object"):
            getattr(v, method)(PerReplica([1.0] * n))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_assignment_in_replicas_is_aggregated(strategy, method, aggregation):
    n = strategy.num_replicas_in_sync
    total = sum(2.0 * (r + 1) for r in range(n))
    want = {
        "NONE": [2.0 * (r + 1) for r in range(n)],
        "SUM": [total] * n,
        "MEAN": [total / n] * n,
        "ONLY_FIRST_REPLICA": [2.0] * n,
    }[aggregation]
    for make in (float, tf.constant, np.float64, lambda x: PerReplica([x] * n)):
        v = variable(strategy, 8.0, aggregation)
        result = strategy.run(
            lambda make=make, v=v: getattr(v, method)(make(2.0 * (replica_id() + 1)))
        )
        assert result is v
        assert components(v) == [after(method, x) for x in want]


def test_list_assigned_in_replicas_is_summed_like_a_tensor(two):
    v = variable(two, [0.0, 0.0], "SUM")
    two.run(lambda: v.assign([1.0, 2.0 * replica_id()]))
    assert components(v) == [[2.0, 2.0]] * 2


def test_literals_assigned_in_replicas_cannot_be_summed(two):
    v = variable(two, 1.0, "SUM")
    for literal, text in ((5.0, "5.0"), (5, "5")):
        with pytest.raises(
            ValueError,
            match=rf"A non-DistributedValues value {text} cannot be reduced with the given reduce op "
            r"ReduceOp.SUM\.",
        ):
            two.run(lambda literal=literal: v.assign(literal))
    two.run(lambda: v.assign_add(0.0))
    assert components(v) == [1.0, 1.0]
    mean = variable(two, np.float64(1.0), "MEAN")
    two.run(lambda: mean.assign_add(5.0))
    two.run(lambda: mean.assign_add(1))  # a Python number fits any dtype
    assert components(mean) == [7.0, 7.0]
    one = mirrored(1)
    v = variable(one, 1.0, "SUM")
    one.run(lambda: v.assign(5.0))
    assert float(v) == 5.0


def test_the_mean_of_ints_is_refused(two):
    parts = [tf.Variable(1), tf.Variable(1)]
    v = MirroredVariable(
        two, parts, True, "v", tf.VariableSynchronization.ON_WRITE, tf.VariableAggregation.MEAN
    )
    with pytest.raises(
        ValueError,
        match="Cannot update non-float variables with tf.VariableAggregation.MEAN aggregation in "
        "replica context.",
    ):
        two.run(lambda: v.assign(replica_id()))
    two.run(lambda: v.assign(7))  # the same on all replicas: TensorFlow allows it
    assert components(v) == [7, 7]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_assignment_in_an_update_changes_one_component(two, method, aggregation):
    v = variable(two, 8.0, aggregation)
    values = two.experimental_distribute_values_from_function(
        lambda c: tf.constant(1.0 + c.replica_id_in_sync_group)
    )
    for target in (lambda c: c, lambda c: v):
        v.assign(8.0)
        two.extended.update(v, lambda c, x, t=target: getattr(t(c), method)(x), args=(values,))
        assert components(v) == [after(method, 1.0), after(method, 2.0)]


def test_update_from_the_replicas_changes_their_components(two):
    v = variable(two, 1.0)

    def replica():
        amount = tf.constant(1.0 + replica_id())
        result = d.get_replica_context().strategy.extended.update(
            v, lambda c, x: c.assign_add(x).read_value(), args=(amount,)
        )
        return float(result)

    assert two.run(replica).values == (2.0, 3.0)
    assert components(v) == [2.0, 3.0]
    other = mirrored(2)
    with pytest.raises(ValueError, match="a variable that was created in the scope of"):
        other.extended.update(v, lambda c: c)
    with pytest.raises(ValueError, match="a variable that was created in the scope of"):
        two.extended.update(tf.Variable(1.0), lambda c: c)


def test_assignment_of_a_wrong_shape_raises_and_changes_nothing(two):
    v = variable(two, [1.0, 2.0], "SUM", name="pair")
    with pytest.raises(ValueError, match=r"assign_add: variable 'pair.*\(2,\).*\(3,\)"):
        two.run(lambda: v.assign_add(np.ones(3) * replica_id()))
    with pytest.raises(ValueError, match=r"assign: variable 'pair.* the value has shape \(\)"):
        two.run(lambda: v.assign(1.0 * replica_id()))
    assert components(v) == [[1.0, 2.0]] * 2


def test_assignments_that_differ_between_replicas_raise(two):
    v, w = variable(two, 1.0, "SUM", name="v"), variable(two, 1.0, "SUM", name="w")
    with pytest.raises(RuntimeError, match="different assignments .*: assign to v, w;"):
        two.run(lambda: [v, w][replica_id()].assign(1.0 * replica_id()))
    with pytest.raises(RuntimeError, match=": assign_add, assign_sub to v;"):
        two.run(lambda: getattr(v, ["assign_add", "assign_sub"][replica_id()])(1.0 * replica_id()))
    with pytest.raises(RuntimeError, match="Some replicas made a different number of"):
        two.run(lambda: v.assign(1.0) if replica_id() else None)
    assert components(v) == components(w) == [1.0, 1.0]


@pytest.mark.parametrize("how", ["assign", "update"])
def test_assignments_of_several_threads_leave_components_equal(two, how):
    v = variable(two, 0.0)
    between, done = threading.Event(), threading.Event()
    second = v.values[1]
    assign = second.assign

    def slow(value):  # the first thread stops between the components
        if float(value) == 1.0:
            between.set()
            done.wait(0.1)
        return assign(value)

    second.assign = slow

    def user(x):
        if how == "assign":
            v.assign(x)
        else:
            two.extended.update(v, lambda c: c.assign(x))

    def other():
        assert between.wait(20)
        user(2.0)
        done.set()

    threads = [threading.Thread(target=user, args=(1.0,)), threading.Thread(target=other)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert components(v) == [2.0, 2.0]


def test_assignments_under_another_strategy_are_refused(two):
    """Each replica of the other strategy would repeat the assignment."""
    other = mirrored(3)
    for v in (variable(two, 1.0), variable(two, 1.0, "SUM", synchronization=ON_READ)):
        before = components(v)
        with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
            other.run(v.assign_add, args=(1.0,))
        with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
            v.assign(1.0)
        assert components(v) == before


# Rows -----------------------------------------------------------------------------------------

OPERATIONS = {
    "scatter_add": lambda old, x: old + x,
    "scatter_sub": lambda old, x: old - x,
    "scatter_mul": lambda old, x: old * x,
    "scatter_div": lambda old, x: old / x,
    "scatter_min": lambda old, x: min(old, x),
    "scatter_max": lambda old, x: max(old, x),
    "scatter_update": lambda old, x: x,
}


@pytest.mark.parametrize("method", OPERATIONS)
def test_scatter_across_replicas_changes_all_components(strategy, method):
    n = strategy.num_replicas_in_sync
    for aggregation in AGGREGATIONS:
        v = variable(strategy, np.full((3, 1), 6.0), aggregation)
        assert getattr(v, method)(slices([[2.0], [8.0]], [2, 0])) is v
        operate = OPERATIONS[method]
        assert components(v) == [[[operate(6.0, 8.0)], [6.0], [operate(6.0, 2.0)]]] * n


@pytest.mark.parametrize("method", ARITHMETIC)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_scatter_in_replicas_is_aggregated(two, method, aggregation):
    v = variable(two, np.full((3, 1), 6.0), aggregation)
    # Replica 0 changes row 0, replica 1 rows 0 and 2.
    two.run(
        lambda: getattr(v, method)(
            slices([[2.0], [4.0]][: replica_id() + 1], [0, 2][: replica_id() + 1])
        )
    )
    operate = OPERATIONS[method]
    scale = 2.0 if aggregation == "MEAN" else 1.0
    both = [[operate(operate(6.0, 2.0 / scale), 2.0 / scale)], [6.0], [operate(6.0, 4.0 / scale)]]
    first = [[operate(6.0, 2.0)], [6.0], [6.0]]
    second = [[operate(6.0, 2.0)], [6.0], [operate(6.0, 4.0)]]
    want = {"NONE": [first, second], "ONLY_FIRST_REPLICA": [first, first]}
    assert components(v) == want.get(aggregation, [both, both])


@pytest.mark.parametrize("method", NOT_AGGREGATED)
def test_scatter_that_cannot_be_aggregated_raises(two, method):
    for aggregation in ("SUM", "MEAN"):
        v = variable(two, np.full((3, 1), 6.0), aggregation)
        with pytest.raises(
            NotImplementedError,
            match=rf"{method} is only supported for mirrored variable \(variable created within "
            r"certain `tf.distribute.Strategy` scope\) with NONE or `ONLY_FIRST_REPLICA` aggregation, "
            rf"got: .*{aggregation}",
        ):
            two.run(lambda v=v: getattr(v, method)(slices([[2.0]], [0])))
    operate = OPERATIONS[method]
    for aggregation, values in (("NONE", [3.0, 9.0]), ("ONLY_FIRST_REPLICA", [3.0, 3.0])):
        v = variable(two, np.full((3, 1), 6.0), aggregation)
        two.run(lambda v=v: getattr(v, method)(slices([[3.0 + 6.0 * replica_id()]], [1])))
        assert components(v) == [[[6.0], [operate(6.0, x)], [6.0]] for x in values]


@pytest.mark.parametrize("method", OPERATIONS)
def test_scatter_in_an_update_changes_one_component(two, method):
    values = two.experimental_distribute_values_from_function(
        lambda c: 2.0 + 6.0 * c.replica_id_in_sync_group
    )
    for aggregation in AGGREGATIONS:
        v = variable(two, np.full((3, 1), 6.0), aggregation)
        two.extended.update(v, lambda c, x: getattr(c, method)(slices([[x]], [1])), args=(values,))
        assert components(v) == [[[6.0], [OPERATIONS[method](6.0, x)], [6.0]] for x in (2.0, 8.0)]


def test_scatter_of_one_object_on_all_replicas_has_a_mean_and_no_sum(two):
    shared = slices([[2.0]], [0])
    v = variable(two, np.full((3, 1), 6.0), "SUM")
    with pytest.raises(
        ValueError, match="A non-DistributedValues value IndexedSlices.*ReduceOp.SUM"
    ):
        two.run(lambda: v.scatter_add(shared))
    mean = variable(two, np.full((3, 1), 6.0), "MEAN")
    two.run(lambda: mean.scatter_add(shared))
    assert components(mean) == [[[8.0], [6.0], [6.0]]] * 2


# Variables that are aggregated when they are read ---------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sync_on_read_in_replicas_is_local(two, method, aggregation):
    v = variable(two, 8.0, aggregation, synchronization=ON_READ)

    def replica():
        getattr(v, method)(1.0 + replica_id())
        return float(v), float(v + 0.0), float(v.numpy()), int(v), bool(v), f"{v:.0f}"

    read = two.run(replica)
    want = [after(method, 1.0), after(method, 2.0)]
    for place in range(3):
        assert list(read[place].values) == want
    assert list(read[3].values) == [int(x) for x in want]
    assert read[4] is True  # the same object in both replicas
    assert read[5].values == tuple(f"{x:.0f}" for x in want)
    assert components(v) == want
    two.extended.update(v, lambda c: v.assign(float(v) + 1.0))
    assert components(v) == [x + 1.0 for x in want]


@pytest.mark.parametrize(
    ("aggregation", "read", "assigned"),
    [("SUM", 12.0, [3.5, 3.5]), ("MEAN", 6.0, [7.0, 7.0]), ("ONLY_FIRST_REPLICA", 8.0, [7.0, 7.0])],
)
def test_sync_on_read_across_replicas_is_aggregated(two, aggregation, read, assigned):
    v = variable(two, 8.0, aggregation, synchronization=ON_READ)
    v.values[1].assign(4.0)
    for value in (v, v.numpy(), v.read_value(), v + 0.0, np.asarray(v), two.extended.read_var(v)):
        assert float(value) == read
    with two.scope():
        assert float(v) == read
    assert (v.shape, v.dtype, v.ndim) == ((), tf.float32, 0)
    assert v.assign(7.0) is v
    assert components(v) == assigned
    assert float(v) == 7.0
    for method in ("assign_add", "assign_sub"):
        if aggregation == "SUM":
            with pytest.raises(
                ValueError,
                match=f"SyncOnReadVariable does not support `{method}` in cross-replica context when "
                "aggregation is set to `tf.VariableAggregation.SUM`.",
            ):
                getattr(v, method)(1.0)
        else:
            v.assign(7.0)
            getattr(v, method)(1.0)
            assert components(v) == [after(method, 1.0, 7.0)] * 2


def test_sync_on_read_without_aggregation_cannot_be_read(two):
    v = variable(two, 8.0, synchronization=ON_READ)
    for read in (lambda: float(v), v.numpy, lambda: v + 1.0, v.read_value):
        with pytest.raises(ValueError, match=r"Could not convert from .*VariableAggregation.NONE"):
            read()
    v.assign(3.0)
    assert components(v) == [3.0, 3.0]
    assert (v.shape, v.dtype) == ((), tf.float32)


def test_sync_on_read_sum_of_ints_is_the_assigned_value():
    three = mirrored(3)
    v = variable(three, 0, "SUM", synchronization=ON_READ)
    for total in (5, -5, 0, 9):
        v.assign(total)
        assert int(v) == total
    pair = variable(three, np.zeros(2, np.int64), "SUM", synchronization=ON_READ)
    pair.assign([10, 2])
    assert pair.numpy().tolist() == [10, 2]
    assert [len(v.shape) for v in pair.values] == [1, 1, 1]


@pytest.mark.parametrize(
    ("aggregation", "want"), [("SUM", 12.0), ("MEAN", 6.0), ("ONLY_FIRST_REPLICA", 8.0)]
)
def test_synchronized_read_in_replicas_is_aggregated(two, aggregation, want):
    v = variable(two, 8.0, aggregation, synchronization=ON_READ)
    v.values[1].assign(4.0)

    def replica():
        with variable_sync_on_read_context():
            synced = float(v + 0.0)
        return synced, float(v)

    got = two.run(replica)
    assert two.experimental_local_results(got[0]) in ((want, want), (want,))
    assert got[1].values == (8.0, 4.0)
    w = variable(two, 8.0, aggregation, synchronization=ON_READ, name="w")

    def mixed():
        with variable_sync_on_read_context():
            return [v, w][replica_id()] + 0.0

    with pytest.raises(RuntimeError, match="the replicas read different variables"):
        two.run(mixed)


@pytest.mark.parametrize("method", OPERATIONS)
def test_rows_of_sync_on_read_variables_are_refused(two, method):
    v = variable(two, np.zeros((3, 1)), "MEAN", synchronization=ON_READ)
    for write in (
        lambda: getattr(v, method)(slices([[1.0]], [0])),
        lambda: two.run(lambda: getattr(v, method)(slices([[1.0]], [0]))),
    ):
        with pytest.raises(
            NotImplementedError,
            match=f"Variables with `synchronization=ON_READ` doesn't support `{method}`",
        ):
            write()


# Checkpoints ----------------------------------------------------------------------------------


def state(strategy):
    """Return a variable of each kind, in the scope of a strategy if there is one."""
    if strategy is None:
        return {"w": tf.Variable([0.0, 0.0]), "sum": tf.Variable(0), "mean": tf.Variable(0.0),
                "first": tf.Variable(0.0)}  # fmt: skip
    return {
        "w": variable(strategy, [0.0, 0.0]),
        "sum": variable(strategy, 0, "SUM", synchronization=ON_READ),
        "mean": variable(strategy, 0.0, "MEAN", synchronization=ON_READ),
        "first": variable(strategy, 0.0, "ONLY_FIRST_REPLICA", synchronization=ON_READ),
    }


@pytest.mark.parametrize("saved", [None, 1, 2, 3])
@pytest.mark.parametrize("restored", [None, 1, 2, 4])
def test_checkpoints_do_not_depend_on_the_strategy(tmp_path, saved, restored):
    pytest.importorskip("safetensors")
    make = lambda n: None if n is None else mirrored(n)  # noqa: E731
    one = state(make(saved))
    for v, value in zip(one.values(), ([1.0, 2.0], 7, 5.0, 3.0), strict=True):
        v.assign(value)
    path = tf.train.Checkpoint(**one).write(tmp_path / "c")
    other = state(make(restored))
    tf.train.Checkpoint(**other).read(path).assert_consumed()
    assert other["w"].numpy().tolist() == [1.0, 2.0]
    assert (int(other["sum"]), float(other["mean"]), float(other["first"])) == (7, 5.0, 3.0)
    if restored:
        assert components(other["w"]) == [[1.0, 2.0]] * restored
        assert sum(components(other["sum"])) == 7
        assert components(other["mean"]) == [5.0] * restored
        assert components(other["first"]) == [3.0] * restored


def test_sum_restored_before_its_creation_has_the_value(tmp_path):
    pytest.importorskip("safetensors")

    class Late(Trackable):
        def build(self):
            return self._new_variable(
                "total", lambda: np.zeros(2), label="total", shape=(2,), dtype=np.dtype("float64"),
                synchronization=ON_READ, aggregation=tf.VariableAggregation.SUM,
            )  # fmt: skip

    saved = Late()
    saved.build().assign([6.0, 9.0])
    path = tf.train.Checkpoint(late=saved).write(tmp_path / "c")
    for inside in (False, True):
        three, late = mirrored(3), Late()
        status = tf.train.Checkpoint(late=late).read(path)
        if inside:
            made = three.run(late.build)
        else:
            with three.scope():
                made = late.build()
        status.assert_consumed()
        assert made.numpy().tolist() == [6.0, 9.0]
        assert components(made) == [[2.0, 3.0]] * 3


# Updates in place -----------------------------------------------------------------------------


def add_one(array):
    array += 1


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in scope"])
def test_update_inplace_outside_replicas_changes_every_component(replicas, inside):
    strategy = mirrored(replicas)
    v = variable(strategy, [1.0, 2.0])
    if inside:
        with strategy.scope():
            v.update_inplace(add_one)
    else:
        v.update_inplace(add_one)
    values = components(v) if replicas > 1 else [v.numpy().tolist()]
    assert values == [[2.0, 3.0]] * replicas


def test_update_inplace_for_one_replica_changes_its_component(two):
    v = variable(two, [1.0])
    two.run(lambda: v.update_inplace(add_one) if replica_id() == 1 else None)
    assert components(v) == [[1.0], [2.0]]
    two.extended.update(v, lambda c: c.update_inplace(add_one))
    assert components(v) == [[2.0], [3.0]]
    on_read = variable(two, [1.0], "SUM", synchronization=ON_READ)
    two.run(lambda: on_read.update_inplace(add_one))
    assert on_read.numpy().tolist() == [4.0]


def test_assignment_of_a_variable_to_itself_keeps_the_copies_equal(two):
    with two.scope():
        v = tf.Variable([1.0, 2.0])
    v.assign_add(v)
    assert [c.numpy().tolist() for c in v.values] == [[2.0, 4.0]] * 2


def test_mean_of_halves_does_not_overflow(two):
    with two.scope():
        v = tf.Variable(
            np.float16(40000),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
    assert v.numpy() == 40000
    assert v.value().dtype == np.float16


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: mirrored(2),
        lambda: d.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        lambda: d.OneDeviceStrategy("cpu:0"),
    ],
)
def test_per_worker_variable_elsewhere_is_an_ordinary_one_and_is_copied(strategy):
    with strategy().scope():
        v = tf.Variable(1.0, per_worker_variable=True)
        copied = copy.deepcopy(v)
    copied.assign(2.0)
    assert (float(v), float(copied)) == (1.0, 2.0)


def test_object_that_creates_once_can_be_copied():
    class Owner:
        pass

    owner = Owner()
    with d.created_once(owner):
        pass
    with d.created_once(copy.deepcopy(owner)):
        pass
