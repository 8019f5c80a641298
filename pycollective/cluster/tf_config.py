"""The cluster in the environment variable ``TF_CONFIG``."""

from __future__ import annotations

import json
import os
from typing import Any

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec

__all__ = ["TFConfigClusterResolver"]


class TFConfigClusterResolver(ClusterResolver):
    """Reads ``TF_CONFIG`` each time it is asked.

    The variable holds JSON: ``{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker",
    "index": 0}, "rpc_layer": "grpc"}``, every part of which may be missing.

    Parameters
    ----------
    task_type, task_id, rpc_layer, environment : optional
        Instead of what the variable says.

    Raises
    ------
    ValueError
        When it is asked: if the variable holds no JSON (``json.JSONDecodeError``), or no object.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        self._environment = environment or ""

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        value = _task().get("type") if self._task_type is None else self._task_type
        return None if value is None else str(value)

    @task_type.setter
    def task_type(self, value: Any) -> None:
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job."""
        value = _task().get("index") if self._task_id is None else self._task_id
        return None if value is None else int(value)

    @task_id.setter
    def task_id(self, value: Any) -> None:
        self._task_id = value

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in addresses."""
        value: str | None = self._rpc_layer
        return _config().get("rpc_layer") if value is None else value

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    @property
    def environment(self) -> str:
        """Where this runs, as it was given."""
        return self._environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of the variable; an empty one where it names none."""
        return ClusterSpec(_config().get("cluster", {}))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one.

        The variable's ``session_master`` comes before everything; a cluster of one task, or of none,
        needs no address.
        """
        session_master: str | None = _config().get("session_master")
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if sum(cluster.num_tasks(job) for job in cluster.jobs) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)


def _config() -> dict[str, Any]:
    return _object("TF_CONFIG", json.loads(os.environ.get("TF_CONFIG") or "{}"))


def _task() -> dict[str, Any]:
    return _object("TF_CONFIG's task", _config().get("task", {}))


def _object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, not {value!r}")
    return value
