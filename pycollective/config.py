"""Which devices there are, under the names of ``tf.config``.

A *physical* device is a processor. A *logical* one is what a strategy puts a replica on: one for each
processor, unless `set_logical_device_configuration` says otherwise. Their numbers go on from processor
to processor: with two on the first GPU, ``"gpu:2"`` is the second one. This module is the only one that
knows which processor a logical device is on; everything else asks `processor_of`.
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
    "get_logical_device_configuration",
    "list_logical_devices",
    "list_physical_devices",
    "set_logical_device_configuration",
]


class PhysicalDevice(NamedTuple):
    """A processor of this machine."""

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device as strategies name it."""

    name: str
    device_type: str


class LogicalDeviceConfiguration(NamedTuple):
    """What one of several logical devices on a processor is like.

    Attributes
    ----------
    memory_limit : float, optional
        Of a GPU: how many MiB it may take. Logical devices on one GPU share CuPy's memory pool, whose
        limit is the sum of theirs.
    experimental_priority, experimental_device_ordinal : optional
        TensorFlow's; they must be None here.
    """

    memory_limit: float | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


class _State:
    """What was configured, and whether it can still be changed."""

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
    """Return the devices of a kind, or all; from then on they cannot be configured.

    One CPU device is listed unless others were configured; strategies take any number of them,
    ``"cpu:0"``, ``"cpu:1"``, …, whatever is listed.
    """
    use_devices()
    listed = []
    for kind in dict.fromkeys(kind for kind, _ in _processors(device_type)):
        listed += [LogicalDevice(f"/device:{kind}:{i}", kind) for i in range(logical_count(kind))]
    return listed


def get_logical_device_configuration(device: Any) -> list[LogicalDeviceConfiguration] | None:
    """Return what was configured for a processor, None if nothing was.

    Raises
    ------
    ValueError
        If there is no such processor.
    """
    parts = _state.parts.get(_processor(device))
    return None if parts is None else list(parts)


def set_logical_device_configuration(
    device: Any, logical_devices: Iterable[LogicalDeviceConfiguration] | int | None
) -> None:
    """Say how many logical devices are on a processor, before devices are used.

    Parameters
    ----------
    device : PhysicalDevice or str
        One of `list_physical_devices`, or its name, ``"gpu:0"``.
    logical_devices : list of LogicalDeviceConfiguration, int or None
        One for each, or how many, which on a GPU share its memory without limits; None: one, as if
        nothing had been said.

    Raises
    ------
    ValueError
        If there is no such processor, no device is left on it, or a configuration is not one that it
        can have.
    TypeError
        If something else than configurations is given.
    RuntimeError
        If devices were used already: a strategy was made, or they were listed.
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
                # The two blanks are TensorFlow's.
                raise ValueError(
                    f"Setting {name} on {kind} virtual  devices is currently not supported"
                )


# For strategies -----------------------------------------------------------------------------------


def _count(kind: str, index: int) -> int:
    parts = _state.parts.get((kind, index))
    return len(parts) if parts else 1


def use_devices() -> None:
    """Note that devices are used, so that they stay what they are."""
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
    """Return how many devices of a kind there are, as they are listed."""
    return sum(_count(*processor) for processor in _processors(kind))


def processor_of(kind: str, index: int) -> int:
    """Return the number of the processor on which a logical device is: for GPUs that of CUDA."""
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
