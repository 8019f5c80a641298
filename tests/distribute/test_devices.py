"""Device names."""

from __future__ import annotations

import pytest

import pycollective as tf
from pycollective import array_backend, distribute
from pycollective.distribute.devices import default_devices, parse_device, parse_devices


@pytest.mark.parametrize(
    "name",
    ["cpu:1", "CPU:1", "/cpu:1", "/device:CPU:1", "device:cpu:1",
     "/job:localhost/replica:0/task:0/device:CPU:1", "/job:localhost/device:CPU:1",
     "/job:localhost/cpu:1", "job:localhost/replica:0/task:0/cpu:1", "/replica:0/task:0/device:CPU:1",
     "/task:0/device:cpu:1", "/device:CPU:1/job:localhost", "/JOB:localhost/DEVICE:cpu:1"],
)  # fmt: skip
def test_device_names_in_every_spelling_are_one_device(name):
    assert str(parse_device(name)) == "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize(
    "name",
    [
        "tpu:0",
        "cpu:x",
        "",
        "gpu:0:1",
        "cpu:*",
        3,
        None,
        "//cpu:0",
        "cpu:0/cpu:1",
        "/job:localhost",
        "/job:localhost/job:localhost/cpu:0",
        "/disk:0/cpu:0",
    ],
)
def test_parse_device_unknown_name_raises_value_error(name):
    with pytest.raises(ValueError, match="device"):
        parse_device(name)


def test_parse_device_without_a_number_has_number_0():
    assert parse_device("cpu").index == 0


def test_gpu_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"no device 'gpu:77'.*GPUs are visible.*'cpu:0'"):
        parse_device("gpu:77")


def test_remote_devices_are_refused():
    for refuse in (parse_device, lambda name: parse_devices([name]), distribute.OneDeviceStrategy):
        with pytest.raises(ValueError, match="Local device should have only 'localhost'"):
            refuse("/job:worker/task:1/device:CPU:0")
    with pytest.raises(ValueError, match="Remote device string must have task specified"):
        parse_devices(["/job:worker/device:CPU:0"])


def test_lists_of_several_machines_are_refused():
    with pytest.raises(
        ValueError,
        match="Local device should have only 'localhost' in the job field in device string.*"
        "cannot have mixed list",
    ):
        parse_devices(["/cpu:0", "/job:worker/task:0/cpu:0"])
    for devices in (
        ["/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"],
        ["/cpu:0", "/task:1/cpu:0"],
    ):
        with pytest.raises(RuntimeError, match="In-graph multi-worker training with `MirroredStr"):
            distribute.MirroredStrategy(devices)


@pytest.mark.parametrize(
    ("visible", "gpus"), [("", 0), ("-1", 0), ("1", 1), ("0,3", 2)]
)  # fmt: skip
def test_parse_device_numbers_visible_gpus(monkeypatch, visible, gpus):
    # CUDA numbers the GPUs of the variable from 0, and CuPy asks CUDA.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (gpus, ""))
    assert [str(d)[-5:] for d in default_devices()] == [f"GPU:{i}" for i in range(gpus)] or [
        "CPU:0"
    ]
    for i in range(gpus):
        assert parse_device(f"/gpu:{i}").index == i
    with pytest.raises(ValueError, match=rf"no device 'gpu:{gpus}': {gpus} GPUs are visible .*"
                       f"CUDA_VISIBLE_DEVICES is '{visible}'"):  # fmt: skip
        parse_device(f"gpu:{gpus}")


def test_duplicate_devices_or_none_raise():
    with pytest.raises(AssertionError, match="No duplicates allowed in `devices` argument"):
        parse_devices(["cpu:0", "/device:CPU:0"])
    with pytest.raises(ValueError, match="devices is empty"):
        distribute.MirroredStrategy([])


def test_default_is_one_replica_or_the_gpus():
    assert len(default_devices()) >= 1
    assert distribute.MirroredStrategy().num_replicas_in_sync == len(default_devices())


# tf.device --------------------------------------------------------------------------------------


def test_device_changes_nothing_on_a_machine_without_gpus():
    assert "device" in dir(tf)
    for name in ("cpu:0", "/CPU:1", "/job:localhost/replica:0/task:0/device:CPU:0", None):
        with tf.device(name):
            v = tf.Variable([1.0, 2.0])
            assert (v + tf.constant([1.0, 1.0])).numpy().tolist() == [2.0, 3.0]
    with tf.device(tf.config.list_logical_devices("CPU")[0]):
        assert tf.ones([2]).numpy().tolist() == [1.0, 1.0]


def test_device_unknown_name_or_function_raises():
    for name in ("disk:0", "", "cpu:*", 3):
        with pytest.raises(ValueError, match="device"), tf.device(name):
            pass
    with pytest.raises(RuntimeError, match="tf.device does not support functions"):
        with tf.device(lambda op: "cpu:0"):
            pass


def test_device_leaves_strategies_and_their_variables_alone():
    strategy = distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with tf.device("cpu:0"), strategy.scope(), tf.device("cpu:1"):
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    assert len(v.values) == 2

    def step():
        with tf.device("cpu:0"):
            v.assign_add(tf.constant(1.0) + 0)

    strategy.run(step)
    assert v.numpy() == 3.0
