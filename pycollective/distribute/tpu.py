"""TPU strategies: their names, for programs that ask for them; there are no TPUs here."""

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
    """Would find the TPUs of a cluster.

    Raises
    ------
    RuntimeError
        Always: there is no TPU that this package could use.
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
        """Raise what making one raises."""
        return TPUClusterResolver(tpu, zone, project)


class TPUStrategy(Strategy):
    """Would train on TPUs.

    Raises
    ------
    RuntimeError
        Always: there is no TPU that this package could use.
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        _no_tpu("TPUStrategy")
