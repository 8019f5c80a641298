"""Cluster descriptions, and the rules that hold in a cluster."""

from __future__ import annotations

import pytest

from pycollective.cluster import ClusterSpec, rules

WORKERS = {"worker": ["w0:1", "w1:1", "w2:1"]}
WITH_CHIEF = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}


def test_dense_and_sparse_jobs():
    spec = ClusterSpec({"worker": ("w0:1", b"w1:1"), "ps": {"2": "p2:1", "0": "p0:1"}})
    assert spec.jobs == ["worker", "ps"]
    assert spec.as_dict() == {"worker": ["w0:1", "w1:1"], "ps": {0: "p0:1", 2: "p2:1"}}
    assert (spec.num_tasks("worker"), spec.num_tasks("ps")) == (2, 2)
    assert spec.task_indices("ps") == [0, 2]
    assert spec.task_address("ps", 2) == "p2:1"
    assert spec.job_tasks("ps") == ["p0:1", None, "p2:1"]
    assert spec.job_tasks("worker") == ["w0:1", "w1:1"]
    assert repr(spec) == ("ClusterSpec({'ps': {0: 'p0:1', 2: 'p2:1'}, 'worker': ['w0:1', 'w1:1']})")


def test_equality_and_copies():
    spec = ClusterSpec(WORKERS)
    assert spec == ClusterSpec(spec) == ClusterSpec({"worker": {0: "w0:1", 1: "w1:1", 2: "w2:1"}})
    assert spec == WORKERS
    assert spec != ClusterSpec({})
    assert spec != 3
    assert spec and not ClusterSpec({})
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ([], "`cluster` must be a dictionary mapping one or more job names to lists of network"),
        ({"worker": "w0:1"}, "The tasks for job 'worker' must be a list or a dictionary from"),
        ({"worker": [3]}, "Task address 3 must be bytes or unicode"),
        ({3: ["w0:1"]}, "Job name 3 must be bytes or unicode"),
    ],
)
def test_cluster_spec_wrong_argument_raises(cluster, text):
    with pytest.raises(TypeError, match=text):
        ClusterSpec(cluster)


@pytest.mark.parametrize("number", [-1, "x"])
def test_tasks_are_numbered_from_0(number):
    with pytest.raises(ValueError, match="numbered from 0, got|invalid literal"):
        ClusterSpec({"worker": {number: "w:1"}})


@pytest.mark.parametrize("ask", ["num_tasks", "task_indices", "job_tasks"])
def test_unknown_jobs_and_tasks(ask):
    spec = ClusterSpec(WORKERS)
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
        getattr(spec, ask)("ps")
    with pytest.raises(ValueError, match="No task with index 3 in job 'worker'"):
        spec.task_address("worker", 3)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "text"),
    [
        (
            {"boss": ["b:1"]},
            None,
            None,
            "Disallowed task type found in cluster spec. Allowed types",
        ),
        (WORKERS, "boss", 0, "Unrecognized task_type: boss, valid task types are"),
        (WORKERS, "chief", 0, "`task_type` 'chief' not found in cluster_spec."),
        (WORKERS, "worker", 3, "The `task_id` 3 exceeds the maximum id of worker."),
        (WORKERS, "worker", -1, "`task_id` of task type 'worker' must be given, from 0; got -1"),
        (WORKERS, "worker", None, "`task_id` of task type 'worker' must be given"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "There must be at most one 'chief' job."),
        ({"evaluator": ["a:1", "b:1"]}, None, None, "There must be at most one 'evaluator' job."),
        ([], None, None, "`cluster_spec' should be dict or a `tf.train.ClusterSpec`"),
    ],
)
def test_validate_broken_rule_raises_value_error(cluster, task_type, task_id, text):
    with pytest.raises(ValueError, match=text):
        rules.validate(cluster, task_type, task_id)


def test_is_chief_chief_or_first_worker_only():
    assert rules.is_chief(WORKERS, "worker", 0)
    assert not rules.is_chief(WORKERS, "worker", 1)
    assert rules.is_chief(WITH_CHIEF, "chief", 0)
    assert not rules.is_chief(WITH_CHIEF, "worker", 0)
    assert not rules.is_chief(WITH_CHIEF, "ps", 0)
    assert rules.is_chief(ClusterSpec(WORKERS), "evaluator", 0)  # need not be in the cluster


def test_worker_count_counts_chief_and_workers():
    assert rules.worker_count(WORKERS, "worker") == 3
    assert rules.worker_count(WITH_CHIEF, "chief") == rules.worker_count(WITH_CHIEF, "worker") == 3
    assert rules.worker_count({**WORKERS, "evaluator": ["e:1"]}, "evaluator") == 1
    assert rules.worker_count(WORKERS, "evaluator") == 1
    with pytest.raises(ValueError, match="Unexpected `task_type` 'ps'"):
        rules.worker_count(WITH_CHIEF, "ps")


def test_id_in_cluster_numbers_the_chief_first():
    assert [rules.id_in_cluster(WORKERS, "worker", i) for i in range(3)] == [0, 1, 2]
    assert rules.id_in_cluster(WITH_CHIEF, "chief", 0) == 0
    assert rules.id_in_cluster(WITH_CHIEF, "worker", 1) == 2
    assert rules.id_in_cluster(WITH_CHIEF, "evaluator", 0) == 0
    with pytest.raises(ValueError, match="There is no id for task_type 'ps'"):
        rules.id_in_cluster(WITH_CHIEF, "ps", 0)


def test_leaders_are_the_first_tasks_of_their_jobs():
    assert rules.collective_leader({}, None, None) == rules.coordination_leader({}) == ""
    assert rules.collective_leader(WORKERS, "worker", 1) == "/job:worker/replica:0/task:0"
    assert rules.collective_leader(WITH_CHIEF, "worker", 1) == "/job:chief/replica:0/task:0"
    assert rules.collective_leader(WORKERS, "evaluator", 0) == ""
    assert rules.coordination_leader(WITH_CHIEF) == "/job:ps/replica:0/task:0"
    assert rules.coordination_leader({"chief": ["c:1"], **WORKERS}) == (
        "/job:chief/replica:0/task:0"
    )
    assert rules.coordination_leader(WORKERS) == "/job:worker/replica:0/task:0"
    with pytest.raises(ValueError, match="so the cluster has no leader"):
        rules.coordination_leader({"evaluator": ["e:1"]})
