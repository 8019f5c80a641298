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

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pycollective.cluster import rules
from pycollective.cluster.examined import (
    Examined,
    Place,
    address_problems,
    are_errors,
    parted,
    places_of,
    tried_here,
)
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

__all__ = [
    "SOURCES",
    "LaunchedClusterResolver",
    "Membership",
    "Source",
    "checked_membership_of",
    "examine",
    "membership_of",
    "resolver_of_environment",
    "source_of",
    "sources_of_environment",
]

_log = logging.getLogger("pycollective")


class LaunchedClusterResolver(RankedClusterResolver):
    """``PYCOLLECTIVE_RANK`` and ``PYCOLLECTIVE_SIZE``, as ``pycollective run`` sets them.

    Without ``PYCOLLECTIVE_ADDRESS`` the processes have been given memory that they share, and need no
    address.
    """

    address_keys = (("PYCOLLECTIVE_ADDRESS",),)
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


@dataclass(frozen=True)
class Source:
    """A way in which the environment may describe a cluster.

    Attributes
    ----------
    name : str
        What log lines call it.
    variables : tuple of str
        Those by which it is known.
    applies : callable
        Whether an environment has it.
    resolver : callable
        Makes the resolver for an environment.
    """

    name: str
    variables: tuple[str, ...]
    applies: Callable[[Mapping[str, str]], bool]
    resolver: Callable[[Mapping[str, str]], ClusterResolver]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.variables)})"


def _launcher(kind: type[RankedClusterResolver]) -> Source:
    return Source(kind.launcher, kind.needs, kind.applies, kind)


def _in_a_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process: not mpirun of MPICH, inside of a step."""
    pmi = (environ.get("PMI_RANK"), environ.get("PMI_SIZE"))
    slurm = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS"))
    return None not in slurm and pmi in ((None, None), slurm)


SOURCES = (
    Source("TF_CONFIG", ("TF_CONFIG",), TFConfigClusterResolver.applies, lambda _: _tf_config()),
    _launcher(LaunchedClusterResolver),
    Source(
        "SageMaker",
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        lambda env: "SM_HOSTS" in env and "SM_CURRENT_HOST" in env,
        lambda _: SageMakerClusterResolver(),
    ),
    _launcher(TorchrunClusterResolver),
    _launcher(KubeflowClusterResolver),
    _launcher(OpenMPIClusterResolver),
    Source(
        "Slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        _in_a_slurm_step,
        lambda _: SlurmClusterResolver(),
    ),
    _launcher(PMIClusterResolver),
    Source(
        "KubernetesJob",
        ("JOB_COMPLETION_INDEX", "PYCOLLECTIVE_SIZE"),
        KubernetesJobClusterResolver.applies,
        lambda _: KubernetesJobClusterResolver(),
    ),
)
"""In the order of precedence: `docs/multi_worker.md` has the same table."""


def _tf_config() -> ClusterResolver:
    return TFConfigClusterResolver()


def sources_of_environment(environ: Mapping[str, str] | None = None) -> list[Source]:
    """Return all that describe a cluster: the first one counts."""
    env = os.environ if environ is None else environ
    return [source for source in SOURCES if source.applies(env)]


def resolver_of_environment(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver that the environment asks for, or None where nothing names a cluster.

    Raises
    ------
    RuntimeError, ValueError
        If Slurm's variables cannot be understood.
    """
    env = os.environ if environ is None else environ
    for source in sources_of_environment(env):
        return source.resolver(env)
    return None


def examine(
    resolver: ClusterResolver, *, here: bool = True, listens: bool = False
) -> tuple[Membership | None, list[str], list[str]]:
    """Return this process's place, and all that is wrong, in sentences.

    Parameters
    ----------
    resolver : ClusterResolver
        Describes the cluster.
    here : bool
        Whether names are looked up, and this process's own address is tried.
    listens : bool
        Whether the launcher listens there already.

    Returns
    -------
    tuple
        The place: None for a cluster of nobody, for the evaluator, and where something is wrong; what
        is wrong; and what may be wrong, as `pycollective.cluster.examined` has it.
    """
    source = source_of(resolver)
    member: Membership | None
    try:
        if isinstance(resolver, RankedClusterResolver):
            member = ranked = _ranked(resolver)
            places = [
                Place("worker 0", resolver.address_key(), address) for address in ranked.addresses
            ]
            wrong, own = address_problems(places), None if ranked.rank else 0
        else:
            seen = resolver.examined() if isinstance(resolver, TFConfigClusterResolver) else None
            if seen is None:
                cluster = resolver.cluster_spec()
                seen = Examined(cluster, resolver.task_type, resolver.task_id)
            if not seen.cluster and not seen.problems:
                return None, [], []
            member, places, own, wrong = _numbered(source, seen)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        return None, [str(error.args[0]) if isinstance(error, KeyError) else str(error)], []
    doubtful: list[str] = []
    sound = [i for i, place in enumerate(places) if parted(place.address)]
    alone = len(places) == 1 if member is None else member.size == 1
    if here and sound and not alone:
        index = sound.index(own) if own in sound else None
        more, doubtful = tried_here([places[i] for i in sound], index, listens)
        wrong += more
    return (None if wrong else member), wrong, doubtful


def source_of(resolver: ClusterResolver) -> str:
    """Return what messages call a resolver."""
    if isinstance(resolver, RankedClusterResolver):
        return resolver.launcher
    name = type(resolver).__name__.removesuffix("ClusterResolver").removesuffix("Resolver")
    return {"TFConfig": "TF_CONFIG"}.get(name, name)


def membership_of(resolver: ClusterResolver) -> Membership | None:
    """Return this process's place; None for a cluster of nobody, and for the evaluator.

    Raises
    ------
    ValueError
        If the description breaks a rule; the message names the source, the key and the task of each
        problem.
    """
    member, wrong, _ = examine(resolver, here=False)
    if wrong:
        raise ValueError(_text(resolver, wrong))
    return member


def checked_membership_of(resolver: ClusterResolver, listens: bool = False) -> Membership | None:
    """As `membership_of`; also looks up names, and tries this process's address.

    Raises
    ------
    ValueError
        If anything is wrong. What may be right all the same, in a container say, is logged.
    """
    member, wrong, doubtful = examine(resolver, listens=listens)
    if are_errors(os.environ):
        wrong, doubtful = [*wrong, *doubtful], []
    for doubt in doubtful:
        _log.warning("%s: %s", source_of(resolver), doubt)
    if wrong:
        raise ValueError(_text(resolver, wrong))
    return member


def _text(resolver: ClusterResolver, wrong: list[str]) -> str:
    source = source_of(resolver)
    if len(wrong) == 1:
        return f"{source}: {wrong[0]}"
    return f"{source}: {len(wrong)} things are wrong:" + "".join(f"\n  {one}" for one in wrong)


def _numbered(
    source: str, seen: Examined
) -> tuple[Membership | None, list[Place], int | None, list[str]]:
    """Return this process's place, who trains and where, which of them this is, and what is wrong."""
    cluster, wrong = seen.cluster, list(seen.problems)
    task_type, task_id = seen.task_type, seen.task_id
    if seen.knows_task and (task_type is None or task_id is None):
        given = {"task_type": task_type, "task_id": task_id}
        missing = [key for key, value in given.items() if value is None]
        wrong.append(
            "When `cluster_spec` is given, you must also specify `task_type` and `task_id`. "
            f"Missing: {', '.join(missing)}"
        )
        task_type = task_id = None
    wrong += rules.broken(cluster, task_type, task_id)
    wrong += _gaps(cluster)
    wrong += address_problems(places_of(cluster, cluster.jobs))
    places = places_of(cluster, ("chief", "worker"))
    own = None
    if task_type in ("chief", "worker") and task_id is not None:
        mine = [i for i, place in enumerate(places) if place.task == f"{task_type} {task_id}"]
        own = mine[0] if mine else None
    if task_type == "evaluator" and not wrong:
        return None, [], None, []
    if task_type == "ps" and not wrong:
        wrong.append("There is no id for task_type 'ps'")
    if wrong or own is None:
        return None, places, own, wrong
    addresses, names = zip(*[(place.address, place.task) for place in places], strict=True)
    return Membership(source, own, len(places), addresses, names), places, own, wrong


def _ranked(resolver: RankedClusterResolver) -> Membership:
    rank, size = resolver.task_id or 0, resolver.num_tasks
    if rank >= size:
        raise ValueError(
            f"{resolver.needs[0]}={rank} is not among the {size} tasks of {resolver.needs[1]}"
        )
    address = resolver.address()
    names = tuple(f"worker {i}" for i in range(size))
    return Membership(resolver.launcher, rank, size, (address,) if address else (), names)


def _gaps(cluster: ClusterSpec) -> list[str]:
    """Return which numbers are missing among the tasks that train."""
    found = []
    for job in ("chief", "worker"):
        numbers = cluster.task_indices(job) if job in cluster.jobs else []
        absent = sorted(set(range(len(numbers))) - set(numbers))
        if absent:
            found.append(
                f"cluster[{job!r}] has tasks {numbers}, but not {', '.join(map(str, absent))}: tasks "
                "are numbered from 0 without gaps"
            )
    return found
