"""The cluster in the environment variable ``TF_CONFIG``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pycollective.cluster.examined import Examined, NoAddress
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import is_number, shown


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in ``TF_CONFIG``, which is read each time.

    The variable holds JSON, in which every part is optional: ``{"cluster": {"worker": ["host:port",
    ...]}, "task": {"type": "worker", "index": 0}, "rpc_layer": "grpc"}``.

    Parameters
    ----------
    task_type, task_id, rpc_layer, environment : optional
        Values instead of the variable's.
    environ : mapping, optional
        The environment, instead of ``os.environ``.

    Raises
    ------
    ValueError
        At the first use: the variable does not hold JSON (``json.JSONDecodeError``) or an object.
        Or the task, the task's number or the protocol has the wrong type.
    TypeError
        From `cluster_spec`: see `ClusterSpec`.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        self._environment = environment or ""
        self._environ: Mapping[str, str] = os.environ if environ is None else environ

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        value = self._task().get("type") if self._task_type is None else self._task_type
        return None if value is None else str(value)

    @task_type.setter
    def task_type(self, value: Any) -> None:
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job."""
        value = self._task().get("index") if self._task_id is None else self._task_id
        try:
            if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
                raise ValueError
            return None if value is None else int(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"TF_CONFIG's task['index'] is {shown(value)}, which is not a task's number"
            ) from None

    @task_id.setter
    def task_id(self, value: Any) -> None:
        self._task_id = value

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in addresses."""
        value: str | None = self._rpc_layer
        return self._text("rpc_layer") if value is None else value

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    @property
    def environment(self) -> str:
        """The given kind of system."""
        return self._environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of the variable, empty if the variable has none."""
        return ClusterSpec(self._config().get("cluster", {}))

    @staticmethod
    def applies(environ: Mapping[str, str]) -> bool:
        """Return True if the variable describes a cluster, or is not valid."""
        try:
            config = _loaded(environ)
        except ValueError:
            return True
        return not isinstance(config, dict) or config.get("cluster", {}) != {}

    def examined(self) -> Examined:
        """Return the valid part of the variable, and all its problems."""
        problems: list[str] = []

        def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) < len(pairs):
                twice = sorted(key for key, n in Counter(k for k, _ in pairs).items() if n > 1)
                problems.append(f"{', '.join(map(repr, twice))} occurs twice in one JSON object")
            return found

        try:
            config = _loaded(self._environ, object_of)
        except ValueError as error:
            text, where = self._environ["TF_CONFIG"], getattr(error, "pos", 0)
            problems.append(f"not JSON: {error}, near {text[max(0, where - 20) : where + 20]!r}")
            return Examined(ClusterSpec({}), None, None, problems, knows_task=False)
        if not isinstance(config, dict):
            problems.append(f"TF_CONFIG must be a JSON object, not {shown(config)}")
            return Examined(ClusterSpec({}), None, None, problems, knows_task=False)
        cluster, knows_task = _examined_cluster(config.get("cluster", {}), problems)
        task = config.get("task", {})
        if not isinstance(task, dict):
            problems.append(f"TF_CONFIG's task must be a JSON object, not {shown(task)}")
            knows_task, task = False, {}
        task_type, task_id = self._task_type, self._task_id
        if task_type is None:
            task_type = task.get("type")
            if not isinstance(task_type, (str, type(None))):
                problems.append(
                    f"task['type'] must be a text such as 'worker', not {shown(task_type)}"
                )
                knows_task = False
        if task_id is None:
            task_id = task.get("index")
            if not _is_index(task_id) and task_id is not None:
                problems.append(f"task['index'] must be a number from 0, not {shown(task_id)}")
                knows_task = False
        if not knows_task:
            return Examined(cluster, None, None, problems, knows_task=False)
        return Examined(cluster, self.task_type, self.task_id, problems)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one.

        The variable's ``session_master`` has precedence. A cluster with fewer than two tasks needs no
        address: the result is ``""``.
        """
        session_master = self._text("session_master")
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if sum(cluster.num_tasks(job) for job in cluster.jobs) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def _config(self) -> dict[str, Any]:
        return _object("TF_CONFIG", _loaded(self._environ))

    def _task(self) -> dict[str, Any]:
        return _object("TF_CONFIG's task", self._config().get("task", {}))

    def _text(self, key: str) -> str | None:
        value = self._config().get(key)
        if not isinstance(value, (str, type(None))):
            raise ValueError(f"TF_CONFIG's {key} must be a text, not {shown(value)}")
        return value


def _loaded(environ: Mapping[str, str], hook: Any = None) -> Any:
    """Return the variable's parsed JSON; raise ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(environ.get("TF_CONFIG") or "{}", object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def _is_index(value: Any) -> bool:
    if isinstance(value, str):
        return is_number(value)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _examined_cluster(cluster: Any, problems: list[str]) -> tuple[ClusterSpec, bool]:
    """Return the valid part of a cluster, and True if that has every task.

    A `NoAddress` replaces an address that is not a text.
    """
    whole = True
    if not isinstance(cluster, dict):
        problems.append(
            f"cluster must be a JSON object, from jobs to lists of addresses, not {shown(cluster)}"
        )
        return ClusterSpec({}), False
    jobs: dict[str, dict[int, str]] = {}
    for job, tasks in cluster.items():
        if isinstance(tasks, list):
            numbered = dict(enumerate(tasks))
        elif isinstance(tasks, dict):
            wrong = [number for number in tasks if not _is_index(number)]
            if wrong:
                whole = False
                problems.append(
                    f"cluster[{job!r}] has {', '.join(map(shown, wrong))} for a task's number: tasks "
                    "are numbered from 0"
                )
            numbered = {int(n): address for n, address in tasks.items() if _is_index(n)}
        else:
            problems.append(f"cluster[{job!r}] must be a list of addresses, not {shown(tasks)}")
            numbered, whole = {}, False
        for number, address in numbered.items():
            if not isinstance(address, str):
                problems.append(
                    f"cluster[{job!r}][{number}] must be a text, host:port, not {shown(address)}"
                )
                numbered[number] = NoAddress()
        jobs[job] = numbered
    return ClusterSpec(jobs), whole


def _object(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, not {shown(value)}")
    return value
