"""The cluster of an instance group of Google Compute Engine."""

from __future__ import annotations

import importlib
import os
import urllib.request
from typing import Any

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec

__all__ = ["GCEClusterResolver"]

METADATA = "GCE_METADATA_IP"
"""Where the machine's metadata server is, instead of at its usual name."""
_EVENT = "http://{}/computeMetadata/v1/instance/maintenance-event"
_ENDS = "TERMINATE_ON_HOST_MAINTENANCE"
_METADATA_SECONDS = 5.0


class GCEClusterResolver(ClusterResolver):
    """The running instances of an instance group; asks Compute Engine each time.

    Parameters
    ----------
    project, zone, instance_group : str
        Which group.
    port : int
        The port of every task.
    task_type : str
        The job of all instances; it cannot be changed later.
    task_id : int
        The number of this process, which cannot be found out.
    rpc_layer : str
        The protocol in addresses.
    credentials
        For the installed client; by default the application's.
    service : optional
        What ``googleapiclient.discovery.build("compute", "v1")`` returns, or has its methods; by
        default the installed client's.

    Raises
    ------
    ImportError
        Without a service, given or installed.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._job = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self._group = {"project": project, "zone": zone, "instanceGroup": instance_group}
        self._port = port
        self._service = _installed_service(credentials) if service is None else service

    @property
    def task_type(self) -> str:
        """The job of all instances."""
        return self._job

    @task_type.setter
    def task_type(self, value: str) -> None:
        raise RuntimeError(
            "You cannot reset the task_type of the GCEClusterResolver after it has been created."
        )

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster: the addresses of all running instances, sorted."""
        groups, instances = self._service.instanceGroups(), self._service.instances()
        addresses = []
        request = groups.listInstances(
            **self._group, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            response = request.execute()
            for item in response.get("items", []):
                details = instances.get(
                    project=self._group["project"],
                    zone=self._group["zone"],
                    instance=item["instance"].split("/")[-1],
                ).execute()
                addresses.append(f"{details['networkInterfaces'][0]['networkIP']}:{self._port}")
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        return ClusterSpec({self._job: sorted(addresses)})

    def is_to_end(self) -> bool:
        """Ask the metadata server whether this machine is about to be stopped for maintenance.

        Raises
        ------
        OSError
            If it does not answer.
        """
        host = os.environ.get(METADATA, "metadata.google.internal")
        request = urllib.request.Request(_EVENT.format(host), headers={"Metadata-Flavor": "Google"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=_METADATA_SECONDS) as answer:
            return bool(answer.read(100).decode(errors="replace").strip() == _ENDS)


def _installed_service(credentials: Any) -> Any:
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
    except ImportError:
        raise ImportError(
            "googleapiclient must be installed before using the GCE cluster resolver: run `pip "
            "install google-api-python-client`."
        ) from None
    # Without credentials the client finds the application's own.
    return discovery.build(
        "compute", "v1", credentials=None if credentials == "default" else credentials
    )
