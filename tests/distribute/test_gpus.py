"""Replicas on GPUs, with a stand-in for CuPy: where variables, batches and results lie."""

from __future__ import annotations

import numpy as np
import pytest
from device_arrays import DeviceArray
from leftovers import assert_no_threads
from strategies import replica_id

import pycollective as tf
from pycollective import array_backend
from pycollective import distribute as d
from pycollective.data import Dataset


@pytest.fixture(autouse=True)
def _gpus(cupy, monkeypatch):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (2, ""))


def where(value):
    """The GPU on which a tensor or a variable lies, None for the host."""
    array = value.array if isinstance(value, tf.Tensor) else value.current().array
    return array.device.id if isinstance(array, DeviceArray) else None


def places(value):
    return [where(v) for v in value.values]


def test_variables_lie_where_their_replicas_are():
    mirrored = d.MirroredStrategy()
    assert [name[-5:] for name in mirrored.extended.worker_devices] == ["GPU:0", "GPU:1"]
    kinds = {
        "mean": {"aggregation": tf.VariableAggregation.MEAN},
        "sum": {
            "aggregation": tf.VariableAggregation.SUM,
            "synchronization": tf.VariableSynchronization.ON_READ,
        },
    }
    for kind in kinds.values():
        with mirrored.scope():
            v = tf.Variable([1.0, 2.0], **kind)
        assert places(v) == [0, 1]
        v.assign([3.0, 4.0])
        assert v.numpy().tolist() == [3.0, 4.0]
        mirrored.run(lambda v=v: v.assign([5.0, 6.0 + v.numpy()[0] * 0.0]))
        assert places(v) == [0, 1]
        mirrored.extended.update(v, lambda c: c.assign_add([1.0, 1.0]))
        assert places(v) == [0, 1]
    made = mirrored.run(lambda: tf.Variable(lambda: np.ones(3)))
    assert places(made) == [0, 1]
    turned = d.MirroredStrategy(["gpu:1", "gpu:0"])
    with turned.scope():
        v = tf.Variable([1.0, 2.0], **kinds["sum"])
    v.assign([4.0, 6.0])
    assert places(v) == [1, 0]
    assert v.numpy().tolist() == [4.0, 6.0]
    turned.run(lambda: v.assign_add([1.0, 1.0]))
    assert v.numpy().tolist() == [6.0, 8.0]
    ids = turned.run(lambda: d.get_replica_context().replica_id_in_sync_group)
    assert places(ids) == [1, 0]
    assert [int(i) for i in ids.values] == [0, 1]
    for strategy, place in (
        (d.OneDeviceStrategy("gpu:1"), 1),
        (d.experimental.CentralStorageStrategy(), None),
        (d.experimental.CentralStorageStrategy(parameter_device="/gpu:1"), 1),
        (d.experimental.CentralStorageStrategy(["gpu:1"]), 1),
    ):
        with strategy.scope():
            v = tf.Variable([1.0])
        assert where(getattr(v, "_values", [v])[0]) == place
        v.assign_add([1.0])
        assert v.numpy().tolist() == [2.0]


def test_batches_are_put_on_the_replicas_devices():
    two = d.MirroredStrategy()
    pairs = Dataset.from_tensor_slices((np.arange(10.0), np.array(list("abcdefghij")))).batch(4)
    fetched = list(two.experimental_distribute_dataset(pairs))
    assert [places(x) for x, _ in fetched] == [[0, 1]] * 3
    assert [v.numpy().tolist() for v in fetched[2][0].values] == [[8.0], [9.0]]
    assert places(fetched[0][1]) == [None, None]  # text stays on the host
    one = d.OneDeviceStrategy("/gpu:1")
    assert [where(x) for x, _ in one.experimental_distribute_dataset(pairs)] == [1] * 3
    mixed = d.MirroredStrategy(["cpu:0", "gpu:1"])
    assert [places(x) for x, _ in mixed.experimental_distribute_dataset(pairs)] == [[None, 1]] * 3
    assert_no_threads()


def test_options_say_whether_batches_are_put_on_devices():
    two = d.MirroredStrategy()
    single = Dataset.range(3).batch(1)
    on_host = d.InputOptions(experimental_fetch_to_device=False)
    (x, _) = two.experimental_distribute_dataset(Dataset.range(4).batch(2), on_host)
    assert places(x) == [None, None]
    for options, found in ((None, [0, 1]), (d.InputOptions(), [0, 1]), (on_host, [None, None])):
        steps = list(two.distribute_datasets_from_function(lambda context: single, options))
        assert [places(x) for x in steps] == [found] * 2
        assert [v.shape for v in steps[1].values] == [(1,), (0,)]  # also the batch without rows
    placed = d.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=d.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
    )
    steps = list(two.distribute_datasets_from_function(lambda context: single, placed))
    assert [places(x) for x in steps] == [[0, 1]] * 3


def test_batches_are_copied_to_devices_ahead():
    distributed = d.MirroredStrategy().experimental_distribute_dataset(Dataset.range(8).batch(4))
    iterator = iter(distributed)
    assert type(iterator._steps).__name__ == "Prefetcher"  # although the rows are in memory
    del iterator
    assert_no_threads()


def test_values_are_reduced_to_their_destinations():
    two = d.MirroredStrategy()
    x = two.run(lambda: tf.Tensor(np.arange(3.0)))
    on_gpus = d.values.PerReplica(
        [tf.Tensor(array_backend.placed(v.array, "GPU", r)) for r, v in enumerate(x.values)]
    )
    slices = d.values.PerReplica([tf.IndexedSlices(v, [0, 2, 1]) for v in on_gpus.values])
    for ops in (None, d.ReductionToOneDevice(), d.HierarchicalCopyAllReduce()):
        strategy = d.MirroredStrategy(cross_device_ops=ops)
        reduced = strategy.reduce("SUM", on_gpus, axis=None)
        assert where(reduced) is None
        assert reduced.numpy().tolist() == [0, 2, 4]
        extended = strategy.extended
        assert where(extended.reduce_to("MEAN", on_gpus, "gpu:1")) == 1
        everywhere = extended.reduce_to("MEAN", on_gpus, on_gpus)
        assert places(everywhere) == [0, 1]
        assert everywhere.values[1].numpy().tolist() == [0, 1, 2]
        assert places(extended.broadcast_to(x.values[0], on_gpus)) == [0, 1]
        assert where(strategy.gather(on_gpus, axis=0)) is None
        rows = extended.reduce_to("SUM", slices, slices)
        assert [where(s.values) for s in rows.values] == [0, 1]
        assert where(extended.reduce_to("SUM", slices, "cpu:0").indices) is None
    # A single value is copied if its destination is another device.
    ops = d.ReductionToOneDevice()
    assert ops.reduce("SUM", on_gpus.values[1], "gpu:1") is on_gpus.values[1]
    assert where(ops.reduce("SUM", on_gpus.values[1], "gpu:0")) == 0
    assert where(ops.reduce("SUM", on_gpus.values[1], "cpu:3")) is None
    assert where(ops.gather(on_gpus.values[1], "gpu:0", 0)) == 0


def test_reduce_of_one_replica_on_a_gpu_returns_to_the_host():
    one = d.MirroredStrategy(["gpu:1"])
    x = one.run(lambda: tf.Tensor(array_backend.placed(np.ones(2), "GPU", 1)))
    assert where(x) == 1
    for op in ("SUM", "MEAN"):
        assert where(one.reduce(op, x, axis=None)) is None
        assert float(one.reduce(op, x, axis=0)) == {"SUM": 2.0, "MEAN": 1.0}[op]
    assert where(one.gather(x, axis=0)) is None
    alone = d.OneDeviceStrategy("gpu:1")
    assert alone.reduce("SUM", x, axis=None) is x
    assert float(alone.reduce("MEAN", x, axis=0)) == 1.0
    two = d.MirroredStrategy()
    parts = two.run(
        lambda: tf.Tensor(array_backend.placed(np.arange(1.0 + replica_id()), "GPU", replica_id()))
    )
    assert float(two.reduce("MEAN", parts, axis=0)) == 1 / 3
    assert float(two.reduce("SUM", parts, axis=-1)) == 1.0


def test_functions_that_make_values_run_on_the_replicas_devices(cupy):
    two = d.MirroredStrategy(["gpu:1", "gpu:0"])
    made = two.experimental_distribute_values_from_function(
        lambda context: tf.Tensor(cupy.zeros(context.replica_id_in_sync_group + 1))
    )
    assert places(made) == [1, 0]
    assert [v.shape for v in made.values] == [(1,), (2,)]


def test_reduction_to_one_device_adds_on_that_device():
    seen = []

    def add(tensors):
        seen.append([where(t) for t in tensors])
        return tensors[0] + tensors[1]

    x = d.values.PerReplica(
        [tf.Tensor(array_backend.placed(np.ones(2), "GPU", r)) for r in range(2)]
    )
    for device, place in ((None, 0), ("gpu:1", 1), ("cpu:0", None)):
        total = d.ReductionToOneDevice(device, add).reduce("SUM", x, x)
        assert seen.pop() == [place] * 2
        assert places(total) == [0, 1]
        assert total.values[1].numpy().tolist() == [2.0, 2.0]
        total = d.ReductionToOneDevice(device).reduce("MEAN", x, x)
        assert places(total) == [0, 1]


def test_collectives_of_replicas_stay_on_their_devices():
    two = d.MirroredStrategy()
    batches = Dataset.from_tensor_slices(np.arange(4.0)).batch(4)
    (x,) = two.experimental_distribute_dataset(batches)

    def replica(x):
        context = d.get_replica_context()
        whole = context.all_gather(x, 0)
        rows = context.all_reduce("SUM", tf.IndexedSlices(x, [0, 1], (4,)))
        return context.all_reduce("SUM", x), whole, rows.values

    for value in two.run(replica, (x,)):
        assert places(value) == [0, 1]
    total, whole, _ = two.run(replica, (x,))
    assert total.values[1].numpy().tolist() == [2.0, 4.0]
    assert whole.values[0].numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("devices", [["gpu:0"], ["gpu:0", "gpu:1"], ["cpu:0", "gpu:0"]])
def test_a_model_trains_as_on_cpus(devices):
    rng = np.random.default_rng(0)
    images, labels = rng.random((8, 5)).astype("float32"), rng.integers(0, 3, 8)

    def train(strategy):
        with strategy.scope():
            tf.keras.utils.set_random_seed(0)
            model = tf.keras.Sequential(
                [tf.keras.layers.Dense(4, "relu"), tf.keras.layers.Dense(3)]
            )
            model.compile(
                tf.keras.optimizers.Adam(0.1),
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        history = model.fit(images, labels, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model, history.history

    model, history = train(d.MirroredStrategy(devices))
    plain, expected = train(d.get_strategy())
    wanted = [int(name[-1]) if name.startswith("gpu") else None for name in devices]
    for v in model.weights:
        assert places(v) == wanted
    for weight, right in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, right, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    assert history["accuracy"] == pytest.approx(expected["accuracy"])


def test_device_says_where_variables_lie():
    with tf.device("/GPU:1"):
        v = tf.Variable([1.0, 2.0])
        with tf.device("cpu:0"):
            w = tf.Variable([1.0, 2.0])
        assert where(v * 2.0) == 1
    assert (where(v), where(w), where(tf.Variable([1.0]))) == (1, None, None)
    strategy = d.MirroredStrategy(["gpu:0", "gpu:1"])
    with strategy.scope(), tf.device("gpu:1"):
        assert places(tf.Variable([1.0])) == [0, 1]
    with pytest.raises(ValueError, match="no device 'gpu:2'"), tf.device("gpu:2"):
        pass
