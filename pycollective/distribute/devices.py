"""Device names: every spelling that TensorFlow accepts, and what this machine has.

A CPU device is a logical one: ``"cpu:0"``, ``"cpu:1"``, … are replicas on the same processor. A GPU
device is one that CuPy can use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pycollective import array_backend

__all__ = ["Device", "default_devices", "parse_device", "parse_devices"]

_SPELLING = re.compile(
    r"""^(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?
        /?(?:device:)?(?P<kind>[a-z]+)(?::(?P<index>\d+|\*))?$""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Device:
    """One device of this machine.

    Attributes
    ----------
    kind : {"CPU", "GPU"}
        What it is.
    index : int
        Which one.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        """Return the canonical name."""
        return f"/job:localhost/replica:0/task:0/device:{self.kind}:{self.index}"


def parse_device(name: str | Device) -> Device:
    """Return the device that a name means.

    Parameters
    ----------
    name : str
        ``"cpu:0"``, ``"/gpu:1"``, ``"/device:CPU:0"``,
        ``"/job:localhost/replica:0/task:0/device:GPU:0"``, …

    Raises
    ------
    ValueError
        If the name is not understood, belongs to another machine, or this machine has no such device.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise ValueError(f"a device is named by a string like 'cpu:0' or 'gpu:1', not {name!r}")
    match = _SPELLING.match(name)
    kind = match["kind"].upper() if match else ""
    if not match or kind not in ("CPU", "GPU"):
        raise ValueError(f"unknown device {name!r}: devices are named like 'cpu:0' or 'gpu:1'")
    if match["job"] not in (None, "localhost"):
        raise ValueError(
            "Local device should have only 'localhost' in the job field in device string. "
            f"E.g. 'job:localhost' in {name!r}"
        )
    if match["index"] == "*":
        raise ValueError(f"device {name!r} is not one device: give its number")
    device = Device(kind, int(match["index"] or 0))
    if kind == "GPU":
        count, why = array_backend.gpu_count()
        if device.index >= count:
            raise ValueError(
                f"no device {name!r}: {count} GPUs are visible ({why or 'numbered from 0'}); "
                "use a CPU device such as 'cpu:0'"
            )
    return device


def parse_devices(names: Sequence[str | Device] | str | None) -> tuple[Device, ...]:
    """Return the devices of a strategy: those named, or all GPUs, or the CPU.

    Raises
    ------
    AssertionError
        If a device is named twice (TensorFlow's error).
    ValueError
        If a name is not a device of this machine, or the list is empty.
    """
    if names is None:
        return default_devices()
    if isinstance(names, (str, Device)):
        names = [names]
    if not isinstance(names, Iterable):
        raise ValueError(f"devices must be a list of names like 'cpu:0', not {names!r}")
    devices = tuple(parse_device(name) for name in names)
    if not devices:
        raise ValueError("devices is empty: give at least one, such as ['cpu:0']")
    if len(set(devices)) != len(devices):
        listed = ", ".join(str(d) for d in devices)
        raise AssertionError(f"No duplicates allowed in `devices` argument: {listed}")
    return devices


def default_devices() -> tuple[Device, ...]:
    """Return all visible GPUs, or the one CPU device."""
    count, _ = array_backend.gpu_count()
    return tuple(Device("GPU", i) for i in range(count)) or (Device("CPU", 0),)
