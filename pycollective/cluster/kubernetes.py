"""The cluster of pods that Kubernetes runs."""

from __future__ import annotations

import enum
import importlib
import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pycollective.cluster import rest
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec

_log = logging.getLogger("pycollective")

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE = 500
_GONE, _FORBIDDEN = 410, 403


class KubernetesExecutableLocation(enum.Enum):
    """The place where this program runs, which determines the credentials."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """A cluster of the pods with certain labels; it asks Kubernetes each time.

    The resolver cannot determine this process's task: set `task_type` and `task_id`. A pod's address is
    its host's if the pod has the port there (``hostNetwork`` or ``hostPort``), else its own.
    TensorFlow's resolver always takes the host's address, even if no process listens there.

    If the Kubernetes client is not installed, a resolver in a pod asks the API itself, as the pod's
    service account. The account needs the right to list pods of all namespaces. With the right for its
    own namespace only, the resolver sees only the pods of this namespace.

    Parameters
    ----------
    job_to_label_mapping : dict, optional
        The label selectors of each job's pods; by default ``{"worker": ["job-name=tensorflow"]}``.
    tf_server_port : int
        The port of every task.
    rpc_layer : str
        The protocol in addresses.
    override_client : optional
        A ``kubernetes.client.CoreV1Api``, or an object with its ``list_pod_for_all_namespaces``; by
        default made with the installed client.
    executable_location : KubernetesExecutableLocation
        The configuration that the installed client loads.

    Raises
    ------
    ImportError
        No client is given and none is installed; and this process does not run in a pod, or
        ``executable_location`` is ``OFF_CLUSTER``.
    ValueError
        ``executable_location`` is unknown.
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
        """Return the cluster with the pods of each selector, sorted by name.

        Raises
        ------
        RuntimeError
            A pod does not run or has no address, no pod has the labels, or Kubernetes does not
            answer or denies access.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._pods(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, selector: str) -> list[str]:
        try:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        except RuntimeError:
            raise
        except Exception as error:  # clients raise classes of their own
            raise RuntimeError(
                f"Kubernetes cannot be asked for the pods with {selector!r}: {error}"
            ) from error
        if not pods:
            raise RuntimeError(f"No pod has the labels {selector!r}")
        return [self._address(pod) for pod in sorted(pods, key=lambda pod: str(pod.metadata.name))]

    def _address(self, pod: Any) -> str:
        name = pod.metadata.name
        if pod.status.phase != "Running":
            raise RuntimeError(f'Pod "{name}" is not running; phase: "{pod.status.phase}"')
        if getattr(pod.metadata, "deletion_timestamp", None):
            raise RuntimeError(f'Pod "{name}" is being deleted')
        pod_ip = getattr(pod.status, "pod_ip", None)
        address = pod_ip if pod_ip and not _has_host_port(pod, self._port) else pod.status.host_ip
        if not address:
            raise RuntimeError(f'Pod "{name}" has no address yet')
        return f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"


def _has_host_port(pod: Any, port: int) -> bool:
    """Return True if a pod occupies this port of its host, or if the pod's spec is unknown."""
    spec = getattr(pod, "spec", None)
    if spec is None or getattr(spec, "host_network", None):
        return True
    ports = [p for container in spec.containers for p in container.ports or ()]
    return any(p.host_port == port for p in ports)


class _InPod:
    """The methods of ``CoreV1Api`` that the resolver calls, with the pod's service account."""

    def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
        """Return the pods with these labels."""
        try:
            pods = self._listed("/api/v1/pods", label_selector)
        except rest.Refusal as error:
            if error.status != _FORBIDDEN:
                raise
            namespace = self._of_account("namespace")
            _log.info("Kubernetes: %s; only pods in namespace %s are seen", error, namespace)
            quoted = urllib.parse.quote(namespace, safe="")
            pods = self._listed(f"/api/v1/namespaces/{quoted}/pods", label_selector)
        return SimpleNamespace(items=[_pod(pod) for pod in pods])

    def _listed(self, path: str, selector: str) -> list[dict[str, Any]]:
        """Return the pods of all pages; begin again if Kubernetes no longer has the next page."""
        pods: list[dict[str, Any]] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            try:
                page = self._answer(f"{path}?{urllib.parse.urlencode(query)}")
            except rest.Refusal as error:
                if error.status != _GONE or "continue" not in query:
                    raise
                pods, query = [], {"labelSelector": selector}  # without pages
                continue
            items = page.get("items")
            pods += items if isinstance(items, list) else []
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return pods
            query["continue"] = str(more)

    def _answer(self, path: str) -> dict[str, Any]:
        import ssl

        host, port = (os.environ[f"KUBERNETES_SERVICE_{name}"] for name in ("HOST", "PORT"))
        authority = _SERVICE_ACCOUNT / "ca.crt"
        try:
            tls = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise RuntimeError(
                f"{authority}, Kubernetes' authority, cannot be used: {error}"
            ) from None
        host = f"[{host}]" if ":" in host else host
        url = f"https://{host}:{port}{path}"
        # Read the token each time: Kubernetes replaces the file before the token expires.
        token = self._of_account("token")
        return rest.ask("Kubernetes", url, token=token, tls=tls, direct=True)

    @staticmethod
    def _of_account(name: str) -> str:
        path = _SERVICE_ACCOUNT / name
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RuntimeError(
                f"the service account's {path} cannot be read ({error.strerror}): check that the "
                "pod does not set automountServiceAccountToken: false"
            ) from None


def _pod(found: dict[str, Any]) -> Any:
    """Return a pod of the API's answer with the attributes of the client's pods."""
    metadata, spec, status = (found.get(name) or {} for name in ("metadata", "spec", "status"))
    containers = [
        SimpleNamespace(
            ports=[SimpleNamespace(host_port=p.get("hostPort")) for p in c.get("ports") or ()]
        )
        for c in spec.get("containers") or ()
    ]
    return SimpleNamespace(
        metadata=SimpleNamespace(
            name=metadata.get("name"), deletion_timestamp=metadata.get("deletionTimestamp")
        ),
        spec=SimpleNamespace(host_network=spec.get("hostNetwork"), containers=containers),
        status=SimpleNamespace(
            phase=status.get("phase"), host_ip=status.get("hostIP"), pod_ip=status.get("podIP")
        ),
    )


def _installed_client(location: KubernetesExecutableLocation) -> Any:
    if not isinstance(location, KubernetesExecutableLocation):
        raise ValueError(f"The executable location provided is invalid: {location!r}.")
    try:
        kubernetes = importlib.import_module("kubernetes")
    except ImportError:
        in_pod = {"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"} <= set(os.environ)
        if in_pod and location is KubernetesExecutableLocation.WITHIN_CLUSTER:
            return _InPod()
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
