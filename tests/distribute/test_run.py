"""Replicas that run concurrently: results, merge points and failures."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
from strategies import mirrored

import pycollective as pc
from pycollective import _core
from pycollective import _nn as kernels
from pycollective import distribute as d
from pycollective.distribute import blas_threads
from pycollective.distribute.values import PerReplica
from pycollective.tensor import GradientTape, Tensor, Variable, as_tensor, constant


def replica_id():
    return d.get_replica_context().local_replica_id


def per_replica(strategy, make):
    return strategy.experimental_distribute_values_from_function(
        lambda c: constant(make(c.replica_id_in_sync_group))
    )


def test_replicas_really_run_at_the_same_time(two):
    meet = threading.Barrier(2, timeout=20)
    assert len({*two.experimental_local_results(two.run(lambda: meet.wait()))}) == 2


def test_results_are_grouped(two):
    Pair = namedtuple("Pair", "a b")
    shared = object()
    result = two.run(lambda: {"x": [replica_id(), None], "y": Pair(shared, (1.5, replica_id()))})
    assert result["x"][0].values == (0, 1)
    assert result["x"][1] is None
    assert result["y"].a is shared
    assert result["y"].b[0] == 1.5
    assert result["y"].b[1].values == (0, 1)
    with pytest.raises(AssertionError, match="different structures"):
        two.run(lambda: [0] * (replica_id() + 1))


def test_run_passes_each_replica_its_part_of_the_arguments(two):
    x = per_replica(two, lambda r: float(r))
    result = two.run(lambda a, b, k: a["x"] * 10 + b + k, args=({"x": x}, 2.0), kwargs={"k": x})
    assert [float(v) for v in result.values] == [2.0, 13.0]
    with pytest.raises(ValueError, match="positional args must be a list or tuple"):
        two.run(lambda a: a, args=3)


def test_one_replica_wraps_nothing():
    one = mirrored(1)
    assert isinstance(one.run(lambda: constant(1.0)), Tensor)


@pytest.mark.parametrize("op", ["SUM", "mean", d.ReduceOp.MEAN])
def test_all_reduce_of_nests_reduces_each_part(strategy, op):
    n = strategy.num_replicas_in_sync

    def replica():
        r = replica_id()
        value = {"a": constant([1.0 * r, 2.0]), "b": (constant(np.int64(r)), constant(r + 0.5))}
        return d.get_replica_context().all_reduce(op, value)

    total = sum(range(n))
    scale = 1 if op == "SUM" else n
    for result in strategy.experimental_local_results(strategy.run(replica)):
        np.testing.assert_allclose(result["a"].numpy(), [total / scale, 2.0 * n / scale])
        np.testing.assert_allclose(result["b"][0].numpy(), total / scale)
        np.testing.assert_allclose(result["b"][1].numpy(), (total + 0.5 * n) / scale)


def test_all_reduce_is_differentiable(strategy):
    n = strategy.num_replicas_in_sync

    def replica():
        context = d.get_replica_context()
        x = constant(2.0 + replica_id())
        with GradientTape() as tape:
            tape.watch(x)
            y = context.all_reduce("SUM", x * x) * (1.0 + replica_id())
        return tape.gradient(y, x)

    # Every y depends on every x. With L, the sum of the ys: dL/dx_r = 2 x_r (1 + … + n).
    for r, g in enumerate(strategy.experimental_local_results(strategy.run(replica))):
        assert float(g) == 2 * (2.0 + r) * n * (n + 1) / 2


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", "int16", "uint32"])
def test_all_reduce_keeps_the_dtype(two, dtype):
    x = per_replica(two, lambda r: np.array([1, r, 0], dtype))
    total = two.run(lambda v: d.get_replica_context().all_reduce("SUM", v), args=(x,))
    for v in total.values:
        np.testing.assert_array_equal(v.numpy(), np.array([2, 1, 0]).astype(dtype))
        assert v.dtype == dtype
    mean = two.reduce("MEAN", x, axis=None)
    np.testing.assert_allclose(mean.numpy(), [1.0, 0.5, 0.0])


def test_the_sum_of_bools_is_refused_everywhere(two):
    """Such a sum would be true or false, and not a number."""
    x = per_replica(two, lambda r: np.array([True, r == 0]))

    def merged(strategy, value):
        return strategy.extended.reduce_to("SUM", value, value)

    def replica(value):
        return d.get_replica_context().merge_call(merged, args=(value,))

    for call, text in (
        (lambda v: d.get_replica_context().all_reduce("SUM", v), "all_reduce"),
        (replica, "reduce_to"),
    ):
        with pytest.raises(
            TypeError, match=rf"{text}\('SUM'\) needs numbers, got bool; use tf.cast"
        ):
            two.run(call, args=(x,))
    assert two.reduce("MEAN", x, axis=None).numpy().tolist() == [1.0, 0.5]


def test_a_mean_of_narrow_ints_does_not_overflow(two):
    for dtype, top in (("int8", 127), ("uint16", 65535), ("uint32", 2**32 - 1)):
        x = per_replica(two, lambda r, top=top, dtype=dtype: np.array([top], dtype))
        assert two.reduce("MEAN", x, axis=None).numpy().tolist() == [top]


def test_merge_call_groups_arguments_and_returns_each_replicas_part(strategy):
    def merge(s, value, scale):
        assert s is strategy
        total = s.reduce("SUM", value, axis=None)
        parts = s.experimental_distribute_values_from_function(
            lambda c: total * (c.replica_id_in_sync_group + 1.0)
        )
        return parts, scale

    def replica():
        first, second = d.get_replica_context().merge_call(
            merge, args=(constant(1.0 + replica_id()),), kwargs={"scale": 7}
        )
        assert second == 7
        return d.get_replica_context().merge_call(lambda s, v: v, args=(first,))

    n = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(replica))
    assert [float(v) for v in results] == [n * (n + 1) / 2 * (r + 1) for r in range(n)]


# Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("others", ["all_reduce", "merge_call", "compute"])
def test_an_exception_of_a_replica_arrives_and_frees_the_others(culprit, others):
    strategy = mirrored(3)

    def replica():
        if replica_id() == culprit:
            raise KeyError(f"replica {culprit}")
        context = d.get_replica_context()
        if others == "all_reduce":
            context.all_reduce("SUM", constant(1.0))
        elif others == "merge_call":
            context.merge_call(lambda s: None)

    for _ in range(2):
        with pytest.raises(KeyError, match=f"replica {culprit}"):
            strategy.run(replica)
    # The strategy still works.
    x = strategy.run(lambda: d.get_replica_context().all_reduce("SUM", constant(1.0)))
    assert float(x.values[2]) == 3.0


@pytest.mark.parametrize("lonely", [0, 1])
def test_merge_call_of_one_replica_alone_raises(two, lonely):
    def replica():
        if replica_id() == lonely:
            d.get_replica_context().merge_call(lambda s: None)

    for late in (0, 0.05):
        with pytest.raises(RuntimeError, match="Some replicas made a different number of"):
            two.run(lambda late=late: (replica(), time.sleep(late)))


@pytest.mark.parametrize("lonely", [0, 1])
@pytest.mark.parametrize("other", ["ends", "merges"])
def test_all_reduce_of_one_replica_alone_raises(two, lonely, other):
    def replica():
        context = d.get_replica_context()
        context.all_reduce("SUM", constant(1.0))
        if replica_id() == lonely:
            context.all_reduce("SUM", constant(1.0))
        elif other == "merges":
            context.merge_call(lambda s: None)

    with pytest.raises(RuntimeError, match=rf"replica {lonely} is in collective number 2"):
        two.run(replica)


def test_differing_shapes_or_dtypes_raise(two):
    with pytest.raises(pc.MismatchError, match=r"float32\[1\].*float32\[2\]"):
        two.run(
            lambda: d.get_replica_context().all_reduce("SUM", as_tensor([1.0] * (1 + replica_id())))
        )
    with pytest.raises(pc.MismatchError, match=r"float32\[1\].*float64\[1\]"):
        two.run(
            lambda: d.get_replica_context().all_reduce(
                "SUM", constant(np.ones(1, ["f4", "f8"][replica_id()]))
            )
        )
    with pytest.raises(ValueError, match=r"replica 0 has float32\[1\], replica 1 has float32\[2\]"):
        two.reduce("SUM", PerReplica([constant([1.0]), constant([1.0, 2.0])]), axis=None)


def test_exception_in_a_merge_function_is_raised(two):
    def broken(_strategy):
        raise ZeroDivisionError("in the merge")

    with pytest.raises(ZeroDivisionError, match="in the merge"):
        two.run(lambda: d.get_replica_context().merge_call(broken))


def test_per_replica_value_outside_of_replicas_raises(two):
    value = per_replica(two, lambda r: 1.0)
    with pytest.raises(
        ValueError, match="It looks like you are using a PerReplica object while not"
    ):
        as_tensor(value)
    assert repr(value).startswith("PerReplica:{\n  0: ")


def test_runs_from_several_user_threads_have_their_own_sums(two):
    totals = []

    def user(x):
        for _ in range(20):
            got = two.run(lambda: d.get_replica_context().all_reduce("SUM", constant(x)))
            totals.append(float(got.values[1]) == 2 * x)

    threads = [threading.Thread(target=user, args=(float(i),)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert totals == [True] * 60


def test_threads_end_with_the_strategy():
    before = set(threading.enumerate())
    strategy = mirrored(4)
    strategy.run(replica_id)
    replica_threads = set(threading.enumerate()) - before
    assert len(replica_threads) == 3
    del strategy
    gc.collect()
    for thread in replica_threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="older NumPy keeps errstate per thread"
)
def test_context_variables_reach_every_replica(two):
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        two.run(lambda: np.ones(1) / np.zeros(1) if replica_id() == 1 else None)


# Cross-device operations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "ops",
    [d.RingAllReduce(), d.RingAllReduce(0), d.HierarchicalCopyAllReduce(3),
     d.HierarchicalCopyAllReduce(0), d.ReductionToOneDevice()],
    ids=lambda o: type(o).__name__,
)  # fmt: skip
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_every_operation_gives_the_same_sums(ops, replicas):
    strategy = mirrored(replicas, ops)
    shapes = [(3,), (), (2, 2), (0, 4), (5,), (1,)]

    def replica():
        r = replica_id()
        values = [constant(np.full(s, r + i, "float64")) for i, s in enumerate(shapes)]
        values.append(constant(np.full(3, r, "int32")))
        return d.get_replica_context().all_reduce("SUM", values)

    for result in strategy.experimental_local_results(strategy.run(replica)):
        base = sum(range(replicas))
        for i, (s, value) in enumerate(zip(shapes, result[:-1], strict=True)):
            np.testing.assert_array_equal(value.numpy(), np.full(s, base + i * replicas, "float64"))
        np.testing.assert_array_equal(result[-1].numpy(), [base] * 3)


class Doubling(d.CrossDeviceOps):
    """A user's own operation; its sums are doubled, so that a test sees that it was called."""

    def __init__(self):
        self.calls = 0

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls += 1
        total = per_replica_value.values[0]
        for v in per_replica_value.values[1:]:
            total = total + v
        total = total * 2.0
        count = len(getattr(destinations, "values", [0]))
        return self.broadcast(total, destinations) if count > 1 else total

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [
            self.reduce_implementation(reduce_op, v, dest, options)
            for v, dest in value_destination_pairs
        ]


def test_users_own_operation_reduces_between_the_replicas():
    ops = Doubling()
    strategy = mirrored(3, ops)
    x = strategy.run(lambda: d.get_replica_context().all_reduce("SUM", [constant(1.0)] * 2))
    assert [float(v) for v in x[0].values] == [6.0] * 3
    assert ops.calls == 2
    assert float(strategy.reduce("SUM", x[1], axis=None)) == 18.0  # without ops, as in TensorFlow
    assert ops.calls == 2


def test_overriding_a_built_in_operation_is_honoured():
    class Half(d.RingAllReduce):
        def batch_reduce_implementation(self, op, pairs, options):
            results = super().batch_reduce_implementation(op, pairs, options)
            return [d.values.Mirrored([v / 2.0 for v in r.values]) for r in results]

    strategy = mirrored(2, Half())
    x = strategy.run(lambda: d.get_replica_context().all_reduce("SUM", constant(3.0)))
    assert [float(v) for v in x.values] == [3.0, 3.0]


def test_accumulation_function_is_used():
    ops = d.ReductionToOneDevice(accumulation_fn=lambda values: values[0] * values[1])
    strategy = mirrored(2, ops)
    x = strategy.run(lambda: d.get_replica_context().all_reduce("SUM", constant(3.0)))
    assert [float(v) for v in x.values] == [9.0, 9.0]


def test_cross_device_ops_wrong_arguments_raise():
    for wrong in ("ring", d.RingAllReduce, 3):
        with pytest.raises(ValueError, match="cross_device_ops must be a CrossDeviceOps object"):
            mirrored(2, wrong)
    with pytest.raises(ValueError, match="HierarchicalCopy requires num_packs >= 0, but -1"):
        d.HierarchicalCopyAllReduce(-1)
    ops = d.RingAllReduce()
    with pytest.raises(ValueError, match="destinations must be one of"):
        ops.reduce("SUM", PerReplica([1.0, 2.0]), 3)
    with pytest.raises(ValueError, match="should be a tuple of size 2"):
        ops.batch_reduce("SUM", [(1.0,)])
    with pytest.raises(TypeError, match="Expected `reduce_op`"):
        ops.reduce("MAX", PerReplica([1.0]), "cpu:0")
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        d.CrossDeviceOps().reduce("SUM", PerReplica([1.0, 2.0]), "cpu:0")
    with pytest.raises(ValueError, match="bytes_per_pack"):
        d.experimental.CommunicationOptions(bytes_per_pack=-1)


def test_all_reduce_with_bytes_per_pack_gives_the_sums(two):
    options = d.experimental.CommunicationOptions(bytes_per_pack=100)

    def replica():
        values = [constant(np.ones(n, "float32")) for n in (32, 8, 200, 1)]
        return d.get_replica_context().all_reduce("SUM", values, options)

    for v in two.run(replica):
        np.testing.assert_array_equal(v.values[0].numpy(), 2.0)


# Reductions -----------------------------------------------------------------------------------


def test_reduce_over_replicas_and_axes_equals_numpy(strategy):
    n = strategy.num_replicas_in_sync
    ragged = strategy.run(lambda: constant(np.arange(2.0 * replica_id() + 1)))
    rows = np.concatenate([np.arange(2.0 * r + 1) for r in range(n)])
    assert float(strategy.reduce("SUM", ragged, axis=0)) == rows.sum()
    assert float(strategy.reduce("MEAN", ragged, axis=0)) == pytest.approx(rows.mean())
    assert float(strategy.reduce("MEAN", ragged, axis=-1)) == pytest.approx(rows.mean())
    equal = strategy.run(lambda: constant([[1.0, replica_id()], [3.0, 4.0]]))
    stacked = np.stack([[[1.0, r], [3.0, 4.0]] for r in range(n)])
    np.testing.assert_allclose(strategy.reduce("SUM", equal, axis=None).numpy(), stacked.sum(0))
    np.testing.assert_allclose(
        strategy.reduce("MEAN", equal, axis=(0, 1)).numpy(), stacked.mean(), rtol=1e-6
    )
    nested = strategy.reduce("SUM", {"a": equal}, axis=None)
    np.testing.assert_allclose(nested["a"].numpy(), stacked.sum(0))


def test_reduce_wrong_axis_raises_and_means_of_few_values_are_exact(two):
    x = per_replica(two, lambda r: [1.0])
    with pytest.raises(ValueError, match="`axis` = 1 out of range for `value` with rank 1"):
        two.reduce("SUM", x, axis=1)
    with pytest.raises(TypeError, match="axis must be"):
        two.reduce("SUM", x, axis="0")
    with pytest.raises(TypeError):
        two.reduce("SUM", x)
    with pytest.raises(ValueError, match="A non-DistributedValues value 5.0 cannot be reduced"):
        two.reduce("SUM", 5.0, axis=None)
    assert float(two.reduce("MEAN", 5.0, axis=None)) == 5.0
    assert np.isnan(float(two.reduce("MEAN", per_replica(two, lambda r: np.zeros(0)), axis=0)))


# Variables ------------------------------------------------------------------------------------


def test_a_variable_is_mirrored(strategy):
    calls = []

    def initial():
        calls.append(1)
        return np.random.default_rng().standard_normal(4).astype("float32")

    with strategy.scope():
        v = Variable(initial, name="w")
    assert calls == [1]
    assert v.name == "w"
    assert [c.name for c in v.values] == ["w"] + [
        f"w/replica_{r}" for r in range(1, strategy.num_replicas_in_sync)
    ]
    assert len({c.numpy().tobytes() for c in v.values}) == 1
    assert strategy.extended.variable_created_in_scope(v)
    assert strategy.extended.value_container(v.values[-1]) is v
    v.assign([1.0, 2.0, 3.0, 4.0])
    v.assign_add(np.ones(4))
    for c in v.values:
        np.testing.assert_array_equal(c.numpy(), [2, 3, 4, 5])
    assert strategy.run(lambda: v) is v
    if strategy.num_replicas_in_sync > 1:  # the components of a variable are grouped into it
        assert strategy.run(lambda: v.local()) is v


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [("NONE", [1.0, 2.0]), ("SUM", [3.0, 3.0]), ("MEAN", [1.5, 1.5]),
     ("ONLY_FIRST_REPLICA", [1.0, 1.0])],
)  # fmt: skip
def test_assignment_in_replicas_is_aggregated(two, aggregation, want):
    with two.scope():
        v = Variable(0.0, aggregation=pc.VariableAggregation[aggregation])
    two.run(lambda: v.assign(constant(1.0 + replica_id())))
    assert [float(c.numpy()) for c in v.values] == want


@pytest.mark.parametrize(
    ("aggregation", "read"), [("SUM", 6.0), ("MEAN", 3.0), ("ONLY_FIRST_REPLICA", 2.0)]
)
def test_sync_on_read_variable_is_local_until_it_is_read(two, aggregation, read):
    with two.scope():
        v = Variable(
            0.0,
            synchronization=pc.VariableSynchronization.ON_READ,
            aggregation=pc.VariableAggregation[aggregation],
        )
    assert not v.trainable
    two.run(lambda: v.assign_add(2.0 * (1 + replica_id())))
    assert float(v) == float(v.numpy()) == float(as_tensor(v)) == read
    local = two.run(lambda: v.read_value())
    assert [float(x) for x in local.values] == [2.0, 4.0]
    v.assign(10.0)
    assert float(v) == 10.0
    if aggregation == "SUM":
        assert [float(c.numpy()) for c in v.values] == [5.0, 5.0]
        with pytest.raises(ValueError, match="does not support `assign_add` in cross-replica"):
            v.assign_add(1.0)


def test_variables_made_in_replicas_are_shared(strategy):
    made = strategy.run(lambda: [Variable(10.0 * replica_id() + i) for i in range(3)])
    assert [float(v.numpy()) for v in made] == [0.0, 1.0, 2.0]  # replica 0's values
    assert all(len(v.values) == strategy.num_replicas_in_sync for v in made)


def test_variable_that_replica_0_does_not_create_raises(two):
    with pytest.raises(RuntimeError, match="replica 1 creates a variable that replica 0"):
        two.run(lambda: Variable(1.0) if replica_id() == 1 else None)


def test_created_once_creates_in_the_replica_that_enters_first(two):
    class Owner:
        variable = None

    owner, has_entered = Owner(), threading.Event()

    def replica():
        if replica_id() == 0:
            assert has_entered.wait(20)
        with d.created_once(owner):
            has_entered.set()
            if owner.variable is None:
                owner.variable = Variable(1.0 + replica_id())
        return owner.variable

    assert two.run(replica) is owner.variable
    assert [float(c.numpy()) for c in owner.variable.values] == [2.0, 2.0]


def test_variable_wrong_mode_or_shape_raises_value_error(two):
    with two.scope():
        with pytest.raises(ValueError, match="`NONE` variable synchronization mode"):
            Variable(1.0, synchronization=pc.VariableSynchronization.NONE)
        with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype"):
            Variable(1, aggregation=pc.VariableAggregation.MEAN)
        v = Variable([1.0, 2.0], name="pair")
    with pytest.raises(ValueError, match=r"pair.*\(2,\).*\(3,\)"):
        v.assign([1.0, 2.0, 3.0])


def test_gradients_of_mirrored_variables_are_those_of_the_replica(strategy):
    with strategy.scope():
        v = Variable([2.0, 3.0])

    def replica():
        with GradientTape() as tape:
            y = v * v * (1.0 + replica_id())
        return tape.gradient(y, v)

    for r, g in enumerate(strategy.experimental_local_results(strategy.run(replica))):
        np.testing.assert_array_equal(g.numpy(), [4.0 * (r + 1), 6.0 * (r + 1)])


def test_update_runs_once_per_component(two):
    with two.scope():
        v = Variable(1.0)
        scale = per_replica(two, lambda r: 2.0)
        two.extended.update(v, lambda c, s: c.assign(c * s), args=(scale,))
    assert [float(c.numpy()) for c in v.values] == [2.0, 2.0]


def test_mirrored_values_behave_like_the_value():
    value = d.values.Mirrored([constant([1.0, 2.0]), constant([1.0, 2.0])])
    np.testing.assert_array_equal((value * 2.0 + value).numpy(), [3.0, 6.0])
    np.testing.assert_array_equal((1.0 - value).numpy(), [0.0, -1.0])
    assert float(value[1]) == 2.0
    assert len(value) == 2
    np.testing.assert_array_equal(value.numpy(), [1.0, 2.0])
    assert repr(value).startswith("Mirrored:{")


def test_ctrl_c_reaches_every_replica(two, ctrl_c):
    stop = threading.Event()

    def replica():
        if replica_id() == 1:
            stop.wait(30)
        d.get_replica_context().all_reduce("SUM", constant(1.0))

    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        threading.Timer(0.3, stop.set).start()
        two.run(replica)
    again = two.run(lambda: d.get_replica_context().all_reduce("SUM", constant(1.0)))
    assert float(again.values[0]) == 2.0


def test_blas_threads_are_divided_among_the_replicas():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    from pycollective import _core

    def blas_threads():
        pools = threadpoolctl.threadpool_info()
        return {p["num_threads"] for p in pools if p["user_api"] == "blas"}

    before = blas_threads()
    if not before:
        pytest.skip("NumPy has no BLAS whose threads can be set")
    for replicas in (2, 4):
        seen = []
        mirrored(replicas).run(lambda seen=seen: seen.append(blas_threads()))
        assert seen == [{max(1, _core.usable_cores() // replicas)}] * replicas
    assert blas_threads() == before


@pytest.mark.parametrize(
    ("usable", "quota", "processes", "threads"),
    [
        (8, 0, 2, 4), (8, 0, 3, 2), (8, 0, 20, 1), (8, 3.0, 2, 1), (8, 6.5, 2, 3),
        (2, 0, 3, 2),  # the launcher has bound the process to its share
    ],
)  # fmt: skip
def test_processes_of_a_host_divide_its_cores(monkeypatch, usable, quota, processes, threads):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(_core, "usable_cores", lambda: usable)
    monkeypatch.setattr(_core, "quota_of_cores", lambda root: quota)
    monkeypatch.setattr(blas_threads, "_controller", lambda: None)
    monkeypatch.setattr(blas_threads, "_unlimited", [])
    monkeypatch.setattr(blas_threads.shared_among, "cores", usable)
    before = kernels.threads(), _core.threads()
    kernels.set_threads(8)
    _core.set_threads(8)
    try:
        blas_threads.limit_to_share(1)
        assert (kernels.threads(), _core.threads()) == (8, 8)
        blas_threads.limit_to_share(processes)
        assert (kernels.threads(), _core.threads()) == (threads, threads)
        with blas_threads.shared_among(2):
            assert (kernels.threads(), _core.threads()) == (max(1, threads // 2), threads)
        assert kernels.threads() == threads
        monkeypatch.setattr(_core, "quota_of_cores", lambda root: 0)
        blas_threads.limit_to_share(1)  # the other processes have ended
        assert (kernels.threads(), _core.threads()) == (usable, usable)
    finally:
        kernels.set_threads(before[0])
        _core.set_threads(before[1])


def test_threads_of_a_blas_that_is_loaded_later_are_divided(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("threadpoolctl")
    script = """
import threadpoolctl
from pycollective import distribute
from pycollective import _core
strategy = distribute.MirroredStrategy(["cpu:0", "cpu:1"])
def threads():
    pools = threadpoolctl.threadpool_info()
    return {p["num_threads"] for p in pools if p["user_api"] == "blas"}
strategy.run(threads)
import scipy.linalg
assert list(strategy.run(threads).values) == [{max(1, _core.usable_cores() // 2)}] * 2
"""
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=120,
    )


def test_error_of_a_merge_function_reaches_every_replica(two):
    failed = []

    def fails_once(strategy, value):
        if not failed:
            failed.append(1)
            raise ValueError("once")
        return value

    def replica():
        for turn in range(2):
            try:
                value = constant(10 * turn + replica_id())
                return turn, d.get_replica_context().merge_call(fails_once, (value,))
            except ValueError:
                pass

    turn, values = two.run(replica)
    assert turn == 1
    assert [int(value) for value in values.values] == [10, 11]


def test_mean_of_bools_along_an_axis(two):
    values = PerReplica([np.array([True, False]), np.array([True, True])])
    assert float(two.reduce("MEAN", values, axis=0)) == 0.75


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce("SUM" if replica_id() else "MEAN", constant([1])),
        lambda c: c.all_gather(constant([[1.0]]), replica_id()),
        lambda c: c.all_reduce(
            "SUM" if replica_id() else "MEAN",
            pc.IndexedSlices(constant([[1.0]]), constant([0])),
        ),
    ],
)
def test_different_arguments_of_the_replicas_raise(two, call):
    with pytest.raises((pc.MismatchError, RuntimeError)):
        two.run(lambda: call(d.get_replica_context()))


def test_infinite_timeout_waits_without_a_limit(two):
    two.extended.timeout = float("inf")

    def replica():
        time.sleep(0.1 * (1 - replica_id()))
        return d.get_replica_context().merge_call(lambda strategy: 1)

    assert two.run(replica) == 1


def test_wrong_replication_mode_raises():
    with pytest.raises(TypeError, match="InputReplicationMode"):
        d.InputOptions(experimental_replication_mode="PER_REPLICA")
