"""Strategies without NCCL, with replicas on one device or on one device each."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from emulated import make_devices

import pycollective as tf
from pycollective import array_backend, config
from pycollective import distribute as d
from pycollective.comm import on_device
from pycollective.distribute import cross_device_ops
from pycollective.distribute.values import PerReplica
from pycollective.tensor import Tensor

OPS = [
    d.NcclAllReduce,
    d.HierarchicalCopyAllReduce,
    d.RingAllReduce,
    d.ReductionToOneDevice,
]


@pytest.fixture
def two(monkeypatch):
    """Two devices that do not reach each other."""
    monkeypatch.setattr(config, "_state", config._State())
    cupy = make_devices(monkeypatch, cliques=(0, 1), seed=3)
    yield cupy
    cupy.emulated.run()


def put(cupy, device, values, dtype=np.float32):
    with cupy.cuda.Device(device):
        return Tensor(cupy.asarray(np.asarray(values, dtype)))


@pytest.mark.parametrize("make", OPS)
@pytest.mark.parametrize("devices", [(0, 1), (0, 0, 1, 1)])
def test_reduce_in_cross_replica_context_is_right(two, make, devices):
    """The replicas have devices of their own, or several share one."""
    ops = make()
    values = [np.arange(50) + r for r in range(len(devices))]
    for dtype in (np.float32, np.int64, np.float16):
        value = PerReplica([put(two, g, v, dtype) for g, v in zip(devices, values, strict=True)])
        for op, want in (("SUM", sum(values)), ("MEAN", sum(values) / len(devices))):
            got = ops.batch_reduce(op, [(value, value)])[0]
            for device, component in zip(devices, got.values, strict=True):
                assert component.array.device.id == device
                np.testing.assert_array_equal(
                    two.asnumpy(component.array), want.astype(component.array.dtype)
                )
    assert two.emulated.counts["combinations"] > 0


@pytest.mark.parametrize("shared", [True, False])
def test_reduce_to_one_device_runs_as_a_schedule(two, shared):
    """A bucket on one device needs one launch, and its data stay on the device."""
    devices = (0, 0, 0) if shared else (0, 1, 0)

    def value(shape, places=devices):
        return PerReplica([put(two, g, np.full(shape, 2.0**r)) for r, g in enumerate(places)])

    def launched(ops, *given):
        before = two.emulated.counts["combinations"]
        results = ops.batch_reduce("SUM", [(one, one) for one in given])
        for one, result in zip(given, results, strict=True):
            for component, source in zip(result.values, one.values, strict=True):
                assert component.array.device.id == source.array.device.id
                assert set(two.asnumpy(component.array).reshape(-1).tolist()) == {7.0}
        return two.emulated.counts["combinations"] - before

    class Subclass(d.ReductionToOneDevice):
        def reduce_implementation(self, *args):
            return super().reduce_implementation(*args)

    many = [value(shape) for shape in ((3,), (2, 2), ())]
    once = 1 if shared else 2
    assert launched(d.ReductionToOneDevice(), *many) == once
    assert launched(d.ReductionToOneDevice("gpu:0"), *many) == once
    assert launched(Subclass(), *many) == 3 * once
    if not shared:
        elsewhere = [value(2, (1, 0, 1)), value(2, (1, 1, 0))]
        assert launched(d.ReductionToOneDevice(), *many, *elsewhere) == 3 * once
    assert (
        launched(d.ReductionToOneDevice(accumulation_fn=lambda v: v[0] + v[1] + v[2]), *many) == 0
    )
    assert launched(d.ReductionToOneDevice("gpu:1"), *many) == 0
    total = d.ReductionToOneDevice().reduce("SUM", many[0], "cpu:0")
    assert total.numpy().tolist() == [7.0] * 3


@pytest.mark.parametrize("make", OPS[:3])
@pytest.mark.parametrize("num_packs", [0, 2])
def test_all_reduce_in_replica_context_is_right(two, make, num_packs):
    strategy = d.MirroredStrategy(cross_device_ops=make(num_packs))

    def step():
        context = d.get_replica_context()
        r = int(context.replica_id_in_sync_group)
        values = [put(two, r, np.arange(n) + r) for n in (4, 3)]
        return context.all_reduce("SUM", values), context.all_reduce("MEAN", values[0])

    total, mean = strategy.run(step)
    fetched = two.fetched
    for replica in range(2):
        for value, n in zip(total, (4, 3), strict=True):
            got = value.values[replica].array
            assert got.device.id == replica
            np.testing.assert_array_equal(two.asnumpy(got), 2.0 * np.arange(n) + 1)
        np.testing.assert_array_equal(two.asnumpy(mean.values[replica].array), np.arange(4) + 0.5)
    assert fetched == 2  # int() of a replica's number: no value went over the host
    assert two.emulated.counts["combinations"] > 0
    strategy.extended.abort_collectives("the test is over")


def test_replicas_on_one_device_share_one_result(two):
    value = PerReplica([put(two, 0, np.full(4, r)) for r in range(3)])
    got = d.NcclAllReduce().batch_reduce("SUM", [(value, value)])[0]
    assert len({array_backend.address(v.array) for v in got.values}) == 1
    assert two.asnumpy(got.values[2].array).tolist() == [3.0] * 4
    by_ring = d.RingAllReduce().batch_reduce("SUM", [(value, value)])[0]
    assert len({array_backend.address(v.array) for v in by_ring.values}) == 3


def test_without_the_executor_arrays_use_host_memory_with_a_warning(two, monkeypatch, caplog):
    monkeypatch.setattr(on_device, "runtime", lambda: None)
    monkeypatch.setattr(cross_device_ops, "_logged", defaultdict(itertools.count))
    value = PerReplica([put(two, r, [1.0 + r, 2.0]) for r in range(2)])
    got = d.HierarchicalCopyAllReduce().batch_reduce("SUM", [(value, value)])[0]
    assert [two.asnumpy(v.array).tolist() for v in got.values] == [[3.0, 4.0]] * 2
    assert "HierarchicalCopy copies GPU arrays through host memory" in caplog.text


def test_replicas_on_cpus_and_devices_are_right(two):
    strategy = d.MirroredStrategy(["cpu:0", "gpu:1"], d.HierarchicalCopyAllReduce())

    def step():
        context = d.get_replica_context()
        r = int(context.replica_id_in_sync_group)
        x = put(two, 1, [1.0, 2.0]) if r else Tensor(np.array([5.0, 6.0], np.float32))
        return context.all_reduce("SUM", x)

    got = strategy.run(step)
    assert [array_backend.to_numpy(v.array).tolist() for v in got.values] == [[6.0, 8.0]] * 2
    assert two.emulated.counts["combinations"] == 0
    strategy.extended.abort_collectives("the test is over")


def test_replicas_on_one_gpu_without_nccl_are_right(two):
    config.set_logical_device_configuration("gpu:0", 3)
    strategy = d.MirroredStrategy()
    assert "NcclAllReduce (NCCL is not installed: by the core's kernels)" in strategy.describe()

    def step():
        context = d.get_replica_context()
        r = int(context.replica_id_in_sync_group)
        return context.all_reduce("SUM", put(two, r // 3, np.full(3, 2.0**r)))

    got = strategy.run(step)
    assert [v.array.device.id for v in got.values] == [0, 0, 0, 1]
    assert [two.asnumpy(v.array).tolist() for v in got.values] == [[15.0] * 3] * 4
    strategy.extended.abort_collectives("the test is over")


@pytest.mark.parametrize("make", OPS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("overlaps", [True, False])
def test_training_on_devices_equals_training_on_cpus(two, make, shared, overlaps):
    if shared:  # gpu:0 and gpu:1 are replicas on one GPU
        config.set_logical_device_configuration("gpu:0", 2)

    def train(devices):
        strategy = d.MirroredStrategy(devices, make())
        with strategy.scope():
            w = tf.Variable(np.arange(6, dtype=np.float32).reshape(3, 2) / 8)
            b = tf.Variable(np.zeros(2, np.float32))
            optimizer = tf.keras.optimizers.SGD(0.125)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.matmul(x, w) + b) ** 2)
            if overlaps:
                optimizer.minimize(loss, [w, b], tape=tape)
            else:
                optimizer.apply_gradients(zip(tape.gradient(loss, [w, b]), [w, b], strict=True))

        x = np.random.default_rng(1).integers(-2, 3, (12, 3)).astype(np.float32) / 4
        for batch in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(x).batch(4)
        ):
            strategy.run(step, args=(batch,))
        weights = [array_backend.to_numpy(c.read_value().array) for v in (w, b) for c in v.values]
        strategy.extended.abort_collectives("the test is over")
        return weights

    for got, want in zip(train(["gpu:0", "gpu:1"]), train(["cpu:0", "cpu:1"]), strict=True):
        np.testing.assert_array_equal(got, want)
