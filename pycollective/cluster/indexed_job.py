"""The cluster of an indexed job of Kubernetes, or a JobSet, from the environment alone."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import number, shown

INDEX = "JOB_COMPLETION_INDEX"
SIZE = "PYCOLLECTIVE_SIZE"
JOBS = "PYCOLLECTIVE_JOBS"
LOCAL_RANK = "PYCOLLECTIVE_LOCAL_RANK"
LOCAL_SIZE = "PYCOLLECTIVE_LOCAL_SIZE"
_MOST_PODS = 100_000
"""The most pods; a larger number is an error, before the list of names fills the memory."""


class KubernetesJobClusterResolver(ClusterResolver):
    """A cluster of the pods of an indexed job, or of all jobs of a JobSet, by their host names.

    Kubernetes sets ``JOB_COMPLETION_INDEX``, the number of this pod in its job, and the host's name,
    ``<job>-<index>``. The author of the job sets ``PYCOLLECTIVE_SIZE``, the number of all workers.

    For a JobSet of several jobs, the author describes the jobs in ``PYCOLLECTIVE_JOBS``. The text
    ``leader:1x1,workers:2x4`` means 1 job ``leader`` with 1 pod, and 2 jobs ``workers`` with 4 pods
    each. Workers are numbered in this order, then by the job's index, then by the pod's. Pods of other
    jobs do not take part.

    If a pod has several processes, ``PYCOLLECTIVE_LOCAL_SIZE`` is their number, and
    ``PYCOLLECTIVE_LOCAL_RANK`` the number of this one. Each process listens at a port of its own.

    The job needs a headless service, with the service's name as ``subdomain``, so that pods find each
    other by name (a JobSet makes the service).

    Parameters
    ----------
    num_tasks : int, optional
        Number of all workers, instead of ``PYCOLLECTIVE_SIZE``.
    port : int
        The port of every pod's first process; the other processes use the ports after it.
    rpc_layer : str, optional
        The protocol in addresses.
    environ : mapping, optional
        The environment, instead of ``os.environ``.

    Raises
    ------
    ValueError
        At the first use: a variable is missing or is not a number, or the variables contradict each
        other or the host's name.
    """

    def __init__(
        self,
        num_tasks: int | None = None,
        port: int = 8470,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        self._size = num_tasks
        self._port = port
        super().__init__("worker", None, rpc_layer)

    @staticmethod
    def applies(environ: Mapping[str, str]) -> bool:
        """Return True in a pod of such a job, if its author set the number of workers."""
        return INDEX in environ and (SIZE in environ or JOBS in environ)

    @property
    def task_id(self) -> int | None:
        """The number of this process among all workers."""
        rank, _ = self._numbered()
        return rank

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        if value is not None:
            raise ValueError(f"task_id cannot be set: {INDEX} determines it")

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        _, hosts = self._numbered()
        _, processes = self._local()
        return ClusterSpec(
            {"worker": [f"{h}:{self._port + i}" for h in hosts for i in range(processes)]}
        )

    def _numbered(self) -> tuple[int, list[str]]:
        """Return this process's number, and the host names in the order of their pods."""
        env = self._environ
        index = number(env, INDEX, 0)
        local, processes = self._local()
        size = self._size
        if size is None and (SIZE in env or JOBS not in env):
            size = number(env, SIZE, 1, _MOST_PODS)
        if size is not None and size % processes:
            raise ValueError(
                f"{SIZE}={size} is the number of all workers: it must be a multiple of the {processes} "
                f"processes of each pod ({LOCAL_SIZE})"
            )
        host, dot, domain = socket.getfqdn(env.get("HOSTNAME", "")).partition(".")
        match = re.fullmatch(r"(.*)-([0-9]{1,9})", host)
        if match is None or int(match[2]) != index:
            raise ValueError(
                f"the name of this host, {shown(host)}, does not end with -{index}, as that of a pod "
                "of an indexed job does: set TF_CONFIG"
            )
        if JOBS in env:
            pods = _pods_of_jobs(match[1], env[JOBS])
        else:
            assert size is not None
            pods = [f"{match[1]}-{i}" for i in range(size // processes)]
        if size is not None and size != len(pods) * processes:
            raise ValueError(
                f"{SIZE}={size}, but {JOBS}={env[JOBS]!r} has {len(pods)} pods with {processes} "
                "processes each"
            )
        if host not in pods:
            named = f"{JOBS}={env[JOBS]!r}" if JOBS in env else f"{SIZE}={size}"
            some = ", ".join(pods[:8]) + ", …" * (len(pods) > 8)
            raise ValueError(f"this host, {shown(host)}, is not among the pods of {named}: {some}")
        return pods.index(host) * processes + local, [f"{pod}{dot}{domain}" for pod in pods]

    def _local(self) -> tuple[int, int]:
        """Return this process's number within its pod, and the number of the pod's processes."""
        if LOCAL_SIZE not in self._environ:
            return 0, 1
        size = number(self._environ, LOCAL_SIZE, 1, _MOST_PODS)
        rank = number(self._environ, LOCAL_RANK, 0)
        if rank >= size:
            raise ValueError(f"{LOCAL_RANK}={rank} is not among the {size} of {LOCAL_SIZE}")
        return rank, size


def _pods_of_jobs(job: str, text: str) -> list[str]:
    """Return the names of a JobSet's pods in their order; ``job`` is the name of this pod's job."""
    jobs = [
        re.fullmatch(r"\s*([a-z0-9-]+):(\d{1,6})x(\d{1,6})\s*", part) for part in text.split(",")
    ]
    if None in jobs:
        raise ValueError(
            f"{JOBS}={text!r} is not a list of jobs, each <name>:<jobs>x<pods of each>, such as "
            "leader:1x1,workers:2x4"
        )
    named = [(m[1], int(m[2]), int(m[3])) for m in jobs if m]
    count = sum(jobs * pods for _, jobs, pods in named)
    if count > _MOST_PODS:
        raise ValueError(f"{JOBS}={text!r} has {count} pods; the limit is {_MOST_PODS}")
    # A job of a JobSet is called <jobset>-<replicated job>-<index>.
    # One name may be the end of another one, so the longest are tried first.
    for name, _, _ in sorted(named, key=lambda job: -len(job[0])):
        found = re.fullmatch(rf"(.+)-{re.escape(name)}-\d+", job)
        if found:
            return [
                f"{found[1]}-{name}-{j}-{i}"
                for name, count, pods in named
                for j in range(count)
                for i in range(pods)
            ]
    raise ValueError(
        f"this pod's job, {job!r}, is none of {JOBS}={text!r}, whose jobs' names are "
        "<jobset>-<name>-<index>"
    )
