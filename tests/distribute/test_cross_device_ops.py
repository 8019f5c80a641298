"""Cross-device operations: arguments, packs, fallbacks, choice, slices, gathers and log lines."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from strategies import mirrored

import pycollective as pc
from pycollective import distribute as d
from pycollective.comm.packing import join, packs, split
from pycollective.distribute import cross_device_ops
from pycollective.distribute.all_reduce_ops import CollectiveAllReduce, default_cross_device_ops
from pycollective.distribute.devices import Device
from pycollective.distribute.experimental import (
    CollectiveCommunication,
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.reducer import parts_of
from pycollective.distribute.values import Mirrored, PerReplica
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import IndexedSlices, Tensor, Variable, constant

BUILT_IN = [
    d.ReductionToOneDevice,
    d.HierarchicalCopyAllReduce,
    d.NcclAllReduce,
    d.RingAllReduce,
    CollectiveAllReduce,
]


def replica_id():
    return d.get_replica_context().local_replica_id


@pytest.fixture(autouse=True)
def _fresh_log():
    cross_device_ops._logged.clear()


# Options --------------------------------------------------------------------------------------


def test_communication_options_check_their_arguments():
    options = CommunicationOptions()
    assert isinstance(options, CommunicationOptions)
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert CommunicationOptions(implementation="nccl").implementation.value == "NCCL"
    assert [i.name for i in CollectiveCommunication] == ["AUTO", "RING", "NCCL", "MPI"]
    assert "bytes_per_pack=3" in repr(CommunicationOptions(3))
    for arguments, message in (
        ({"bytes_per_pack": -1}, "Argument `bytes_per_pack` must be >=0, Received -1"),
        ({"implementation": 3}, "Argument `implementation` must be instance of "
                                "`tf.distribute.experimental.CommunicationImplementation`."),
        ({"implementation": "gloo"}, "GLOO"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            CommunicationOptions(**arguments)


def test_options_are_merged():
    first = CommunicationOptions(10, 3.0, "RING")
    assert first.merge(None) == first
    assert first.merge(CommunicationOptions()) == first
    other = CommunicationOptions(20, 4.0, "NCCL")
    assert first.merge(other) == other
    assert CommunicationOptions(5).merge(CommunicationOptions(timeout_seconds=2.0)) == (
        CommunicationOptions(5, 2.0)
    )
    assert first != 3


def test_timeout_of_the_options_limits_the_call(two):
    over = threading.Event()

    def replica():
        if replica_id() == 1:
            over.wait(20)
            return
        options = CommunicationOptions(timeout_seconds=0.2)
        try:
            d.get_replica_context().all_reduce("SUM", constant(1.0), options)
        finally:
            over.set()

    with pytest.raises(pc.CollectiveTimeoutError, match="replica 1|rank 1"):
        two.run(replica)


# The base class -------------------------------------------------------------------------------


class Recording(d.CrossDeviceOps):
    def __init__(self):
        self.calls = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls.append(("reduce", reduce_op, per_replica_value, destinations, options))
        return "reduced"

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.calls.append(("batch", reduce_op, value_destination_pairs, options))
        return ["reduced"] * len(value_destination_pairs)


def test_base_class_converts_the_arguments_of_its_hooks():
    ops = Recording()
    two = PerReplica([constant(1.0), constant(2.0)])
    assert ops.reduce("sum", two, two) == "reduced"
    (_, op, value, destinations, options) = ops.calls.pop()
    assert op is d.ReduceOp.SUM
    assert value is two
    assert destinations is two
    assert options == CommunicationOptions()
    given = CommunicationOptions(8)
    assert ops.batch_reduce("MEAN", iter([(two, "cpu:0"), (3.0, two)]), given) == ["reduced"] * 2
    (_, op, pairs, options) = ops.calls.pop()
    assert options is given
    assert isinstance(pairs[1][0], PerReplica)  # a bare value becomes a PerReplica of it alone
    assert float(pairs[1][0].values[0]) == 3.0


def test_one_value_at_its_destination_is_returned_as_it_is():
    ops = Recording()
    x = constant([1.0])
    assert ops.reduce("SUM", x, "cpu:0") is x
    assert ops.reduce("SUM", PerReplica([x]), Variable(0.0)) is x
    assert ops.batch_reduce("SUM", [(x, "cpu:0"), (PerReplica([x]), x)]) == [x, x]
    assert ops.gather(x, "cpu:0", 0) is x
    assert ops.calls == []
    assert ops.batch_reduce("SUM", []) == []
    # A value on one device must still be copied to two.
    assert ops.reduce("SUM", x, Mirrored([x, x])) == "reduced"
    assert ops.batch_reduce("SUM", [(x, x), (x, Mirrored([x, x]))]) == ["reduced"] * 2


@pytest.mark.parametrize(
    ("destinations", "message"),
    [(3, "destinations must be one of a `DistributedValues` object, a tf.Variable object, or a "
         r"device string\."),
     ([1], "destinations must be one of"),
     (PerReplica([]), "destinations can not be empty"),
     ("", "destinations can not be empty"),
     ("disk:0", "unknown device 'disk:0'")],
)  # fmt: skip
def test_destinations_wrong_raise_value_error(destinations, message):
    ops, x = Recording(), PerReplica([constant(1.0), constant(2.0)])
    for call in (
        lambda: ops.reduce("SUM", x, destinations),
        lambda: ops.batch_reduce("SUM", [(x, destinations)]),
        lambda: ops.broadcast(constant(1.0), destinations),
        lambda: ops.gather(x, destinations, 0),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert ops.calls == []


def test_batch_reduce_wrong_pairs_raise_value_error():
    ops, x = Recording(), constant(1.0)
    with pytest.raises(ValueError, match="Each element of `value_destination_pairs` should be a t"):
        ops.batch_reduce("SUM", [[x, x]])
    with pytest.raises(ValueError, match="should be a tuple of size 2."):
        ops.batch_reduce("SUM", [(x, x, x)])


def test_hooks_that_a_subclass_lacks_raise():
    x = PerReplica([constant(1.0), constant(2.0)])
    with pytest.raises(NotImplementedError, match="CrossDeviceOps must override reduce_impl"):
        d.CrossDeviceOps().reduce("SUM", x, x)
    with pytest.raises(NotImplementedError, match="batch_reduce_implementation"):
        d.CrossDeviceOps().batch_reduce("SUM", [(x, x)])


@pytest.mark.parametrize("ops", BUILT_IN)
def test_broadcast_copies_and_gather_joins_values(ops):
    ops = ops()
    many = PerReplica([constant([[1.0, 2.0]]), constant([[3.0, 4.0], [5.0, 6.0]])])
    copies = ops.broadcast(constant(3.0), many)
    assert isinstance(copies, Mirrored)
    assert [float(v) for v in copies.values] == [3.0, 3.0]
    assert isinstance(ops.broadcast(constant(3.0), "cpu:0"), Mirrored)
    assert ops.gather(many, "cpu:0", 0).numpy().tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [len(v) for v in ops.gather(many, many, 0).values] == [3, 3]
    for axis, other, message in (
        (1, many.values[1], r"Dimension 0 in both shapes must be equal: .* along axis 1 only"),
        (0, constant([[1.0]]), r"Dimension 1 in both shapes must be equal: .*\[1, 2\].*\[1, 1\]"),
        (0, constant([1.0]), "Ranks of all input tensors should match: replica 0 has float32"),
        (0, constant([[1, 2]]), "The dtypes of all input tensors should match: .* int32"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            ops.gather(PerReplica([many.values[0], other]), "cpu:0", axis)
    slices = IndexedSlices(constant([[1.0]]), np.array([0]))
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        ops.gather(PerReplica([slices, slices]), "cpu:0", 0)


# Built-in operations --------------------------------------------------------------------------


@pytest.mark.parametrize("ops", BUILT_IN)
@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64", "bool"])
def test_batch_reduce_gives_sums_and_means_of_each_dtype(ops, replicas, dtype):
    ops = ops()
    rng = np.random.default_rng(0)
    rows = [
        [rng.integers(0, 2, s).astype(dtype) for _ in range(replicas)] for s in ((5,), (), (0, 3))
    ]
    pairs = [(PerReplica([Tensor(a) for a in row]),) * 2 for row in rows]
    for op, want in (("SUM", np.sum), ("MEAN", np.mean)):
        if dtype == "bool" and op == "MEAN":
            continue
        for got, row in zip(ops.batch_reduce(op, pairs), rows, strict=True):
            assert isinstance(got, Mirrored)
            assert len(got.values) == replicas
            wanted = want(np.stack(row).astype(float), axis=0)
            for component in got.values:
                assert component.shape == row[0].shape
                if op == "SUM":
                    assert component.dtype == dtype
                np.testing.assert_allclose(
                    component.numpy().astype(float), wanted > 0 if dtype == "bool" else wanted, 1e-3
                )
        one = ops.reduce(op, pairs[0][0], "cpu:0")
        assert isinstance(one, Tensor)
        np.testing.assert_array_equal(one.numpy(), ops.reduce(op, *pairs[0]).values[0].numpy())


def test_the_last_device_of_an_odd_number_counts():
    ops = d.HierarchicalCopyAllReduce()
    for replicas in (1, 3, 5, 7):
        x = PerReplica([constant(10.0**r) for r in range(replicas)])
        total = ops.reduce("SUM", x, x)
        assert float(total if replicas == 1 else total.values[-1]) == (10**replicas - 1) / 9


@pytest.mark.parametrize(
    ("ops", "called"),
    [(d.NcclAllReduce, "NCCL all-reduce"), (d.HierarchicalCopyAllReduce, "HierarchicalCopy"),
     (d.RingAllReduce, "Ring all-reduce")],
)  # fmt: skip
def test_num_packs_negative_raises_and_others_give_the_sums(ops, called):
    with pytest.raises(ValueError, match=f"{called} requires num_packs >= 0, but -1 is specified"):
        ops(num_packs=-1)
    for num_packs in (0, 1, 2, 3, 50):
        values = [PerReplica([constant(np.arange(n) + r) for r in range(3)]) for n in (4, 1, 6)]
        got = ops(num_packs=num_packs).batch_reduce("SUM", [(v, v) for v in values])
        for value, n in zip(got, (4, 1, 6), strict=True):
            np.testing.assert_array_equal(value.values[2].numpy(), 3 * np.arange(n) + 3)
        strategy = mirrored(3, ops(num_packs))
        got = strategy.run(
            lambda: d.get_replica_context().all_reduce(
                "SUM", [constant(np.arange(n) + float(replica_id())) for n in (4, 1, 6)]
            )
        )
        for value, n in zip(got, (4, 1, 6), strict=True):
            np.testing.assert_array_equal(value.values[1].numpy(), 3 * np.arange(n) + 3)


def test_parts_of_a_bucket_are_even():
    assert parts_of(11, 3) == [(0, 3), (3, 6), (6, 11)]
    assert parts_of(2, 3) == [(0, 2)]
    assert parts_of(0, 2) == [(0, 0)]


def bytes_of(*sizes):
    return [np.zeros(n, np.uint8) for n in sizes]


def test_packs_take_arrays_until_they_exceed_the_limit():
    assert packs(bytes_of(128, 32, 800, 4), 200) == [[0, 1, 2], [3]]
    assert packs(bytes_of(200, 1), 200) == [[0, 1]]
    assert packs(bytes_of(201, 1), 200) == [[0], [1]]
    assert packs([], 200) == []
    mixed = [np.zeros(4, t) for t in ("f4", "f8", "f4", "f8")]
    assert packs(mixed, 20) == [[0, 2], [1], [3]]


def test_packs_of_gradients_begin_at_the_end():
    ops = CollectiveAllReduce()
    likes = bytes_of(4, 800, 32, 128)
    assert ops.buckets(likes, CommunicationOptions(200)) == [[1, 2, 3], [0]]
    assert ops.buckets(likes, CommunicationOptions()) == [[0, 1, 2, 3]]


def test_joining_copies_once_or_not_at_all():
    one, other = np.arange(3.0), np.arange(4.0).reshape(2, 2)
    flat, copied = join([one, other])
    assert copied
    assert flat.tolist() == [0, 1, 2, 0, 1, 2, 3]
    parts = split(flat, [one, other])
    assert all(p.base is not None and np.shares_memory(p, flat) for p in parts)
    assert parts[1].tolist() == other.tolist()
    flat, copied = join([other])
    assert not copied
    assert np.shares_memory(flat, other)
    together = np.arange(10.0)
    a, b, c = together[1:3], together[3:7].reshape(2, 2), together[7:8]
    flat, copied = join([a, b, c])
    assert not copied
    assert np.shares_memory(flat, together)
    assert flat.tolist() == list(range(1, 8))
    for apart in ([b, a], [a, c], [a, one], [one, a]):
        flat, copied = join(apart)
        assert copied
        assert flat.tolist() == [v for x in apart for v in x.reshape(-1).tolist()]
    flat, copied = join([a, b, c], "float32")
    assert copied
    assert flat.dtype == np.float32


def test_gradients_that_lie_together_are_not_written_to(two):
    def replica():
        together = np.arange(6.0) + replica_id()
        parts = [Tensor(together[:2]), Tensor(together[2:])]
        got = d.get_replica_context().all_reduce("SUM", parts)
        assert together.tolist() == [i + replica_id() for i in range(6)]
        return got

    first, second = two.run(replica)
    assert first.values[0].numpy().tolist() + second.values[1].numpy().tolist() == [
        1,
        3,
        5,
        7,
        9,
        11,
    ]


# Sparse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", BUILT_IN)
def test_slices_are_joined(ops, caplog):
    def slices(rows, indices):
        return IndexedSlices(constant(rows), np.array(indices), (5, 1))

    value = PerReplica([slices([[1.0], [2.0]], [0, 3]), slices([[4.0]], [3])])
    dense = PerReplica([constant(1.0), constant(2.0)])
    with caplog.at_level(logging.WARNING, "pycollective"):
        got, plain = ops().batch_reduce("MEAN", [(value, value), (dense, dense)])
    assert float(plain.values[0]) == 1.5
    for part in got.values:
        assert part.indices.numpy().tolist() == [0, 3, 3]  # duplicates are kept
        assert part.values.numpy().tolist() == [[0.5], [1.0], [2.0]]
        assert part.dense_shape == (5, 1)
    warned = "Efficient allreduce is not supported for 1 IndexedSlices" in caplog.text
    assert warned == (ops not in (d.ReductionToOneDevice, CollectiveAllReduce))
    total = ops().reduce("SUM", value, "cpu:0")
    assert total.values.numpy().tolist() == [[1.0], [2.0], [4.0]]
    with pytest.raises(ValueError, match="some are IndexedSlices"):
        ops().reduce("SUM", PerReplica([value.values[0], constant([1.0])]), "cpu:0")


# The choice -----------------------------------------------------------------------------------


def test_default_operation_depends_on_the_kinds_of_devices():
    cpu, gpu = Device("CPU", 0), Device("GPU", 0)
    for devices, kind in (
        ([cpu, Device("CPU", 1)], CollectiveAllReduce),
        ([gpu, Device("GPU", 1)], d.NcclAllReduce),
        ([cpu, gpu], d.ReductionToOneDevice),
    ):
        assert type(default_cross_device_ops(devices)[0]) is kind
    assert type(mirrored(2).extended.cross_device_ops) is CollectiveAllReduce


def test_int32_is_reduced_on_one_device():
    ops = Recording()
    strategy = mirrored(3, ops)
    value = strategy.run(lambda: constant(np.int32(replica_id())))
    assert int(strategy.reduce("SUM", value, axis=None)) == 3
    got = strategy.run(
        lambda: d.get_replica_context().all_reduce("SUM", constant(np.int32(replica_id())))
    )
    assert [int(v) for v in got.values] == [3] * 3
    assert ops.calls == []
    with pytest.raises(AttributeError):  # the user's "reduced" is no tensor
        strategy.run(lambda: d.get_replica_context().all_reduce("SUM", constant(1.0)))
    assert [call[0] for call in ops.calls] == ["batch"]


def test_other_destinations_than_the_sources_go_through_one_device():
    ops = d.HierarchicalCopyAllReduce()
    halves = PerReplica([constant(np.float32(0.1 * r)) for r in range(4)])
    one = ops.reduce("SUM", halves, "cpu:0")
    in_order = halves.values[0].numpy()
    for v in halves.values[1:]:
        in_order = in_order + v.numpy()
    assert one.numpy() == in_order
    assert ops._groups == {}
    assert [float(v) for v in ops.reduce("SUM", halves, Mirrored([1.0, 1.0])).values] == [one] * 2


def test_reduction_to_one_device_uses_the_accumulation_function():
    ops = d.ReductionToOneDevice(accumulation_fn=lambda values: values[0] * values[1])
    x = PerReplica([constant(3.0), constant(5.0)])
    assert float(ops.reduce("SUM", x, "cpu:0")) == 15.0
    assert float(ops.reduce("MEAN", x, x).values[1]) == 7.5
    with pytest.raises(ValueError, match="unknown device 'disk'"):
        d.ReductionToOneDevice("disk")


def test_implementation_of_the_options_selects_the_algorithm(two):
    ops = CollectiveAllReduce()
    assert ops.algorithm_on(False, CommunicationOptions(implementation="RING")) == "ring"
    assert ops.algorithm_on(False, CommunicationOptions()) == "auto"
    got = two.run(
        lambda: d.get_replica_context().all_reduce(
            "SUM", constant(1.0), CommunicationOptions(implementation="RING")
        )
    )
    assert float(got.values[0]) == 2.0


# Log lines ------------------------------------------------------------------------------------


def lines(caplog, beginning):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(beginning)]


def test_log_lines_are_tensorflows(caplog, two, monkeypatch):
    caplog.set_level(logging.INFO, "pycollective")
    x = PerReplica([constant(1.0), constant(2.0)])
    for _ in range(12):
        d.ReductionToOneDevice().reduce("SUM", x, "cpu:0")
    found = lines(caplog, "Reduce to ")
    assert len(found) == 10
    assert found[0].endswith("then broadcast to ('/job:localhost/replica:0/task:0/device:CPU:0',).")
    two.run(lambda: d.get_replica_context().all_reduce("SUM", [constant(1.0)] * 8))
    assert lines(caplog, "Collective all_reduce tensors") == [
        "Collective all_reduce tensors: 8 all_reduces, num_devices = 2, group_size = 2, "
        "implementation = AUTO, num_packs = 1"
    ]
    d.HierarchicalCopyAllReduce(2).batch_reduce("SUM", [(x, x)] * 3)
    assert lines(caplog, "batch_all_reduce") == [
        "batch_all_reduce: 3 all-reduces with algorithm = hierarchical_copy, num_packs = 2"
    ]
    mirrored(2)
    assert lines(
        caplog, "Using MirroredStrategy with devices ('/job:localhost/replica:0/task:0/dev"
    )
    assert not lines(caplog, "Initializing local devices")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    mirrored(2)
    assert "TF_CONFIG will be ignored" in lines(caplog, "Initializing local devices")[0]
    d.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    assert lines(
        caplog, "ParameterServerStrategy (CentralStorageStrategy if you are using a single"
    )


def test_log_lines_of_slices_and_gathers(caplog, two):
    caplog.set_level(logging.INFO, "pycollective")
    rows = IndexedSlices(constant([[1.0]]), np.array([0]))

    def gather_and_reduce():
        context = d.get_replica_context()
        return context.all_gather(constant([1.0]), 0), context.all_reduce("SUM", [rows, rows])

    two.run(gather_and_reduce)
    assert lines(caplog, "Collective all_reduce IndexedSlices") == [
        "Collective all_reduce IndexedSlices: 2 all_reduces, num_devices = 2, group_size = 2, "
        "implementation = AUTO"
    ]
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
    for ops in (d.NcclAllReduce, d.HierarchicalCopyAllReduce):
        caplog.clear()
        cross_device_ops._logged.clear()
        strategy = mirrored(2, ops())
        for _ in range(12):
            strategy.run(gather_and_reduce)
        strategy.gather(strategy.run(lambda: constant([1.0])), axis=0)
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warned.count("Efficient allreduce is not supported for 2 IndexedSlices") == 10
        (gathered,) = set(warned[:20]) - set(warned[-1:])
        assert gathered.startswith(
            "gather/all_gather with NCCL or HierarchicalCopy is not supported. Falling back to gather "
            "on one device and then broadcast."
        )
        assert warned.count(gathered) == 3


# A user's own operations --------------------------------------------------------------------


class Own(d.ReductionToOneDevice):
    """An operation that records the calls of its hooks, which must be in cross-replica context."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def note(self, what, value):
        assert d.in_cross_replica_context()
        self.asked.append((what, len(value.values)))

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.note("reduce", per_replica_value)
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def _gather_implementation(self, per_replica_value, destinations, axis, options):
        self.note("gather", per_replica_value)
        return super()._gather_implementation(per_replica_value, destinations, axis, options)


def test_gathers_and_slices_ask_the_operation_of_the_strategy():
    ops = Own()
    strategy = mirrored(2, ops)
    ids = strategy.run(lambda: constant([1.0 * replica_id()]))
    with strategy.scope():
        assert strategy.gather(ids, axis=0).numpy().tolist() == [0, 1]
        assert ops.asked == [("gather", 2)]

    def replica():
        context = d.get_replica_context()
        rows = IndexedSlices(constant([[1.0 + replica_id()]]), np.array([replica_id()]))
        return context.all_gather([constant([1.0 * replica_id()])] * 2, 0), context.all_reduce(
            "MEAN", rows
        )

    gathered, rows = strategy.run(replica)
    assert ops.asked == [("gather", 2)] * 3 + [("reduce", 2)]
    assert gathered[1].values[1].numpy().tolist() == [0, 1]
    assert rows.values[1].values.numpy().tolist() == [[0.5], [1.0]]


def test_users_own_operation_is_not_called_to_reduce_to_the_host():
    """As in TensorFlow, only `reduce` and `reduce_to` with a host as destination do not call it."""
    ops = Own()
    strategy = mirrored(2, ops)
    x = PerReplica([constant(1.0), constant(2.0)])
    with strategy.scope():
        assert float(strategy.reduce("SUM", x, axis=None)) == 3.0
        assert float(strategy.extended.reduce_to("SUM", x, "cpu:0")) == 3.0
        assert ops.asked == []
        assert float(strategy.extended.batch_reduce_to("SUM", [(x, "cpu:0")])[0]) == 3.0
        assert ops.asked == [("reduce", 2)]
        ops.asked.clear()
        v = Variable(0.0, aggregation=pc.VariableAggregation.SUM)
        strategy.extended.reduce_to("SUM", x, x)
        strategy.extended.reduce_to("SUM", x, v)
        strategy.extended.batch_reduce_to("SUM", [(x, x), (x, v)])
    assert ops.asked == [("reduce", 2)] * 4
    strategy.run(lambda: v.assign(1.0 + replica_id()))
    assert ops.asked == [("reduce", 2)] * 5
    with pytest.raises(ValueError, match="should be a tuple of size 2"):
        strategy.extended.batch_reduce_to("SUM", [(x,)])


class FromTheReplicas(d.RingAllReduce):
    """A ring all-reduce whose all-reduce hook uses a group of its own in the replicas' threads."""

    def __init__(self, replicas):
        super().__init__()
        self.group = pc.local_group(replicas, timeout=20)
        self.calls = []

    def _all_reduce(self, reduce_op, value, replica_id, options):
        assert d.get_replica_context().local_replica_id == replica_id
        self.calls.append((reduce_op, len(value), options.bytes_per_pack))
        reduced = [self.group[replica_id].all_reduce(x.numpy(), "max") for x in value]
        return [constant(r) for r in reduced]


def test_users_own_all_reduce_is_called_in_the_replicas():
    ops = FromTheReplicas(3)
    strategy = mirrored(3, ops)

    def replica():
        x = constant(2.0 + replica_id())
        with pc.GradientTape() as tape:
            tape.watch(x)
            most = d.get_replica_context().all_reduce(
                "MEAN", [x, x * 10.0, constant(1)], CommunicationOptions(7)
            )
            loss = (most[0] + most[1]) * float(1 + replica_id())
        return most, tape.gradient(loss, x)

    most, gradients = strategy.run(replica)
    assert [[float(v) for v in m.values] for m in most] == [[4.0] * 3, [40.0] * 3, [1.0] * 3]
    # The gradient of a collective is the same collective: the maximum of 1, 2 and 3, times 1 + 10.
    assert [float(g) for g in gradients.values] == [33.0] * 3
    assert ops.calls[:3] == [(d.ReduceOp.MEAN, 2, 7)] * 3  # the int32 goes through one device
    assert len(ops.calls) == 6
    assert ops.has_own_hooks()  # or gradients would pass by it while the tape runs
    with pytest.raises(RuntimeError, match="replica 1 is in collective number 1"):
        strategy.run(lambda: replica_id() == 1 and d.get_replica_context().all_reduce("SUM", 1.0))


def test_all_reduce_hook_not_overridden_raises():
    with pytest.raises(NotImplementedError, match="Own must override _all_reduce"):
        Own()._all_reduce(d.ReduceOp.SUM, [constant(1.0)], 0, CommunicationOptions())


@pytest.mark.parametrize("num_packs", [0, 1, 2, 3, 50])
def test_packs_of_any_number_give_the_sums(num_packs):
    ops = d.HierarchicalCopyAllReduce(num_packs=num_packs)
    rows = [[np.arange(n, dtype=np.float32) + 10 * r for r in range(2)] for n in (3, 1, 7)]
    many = [PerReplica([constant(x) for x in row]) for row in rows]
    sums = ops.batch_reduce("SUM", [(value, value) for value in many])
    for total, row in zip(sums, rows, strict=True):
        for component in total.values:
            np.testing.assert_array_equal(component.numpy(), row[0] + row[1])
