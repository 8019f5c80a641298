"""Device names."""

from __future__ import annotations

import pytest

from pycollective import distribute
from pycollective.distribute.devices import default_devices, parse_device, parse_devices


@pytest.mark.parametrize(
    "name",
    ["cpu:1", "CPU:1", "/cpu:1", "/device:CPU:1", "device:cpu:1",
     "/job:localhost/replica:0/task:0/device:CPU:1", "/job:localhost/device:CPU:1"],
)  # fmt: skip
def test_spellings(name):
    assert str(parse_device(name)) == "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize("name", ["tpu:0", "cpu", "cpu:x", "", "gpu:0:1", "cpu:*", 3, None])
def test_unknown_devices(name):
    if name == "cpu":
        assert parse_device(name).index == 0
        return
    with pytest.raises(ValueError, match="device"):
        parse_device(name)


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no device 'gpu:77'.*GPUs are visible.*'cpu:0'"):
        parse_device("gpu:77")


def test_remote_devices_are_refused():
    with pytest.raises(ValueError, match="Local device should have only 'localhost'"):
        parse_device("/job:worker/task:1/device:CPU:0")


def test_duplicates_and_empty():
    with pytest.raises(AssertionError, match="No duplicates allowed in `devices` argument"):
        parse_devices(["cpu:0", "/device:CPU:0"])
    with pytest.raises(ValueError, match="devices is empty"):
        distribute.MirroredStrategy([])


def test_default_is_one_replica_or_the_gpus():
    assert len(default_devices()) >= 1
    assert distribute.MirroredStrategy().num_replicas_in_sync == len(default_devices())
