"""Logical devices of this machine, by TensorFlow's names.

``"cpu:0"``, ``"cpu:1"``, … are replicas on the same processor. A GPU can have several logical devices
(`config.set_logical_device_configuration`). For a GPU, `Device.processor` is CUDA's
number.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import array_backend, config
from pycollective.array_backend import Array
from pycollective.nccl.device import Upload

# The parts of a name between its slashes, in any order.
_PART = re.compile(
    r"""(?:job:(?P<job>\w+) | replica:(?P<replica>\d+) | task:(?P<task>\d+)
        | (?:device:)?(?P<kind>[a-z]+)(?::(?P<index>\d+|\*))?)""",
    re.VERBOSE | re.IGNORECASE,
)
_LOCAL = (None, "localhost")
_NOT_LOCAL = (
    "Local device should have only 'localhost' in the job field in device string. E.g. "
    "'job:localhost' in /job:localhost/replica:0/task:0/device:CPU:0"
)


@dataclass(frozen=True)
class Device:
    """One logical device of this machine.

    Attributes
    ----------
    kind : {"CPU", "GPU"}
        The kind.
    index : int
        The number among the logical devices of this kind.
    """

    kind: str
    index: int

    @property
    def processor(self) -> int:
        """The number of the processor; for GPUs CUDA's."""
        return config.processor_of(self.kind, self.index)

    @property
    def memory(self) -> Device:
        """The first device of the same processor, which represents the processor's memory."""
        if self.kind == "CPU":
            return _HOST
        return Device(self.kind, config.first_on(self.kind, self.processor))

    def place(self, array: Array) -> Array:
        """Return an array in this device's memory: the same one if it is there already."""
        if self.kind == "CPU" and array.__class__ is np.ndarray:
            return array
        return array_backend.placed(array, self.kind, self.processor)

    def in_use(self) -> AbstractContextManager[Any]:
        """Return a context in which new arrays are allocated on this device, if it is a GPU."""
        return (
            _NOTHING if self.kind == "CPU" else array_backend.on_device(self.kind, self.processor)
        )

    def __str__(self) -> str:
        """Return the canonical name."""
        return f"/job:localhost/replica:0/task:0/device:{self.kind}:{self.index}"


_NOTHING = nullcontext()

#: The device that represents the host's memory.
_HOST = Device("CPU", 0)


class Uploads:
    """Copies to GPUs by a thread that prefetches batches, while the GPUs compute."""

    def __init__(self) -> None:
        self._uploads: dict[int, Upload] = {}

    def place(self, device: Device, array: Array) -> Array:
        """Return an array in a device's memory when the copy is complete; as `Device.place`."""
        elsewhere = not array_backend.on_host(array)
        if device.kind != "GPU" or elsewhere or array.dtype.kind not in "biufc" or not array.nbytes:
            return device.place(array)
        processor = device.processor
        with device.in_use():
            if processor not in self._uploads:
                self._uploads[processor] = Upload()
            copied: Array = self._uploads[processor](array)
        return copied


def parse_device(name: str | Device) -> Device:
    """Return the device with a name.

    Parameters
    ----------
    name : str
        ``"cpu:0"``, ``"/gpu:1"``, ``"/device:CPU:0"``,
        ``"/job:localhost/replica:0/task:0/device:GPU:0"``, …, in capital or small letters. Numbers
        count the GPUs in ``CUDA_VISIBLE_DEVICES``; a GPU has a number for each of its logical devices.

    Raises
    ------
    ValueError
        The name is wrong, names another machine, or this machine has no such device.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise ValueError(f"a device is named by a string like 'cpu:0' or 'gpu:1', not {name!r}")
    parts = _parts(name)
    if parts["job"] not in _LOCAL:
        raise ValueError(f"{_NOT_LOCAL}, not {name!r}")
    if parts["index"] == "*":
        raise ValueError(f"device {name!r} is not one device: give a number in the place of *")
    device = Device(str(parts["kind"]).upper(), int(parts["index"] or 0))
    config.use_devices()
    if device.kind == "CPU" or device.index < (count := config.logical_count("GPU")):
        return device
    gpus, why = array_backend.gpu_count()
    if count > gpus:
        raise ValueError(
            f"no device {name!r}: {count} logical devices on {gpus} GPUs, numbered from 0"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        why = f"CUDA_VISIBLE_DEVICES is {visible!r}{f'; {why}' if why else ''}"
    raise ValueError(
        f"no device {name!r}: {count} GPUs are visible ({why or 'numbered from 0'}); "
        "use a CPU device such as 'cpu:0'"
    )


def in_memory_of(array: Any) -> Device:
    """Return the device that represents the memory of a value, as `Device.memory`."""
    if array.__class__ is np.ndarray:
        return _HOST
    kind, processor = array_backend.device_of(array)
    return Device(kind, config.first_on(kind, processor))


@functools.lru_cache(maxsize=256)
def _parts(name: str) -> Mapping[str, str | None]:
    """Return the parts of a name; None for each part that is missing."""
    found: dict[str, str | None] = dict.fromkeys(("job", "replica", "task", "kind", "index"))
    for part in name.removeprefix("/").split("/"):
        match = _PART.fullmatch(part)
        said = {k: v for k, v in match.groupdict().items() if v is not None} if match else {}
        if not said or any(found[k] is not None for k in said):
            raise _unknown(name)
        found.update(said)
    if found["kind"] is None or found["kind"].upper() not in ("CPU", "GPU"):
        raise _unknown(name)
    return found


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown device {name!r}: devices are named like 'cpu:0' or 'gpu:1'")


def parse_devices(names: Sequence[str | Device] | str | None) -> tuple[Device, ...]:
    """Return the devices with these names; for None all GPUs, or the CPU.

    Raises
    ------
    AssertionError
        A device is named twice (TensorFlow's error).
    RuntimeError
        The devices belong to several machines.
    ValueError
        A name is not a device of this machine, or the list is empty.
    """
    if names is None:
        return default_devices()
    if isinstance(names, (str, Device)):
        names = [names]
    if not isinstance(names, Iterable):
        raise ValueError(f"devices must be a list of names like 'cpu:0', not {names!r}")
    names = list(names)
    _require_one_machine([name for name in names if isinstance(name, str)])
    devices = tuple(parse_device(name) for name in names)
    if not devices:
        raise ValueError("devices is empty: give at least one, such as ['cpu:0']")
    if len(set(devices)) != len(devices):
        listed = ", ".join(str(d) for d in devices)
        raise AssertionError(f"No duplicates allowed in `devices` argument: {listed}")
    return devices


def _require_one_machine(names: Sequence[str]) -> None:
    """Raise TensorFlow's error unless all devices are on this machine."""
    found = [_parts(name) for name in names]
    local = [parts["job"] in _LOCAL for parts in found]
    if any(local) and not all(local):
        raise ValueError(
            f"{_NOT_LOCAL} Devices cannot have mixed list of device strings containing both "
            f"localhost and other job types such as worker, ps etc.: {', '.join(names)}"
        )
    workers = {
        (parts["job"] or "localhost", parts["replica"] or "0", parts["task"] or "0")
        for parts in found
    }
    if len(workers) > 1:
        raise RuntimeError(
            "In-graph multi-worker training with `MirroredStrategy` is not supported in eager mode. "
            f"The devices are those of {len(workers)} workers: {', '.join(names)}"
        )
    if not all(local) and any(parts["task"] is None for parts in found):
        raise ValueError(
            "Remote device string must have task specified.E.g. 'task:0' in "
            f"/job:worker/replica:0/task:0/device:CPU:0, not {', '.join(names)}"
        )


def default_devices() -> tuple[Device, ...]:
    """Return all logical devices on visible GPUs; without a GPU those on the CPU."""
    return visible_gpus() or tuple(Device("CPU", i) for i in range(config.logical_count("CPU")))


def visible_gpus() -> tuple[Device, ...]:
    """Return all logical devices on visible GPUs."""
    config.use_devices()
    return tuple(Device("GPU", i) for i in range(config.logical_count("GPU")))
