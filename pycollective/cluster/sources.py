"""Launchers that may have started this process: one table, `SOURCES`.

The table is used by `pycollective.init`, `MultiWorkerMirroredStrategy` and ``pycollective doctor``.
The first source in this list whose variables are set counts::

    TF_CONFIG : with a cluster in it
    PYCOLLECTIVE_RANK, PYCOLLECTIVE_SIZE : pycollective run, or set by hand
    SM_HOSTS, SM_CURRENT_HOST : SageMaker
    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT : torchrun
    PET_NODE_RANK, PET_NNODES : Kubeflow
    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE : Open MPI
    SLURM_PROCID, SLURM_STEP_NUM_TASKS : a Slurm step, unless PMI_RANK and PMI_SIZE have other values
        (then mpirun of MPICH runs in the step)
    PMI_RANK, PMI_SIZE : MPICH, Intel MPI
    JOB_COMPLETION_INDEX, PYCOLLECTIVE_SIZE : an indexed job of Kubernetes; PYCOLLECTIVE_JOBS may
        replace the second variable

Without any of them the process is alone. If a variable nevertheless means several processes, this is an
error (`overlooked_variables`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pycollective.cluster import ranked
from pycollective.cluster.indexed_job import KubernetesJobClusterResolver
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.sagemaker import SageMakerClusterResolver
from pycollective.cluster.slurm import SlurmClusterResolver
from pycollective.cluster.tf_config import TFConfigClusterResolver
from pycollective.environment import enumerated


class LaunchedClusterResolver(ranked.RankedClusterResolver):
    """``PYCOLLECTIVE_RANK`` and ``PYCOLLECTIVE_SIZE``, as ``pycollective run`` sets them.

    With ``PYCOLLECTIVE_MEMORY_FD`` the processes have inherited shared memory, and need no address. A
    group of one needs no address either.
    """

    address_keys = (("PYCOLLECTIVE_ADDRESS",),)
    needs = ("PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE")
    launcher = "pycollective run"

    def address(self) -> str:
        """Return worker 0's address, or ``""`` if none is needed."""
        if "PYCOLLECTIVE_ADDRESS" in self._environ:
            return self._environ["PYCOLLECTIVE_ADDRESS"]
        if "PYCOLLECTIVE_MEMORY_FD" not in self._environ and self.num_tasks > 1:
            raise ValueError(
                "PYCOLLECTIVE_RANK and PYCOLLECTIVE_SIZE are set and PYCOLLECTIVE_ADDRESS is not: set "
                "it to host:port of rank 0, or start the processes with pycollective run"
            )
        return ""


@dataclass(frozen=True)
class Source:
    """A launcher, or another source of a cluster's description in the environment.

    Attributes
    ----------
    name : str
        Its name in log lines.
    variables : tuple of str
        The variables that identify it.
    applies : callable
        A function that returns True for an environment of this source.
    resolver : callable
        A function that makes the resolver for an environment.
    sizes : tuple of str
        The variables with the number of processes, or of jobs and pods.
    """

    name: str
    variables: tuple[str, ...]
    applies: Callable[[Mapping[str, str]], bool]
    resolver: Callable[[Mapping[str, str]], ClusterResolver]
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        variables = ", ".join(self.variables)
        return variables if variables == self.name else f"{self.name} ({variables})"


def _launcher(kind: type[ranked.RankedClusterResolver]) -> Source:
    return Source(kind.launcher, kind.needs, kind.applies, kind, kind.needs[1:2])


def _in_a_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return True if srun started this process, and not MPICH's mpirun within a step."""
    pmi = (environ.get("PMI_RANK"), environ.get("PMI_SIZE"))
    slurm = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS"))
    return None not in slurm and (None in pmi or pmi == slurm)


SOURCES = (
    Source(
        "TF_CONFIG",
        ("TF_CONFIG",),
        TFConfigClusterResolver.applies,
        lambda env: TFConfigClusterResolver(environ=env),
        (),
    ),
    _launcher(LaunchedClusterResolver),
    Source(
        "SageMaker",
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        lambda env: "SM_HOSTS" in env and "SM_CURRENT_HOST" in env,
        lambda env: SageMakerClusterResolver(environ=env),
        ("SM_HOSTS",),
    ),
    _launcher(ranked.TorchrunClusterResolver),
    _launcher(ranked.KubeflowClusterResolver),
    _launcher(ranked.OpenMPIClusterResolver),
    Source(
        "Slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        _in_a_slurm_step,
        lambda env: SlurmClusterResolver(environ=env),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"),
    ),
    _launcher(ranked.PMIClusterResolver),
    Source(
        "KubernetesJob",
        ("JOB_COMPLETION_INDEX", "PYCOLLECTIVE_SIZE"),
        KubernetesJobClusterResolver.applies,
        lambda env: KubernetesJobClusterResolver(environ=env),
        ("PYCOLLECTIVE_JOBS",),
    ),
)
"""The sources in order of precedence; `docs/reference/launchers.md` has the same table."""

_OTHER_SIZES = {
    "FLUX_JOB_SIZE": "Flux",
    "HOROVOD_SIZE": "horovodrun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH2",
}
"""Variables of launchers that are not in the table."""
_COMMANDS = {"Open MPI": "mpirun", "PMI": "mpiexec", "Slurm": "srun", "torchrun": "torchrun"}
_ALONE = "to run this process alone, set PYCOLLECTIVE_RANK=0 and PYCOLLECTIVE_SIZE=1"


def sources_of_environment(environ: Mapping[str, str] | None = None) -> list[Source]:
    """Return all sources that describe a cluster; the first one counts."""
    env = os.environ if environ is None else environ
    return [source for source in SOURCES if source.applies(env)]


def resolver_of_environment(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver for the environment, or None if no variable describes a cluster."""
    env = os.environ if environ is None else environ
    for source in sources_of_environment(env):
        return source.resolver(env)
    return None


def overlooked_variables(environ: Mapping[str, str]) -> list[str]:
    """Return error texts about variables that mean several processes, for a process that is alone.

    ``PYCOLLECTIVE_RANK=0`` and ``PYCOLLECTIVE_SIZE=1`` mean that the process is alone on purpose.
    """
    if LaunchedClusterResolver.applies(environ) and environ["PYCOLLECTIVE_SIZE"].strip() == "1":
        return []
    complete = sources_of_environment(environ)
    if complete:
        return [
            f"{_several(environ, name)}, but {complete[0]}, which has precedence, describes one: remove "
            f"one of the two descriptions; {_ALONE}"
            for source in complete[1:]
            for name in source.sizes[:1]
            if _count(environ, name) > 1
        ]
    own = ("PYCOLLECTIVE_RANK", "PYCOLLECTIVE_SIZE", "PYCOLLECTIVE_ADDRESS")
    given = [name for name in (*own, "PYCOLLECTIVE_MEMORY_FD") if name in environ]
    missing = [name for name in own[:2] if name not in environ]
    if given:
        return [
            f"{enumerated(given)} set and {enumerated(missing)} not: set PYCOLLECTIVE_RANK, "
            "PYCOLLECTIVE_SIZE and PYCOLLECTIVE_ADDRESS=host:port of rank 0, or start the processes "
            "with pycollective run"
        ]
    found = []
    for source in SOURCES:
        for name in source.sizes:
            if _count(environ, name) > 1:
                missing = [other for other in source.variables if other not in environ]
                command = _COMMANDS.get(source.name)
                found.append(
                    f"{_several(environ, name)}, but {enumerated(missing)} not set: "
                    + (f"start the program with {command}" if command else "set the missing ones")
                    + f"; {_ALONE}"
                )
                break
    if "JOB_COMPLETION_INDEX" in environ and not found:
        found.append(
            "JOB_COMPLETION_INDEX is set, as in an indexed job of several pods, but PYCOLLECTIVE_SIZE "
            f"is not: set it to the number of all workers; {_ALONE}"
        )
    return found or [
        f"{_several(environ, name)}, but {launcher} gives no address of rank 0: set "
        f"PYCOLLECTIVE_RANK, PYCOLLECTIVE_SIZE and PYCOLLECTIVE_ADDRESS; {_ALONE}"
        for name, launcher in _OTHER_SIZES.items()
        if _count(environ, name) > 1
    ]


def other_launchers(environ: Mapping[str, str]) -> list[str]:
    """Return texts about the launchers that have started this process as one of several."""
    return [
        f"{source.name} has started this process as one of several ({name}={environ[name]})"
        for source in sources_of_environment(environ)
        if source.name in _COMMANDS
        for name in source.sizes[:1]
        if _count(environ, name) > 1
    ]


def _several(environ: Mapping[str, str], name: str) -> str:
    text = environ[name]
    return f"{name}={text if len(text) <= 60 else f'{text[:60]}…'} means several processes"


def _count(environ: Mapping[str, str], name: str) -> int:
    """Return the largest number in a variable, or the length if it is a JSON list."""
    text = environ.get(name, "")
    if text.startswith("["):
        return text.count(",") + 1
    return max(map(int, re.findall(r"[0-9]{1,9}", text)), default=0)
