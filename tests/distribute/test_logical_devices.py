"""Several logical devices on one processor: configuration, numbers, and the memory of values."""

from __future__ import annotations

import numpy as np
import pytest
from device_arrays import DeviceArray

import pycollective as tf
from pycollective import array_backend, config
from pycollective import distribute as d
from pycollective.distribute.cluster_resolver import TFConfigClusterResolver
from pycollective.distribute.cross_device_ops import devices_of
from pycollective.distribute.devices import Device, parse_device
from pycollective.distribute.values import PerReplica

Part = config.LogicalDeviceConfiguration


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch):
    monkeypatch.setattr(config, "_state", config._State())


@pytest.fixture
def two_gpus(cupy, monkeypatch):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (2, ""))
    return cupy


def names(kind=None):
    return [device.name for device in config.list_logical_devices(kind)]


def test_logical_cpus_are_configured_once_as_in_tensorflow():
    (cpu,) = config.list_physical_devices("CPU")
    assert config.get_logical_device_configuration(cpu) is None
    config.set_logical_device_configuration(cpu, [Part(), Part()])
    config.set_logical_device_configuration(cpu, [Part(), Part(), Part()])  # not used yet
    assert config.get_logical_device_configuration(cpu) == [Part()] * 3
    assert names("CPU") == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
    config.set_logical_device_configuration(cpu, [Part()] * 3)  # changes nothing
    for changed in ([Part()] * 2, None, 1):
        with pytest.raises(
            RuntimeError, match="Virtual devices cannot be modified after being initialized"
        ):
            config.set_logical_device_configuration(cpu, changed)
    assert d.MirroredStrategy(["cpu:0", "cpu:2"]).num_replicas_in_sync == 2
    assert d.MirroredStrategy().num_replicas_in_sync == 3  # as in TensorFlow
    assert parse_device("cpu:3").memory == Device("CPU", 0)  # TensorFlow takes any number, too


@pytest.mark.parametrize(
    "use",
    [
        lambda: d.MirroredStrategy(["cpu:0"]),
        d.MirroredStrategy,
        lambda: d.OneDeviceStrategy("cpu:1"),
        config.list_logical_devices,
        lambda: TFConfigClusterResolver().num_accelerators(),
    ],
)
def test_use_of_devices_fixes_their_configuration(use):
    config.set_logical_device_configuration("cpu:0", 2)
    config.set_logical_device_configuration("cpu:0", None)
    assert config.get_logical_device_configuration("cpu:0") is None
    tf.constant([1.0]) + 1.0  # uses no device of a strategy
    config.set_logical_device_configuration("cpu:0", 2)
    use()
    with pytest.raises(RuntimeError, match="Virtual devices cannot be modified"):
        config.set_logical_device_configuration("cpu:0", 4)


@pytest.mark.parametrize(
    ("device", "parts", "error", "text"),
    [
        ("cpu:1", 2, ValueError, "Unrecognized device: 'cpu:1'"),
        (config.PhysicalDevice("/physical_device:GPU:2", "GPU"), 2, ValueError,
         "Unrecognized device: PhysicalDevice"),
        (7, 2, ValueError, "Unrecognized device: 7"),
        ("gpu:*", 2, ValueError, "Unrecognized device"),
        ("cpu:0", [Part(8)], ValueError,
         "Setting memory limit on CPU virtual devices is currently not supported"),
        ("cpu:0", [Part(None, 1)], ValueError,
         "Setting experimental_priority on CPU virtual  devices is currently not supported"),
        ("cpu:0", [Part(None, None, 1)], ValueError,
         "Setting experimental_device_ordinal on CPU virtual  devices is currently not supported"),
        ("gpu:0", [Part(8), Part()], ValueError,
         "Setting memory limit is required for GPU virtual devices"),
        ("gpu:0", [Part(-8)], ValueError, "memory_limit must be a positive number of MiB, got -8"),
        ("gpu:0", [Part(8, 1)], ValueError, "experimental_priority"),
        ("gpu:0", [8, 8], TypeError, "LogicalDeviceConfiguration objects, not 8"),
        ("gpu:0", 0, ValueError, "at least one logical device, got 0"),
        ("gpu:0", [], ValueError, r"at least one logical device, got \[\]"),
    ],
)  # fmt: skip
def test_invalid_configuration_of_devices_raises(two_gpus, device, parts, error, text):
    with pytest.raises(error, match=text):
        config.set_logical_device_configuration(device, parts)
    assert names("GPU") == ["/device:GPU:0", "/device:GPU:1"]


def test_logical_devices_are_numbered_across_gpus(two_gpus):
    config.set_logical_device_configuration("gpu:0", 3)
    assert names("GPU") == [f"/device:GPU:{i}" for i in range(4)]
    assert [parse_device(f"gpu:{i}").processor for i in range(4)] == [0, 0, 0, 1]
    assert [Device("GPU", i).memory.index for i in range(4)] == [0, 0, 0, 3]
    with pytest.raises(ValueError, match="no device 'gpu:4': 4 logical devices on 2 GPUs"):
        parse_device("gpu:4")
    everything = d.MirroredStrategy()
    assert [name[-5:] for name in everything.extended.worker_devices] == [
        f"GPU:{i}" for i in range(4)
    ]
    lines = everything.describe().splitlines()
    assert ["on GPU" in line for line in lines] == [False, True, True, True]
    assert "GPU:2 on GPU 0," in lines[2] and "GPU:3 on GPU 1," in lines[3]
    assert "some are on one GPU, so NCCL is not used" in lines[0]
    assert "on one GPU" not in d.MirroredStrategy(["gpu:1", "gpu:3"]).describe()
    assert TFConfigClusterResolver().num_accelerators() == {"GPU": 4}


def test_memory_limit_of_a_gpu_is_the_sum_over_its_logical_devices(two_gpus):
    limits = []

    class Pool:
        def set_limit(self, size):
            limits.append((array_backend.device_of(two_gpus.zeros(1))[1], size))

    two_gpus.get_default_memory_pool = Pool
    gpus = config.list_physical_devices("GPU")
    config.set_logical_device_configuration(gpus[1], [Part(memory_limit=100), Part(28)])
    config.set_logical_device_configuration(gpus[0], 2)
    assert limits == []
    assert len(names("GPU")) == 4
    parse_device("gpu:3")
    assert limits == [(1, 128 << 20)]


def test_values_lie_on_the_gpu(two_gpus):
    config.set_logical_device_configuration("gpu:0", 2)
    devices = ["gpu:1", "gpu:0", "gpu:2"]
    places = [0, 0, 1]
    strategy = d.MirroredStrategy(devices)
    kinds = [{"aggregation": tf.VariableAggregation.MEAN},
             {"aggregation": tf.VariableAggregation.SUM,
              "synchronization": tf.VariableSynchronization.ON_READ}]  # fmt: skip

    def where(value):
        arrays = [(v.current() if isinstance(v, tf.Variable) else v).array for v in value.values]
        assert all(isinstance(a, DeviceArray) for a in arrays)
        return [a.device.id for a in arrays]

    for kind in kinds:
        with strategy.scope():
            v = tf.Variable([1.0, 2.0], **kind)
        assert where(v) == places
        assert len({id(c.current().array) for c in v.values}) == 3
    rows = tf.data.Dataset.range(12).batch(6)
    for batch in strategy.experimental_distribute_dataset(rows):
        assert where(batch) == places
    assert where(strategy.run(lambda: tf.Variable(np.ones(2)))) == places
    value = PerReplica([tf.Tensor(array_backend.placed(np.ones(2), "GPU", p)) for p in places])
    assert [device.index for device in devices_of(value)] == [0, 0, 2]
    assert devices_of("gpu:1") == (Device("GPU", 0),)
    extended = strategy.extended
    assert extended.reduce_to("SUM", value, "gpu:2").array.device.id == 1
    assert where(extended.reduce_to("SUM", value, value)) == places
    assert where(extended.broadcast_to(value.values[2], value)) == places
    assert strategy.reduce("SUM", value, axis=None).numpy().tolist() == [3.0, 3.0]
    ops = d.ReductionToOneDevice("gpu:1")
    assert where(ops.reduce("SUM", value, value)) == places
    # All logical devices of a GPU have one memory, so nothing is copied.
    alone = value.values[0]
    assert d.ReductionToOneDevice().reduce("SUM", alone, "gpu:1") is alone


@pytest.mark.parametrize("central", [False, True])
def test_fit_on_two_devices_of_one_gpu_equals_fit_on_two_cpus(cupy, monkeypatch, central, tmp_path):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (1, ""))
    config.set_logical_device_configuration("gpu:0", 2)
    random = np.random.default_rng(0)
    images, labels = random.random((14, 5)).astype("float32"), random.integers(0, 3, 14)
    make = d.experimental.CentralStorageStrategy if central else d.MirroredStrategy

    def train(devices):
        strategy = make(devices)
        with strategy.scope():
            tf.keras.utils.set_random_seed(0)
            model = tf.keras.Sequential(
                [tf.keras.layers.Dense(4, "relu"), tf.keras.layers.Dense(3)]
            )
            model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(images, labels, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model, history.history["loss"], model.predict(images, verbose=0)

    model, loss, predicted = train(["gpu:0", "gpu:1"])
    assert [name[-5:] for name in model.distribute_strategy.extended.worker_devices] == [
        "GPU:0",
        "GPU:1",
    ]
    expected, expected_loss, expected_prediction = train(["cpu:0", "cpu:1"])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(predicted, expected_prediction, rtol=1e-4, atol=1e-6)
    for weight, right in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, right, rtol=1e-4, atol=1e-6)
    # A checkpoint of two replicas is restored into one replica on the GPU.
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    with d.OneDeviceStrategy("gpu:1").scope():
        other = tf.keras.Sequential([tf.keras.layers.Dense(4, "relu"), tf.keras.layers.Dense(3)])
        other.build((None, 5))
    tf.train.Checkpoint(model=other).restore(path)
    assert all(type(v.current().array) is DeviceArray for v in other.weights)
    for weight, restored in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, restored)
