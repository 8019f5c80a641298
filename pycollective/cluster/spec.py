"""`ClusterSpec`: the tasks of a cluster, in jobs, and their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClusterSpec:
    """The tasks of a cluster, organized in jobs.

    Parameters
    ----------
    cluster : dict or ClusterSpec
        The addresses of each job's tasks: a list of ``"host:port"``, or a dict from task numbers to
        addresses if only some tasks are known.

    Raises
    ------
    TypeError
        ``cluster``, or a part of it, has another type.
    ValueError
        A task's number is negative or not a number.
    """

    def __init__(self, cluster: Any) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster._jobs
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network "
                f"addresses, or a `ClusterSpec`, not {cluster!r}"
            )
        self._jobs: dict[str, dict[int, str]] = {
            _text("Job name", job): _tasks(job, tasks) for job, tasks in cluster.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job; raise ValueError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks, sorted; raise ValueError if there is no such job."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task; raise ValueError if there is no such job or task."""
        try:
            return self._job(job_name)[task_index]
        except KeyError:
            raise ValueError(f"No task with index {task_index!r} in job {job_name!r}") from None

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks by number, None for an unknown address.

        Raise ValueError if there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(number) for number in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return the addresses by job: a list if the numbers are 0, 1, 2 and so on, else a dict."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def _job(self, name: str) -> dict[int, str]:
        try:
            return self._jobs[name]
        except KeyError:
            raise ValueError(f"No such job in cluster: {name!r}") from None

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        try:
            return self._jobs == ClusterSpec(other)._jobs
        except (TypeError, ValueError):
            return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        items = ", ".join(f"{job!r}: {tasks!r}" for job, tasks in sorted(self.as_dict().items()))
        return f"ClusterSpec({{{items}}})"


def _tasks(job: Any, tasks: Any) -> dict[int, str]:
    """Return a job's addresses by number, in ascending order."""
    if isinstance(tasks, Mapping):
        numbered = {int(number): address for number, address in tasks.items()}
    elif isinstance(tasks, (list, tuple)):
        numbered = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings."
        )
    if any(number < 0 for number in numbered):
        raise ValueError(f"The tasks for job {job!r} are numbered from 0, got {sorted(numbered)}")
    return {number: _text("Task address", numbered[number]) for number in sorted(numbered)}


def _text(what: str, value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} {value!r} must be bytes or unicode")
    return value
