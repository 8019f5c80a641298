"""The description of a strategy's replicas and reductions, for `Strategy.describe`."""

from __future__ import annotations

from pycollective import _core
from pycollective.distribute.blas_threads import controls_threads
from pycollective.distribute.extended import StrategyExtended


def describe(extended: StrategyExtended) -> str:
    """Return a line for each replica: device, threads, cross-device operations and their reason."""
    devices = extended.devices
    workers = extended.workers
    if extended.num_replicas_in_sync == 1:
        reduces = "nothing to reduce: it is the only replica"
    else:
        reduces = f"{extended.cross_device_ops.describe()}, {extended.why_these_ops}"
    if workers.communicator is not None:
        reduces += f"; then among {workers.count} workers, {workers.communicator.transport}"
    lines = []
    for local, device in enumerate(devices):
        replica = extended.first_replica + local
        runs = "the caller's thread" if local == 0 else f"thread pycollective-replica-{local}"
        shared = device.kind == "GPU" and device.index != device.processor
        where = f"{device} on GPU {device.processor}" if shared else str(device)
        lines.append(f"replica {replica}: {where}, {runs}, {_blas(len(devices))}, {reduces}")
    return "\n".join(lines)


def _blas(replicas: int) -> str:
    cores = _core.usable_cores()
    if replicas > 1 and not controls_threads():
        return "BLAS threads not divided (no threadpoolctl)"
    threads = cores if replicas == 1 else max(1, cores // replicas)
    return f"{threads} BLAS thread{'s'[: threads > 1]} of {cores}"
