"""Rules of a cluster: the tasks that it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective.cluster.spec import ClusterSpec

_TYPES = ("chief", "worker", "evaluator", "ps", None)


def normalize_cluster_spec(cluster_spec: Any) -> ClusterSpec:
    """Return the `ClusterSpec` of a `ClusterSpec` or a dict; raise ValueError for anything else."""
    if isinstance(cluster_spec, ClusterSpec):
        return cluster_spec
    if isinstance(cluster_spec, Mapping):
        return ClusterSpec(cluster_spec)
    raise ValueError("`cluster_spec' should be dict or a `tf.train.ClusterSpec` object")


def task_count(cluster_spec: ClusterSpec, task_type: str) -> int:
    """Return the number of tasks of a type."""
    return cluster_spec.num_tasks(task_type) if task_type in cluster_spec.jobs else 0


def validate(cluster_spec: Any, task_type: str | None, task_id: int | None) -> ClusterSpec:
    """Return the cluster if it keeps all rules and has this task.

    An evaluator need not be in the cluster that it belongs to.

    Raises
    ------
    ValueError
        A rule is broken.
    """
    cluster = normalize_cluster_spec(cluster_spec)
    for problem in broken(cluster, task_type, task_id):
        raise ValueError(problem)
    return cluster


def broken(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> list[str]:
    """Return a sentence for each broken rule."""
    found = []
    if any(job not in _TYPES for job in cluster.jobs):
        found.append(
            "Disallowed task type found in cluster spec. Allowed types are "
            f"{_TYPES} and the cluster spec is {_short(cluster)}."
        )
    if task_type not in _TYPES:
        found.append(f"Unrecognized task_type: {_short(task_type)}, valid task types are: {_TYPES}")
    elif task_type and task_type not in cluster.jobs and task_type != "evaluator":
        found.append(f"`task_type` {task_type!r} not found in cluster_spec.")
    for single in ("chief", "evaluator"):
        if task_count(cluster, single) > 1:
            found.append(f"There must be at most one {single!r} job.")
    if task_type in cluster.jobs and task_type in _TYPES:
        count = cluster.num_tasks(task_type)
        if task_id is None or task_id < 0:
            found.append(
                f"`task_id` of task type {task_type!r} must be given, from 0; got {task_id}."
            )
        elif task_id >= count:
            there = f"There are {count}, numbered from 0" if count else "There are none"
            found.append(f"The `task_id` {task_id} exceeds the maximum id of {task_type}. {there}")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 500 else f"{text[:500]}…"
