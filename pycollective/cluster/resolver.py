"""`ClusterResolver`: the common interface; one that is told everything, and one made of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pycollective import config
from pycollective.cluster.spec import ClusterSpec

__all__ = ["ClusterResolver", "SimpleClusterResolver", "UnionResolver", "master_url"]


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return an address with the protocol before it, if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class ClusterResolver(ABC):
    """Finds out who is in the cluster, and which task this process is.

    One of your own overrides `cluster_spec`, and what else differs.

    Attributes
    ----------
    task_type, task_id
        This process's job and its number there; None where that is not known. They can be set.
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
        """Return the cluster, as it is now."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one; ``""`` where none is known.

        Raises ValueError if there is no such task.
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
        """Return how many devices of each kind but CPU this machine has."""
        count = len(config.list_logical_devices("GPU"))
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str:
        """Where this runs; ``""`` is anywhere."""
        return ""


class SimpleClusterResolver(ClusterResolver):
    """Says what it was told.

    Parameters
    ----------
    cluster_spec : ClusterSpec
        The cluster.
    master : str
        What `master` returns when it is asked for no task.
    task_type, task_id, environment, rpc_layer
        As the attributes of `ClusterResolver`.
    num_accelerators : dict, optional
        From kinds of devices to how many of them each task has.

    Raises
    ------
    TypeError
        If ``cluster_spec`` is no `ClusterSpec`, or ``master`` no str.
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
        """Return the address of the task that is named, or the one given as ``master``."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the devices that were given."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """Where this runs, as it was given."""
        return self._environment


class UnionResolver(ClusterResolver):
    """The clusters of several resolvers as one; everything else is the first one's.

    Parameters
    ----------
    *resolvers : ClusterResolver
        One or more.
    rpc_layer, task_type, task_id : optional
        Instead of the first resolver's. A ``task_id`` of 0 counts, which TensorFlow overlooks.

    Raises
    ------
    ValueError
        Without a resolver, or for an unknown keyword.
    TypeError
        If something else than a resolver is given.
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
        """Where the first resolver runs."""
        return self._resolvers[0].environment

    def cluster_spec(self) -> ClusterSpec:
        """Return all clusters as one.

        The tasks of a job that are lists everywhere are joined; if any are a dict, all are merged by
        number.

        Raises
        ------
        KeyError
            If a number in dicts that are merged is there twice.
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
        """Return the address of the task that is named, or the first resolver's master."""
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
