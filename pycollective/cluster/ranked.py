"""Resolvers of launchers that number their processes, and tell them at most where the first one is.

torchrun, Kubeflow's trainer, Open MPI, and MPICH and others that speak PMI. The cluster that they
describe has only worker 0's address; the workers meet there, and tell each other the rest.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import is_number, number, shown

__all__ = [
    "KubeflowClusterResolver",
    "OpenMPIClusterResolver",
    "PMIClusterResolver",
    "RankedClusterResolver",
    "TorchrunClusterResolver",
]

_ADDRESS = "PYCOLLECTIVE_ADDRESS"


class RankedClusterResolver(ClusterResolver):
    """Reads the environment each time it is asked; all processes are workers.

    Parameters
    ----------
    environ : mapping, optional
        Instead of ``os.environ``.
    rpc_layer : str, optional
        The protocol in `master`'s addresses.

    Raises
    ------
    ValueError
        When it is asked: if a variable is missing or no number, or nothing says where worker 0 is.
    """

    #: The variables without which this is not the launcher.
    needs: tuple[str, ...]
    #: Who sets them.
    launcher: str
    #: Those that may say where worker 0 is, the first that are set.
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
        """Whether a process with these variables was started by this launcher."""
        return all(name in environ for name in cls.needs)

    @property
    def task_id(self) -> int | None:
        """This process's number."""
        return self._number(self.needs[0], 0)

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        if value is not None:
            raise ValueError(f"{self.launcher} says which task this is: task_id cannot be set")

    @property
    def num_tasks(self) -> int:
        """How many processes there are."""
        return self._number(self.needs[1], 1)

    @abstractmethod
    def address(self) -> str:
        """Return worker 0's address."""

    def address_key(self) -> str:
        """Return which variables say it."""
        for names in self.address_keys:
            if all(name in self._environ for name in names):
                return ", ".join(names)
        return "worker 0's address"

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster, in which only worker 0 has an address."""
        return ClusterSpec({"worker": {0: self.address()}})

    def _number(self, name: str, least: int) -> int:
        if name not in self._environ:
            raise ValueError(f"{name} is not set, which {self.launcher} sets")
        return number(self._environ, name, least)

    def _master(self) -> str | None:
        """Return the address that a user, or the launcher's surroundings, have set."""
        if _ADDRESS in self._environ:
            return self._environ[_ADDRESS]
        if "MASTER_ADDR" in self._environ and "MASTER_PORT" in self._environ:
            return f"{self._environ['MASTER_ADDR']}:{self._number('MASTER_PORT', 1)}"
        return None


class TorchrunClusterResolver(RankedClusterResolver):
    """``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

    Where torchrun's own store listens on that port, the workers meet on the one after it.
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

    A pod is a worker; its replicas are its devices. ``PET_RDZV_ENDPOINT`` stands for the last two.
    """

    address_keys = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("PET_RDZV_ENDPOINT",))
    needs = ("PET_NODE_RANK", "PET_NNODES")
    launcher = "Kubeflow"

    @property
    def num_tasks(self) -> int:
        """How many pods there are; ``2:2`` is 2."""
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
    #: The number of processes on this host, if it is known; and what names the job.
    local_sizes: tuple[str, ...]
    jobs: tuple[str, ...]

    def address(self) -> str:
        """Return worker 0's address: as it was set; where all are on one host, its loopback address.

        The port is then made of the job's name, or of the process that started the job's. On several
        hosts MPI itself is asked, by all processes, if mpi4py is there.
        """
        given = self._master()
        if given is not None:
            return given
        size = self.num_tasks
        local = [name for name in self.local_sizes if name in self._environ]
        if size > 1 and not any(self._number(name, 1) == size for name in local):
            from pycollective.cluster import over_mpi

            try:
                return over_mpi.worker_0(size)
            except LookupError as error:
                raise ValueError(
                    f"{self.launcher} does not say where worker 0 of {size} is, and they are not all "
                    f"on this host; {error}: set {_ADDRESS}=host:port of it, as in mpirun -x "
                    f"{_ADDRESS}=node1:8476"
                ) from None
        job = [self._environ[name] for name in self.jobs if name in self._environ]
        name = " ".join(job or map(str, _starter()))
        return f"127.0.0.1:{20000 + zlib.crc32(name.encode()) % 10000}"


_STARTERS = ("hydra", "mpiexec", "mpirun", "orte", "prte", "pmi", "pals", "slurmstepd")
"""The names of programs that start the processes of an MPI job on a host begin so."""


def _starter() -> tuple[int, ...]:
    """Return the process that started this MPI job here, which its other processes have in common."""
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

    Worker 0's address is ``PYCOLLECTIVE_ADDRESS``, or ``MASTER_ADDR`` and ``MASTER_PORT``; on one
    host, and where mpi4py is installed, it need not be set.
    """

    needs = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    launcher = "Open MPI"
    local_sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21")


class PMIClusterResolver(_MPIClusterResolver):
    """``PMI_RANK`` and ``PMI_SIZE`` of MPICH, Intel MPI and others; as `OpenMPIClusterResolver`."""

    needs = ("PMI_RANK", "PMI_SIZE")
    launcher = "PMI"
    local_sizes = ("MPI_LOCALNRANKS",)
    jobs = ("PMI_JOBID", "PMI_PORT", "I_MPI_HYDRA_UUID")
