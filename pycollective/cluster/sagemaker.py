"""The cluster of a SageMaker training job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import shown


class SageMakerClusterResolver(ClusterResolver):
    """A cluster from ``SM_HOSTS`` and ``SM_CURRENT_HOST``, whose hosts are workers in sorted order.

    Each call reads the variables again.

    Parameters
    ----------
    port : int
        The port of every task.
    rpc_layer : str
        The protocol in addresses.
    environ : mapping, optional
        The environment, instead of ``os.environ``.

    Raises
    ------
    ValueError
        At the first use: a variable is missing or not valid.
    """

    def __init__(
        self,
        port: int = 2223,
        rpc_layer: str = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._port = port
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        super().__init__("worker", None, rpc_layer)

    @property
    def task_id(self) -> int | None:
        """The number of this host among all hosts."""
        hosts, here = self._hosts(), self._environ.get("SM_CURRENT_HOST")
        if here not in hosts:
            raise ValueError(f"SM_CURRENT_HOST={shown(here)} is not among SM_HOSTS: {shown(hosts)}")
        return hosts.index(here)

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        if value is not None:
            raise ValueError("task_id cannot be set: SM_CURRENT_HOST determines it")

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in self._hosts()]})

    def _hosts(self) -> list[str]:
        text = self._environ.get("SM_HOSTS", "")
        try:
            hosts = json.loads(text)
        except (ValueError, RecursionError):
            hosts = None
        if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
            raise ValueError(f"SM_HOSTS={shown(text)} is not a JSON list of names")
        return sorted(hosts)
