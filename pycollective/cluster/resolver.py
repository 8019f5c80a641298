"""`ClusterResolver`, the common interface; a resolver with fixed values, and a union of resolvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pycollective import config
from pycollective.cluster.spec import ClusterSpec


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return an address with the protocol, if there is one, in front."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class ClusterResolver(ABC):
    """A source of the cluster's description and of this process's task.

    A subclass overrides `cluster_spec`, and other methods where it differs.

    Attributes
    ----------
    task_type, task_id
        This process's job and its number in the job; None if unknown. Both can be set.
    rpc_layer : str or None
        The protocol in `master`'s addresses.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the present cluster."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this process's; ``""`` if the task is unknown.

        Raises ValueError if the cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the number of this machine's devices of each kind other than CPU."""
        count = len(config.list_logical_devices("GPU"))
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str:
        """The kind of system on which this process runs; ``""`` is any."""
        return ""


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns the values it was given.

    Parameters
    ----------
    cluster_spec : ClusterSpec
        The cluster.
    master : str
        The result of `master` without a task.
    task_type, task_id, environment, rpc_layer
        As the attributes of `ClusterResolver`.
    num_accelerators : dict, optional
        The number of each task's devices by kind.

    Raises
    ------
    TypeError
        ``cluster_spec`` is not a `ClusterSpec`, or ``master`` is not a str.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError("cluster_spec must be a `tf.train.ClusterSpec`.")
        if not isinstance(master, str):
            raise TypeError("master must be a string.")
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the given task, or without a task ``master``."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the given devices."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """The given kind of system."""
        return self._environment


class UnionResolver(ClusterResolver):
    """The union of several resolvers' clusters; all other values are the first resolver's.

    Parameters
    ----------
    *resolvers : ClusterResolver
        One or more resolvers.
    rpc_layer, task_type, task_id : optional
        Values instead of the first resolver's. A ``task_id`` of 0 counts; TensorFlow ignores it.

    Raises
    ------
    ValueError
        There is no resolver, or a keyword is unknown.
    TypeError
        An argument is not a resolver.
    """

    def __init__(self, *resolvers: ClusterResolver, **kwargs: Any) -> None:
        own = {key: kwargs.pop(key, None) for key in ("task_type", "task_id", "rpc_layer")}
        if kwargs:
            raise ValueError(f"Unexpected kwargs provided {kwargs!r}")
        if not resolvers:
            raise ValueError("At least one ClusterResolver is required.")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"All arguments must be a sub-class of `ClusterResolver.`, not {resolver!r}"
                )
        self._resolvers = resolvers
        self._own: dict[str, Any] = own

    def _value(self, name: str) -> Any:
        return getattr(self._resolvers[0], name) if self._own[name] is None else self._own[name]

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        value: str | None = self._value("task_type")
        return value

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._own["task_type"] = value

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job."""
        value: int | None = self._value("task_id")
        return value

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._own["task_id"] = value

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in addresses."""
        value: str | None = self._value("rpc_layer")
        return value

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._own["rpc_layer"] = value

    @property
    def environment(self) -> str:
        """The first resolver's kind of system."""
        return self._resolvers[0].environment

    def cluster_spec(self) -> ClusterSpec:
        """Return all clusters as one.

        If all tasks of a job are lists, the lists are joined. If one is a dict, tasks are merged by
        number.

        Raises
        ------
        KeyError
            Two merged dicts have the same number.
        """
        jobs: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                jobs.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _union(parts) for job, parts in jobs.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the given task, or the first resolver's master."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the first resolver's devices."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _union(parts: list[Any]) -> Any:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = merged.keys() & tasks.keys()
        if twice:
            raise KeyError(f"Duplicate keys detected when merging two ClusterSpecs: {twice!r}")
        merged.update(tasks)
    return merged
