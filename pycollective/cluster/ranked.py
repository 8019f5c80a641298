"""Resolvers of launchers that number their processes and give at most the first one's address.

There are resolvers for torchrun, Kubeflow's trainer, Open MPI, and MPICH and others with PMI. The
cluster has worker 0's address only: the workers connect there and exchange the other addresses.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

from pycollective.cluster import over_mpi
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import is_number, number, shown

_ADDRESS = "PYCOLLECTIVE_ADDRESS"


class RankedClusterResolver(ClusterResolver):
    """A cluster whose processes are all workers; it reads the environment each time.

    Parameters
    ----------
    environ : mapping, optional
        The environment, instead of ``os.environ``.
    rpc_layer : str, optional
        The protocol in `master`'s addresses.

    Raises
    ------
    ValueError
        At the first use: a variable is missing or is not a number, or worker 0's address is unknown.
    """

    #: Variables that the launcher always sets: the process's number, the number of processes, ...
    needs: tuple[str, ...]
    #: Name of the launcher.
    launcher: str
    #: Groups of variables that may hold worker 0's address; the first group that is set counts.
    address_keys: tuple[tuple[str, ...], ...] = (
        (_ADDRESS,),
        ("MASTER_ADDR", "MASTER_PORT"),
    )

    def __init__(
        self, environ: Mapping[str, str] | None = None, rpc_layer: str | None = None
    ) -> None:
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        super().__init__("worker", None, rpc_layer)

    @classmethod
    def applies(cls, environ: Mapping[str, str]) -> bool:
        """Return True if this launcher started a process with these variables."""
        return all(name in environ for name in cls.needs)

    @property
    def task_id(self) -> int | None:
        """The number of this process."""
        return self._number(self.needs[0], 0)

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        if value is not None:
            raise ValueError(f"task_id cannot be set: {self.launcher} determines it")

    @property
    def num_tasks(self) -> int:
        """The number of processes."""
        return self._number(self.needs[1], 1)

    @abstractmethod
    def address(self) -> str:
        """Return worker 0's address."""

    def address_key(self) -> str:
        """Return the names of the variables that hold worker 0's address."""
        for names in self.address_keys:
            if all(name in self._environ for name in names):
                return ", ".join(names)
        return "worker 0's address"

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster, with worker 0's address only."""
        return ClusterSpec({"worker": {0: self.address()}})

    def _number(self, name: str, least: int) -> int:
        if name not in self._environ:
            raise ValueError(f"{name} is not set, although {self.launcher} always sets it")
        return number(self._environ, name, least)

    def _master(self) -> str | None:
        """Return the address in the general variables, or None if they are not set."""
        if _ADDRESS in self._environ:
            return self._environ[_ADDRESS]
        if "MASTER_ADDR" in self._environ and "MASTER_PORT" in self._environ:
            return f"{self._environ['MASTER_ADDR']}:{self._number('MASTER_PORT', 1)}"
        return None


class TorchrunClusterResolver(RankedClusterResolver):
    """``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

    If torchrun's own store listens on that port, the workers use the port after it.
    """

    address_keys = (("MASTER_ADDR", "MASTER_PORT"),)
    needs = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launcher = "torchrun"

    def address(self) -> str:
        """Return worker 0's address."""
        port = self._number("MASTER_PORT", 1)
        if self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            if port == 65535:
                raise ValueError(
                    "MASTER_PORT=65535: torchrun listens there, and the workers need the port after "
                    "it, which does not exist; start torchrun with a smaller --master-port"
                )
            port += 1
        return f"{self._environ['MASTER_ADDR']}:{port}"


class KubeflowClusterResolver(RankedClusterResolver):
    """``PET_NODE_RANK``, ``PET_NNODES``, ``PET_MASTER_ADDR``, ``PET_MASTER_PORT`` of Kubeflow's trainer.

    A pod is a worker; its replicas are its devices. ``PET_RDZV_ENDPOINT`` may replace the last two.
    """

    address_keys = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("PET_RDZV_ENDPOINT",))
    needs = ("PET_NODE_RANK", "PET_NNODES")
    launcher = "Kubeflow"

    @property
    def num_tasks(self) -> int:
        """The number of pods; ``2:2`` is 2."""
        text = self._environ.get("PET_NNODES", "")
        least, _, most = text.partition(":")
        if not is_number(least) or int(least) < 1 or most not in ("", least):
            raise ValueError(
                f"PET_NNODES={shown(text)}: the number of workers must be one number; elastic jobs "
                "(least:most) are not supported"
            )
        return int(least)

    def address(self) -> str:
        """Return worker 0's address."""
        if "PET_MASTER_ADDR" in self._environ:
            return f"{self._environ['PET_MASTER_ADDR']}:{self._number('PET_MASTER_PORT', 1)}"
        if "PET_RDZV_ENDPOINT" in self._environ:
            return self._environ["PET_RDZV_ENDPOINT"]
        raise ValueError("neither PET_MASTER_ADDR nor PET_RDZV_ENDPOINT is set")


class _MPIClusterResolver(RankedClusterResolver):
    #: Variables with the number of processes on this host, and variables that name the job.
    local_sizes: tuple[str, ...]
    jobs: tuple[str, ...]

    def address(self) -> str:
        """Return worker 0's address from the variables, or the loopback address if all are on one host.

        The loopback port is computed from the job's name, or from the id of the process that started the
        job. On several hosts all processes ask MPI, which needs mpi4py.
        """
        given = self._master()
        if given is not None:
            return given
        size = self.num_tasks
        local = [name for name in self.local_sizes if name in self._environ]
        if size > 1 and not any(self._number(name, 1) == size for name in local):
            try:
                return over_mpi.worker_0(size, self._environ)
            except LookupError as error:
                raise ValueError(
                    f"{self.launcher} does not tell the address of worker 0, and its {size} processes "
                    f"are not all on this host; {error}. Set {_ADDRESS}=host:port of worker 0, as in "
                    f"mpirun -x {_ADDRESS}=node1:8476"
                ) from None
        job = [self._environ[name] for name in self.jobs if name in self._environ]
        name = " ".join(job or map(str, _starter()))
        return f"127.0.0.1:{20000 + zlib.crc32(name.encode()) % 10000}"


_STARTERS = ("hydra", "mpiexec", "mpirun", "orte", "prte", "pmi", "pals", "slurmstepd")
"""Beginnings of the names of programs that start the processes of an MPI job on a host."""


def _starter() -> tuple[int, ...]:
    """Return the id of the process that started all processes of this MPI job on this host."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith(_STARTERS):
                return (pid,)
            pid = int(rest.split()[1])
    return ()


class OpenMPIClusterResolver(_MPIClusterResolver):
    """``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE`` of Open MPI's ``mpirun``.

    Worker 0's address is ``PYCOLLECTIVE_ADDRESS``, or ``MASTER_ADDR`` and ``MASTER_PORT``. On one host,
    or if mpi4py is installed, these need not be set.
    """

    needs = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    launcher = "Open MPI"
    local_sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21")


class PMIClusterResolver(_MPIClusterResolver):
    """``PMI_RANK`` and ``PMI_SIZE`` of MPICH, Intel MPI and others; see `OpenMPIClusterResolver`."""

    needs = ("PMI_RANK", "PMI_SIZE")
    launcher = "PMI"
    local_sizes = ("MPI_LOCALNRANKS",)
    jobs = ("PMI_JOBID", "PMI_PORT", "I_MPI_HYDRA_UUID")
