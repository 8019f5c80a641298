"""The cluster of pods that Kubernetes runs."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec

__all__ = ["KubernetesClusterResolver", "KubernetesExecutableLocation"]


class KubernetesExecutableLocation(enum.Enum):
    """Where this program runs; says which credentials are loaded."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """The pods with certain labels; asks Kubernetes each time.

    Which task this process is cannot be found out: set `task_type` and `task_id`.

    Parameters
    ----------
    job_to_label_mapping : dict, optional
        From jobs to the label selectors of their pods; by default
        ``{"worker": ["job-name=tensorflow"]}``.
    tf_server_port : int
        The port of every task.
    rpc_layer : str
        The protocol in addresses.
    override_client : optional
        A ``kubernetes.client.CoreV1Api``, or what has its ``list_pod_for_all_namespaces``; by default
        the installed client's.
    executable_location : KubernetesExecutableLocation
        Which configuration the installed client loads.

    Raises
    ------
    ImportError
        Without a client, given or installed.
    ValueError
        For an unknown ``executable_location``.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._client = override_client or _installed_client(executable_location)
        self._selectors = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = tf_server_port

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster: the pods of each selector, sorted by name.

        Raises
        ------
        RuntimeError
            If a pod does not run.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._pods(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, selector: str) -> list[str]:
        pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        addresses = []
        for pod in sorted(pods, key=lambda pod: str(pod.metadata.name)):
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"'
                )
            addresses.append(f"{pod.status.host_ip}:{self._port}")
        return addresses


def _installed_client(location: KubernetesExecutableLocation) -> Any:
    if not isinstance(location, KubernetesExecutableLocation):
        raise ValueError(f"The executable location provided is invalid: {location!r}.")
    try:
        kubernetes = importlib.import_module("kubernetes")
    except ImportError:
        raise ImportError(
            "The Kubernetes Python client must be installed before using the Kubernetes Cluster "
            "Resolver. To install the Kubernetes Python client, run `pip install kubernetes` on your "
            "command line."
        ) from None
    if location is KubernetesExecutableLocation.OFF_CLUSTER:
        kubernetes.config.load_kube_config()
    else:
        kubernetes.config.load_incluster_config()
    return kubernetes.client.CoreV1Api()
