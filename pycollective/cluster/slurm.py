"""The cluster of a Slurm job step, read from the environment that ``srun`` sets."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import is_number, number, shown

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST = 100_000
"""The most hosts of a list; a longer list is a mistake that would fill the memory."""


class SlurmClusterResolver(ClusterResolver):
    """A cluster of the tasks of a Slurm step; the jobs, sorted by name, get consecutive ranks.

    Task j of a host listens at ``port_base + j``. Hosts and ranks have Slurm's order: that of its host
    list and its distribution. (TensorFlow sorts hosts by name, which puts n10 before n2.)

    Parameters
    ----------
    jobs : dict, optional
        The number of tasks of each job; by default all tasks are workers.
    port_base : int
        The first port on each host.
    gpus_per_node : int, optional
        The default is the number of GPUs in ``CUDA_VISIBLE_DEVICES`` (before a resolver narrowed
        it), or in the list of ``nvidia-smi``.
    gpus_per_task : int, optional
        The default is an equal share of ``gpus_per_node``. If Slurm shows each task only its own GPUs
        (``--gpus-per-task``, ``--gpu-bind``), it is their number.
    tasks_per_node : int or dict, optional
        One number for all hosts, or numbers by host name; by default Slurm's.
    auto_set_gpu : bool
        Let `cluster_spec` set ``CUDA_VISIBLE_DEVICES`` to this task's GPUs. Call `cluster_spec` before
        CUDA is used.
    rpc_layer : str
        The protocol in addresses.
    environ : mapping, optional
        The environment, instead of ``os.environ``; ``auto_set_gpu`` then sets nothing.

    Raises
    ------
    RuntimeError
        This process is not in a Slurm step, or there are not enough GPUs or tasks.
    ValueError
        A list or a number of Slurm is not valid.
    """

    def __init__(
        self,
        jobs: dict[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | dict[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        env: Mapping[str, str] = os.environ if environ is None else environ
        self._environ = env
        _slurm(env, "PROCID")
        self._rank = number(env, "SLURM_PROCID", 0)
        if jobs is None:
            _slurm(env, "STEP_NUM_TASKS")
            jobs = {"worker": number(env, "SLURM_STEP_NUM_TASKS", 1)}
        self._jobs = dict(jobs)
        self._port_base = port_base
        self._auto_set_gpu = auto_set_gpu
        self._tasks_of_host = _tasks_of_hosts(env, tasks_per_node)
        most = max([1, *self._tasks_of_host.values()])
        tasks = sum(self._tasks_of_host.values())
        visible = _visible_gpus(env)
        sees_own = gpus_per_node is None and _are_own(env, visible, most)
        if gpus_per_node is None:
            gpus_per_node = _count_gpus() if visible is None else len(visible)
        if sees_own:
            gpus_per_node *= most
        self._gpus_per_task = gpus_per_node // most if gpus_per_task is None else gpus_per_task
        if most * self._gpus_per_task > gpus_per_node:
            raise RuntimeError("Requested more GPUs per node than available.")
        if sees_own and visible:
            self._gpus_of_host = visible[: self._gpus_per_task] * most
        elif visible and len(visible) >= gpus_per_node:
            self._gpus_of_host = visible
        else:
            self._gpus_of_host = [str(number) for number in range(gpus_per_node)]
        if sum(self._jobs.values()) != tasks:
            raise RuntimeError(
                f"Requested {sum(self._jobs.values())} tasks but only {tasks} were assigned."
            )
        if not 0 <= self._rank < tasks:
            hint = ""
            if env.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
                hint = " Steps over several components of a heterogeneous job need TF_CONFIG."
            raise RuntimeError(f"SLURM_PROCID is {self._rank}, but there are {tasks} tasks.{hint}")
        self._places = _distribute_tasks(env, self._tasks_of_host)
        self._check_place()

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster.

        Sets `task_type` and `task_id`, and with ``auto_set_gpu`` also ``CUDA_VISIBLE_DEVICES``.
        """
        addresses, gpus = [], []
        for host, j in self._places:
            addresses.append(f"{host}:{self._port_base + j}")
            first = j * self._gpus_per_task
            gpus.append(",".join(self._gpus_of_host[first : first + self._gpus_per_task]))
        cluster, start = {}, 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = addresses[start : start + count]
            if start <= self._rank < start + count:
                self.task_type, self.task_id = job, self._rank - start
            start += count
        if self._auto_set_gpu and self._environ is os.environ:
            _narrow(gpus[self._rank])
        return ClusterSpec(cluster)

    def _check_place(self) -> None:
        """Raise RuntimeError if Slurm placed this task elsewhere than this resolver computed."""
        host, j = self._places[self._rank]
        env = self._environ
        said, name = env.get("SLURM_LOCALID"), env.get("SLURMD_NODENAME")
        if (said, name) in ((str(j), host), (None, host), (str(j), None), (None, None)):
            return
        raise RuntimeError(
            f"Task {self._rank} should be number {j} on {host}, and Slurm says that it is number "
            f"{said} on {name} (SLURM_DISTRIBUTION={env.get('SLURM_DISTRIBUTION')!r}). Start it "
            "with srun --distribution=block, or set TF_CONFIG"
        )

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return `task_type` and `task_id`, which are None before the first `cluster_spec`."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the number of GPUs that each task has."""
        return {"GPU": self._gpus_per_task}


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of Slurm's list: ``"n[1-2,07-08],m5"`` is n1, n2, n07, n08, m5.

    A name may have several brackets: ``"r[1-2]n[1-2]"`` is r1n1, r1n2, r2n1, r2n2. Raises ValueError
    if the list is not valid.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", hostlist):  # commas in brackets separate ranges
        if not part or re.fullmatch(r"(?:[^\[\],]|\[[\d,-]+\])*", part) is None:
            raise _invalid("hostlist", hostlist, part)
        pieces = re.split(r"\[([\d,-]+)\]", part)  # odd pieces were in brackets
        for i in range(1, len(pieces), 2):
            if not pieces[i - 1]:
                raise _invalid("hostlist", hostlist, part)
        choices = [
            _numbers(hostlist, piece) if i % 2 else [piece] for i, piece in enumerate(pieces)
        ]
        if len(hosts) + math.prod(map(len, choices)) > _MOST:
            raise _invalid("hostlist", hostlist, part)
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _numbers(hostlist: str, ranges: str) -> list[str]:
    numbers = []
    for span in ranges.split(","):
        ends = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", span)
        if ends is None or not 0 <= int(ends[2] or ends[1]) - int(ends[1]) < _MOST:
            raise _invalid("hostlist", hostlist, span)
        width = len(ends[1])
        numbers += [f"{n:0{width}d}" for n in range(int(ends[1]), int(ends[2] or ends[1]) + 1)]
    return numbers


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the numbers of Slurm's list: ``"3(x2),1"`` is 3, 3, 1.

    Raises ValueError if the list is not valid.
    """
    numbers: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None or len(numbers) + int(match[2] or 1) > _MOST:
            raise _invalid("tasks-per-node list", tasks_per_node, part)
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _invalid(what: str, text: str, part: str) -> ValueError:
    text = text if len(text) <= 200 else f"{text[:200]}…"
    return ValueError(f'Invalid {what} format "{text}": Invalid part: {shown(part)}')


def _tasks_of_hosts(
    env: Mapping[str, str], tasks_per_node: int | dict[str, int] | None
) -> dict[str, int]:
    if isinstance(tasks_per_node, dict):
        order = expand_hostlist(env.get("SLURM_STEP_NODELIST") or "none")
        order += sorted(set(tasks_per_node) - set(order))
        return {host: tasks_per_node[host] for host in order if host in tasks_per_node}
    hosts = expand_hostlist(_slurm(env, "STEP_NODELIST"))
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, int(tasks_per_node))
    tasks = expand_tasks_per_node(_slurm(env, "STEP_TASKS_PER_NODE"))
    if len(hosts) != len(tasks):
        raise ValueError(
            f"SLURM_STEP_NODELIST names {len(hosts)} hosts, but SLURM_STEP_TASKS_PER_NODE has the "
            f"tasks of {len(tasks)}"
        )
    return dict(zip(hosts, tasks, strict=True))


def _distribute_tasks(
    env: Mapping[str, str], tasks_of_host: dict[str, int]
) -> list[tuple[str, int]]:
    """Return the host of each rank and its number there, in the order of srun's --distribution.

    "block" fills one host after the other, "cyclic" gives each host one task in turn, and "plane=n" n
    tasks in turn.
    """
    how = env.get("SLURM_DISTRIBUTION", "").partition(":")[0].partition(",")[0].lower()
    if how.startswith("plane"):
        size = how.partition("=")[2] or env.get("SLURM_DIST_PLANESIZE", "")
        if not is_number(size) or int(size) < 1:
            raise RuntimeError(
                f"SLURM_DISTRIBUTION is plane, and its size {size!r} is not a number from 1"
            )
        turn = int(size)
    else:
        turn = 1 if how == "cyclic" else max([1, *tasks_of_host.values()])
    places: list[tuple[str, int]] = []
    given = dict.fromkeys(tasks_of_host, 0)
    while len(places) < sum(tasks_of_host.values()):
        for host, tasks in tasks_of_host.items():
            more = range(given[host], min(given[host] + turn, tasks))
            places += [(host, j) for j in more]
            given[host] += len(more)
    return places


def _slurm(env: Mapping[str, str], name: str) -> str:
    name = f"SLURM_{name}"
    try:
        return env[name]
    except KeyError:
        raise RuntimeError(
            f"{name} not found in environment. Not running inside a SLURM step?"
        ) from None


_narrowed: tuple[str | None, str] | None = None
"""``CUDA_VISIBLE_DEVICES`` before and after a resolver set it; other resolvers use the value before."""


def _before_narrowing() -> str | None:
    now = os.environ.get(_VISIBLE)
    return _narrowed[0] if _narrowed is not None and _narrowed[1] == now else now


def _narrow(gpus: str) -> None:
    global _narrowed
    _narrowed = _before_narrowing(), gpus
    os.environ[_VISIBLE] = gpus


def _visible_gpus(env: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, or None if it is not set."""
    visible = _before_narrowing() if env is os.environ else env.get(_VISIBLE)
    return None if visible is None else [g.strip() for g in visible.split(",") if g.strip()]


def _are_own(env: Mapping[str, str], visible: list[str] | None, tasks: int) -> bool:
    """Return True if each task of a host sees only its own GPUs.

    Then there are fewer visible GPUs than tasks, or as many as Slurm's number for each task.
    """
    if not visible or tasks == 1:
        return False
    of_each = env.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    return len(visible) < tasks or of_each == str(len(visible))


def _count_gpus() -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except FileNotFoundError:
        return 0  # no driver: no GPU
    except subprocess.SubprocessError as error:
        raise RuntimeError(
            f"Could not get number of GPUs from nvidia-smi ({error}): give gpus_per_node."
        ) from error
    return sum(line.startswith("GPU ") for line in listed.splitlines())
