"""The cluster of an indexed job of Kubernetes, or a JobSet, from the environment alone."""

from __future__ import annotations

import os
import re
import socket

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec

__all__ = ["KubernetesJobClusterResolver"]


class KubernetesJobClusterResolver(ClusterResolver):
    """The pods of an indexed job: ``<job>-0`` to ``<job>-<n-1>``, by their host names.

    ``JOB_COMPLETION_INDEX``, which Kubernetes sets, says which pod this is; ``PYCOLLECTIVE_SIZE``, which
    the job's author sets to its number of completions, how many there are. Other pods are found by
    name, for which the job needs a headless service and its name as ``subdomain`` (a JobSet makes it).

    Parameters
    ----------
    num_tasks : int, optional
        Instead of ``PYCOLLECTIVE_SIZE``.
    port : int
        The port of every task.
    rpc_layer : str, optional
        The protocol in addresses.

    Raises
    ------
    ValueError
        When it is asked: if a variable is missing or no number, or the host's name does not end with
        the index.
    """

    def __init__(
        self, num_tasks: int | None = None, port: int = 8470, rpc_layer: str | None = None
    ) -> None:
        self._size = num_tasks
        self._port = port
        super().__init__("worker", None, rpc_layer)

    @property
    def task_id(self) -> int | None:
        """This pod's number."""
        return _number("JOB_COMPLETION_INDEX", 0)

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        if value is not None:
            raise ValueError("JOB_COMPLETION_INDEX says which task this is: task_id cannot be set")

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        index = self.task_id
        size = _number("PYCOLLECTIVE_SIZE", 1) if self._size is None else self._size
        host, dot, domain = socket.getfqdn(os.environ.get("HOSTNAME", "")).partition(".")
        match = re.fullmatch(r"(.*)-(\d+)", host)
        if match is None or int(match[2]) != index:
            raise ValueError(
                f"the name of this host, {host!r}, does not end with -{index}, as that of a pod of an "
                "indexed job does: set TF_CONFIG"
            )
        names = [f"{match[1]}-{i}{dot}{domain}" for i in range(size)]
        return ClusterSpec({"worker": [f"{name}:{self._port}" for name in names]})


def _number(name: str, least: int) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}={text!r} is not a number from {least}")
    return int(text)
