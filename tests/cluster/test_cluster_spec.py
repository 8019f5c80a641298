"""Cluster descriptions, and the rules that hold in a cluster."""

from __future__ import annotations

import pytest

from pycollective.cluster import ClusterSpec, rules

WORKERS = {"worker": ["w0:1", "w1:1", "w2:1"]}


def test_cluster_spec_of_lists_and_dicts_lists_their_tasks():
    spec = ClusterSpec({"worker": ("w0:1", b"w1:1"), "ps": {"2": "p2:1", "0": "p0:1"}})
    assert spec.jobs == ["worker", "ps"]
    assert spec.as_dict() == {"worker": ["w0:1", "w1:1"], "ps": {0: "p0:1", 2: "p2:1"}}
    assert (spec.num_tasks("worker"), spec.num_tasks("ps")) == (2, 2)
    assert spec.task_indices("ps") == [0, 2]
    assert spec.task_address("ps", 2) == "p2:1"
    assert spec.job_tasks("ps") == ["p0:1", None, "p2:1"]
    assert spec.job_tasks("worker") == ["w0:1", "w1:1"]
    assert repr(spec) == ("ClusterSpec({'ps': {0: 'p0:1', 2: 'p2:1'}, 'worker': ['w0:1', 'w1:1']})")


def test_cluster_specs_of_the_same_tasks_are_equal():
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
def test_unknown_job_or_task_raises_value_error(ask):
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
