"""Which worker this process is, of how many, and where they meet: what a resolver's answer comes to.

`resolver_of_environment` finds the resolver where none is given. Its order, in which the first one
whose variables are set is taken:

1. ``TF_CONFIG`` with a cluster in it
2. ``PYCOLLECTIVE_RANK``, ``PYCOLLECTIVE_SIZE``: ``pycollective run``, or set by hand
3. ``SM_HOSTS``, ``SM_CURRENT_HOST``: SageMaker
4. ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``: torchrun
5. ``PET_NODE_RANK``, ``PET_NNODES``: Kubeflow
6. ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``: Open MPI
7. ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``: a Slurm step, unless ``PMI_RANK`` and ``PMI_SIZE`` say
   otherwise (then ``mpirun`` of MPICH runs in it)
8. ``PMI_RANK``, ``PMI_SIZE``: MPICH, Intel MPI
9. ``JOB_COMPLETION_INDEX``, ``PYCOLLECTIVE_SIZE``: an indexed job of Kubernetes
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pycollective.cluster import rules
from pycollective.cluster.indexed_job import KubernetesJobClusterResolver
from pycollective.cluster.ranked import (
    KubeflowClusterResolver,
    OpenMPIClusterResolver,
    PMIClusterResolver,
    RankedClusterResolver,
    TorchrunClusterResolver,
)
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.sagemaker import SageMakerClusterResolver
from pycollective.cluster.slurm import SlurmClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.cluster.tf_config import TFConfigClusterResolver

__all__ = ["LaunchedClusterResolver", "Membership", "membership_of", "resolver_of_environment"]


class LaunchedClusterResolver(RankedClusterResolver):
    """``PYCOLLECTIVE_RANK`` and ``PYCOLLECTIVE_SIZE``, as ``pycollective run`` sets them.

    Without ``PYCOLLECTIVE_ADDRESS`` the processes have been given memory that they share, and need no
    address.
    """

    needs = ("PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE")
    launcher = "pycollective run"

    def address(self) -> str:
        """Return worker 0's address; ``""`` where none is needed."""
        return self._environ.get("PYCOLLECTIVE_ADDRESS", "")


@dataclass(frozen=True)
class Membership:
    """A process's place among the workers.

    Attributes
    ----------
    source : str
        Where this was found.
    rank, size : int
        Which worker this is, of how many.
    addresses : tuple of str
        Of all workers by rank; of worker 0 alone; or none, where the launcher gave what they need.
    names : tuple of str
        What the workers are called, such as ``"chief 0"``.
    """

    source: str
    rank: int
    size: int
    addresses: tuple[str, ...]
    names: tuple[str, ...]


def resolver_of_environment(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver that the environment asks for, or None where nothing names a cluster.

    Raises
    ------
    ValueError
        If ``TF_CONFIG`` is no JSON object.
    """
    env = os.environ if environ is None else environ
    if env.get("TF_CONFIG"):
        resolver = TFConfigClusterResolver()
        if resolver.cluster_spec():
            return resolver
    if LaunchedClusterResolver.applies(env):
        return LaunchedClusterResolver(env)
    if "SM_HOSTS" in env and "SM_CURRENT_HOST" in env:
        return SageMakerClusterResolver()
    for kind in (TorchrunClusterResolver, KubeflowClusterResolver, OpenMPIClusterResolver):
        if kind.applies(env):
            return kind(env)
    pmi = (env.get("PMI_RANK"), env.get("PMI_SIZE"))
    slurm = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
    if None not in slurm and pmi in ((None, None), slurm):
        return SlurmClusterResolver()
    if PMIClusterResolver.applies(env):
        return PMIClusterResolver(env)
    if "JOB_COMPLETION_INDEX" in env and "PYCOLLECTIVE_SIZE" in env:
        return KubernetesJobClusterResolver()
    return None


def membership_of(resolver: ClusterResolver) -> Membership | None:
    """Return this process's place; None for a cluster of nobody, and for the evaluator.

    Raises
    ------
    ValueError
        If the description breaks a rule; the message names the source, the key and the task.
    """
    source = type(resolver).__name__.removesuffix("ClusterResolver").removesuffix("Resolver")
    source = {"TFConfig": "TF_CONFIG"}.get(source, source)
    try:
        if isinstance(resolver, RankedClusterResolver):
            return _ranked(resolver)
        cluster = resolver.cluster_spec()
        if not cluster:
            return None
        task_type, task_id = resolver.task_type, resolver.task_id
        if task_type is None or task_id is None:
            missing = [
                key for key, v in {"task_type": task_type, "task_id": task_id}.items() if v is None
            ]
            raise ValueError(
                "When `cluster_spec` is given, you must also specify `task_type` and `task_id`. "
                f"Missing: {', '.join(missing)}"
            )
        rules.validate(cluster, task_type, task_id)
        if task_type == "evaluator":
            return None
        rank = rules.id_in_cluster(cluster, task_type, task_id)
        tasks = _workers(cluster)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{source}: {error}") from None
    addresses = tuple(address for _, address in tasks)
    check_addresses(source, tasks)
    return Membership(source, rank, len(tasks), addresses, tuple(name for name, _ in tasks))


def _ranked(resolver: RankedClusterResolver) -> Membership:
    rank, size = resolver.task_id or 0, resolver.num_tasks
    if rank >= size:
        raise ValueError(
            f"{resolver.needs[0]}={rank} is not among the {size} tasks of {resolver.needs[1]}"
        )
    address = resolver.address()
    if address:
        check_addresses(resolver.launcher, [("worker 0", address)])
    names = tuple(f"worker {i}" for i in range(size))
    return Membership(resolver.launcher, rank, size, (address,) if address else (), names)


def _workers(cluster: ClusterSpec) -> list[tuple[str, str]]:
    """Return the names and addresses of the tasks that train, by rank."""
    tasks = []
    for job in ("chief", "worker"):
        numbers = cluster.task_indices(job) if job in cluster.jobs else []
        absent = sorted(set(range(len(numbers))) - set(numbers))
        if absent:
            raise ValueError(
                f"cluster[{job!r}] has tasks {numbers}, but not {', '.join(map(str, absent))}: tasks "
                "are numbered from 0 without gaps"
            )
        tasks += [(f"{job} {i}", cluster.task_address(job, i)) for i in numbers]
    return tasks


def check_addresses(source: str, tasks: list[tuple[str, str]]) -> None:
    """Raise unless each task has an address of its own.

    Raises
    ------
    ValueError
        Names the task and the address, by where it stands in the description.
    """
    seen: dict[str, str] = {}
    for name, address in tasks:
        host, colon, port = address.rpartition(":")
        where = "cluster[{!r}][{}]".format(*name.split())
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"{source}: {where} is {address!r}, which is not host:port with a port from 1 to 65535"
            )
        if address in seen:
            raise ValueError(
                f"{source}: {where} and {seen[address]} have the same address {address}: each task "
                "needs its own"
            )
        seen[address] = where


def problems(member: Membership, listens: bool = False) -> list[str]:
    """Return what is wrong with the addresses, as far as it can be seen from here, in sentences.

    Names are looked up, and this process's own address is tried out: a port is listened to for a
    moment, unless the launcher listens there already.
    """
    found = []
    for name, address in zip(member.names, member.addresses, strict=False):
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        except OSError as error:
            found.append(f"{name}: the name {host!r} does not resolve here: {error.strerror}")
            continue
        if name == member.names[member.rank] and not listens:
            problem = _cannot_listen(resolved[0], resolved[4])
            if problem:
                found.append(f"{name}, this process: {address} {problem}")
    return found


def _cannot_listen(family: int, address: tuple[object, ...]) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return (
                    f"({address[0]}) is no address of this host: it listens at all of its addresses "
                    "instead, which needs a secret"
                )
            return f"cannot be listened at: {error.strerror}"
    return ""
