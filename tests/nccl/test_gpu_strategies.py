"""Strategies with replicas on GPUs: the choice of operations, and gradients reduced with NCCL."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf
from pycollective import array_backend, config
from pycollective import distribute as d
from pycollective.distribute.values import PerReplica
from pycollective.tensor import Tensor


@pytest.fixture
def two(gpus, monkeypatch):
    """Return a stand-in for CuPy with which the package finds two GPUs."""
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (2, ""))
    return gpus


def put(gpus, replica, values):
    with gpus.cuda.Device(replica):
        return Tensor(gpus.asarray(np.asarray(values, np.float32)))


def reductions(gpus):
    return [line for line in gpus.log() if "AllReduce" in line]


def test_mirrored_strategy_uses_gpus_and_nccl_by_default(two):
    strategy = d.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    assert isinstance(strategy.extended.cross_device_ops, d.NcclAllReduce)
    assert "NcclAllReduce (NCCL 2.28.3), the default if all devices are GPUs" in (
        strategy.describe()
    )


@pytest.mark.parametrize("num_packs", [0, 1, 2])
def test_all_reduce_in_replica_context_is_right(two, num_packs):
    strategy = d.MirroredStrategy(cross_device_ops=d.NcclAllReduce(num_packs))

    def step():
        context = d.get_replica_context()
        r = int(context.replica_id_in_sync_group)
        values = [put(two, r, np.arange(n) + r) for n in (4, 3)]
        return context.all_reduce("SUM", values), context.all_reduce("MEAN", values[0])

    total, mean = strategy.run(step)
    for replica in range(2):
        for value, n in zip(total, (4, 3), strict=True):
            got = value.values[replica].array
            assert got.device.id == replica
            np.testing.assert_array_equal(two.asnumpy(got), 2.0 * np.arange(n) + 1)
        np.testing.assert_array_equal(two.asnumpy(mean.values[replica].array), np.arange(4) + 0.5)
    calls = {0: 2 + 1, 1: 1 + 1, 2: 2 + 2}[num_packs]
    assert len(reductions(two)) == 2 * calls
    assert two.fetched == 4 + 2 + 2  # by this test, and by int() of a replica's number
    strategy.extended.abort_collectives("the test is over")


def test_reduce_in_cross_replica_context_is_right(two):
    ops = d.NcclAllReduce()
    value = PerReplica([put(two, r, [1.0 + r, 2.0]) for r in range(2)])
    for op, want in (("SUM", [3.0, 4.0]), ("MEAN", [1.5, 2.0])):
        got = ops.batch_reduce(op, [(value, value)])[0]
        for r in range(2):
            assert got.values[r].array.device.id == r
            assert two.asnumpy(got.values[r].array).tolist() == want
    assert len(reductions(two)) == 4
    two.cuda.library.fake_fail_next(3)
    with pytest.raises(tf.errors.CollectiveError):
        ops.batch_reduce("SUM", [(value, value)])
    got = ops.batch_reduce("SUM", [(value, value)])[0]  # in a new group
    assert two.asnumpy(got.values[0].array).tolist() == [3.0, 4.0]


def test_ring_by_name_copies_through_host_memory(two):
    ring = d.experimental.CommunicationOptions(implementation="RING")
    value = PerReplica([put(two, r, [1.0 + r, 2.0]) for r in range(2)])
    got = d.NcclAllReduce().batch_reduce("SUM", [(value, value)], ring)[0]
    assert two.asnumpy(got.values[1].array).tolist() == [3.0, 4.0]
    assert not reductions(two)


def test_replicas_without_nccl_warn_and_are_right(two, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PYCOLLECTIVE_NCCL_LIBRARY", str(tmp_path / "none"))
    strategy = d.MirroredStrategy()
    assert "NCCL is not installed: in the host's memory" in strategy.describe()

    def step():
        context = d.get_replica_context()
        return context.all_reduce("SUM", put(two, int(context.replica_id_in_sync_group), [1.0]))

    got = strategy.run(step)
    assert [two.asnumpy(v.array).tolist() for v in got.values] == [[2.0], [2.0]]
    assert "GPU arrays are copied through host memory" in caplog.text


def test_gradients_are_reduced_while_others_are_computed(two):
    """Buckets are enqueued before the tape is done, on one more stream of each GPU."""
    strategy = d.MirroredStrategy()
    strategy.extended.gradient_options = d.experimental.CommunicationOptions(bytes_per_pack=8)
    with strategy.scope():
        first, second, third = (tf.Variable(np.eye(3, dtype=np.float32) * k) for k in (1, 2, 3))
        optimizer = tf.keras.optimizers.SGD(1.0)
    seen = [[], []]

    def streams_of(replica):
        lines = [line for line in reductions(two) if line.startswith(f"rank {replica}:")]
        return [int(line.rsplit("stream=")[1]) for line in lines]

    @tf.custom_gradient
    def noted(x):
        def gradient(dy):
            replica = int(d.get_replica_context().replica_id_in_sync_group)
            seen[replica].append(streams_of(replica))
            return dy

        return x, gradient

    def step():
        replica = int(d.get_replica_context().replica_id_in_sync_group)
        x = put(two, replica, np.full((2, 3), replica + 1.0))
        with tf.GradientTape() as tape:
            for w in (first, second, third):
                x = tf.matmul(noted(x), w)
            loss = tf.reduce_sum(x)
        optimizer.minimize(loss, [first, second, third], tape=tape)

    strategy.run(step)
    for replica in range(2):
        at_third, at_second = seen[replica][:2]
        streams = streams_of(replica)
        own, program = streams[0], 0x100 + replica
        assert (len(at_third), len(at_second), len(streams)) == (1, 2, 3), seen
        assert own != program and streams == [own, own, program]  # the last bucket
        side = [s for s in two.cuda.streams[replica] if s.ptr == own]
        assert len(side) == 1 and side[0].waits >= 2  # for earlier work of the program's stream
        total = (
            np.ones((3, 1)) * 3 * 6 * np.ones((1, 3))
        )  # of x = 1 and 2, two rows each, times 2 x 3
        got = two.asnumpy(first.values[replica].read_value().array)
        np.testing.assert_array_equal(got, np.eye(3) - 2 * total)
    strategy.extended.abort_collectives("the test is over")


@pytest.mark.parametrize("overlaps", [True, False])
def test_training_on_gpus_equals_training_on_cpus(two, overlaps):
    """NCCL reduces gradients also while the tape computes; the weights are those of CPU replicas."""

    def train(devices):
        strategy = d.MirroredStrategy(devices)
        with strategy.scope():
            w = tf.Variable(np.arange(6, dtype=np.float32).reshape(3, 2) / 10)
            b = tf.Variable(np.zeros(2, np.float32))
            optimizer = tf.keras.optimizers.SGD(0.1)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.matmul(x, w) + b) ** 2)
            if overlaps:
                optimizer.minimize(loss, [w, b], tape=tape)
            else:
                optimizer.apply_gradients(zip(tape.gradient(loss, [w, b]), [w, b], strict=True))

        x = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)
        for batch in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(x).batch(4)
        ):
            strategy.run(step, args=(batch,))
        kinds = {array_backend.device_of(c.read_value().array)[0] for v in (w, b) for c in v.values}
        assert kinds == {devices[0][:3].upper()}
        weights = [array_backend.to_numpy(c.read_value().array) for v in (w, b) for c in v.values]
        strategy.extended.abort_collectives("the test is over")
        return weights

    for got, want in zip(train(["gpu:0", "gpu:1"]), train(["cpu:0", "cpu:1"]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert reductions(two)


def test_replicas_on_one_gpu_are_right(two, monkeypatch):
    """If replicas share a GPU, NCCL is not used; results are right, and on the replicas' GPUs."""
    monkeypatch.setattr(config, "_state", config._State())
    config.set_logical_device_configuration("gpu:0", 2)
    strategy = d.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 3
    assert "so NCCL is not used" in strategy.describe()
    places = [0, 0, 1]

    def step():
        context = d.get_replica_context()
        r = context.local_replica_id
        return context.all_reduce("SUM", put(two, places[r], [1.0 + r, 2.0]))

    got = strategy.run(step)
    assert [v.array.device.id for v in got.values] == places
    assert [two.asnumpy(v.array).tolist() for v in got.values] == [[6.0, 6.0]] * 3
    value = PerReplica([put(two, p, [1.0, p]) for p in places])
    got = d.NcclAllReduce().reduce("MEAN", value, value)
    assert [v.array.device.id for v in got.values] == places
    np.testing.assert_allclose(two.asnumpy(got.values[2].array), [1.0, 1 / 3], rtol=1e-6)
    assert not reductions(two)
    strategy.extended.abort_collectives("the test is over")
