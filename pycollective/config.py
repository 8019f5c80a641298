"""Devices, under the names of ``tf.config``.

A *physical* device is a processor. A *logical* device holds a replica of a strategy: each processor
has one, unless `set_logical_device_configuration` changes that. Logical devices are numbered
through all processors: with two logical devices on the first GPU, ``"gpu:2"`` is on the second GPU.
Only this module maps logical devices to processors; other modules call `processor_of`.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from pycollective import array_backend

__all__ = [
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "functions_run_eagerly",
    "get_logical_device_configuration",
    "list_logical_devices",
    "list_physical_devices",
    "run_functions_eagerly",
    "set_logical_device_configuration",
]


class PhysicalDevice(NamedTuple):
    """A processor of this machine."""

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device that a strategy can name."""

    name: str
    device_type: str


class LogicalDeviceConfiguration(NamedTuple):
    """Settings of one of several logical devices on a processor.

    Attributes
    ----------
    memory_limit : float, optional
        Most MiB of a GPU that the device may use. Logical devices on one GPU share CuPy's memory pool,
        whose limit is the sum of their limits.
    experimental_priority, experimental_device_ordinal : optional
        TensorFlow's settings, which must be None here.
    """

    memory_limit: float | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


class _State:
    """The configuration, and a flag that forbids changes once devices are in use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: dict[tuple[str, int], list[LogicalDeviceConfiguration]] = {}
        self.in_use = False


_state = _State()
_NAME = re.compile(r"/?(?:physical_)?(?:device:)?(cpu|gpu)(?::(\d+))?", re.IGNORECASE)


def _processors(device_type: str | None = None) -> list[tuple[str, int]]:
    devices = [("CPU", 0), *(("GPU", i) for i in range(array_backend.gpu_count()[0]))]
    return [d for d in devices if device_type is None or d[0] == device_type.upper()]


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Return the processors of a kind (``"CPU"``, ``"GPU"``), or all."""
    return [
        PhysicalDevice(f"/physical_device:{kind}:{i}", kind) for kind, i in _processors(device_type)
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Return the logical devices of a kind, or all; after this call they cannot be configured.

    One CPU device is listed unless others are configured. Strategies accept any number of CPU devices,
    ``"cpu:0"``, ``"cpu:1"``, …, listed or not.
    """
    use_devices()
    listed = []
    for kind in dict.fromkeys(kind for kind, _ in _processors(device_type)):
        listed += [LogicalDevice(f"/device:{kind}:{i}", kind) for i in range(logical_count(kind))]
    return listed


def get_logical_device_configuration(device: Any) -> list[LogicalDeviceConfiguration] | None:
    """Return the configuration of a processor, or None if there is none.

    Raises
    ------
    ValueError
        There is no such processor.
    """
    parts = _state.parts.get(_processor(device))
    return None if parts is None else list(parts)


def set_logical_device_configuration(
    device: Any, logical_devices: Iterable[LogicalDeviceConfiguration] | int | None
) -> None:
    """Set the logical devices of a processor, before devices are used.

    Parameters
    ----------
    device : PhysicalDevice or str
        One of `list_physical_devices`, or its name, ``"gpu:0"``.
    logical_devices : list of LogicalDeviceConfiguration, int or None
        One configuration for each device. A number: that many devices, which share a GPU's memory
        without limits. None: one device, the default.

    Raises
    ------
    ValueError
        There is no such processor, the processor would have no device, or a configuration is not valid
        for it.
    TypeError
        ``logical_devices`` has elements that are not configurations.
    RuntimeError
        Devices are in use: a strategy was made, or devices were listed.
    """
    processor = _processor(device)
    if isinstance(logical_devices, int):
        parts = [LogicalDeviceConfiguration()] * logical_devices
    else:
        parts = list(logical_devices or ())
        _check(processor[0], parts)
    if logical_devices is not None and not parts:
        raise ValueError(f"{device!r} needs at least one logical device, got {logical_devices!r}")
    with _state.lock:
        if _state.parts.get(processor, []) == parts:
            return
        if _state.in_use:
            raise RuntimeError(
                "Virtual devices cannot be modified after being initialized: a strategy was made, or "
                "logical devices were listed; configure them at the program's start"
            )
        if parts:
            _state.parts[processor] = parts
        else:
            del _state.parts[processor]


def _processor(device: Any) -> tuple[str, int]:
    name = device.name if isinstance(device, PhysicalDevice) else device
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    found = (match[1].upper(), int(match[2] or 0)) if match else None
    if found is None or found not in _processors():
        raise ValueError(
            f"Unrecognized device: {device!r}; processors of this machine are "
            f"{', '.join(d.name for d in list_physical_devices())}"
        )
    return found


def _check(kind: str, parts: list[LogicalDeviceConfiguration]) -> None:
    for part in parts:
        if not isinstance(part, LogicalDeviceConfiguration):
            raise TypeError(f"logical devices are LogicalDeviceConfiguration objects, not {part!r}")
        limit = part.memory_limit
        if kind == "CPU" and limit is not None:
            raise ValueError(
                "Setting memory limit on CPU virtual devices is currently not supported"
            )
        if kind == "GPU" and limit is None:
            raise ValueError(
                "Setting memory limit is required for GPU virtual devices: give memory_limit in MiB to "
                "each, or a number of devices instead of the list"
            )
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"memory_limit must be a positive number of MiB, got {limit!r}")
        for name in ("experimental_priority", "experimental_device_ordinal"):
            if getattr(part, name) is not None:
                # The two spaces are TensorFlow's.
                raise ValueError(
                    f"Setting {name} on {kind} virtual  devices is currently not supported"
                )


# For strategies -----------------------------------------------------------------------------------


def _count(kind: str, index: int) -> int:
    parts = _state.parts.get((kind, index))
    return len(parts) if parts else 1


def use_devices() -> None:
    """Mark devices as used, so that their configuration cannot change, and set memory limits."""
    if _state.in_use:
        return
    with _state.lock:
        _state.in_use = True
        limits = {
            index: sum(part.memory_limit or 0 for part in parts)
            for (kind, index), parts in _state.parts.items()
            if kind == "GPU"
        }
    for index, mebibytes in limits.items():
        if mebibytes:
            array_backend.limit_memory(index, int(mebibytes * 2**20))


def logical_count(kind: str) -> int:
    """Return the number of listed logical devices of a kind."""
    return sum(_count(*processor) for processor in _processors(kind))


def processor_of(kind: str, index: int) -> int:
    """Return the number of a logical device's processor, for a GPU its CUDA number."""
    if kind == "CPU":
        return 0
    processor = 0
    while index >= (count := _count(kind, processor)):
        index -= count
        processor += 1
    return processor


def first_on(kind: str, processor: int) -> int:
    """Return the number of the first logical device on a processor."""
    return sum(_count(kind, i) for i in range(processor))


_eagerly = False


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Run each layer from Python if True; if False, the default, replay recorded kernels.

    Functions of ``tf.function`` run as Python in both cases. With True they check no signature, and may
    create variables in each call.
    """
    global _eagerly
    _eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """Return the setting of `run_functions_eagerly`."""
    return _eagerly
