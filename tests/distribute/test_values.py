"""Distributed values, and how results are grouped into them."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
from strategies import mirrored, replica_id

import pycollective as tf
from pycollective import distribute as d
from pycollective.distribute.values import Mirrored, PerReplica, regroup, select_replica

Pair = namedtuple("Pair", "a b")


class Named(dict):
    """A dict whose constructor wants a name."""

    def __init__(self, name):
        super().__init__()
        self.name = name


def named(**items):
    made = Named("n")
    made.update(items)
    return made


def test_containers_keep_their_kind():
    with_default = defaultdict(list, a=1, b=2)
    for one, other in [
        ([1, 2], [3, 4]),
        ((1, 2), (3, 4)),
        (Pair(1, 2), Pair(3, 4)),
        ({"a": 1, "b": 2}, {"b": 4, "a": 3}),
        (OrderedDict(a=1, b=2), OrderedDict(a=3, b=4)),
        (with_default, defaultdict(list, a=3, b=4)),
        (named(a=1, b=2), named(a=3, b=4)),
        (MappingProxyType({"a": 1, "b": 2}), MappingProxyType({"a": 3, "b": 4})),
    ]:
        grouped = regroup([one, other])
        assert type(grouped) is type(one)
        first, second = grouped.values() if hasattr(one, "keys") else grouped
        assert (first.values, second.values) == ((1, 3), (2, 4))
        assert select_replica(1, grouped) == other
    assert regroup([with_default, with_default]).default_factory is list
    assert regroup([named(a=1), named(a=2)]).name == "n"
    assert regroup([[], []]) == []


def test_regroup_of_differing_structures_raises():
    for one, other in [
        ([1], [1, 2]), ([1], (1,)), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 1}), ([1], 1),
        (Pair(1, 2), (1, 2)),
    ]:  # fmt: skip
        with pytest.raises(AssertionError, match="replicas returned different structures"):
            regroup([one, other])


def test_regroup_of_one_object_wraps_nothing():
    shared = tf.constant(1.0)
    assert regroup([shared, shared]) is shared
    assert regroup([None, None]) is None
    equal = regroup([tf.constant(1.0), tf.constant(1.0)])
    assert type(equal) is PerReplica
    assert type(regroup([1, 2], Mirrored)) is Mirrored
    always = regroup([shared, shared], always_wrap=True)
    assert type(always) is PerReplica
    assert always.values == (shared, shared)
    assert regroup([[shared]]) == [shared]  # one replica wraps nothing
    assert regroup([shared], always_wrap=True).values == (shared,)


def test_components_of_a_variable_become_the_variable():
    two, three = mirrored(2), mirrored(3)
    with two.scope():
        v, w = tf.Variable(1.0), tf.Variable(2.0)
    with three.scope():
        long = tf.Variable(1.0)
    assert regroup(list(v.values)) is v
    assert regroup([v, v]) is v
    assert regroup(list(v.values), always_wrap=True) is v
    assert type(regroup([v.values[0], w.values[1]])) is PerReplica
    assert type(regroup([v.values[1], v.values[0]])) is PerReplica
    assert type(regroup(list(long.values[:2]))) is PerReplica


def test_per_replica_value_outside_of_replicas_raises():
    value = PerReplica([tf.constant(1.0), tf.constant(2.0)])
    text = "It looks like you are using a PerReplica object while not inside a replica context"
    for use in (
        lambda: tf.constant(1.0) + value,
        lambda: tf.convert_to_tensor(value),
        lambda: np.asarray(value),
    ):
        with pytest.raises(ValueError, match=text):
            use()
        with mirrored(2).scope(), pytest.raises(ValueError, match="by using `strategy.run`"):
            use()
        with pytest.raises(ValueError, match=text):  # another number of replicas
            mirrored(3).run(use)
    for operate in (operator.add, operator.mul, operator.lt):
        with pytest.raises(TypeError):
            operate(value, 1.0)
    assert (value == PerReplica(value.values)) is False
    two = mirrored(2)
    got = two.run(lambda: (tf.constant(10.0) + value, float(np.asarray(value))))
    assert [float(v) for v in got[0].values] == [11.0, 12.0]
    assert got[1].values == (1.0, 2.0)
    with two.scope():
        v = tf.Variable(0.0)
    two.extended.update(v, lambda component: component.assign(value))
    assert [float(c) for c in v.values] == [1.0, 2.0]
    assert repr(PerReplica([1, "x"])) == "PerReplica:{\n  0: 1,\n  1: 'x'\n}"
    assert repr(Mirrored([1, 1])) == "Mirrored:{\n  0: 1,\n  1: 1\n}"


BINARY = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
]


@pytest.mark.parametrize("name", BINARY)
def test_mirrored_has_all_operators(name):
    operate = getattr(operator, name)
    one, other = tf.constant([5.0, 7.0]), tf.constant([2.0, 7.0])
    left, right = Mirrored([one, one + 0.0]), Mirrored([other, other + 0.0])
    want = operate(one, other).numpy().tolist()
    for a, b in ((left, right), (left, other), (one, right)):
        assert operate(a, b).numpy().tolist() == want
    assert operate(3.0, right).numpy().tolist() == operate(3.0, other).numpy().tolist()


def test_mirrored_is_used_like_the_value():
    matrix = tf.constant([[1.0, -2.0], [3.0, 4.0]])
    value = Mirrored([matrix, matrix + 0.0])
    assert (value @ value).numpy().tolist() == (matrix @ matrix).numpy().tolist()
    assert (matrix @ value).numpy().tolist() == (matrix @ matrix).numpy().tolist()
    assert (-value).numpy().tolist() == [[-1.0, 2.0], [-3.0, -4.0]]
    assert (+value).numpy().tolist() == value.numpy().tolist()
    assert abs(value).numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert value[1].numpy().tolist() == [3.0, 4.0]
    assert [row.numpy().tolist() for row in value] == [[1.0, -2.0], [3.0, 4.0]]
    assert np.asarray(value).tolist() == matrix.numpy().tolist()
    assert (value.shape, value.dtype, value.ndim, len(value)) == ((2, 2), tf.float32, 2, 2)
    with pytest.raises(AttributeError):
        value.nothing  # noqa: B018
    flags = Mirrored([tf.constant([True]), tf.constant([True])])
    assert (~flags & True).numpy().tolist() == [False]
    assert (flags | False).numpy().tolist() == (flags ^ False).numpy().tolist() == [True]
    number = Mirrored([tf.constant(2), tf.constant(2)])
    assert (int(number), float(number), bool(number), [5, 6, 7][number]) == (2, 2.0, True, 7)
    assert f"{Mirrored([1.25, 1.25]):.1f}" == "1.2"
    assert [float(v) for v in copy.deepcopy(Mirrored([number.values[0]] * 2)).values] == [2.0, 2.0]


def test_mirrored_is_the_replicas_own_component():
    marked = Mirrored([tf.constant(0), tf.constant(1)])  # different, to see which one is used
    got = mirrored(2).run(lambda: (int(marked), marked + 0 == replica_id()))
    assert got[0].values == (0, 1)
    assert all(bool(v) for v in got[1].values)
    assert int(marked) == 0


def test_value_context_has_defaults_and_a_text():
    context = d.experimental.ValueContext(2, 4)
    assert str(context) == "tf.distribute.ValueContext(replica id 2,  total replicas in sync: 4)"
    default = d.experimental.ValueContext()
    assert (default.replica_id_in_sync_group, default.num_replicas_in_sync) == (0, 1)


def test_reduce_op_of_an_aggregation_is_sum_or_mean():
    aggregation, of = tf.VariableAggregation, d.ReduceOp.from_variable_aggregation
    assert of(aggregation.SUM) is d.ReduceOp.SUM
    assert of(aggregation.MEAN) is d.ReduceOp.MEAN
    for other in (aggregation.NONE, aggregation.ONLY_FIRST_REPLICA, "SUM", None):
        with pytest.raises(
            ValueError, match="Could not convert from `tf.VariableAggregation`.*Redu"
        ):
            of(other)
