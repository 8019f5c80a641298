"""Which devices there are, under the names of ``tf.config``."""

from __future__ import annotations

from typing import NamedTuple

from pycollective import array_backend

__all__ = ["LogicalDevice", "PhysicalDevice", "list_logical_devices", "list_physical_devices"]


class PhysicalDevice(NamedTuple):
    """A processor of this machine."""

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device as strategies name it."""

    name: str
    device_type: str


def _numbered(device_type: str | None) -> list[tuple[str, int]]:
    devices = [("CPU", 0), *(("GPU", i) for i in range(array_backend.gpu_count()[0]))]
    return [d for d in devices if device_type is None or d[0] == device_type.upper()]


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Return the processors of a kind (``"CPU"``, ``"GPU"``), or all."""
    return [
        PhysicalDevice(f"/physical_device:{kind}:{i}", kind) for kind, i in _numbered(device_type)
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Return the devices of a kind, or all.

    One CPU device is listed; strategies take any number of them, ``"cpu:0"``, ``"cpu:1"``, ….
    """
    return [LogicalDevice(f"/device:{kind}:{i}", kind) for kind, i in _numbered(device_type)]
