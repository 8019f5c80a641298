"""Names of TPU strategies; their constructors raise an error, because TPUs are not supported."""

from __future__ import annotations

from typing import Any, NoReturn

from pycollective.distribute.strategy import Strategy

__all__ = ["TPUClusterResolver", "TPUStrategy"]


def _no_tpu(asker: str) -> NoReturn:
    raise RuntimeError(
        f"{asker} needs TPU hardware, which pycollective cannot use: it runs on CPUs and GPUs. Use "
        "MirroredStrategy for the devices of one machine, OneDeviceStrategy for one of them"
    )


class TPUClusterResolver:
    """A resolver of TPU clusters, which are not supported.

    Raises
    ------
    RuntimeError
        Always: pycollective does not run on TPUs.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        _no_tpu("TPUClusterResolver")

    @staticmethod
    def connect(tpu: str | None = None, zone: str | None = None, project: str | None = None) -> Any:
        """Raise the error of the constructor."""
        return TPUClusterResolver(tpu, zone, project)


class TPUStrategy(Strategy):
    """Training on TPUs, which is not supported.

    Raises
    ------
    RuntimeError
        Always: pycollective does not run on TPUs.
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        _no_tpu("TPUStrategy")
