"""The cluster of an instance group of Google Compute Engine."""

from __future__ import annotations

import importlib
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pycollective.cluster import rest
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec

METADATA = "GCE_METADATA_IP"
"""The environment variable with the address of the metadata server, instead of its usual name."""
_EVENT = "http://{}/computeMetadata/v1/instance/maintenance-event"
_ENDS = "TERMINATE_ON_HOST_MAINTENANCE"
_METADATA_SECONDS = 5.0
_TOKEN_SPARE = 60.0
_TOKEN = "http://{}/computeMetadata/v1/instance/service-accounts/default/token"
_API = "https://compute.googleapis.com/compute/v1"
_PRODUCT = Path("/sys/class/dmi/id/product_name")
_FLAVOR = {"Metadata-Flavor": "Google"}


class GCEClusterResolver(ClusterResolver):
    """A cluster of the running instances of an instance group; it asks Compute Engine each time.

    If Google's client is not installed, a resolver on an instance asks the API itself, as the instance's
    service account, which needs the scope ``compute.readonly``.

    Parameters
    ----------
    project, zone, instance_group : str
        The group.
    port : int
        The port of every task.
    task_type : str
        The job of all instances; it cannot be changed later.
    task_id : int
        The number of this process, which the resolver cannot determine.
    rpc_layer : str
        The protocol in addresses.
    credentials
        Credentials for the installed client; by default those of the application.
    service : optional
        The result of ``googleapiclient.discovery.build("compute", "v1")``, or an object with its
        methods; by default made with the installed client.

    Raises
    ------
    ImportError
        No service is given and the client is not installed; and this machine is not an instance, or
        ``credentials`` are given.
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
        """Return the cluster with the addresses of all running instances, sorted.

        Raises
        ------
        RuntimeError
            An instance has no address, or Compute Engine does not answer or denies access.
        """
        groups, instances = self._service.instanceGroups(), self._service.instances()
        addresses = []
        request = groups.listInstances(
            **self._group, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            response = _answer(request)
            for item in response.get("items", []):
                name = item["instance"].split("/")[-1]
                details = _answer(
                    instances.get(
                        project=self._group["project"], zone=self._group["zone"], instance=name
                    )
                )
                try:
                    address = details["networkInterfaces"][0]["networkIP"]
                except (KeyError, IndexError):
                    raise RuntimeError(f"Instance {name!r} has no address in a network") from None
                addresses.append(f"{address}:{self._port}")
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        return ClusterSpec({self._job: sorted(addresses)})

    def is_to_end(self) -> bool:
        """Return True if the metadata server says that this machine will be stopped for maintenance.

        Raises
        ------
        OSError
            The metadata server does not answer.
        """
        import urllib.request

        request = urllib.request.Request(_EVENT.format(_metadata_server()), headers=_FLAVOR)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=_METADATA_SECONDS) as answer:
            return bool(answer.read(100).decode(errors="replace").strip() == _ENDS)


def _answer(request: Any) -> Any:
    try:
        return request.execute()
    except RuntimeError:
        raise
    except Exception as error:  # clients raise classes of their own
        raise RuntimeError(f"Compute Engine cannot be asked: {error}") from error


def _metadata_server() -> str:
    return os.environ.get(METADATA) or "metadata.google.internal"


def _on_an_instance() -> bool:
    """Return True if this machine is an instance of Compute Engine."""
    if os.environ.get(METADATA):
        return True
    try:
        return _PRODUCT.read_text(encoding="utf-8").startswith("Google")
    except OSError:
        return False


class _Request:
    """A request that `execute` sends."""

    def __init__(
        self,
        ask: Callable[[], dict[str, Any]],
        following: Callable[[str], _Request] | None = None,
    ) -> None:
        self.execute = ask
        self.following = following


class _OnInstance:
    """The methods of Google's client that the resolver calls, with the instance's service account."""

    def __init__(self) -> None:
        self._token, self._until = "", 0.0

    def instanceGroups(self) -> _OnInstance:
        """Return the object with `listInstances`."""
        return self

    def instances(self) -> _OnInstance:
        """Return the object with `get`."""
        return self

    def listInstances(
        self,
        project: str,
        zone: str,
        instanceGroup: str,
        body: Mapping[str, Any],
        orderBy: str,
        pageToken: str = "",
    ) -> _Request:
        """Return a request for a page of a group's instances."""
        path = self._path(project, zone, "instanceGroups", instanceGroup) + "/listInstances?"
        query = {"orderBy": orderBy, **({"pageToken": pageToken} if pageToken else {})}

        def following(token: str) -> _Request:
            return self.listInstances(project, zone, instanceGroup, body, orderBy, token)

        return _Request(lambda: self._asked(path + urllib.parse.urlencode(query), body), following)

    def listInstances_next(
        self, previous_request: Any, previous_response: Mapping[str, Any]
    ) -> Any:
        """Return a request for the next page, or None after the last page."""
        token = previous_response.get("nextPageToken")
        return previous_request.following(token) if token else None

    def get(self, project: str, zone: str, instance: str) -> _Request:
        """Return a request for an instance."""
        path = self._path(project, zone, "instances", instance)
        return _Request(lambda: self._asked(path))

    @staticmethod
    def _path(project: str, zone: str, kind: str, name: str) -> str:
        parts = "projects", project, "zones", zone, kind, name
        return "/".join([_API, *(urllib.parse.quote(part, safe=":") for part in parts)])

    def _asked(self, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return rest.ask("Compute Engine", url, token=self._current_token(), body=body)

    def _current_token(self) -> str:
        if time.monotonic() >= self._until:
            where = _TOKEN.format(_metadata_server())
            found = rest.ask("The metadata server", where, headers=_FLAVOR, direct=True)
            token, seconds = found.get("access_token"), found.get("expires_in", 0)
            if not isinstance(token, str) or not token or not isinstance(seconds, int):
                raise RuntimeError(
                    "The metadata server gives no token: give the instance a service account"
                )
            self._token, self._until = token, time.monotonic() + seconds - _TOKEN_SPARE
        return self._token


def _installed_service(credentials: Any) -> Any:
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
    except ImportError:
        if credentials == "default" and _on_an_instance():
            return _OnInstance()
        raise ImportError(
            "googleapiclient must be installed before using the GCE cluster resolver: run `pip "
            "install google-api-python-client`."
        ) from None
    # With None the client looks for the application's credentials itself.
    return discovery.build(
        "compute", "v1", credentials=None if credentials == "default" else credentials
    )
