"""Indexed jobs and JobSets: every pod's environment gives the same cluster, and its own place in it."""

from __future__ import annotations

import os
import socket

import pytest

from pycollective.cluster import KubernetesJobClusterResolver
from pycollective.cluster.membership import membership_of
from pycollective.cluster.sources import resolver_of_environment

DOMAIN = "net.default.svc.cluster.local"
NAMES = ("TF_CONFIG", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "SM_HOSTS")


@pytest.fixture
def pod(monkeypatch):
    """Return a function that sets this process's variables as Kubernetes and the job's author do."""

    def put(host, index, **variables):
        for name in list(os.environ):
            if name.startswith("PYCOLLECTIVE_") or name in NAMES:
                monkeypatch.delenv(name)
        monkeypatch.setenv("HOSTNAME", host)
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        for name, value in variables.items():
            monkeypatch.setenv(f"PYCOLLECTIVE_{name}", str(value))
        monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.{DOMAIN}")
        return resolver_of_environment()

    return put


def test_jobset_of_several_jobs_orders_ranks_by_job_and_index(pod):
    """Workers are sorted by replicated job in the given order, then by job index, then by pod index."""
    order = [
        "net-leader-0-0",
        *(f"net-workers-{job}-{index}" for job in range(2) for index in range(3)),
    ]
    for rank, host in enumerate(order):
        resolver = pod(host, host[-1], JOBS="leader:1x1,workers:2x3")
        assert isinstance(resolver, KubernetesJobClusterResolver)
        member = membership_of(resolver)
        assert (member.source, member.rank, member.size) == ("KubernetesJob", rank, 7)
        assert list(member.addresses) == [f"{name}.{DOMAIN}:8470" for name in order]
    assert membership_of(pod(order[-1], 2, JOBS=" workers:2x3 , leader:1x1", SIZE=7)).rank == 5


def test_several_processes_in_each_pod_have_consecutive_ranks_and_ports(pod):
    seen = []
    for job in range(2):
        for local in range(2):
            process = {"LOCAL_RANK": local, "LOCAL_SIZE": 2}
            member = membership_of(pod(f"net-w-{job}-0", 0, JOBS="w:2x1", **process))
            seen.append((member.rank, member.addresses[member.rank]))
            assert member.size == 4
    assert seen == [
        (0, f"net-w-0-0.{DOMAIN}:8470"),
        (1, f"net-w-0-0.{DOMAIN}:8471"),
        (2, f"net-w-1-0.{DOMAIN}:8470"),
        (3, f"net-w-1-0.{DOMAIN}:8471"),
    ]
    member = membership_of(pod("train-1", 1, SIZE=6, LOCAL_SIZE=2, LOCAL_RANK=1))
    assert (member.rank, member.size) == (3, 6)
    assert member.addresses[4:] == (f"train-2.{DOMAIN}:8470", f"train-2.{DOMAIN}:8471")


def test_jobset_job_that_is_not_named_does_not_take_part(pod):
    with pytest.raises(ValueError, match="'net-driver-0', is none of PYCOLLECTIVE_JOBS='w:2x1'"):
        membership_of(pod("net-driver-0-0", 0, JOBS="w:2x1"))


def test_jobset_name_that_ends_another_is_not_confused_with_it(pod):
    member = membership_of(pod("net-big-w-0-1", 1, JOBS="w:1x2,big-w:1x2"))
    assert member.rank == 3
    assert member.addresses[0] == f"net-w-0-0.{DOMAIN}:8470"


@pytest.mark.parametrize(
    ("host", "index", "variables", "message"),
    [
        ("t-5", 5, {"SIZE": 5}, r"this host, 't-5', is not among the pods of PYCOLLECTIVE_SIZE=5"),
        ("s-w-2-0", 0, {"JOBS": "w:2x1"}, "'s-w-2-0', is not among the pods of PYCOLLECTIVE_JOBS"),
        ("s-w-0-0", 0, {"JOBS": "w"}, "PYCOLLECTIVE_JOBS='w' is not a list of jobs, each <name>"),
        (
            "s-w-0-0",
            0,
            {"JOBS": "w:1x2", "SIZE": 4},
            "SIZE=4, but PYCOLLECTIVE_JOBS='w:1x2' has 2 pods",
        ),
        (
            "t-0",
            0,
            {"SIZE": 3, "LOCAL_SIZE": 2, "LOCAL_RANK": 0},
            "=3 .* must be a multiple of the 2 ",
        ),
        (
            "t-0",
            0,
            {"SIZE": 4, "LOCAL_SIZE": 2},
            "PYCOLLECTIVE_LOCAL_RANK='' is not a number from 0",
        ),
        (
            "t-0",
            0,
            {"SIZE": 4, "LOCAL_SIZE": 2, "LOCAL_RANK": 2},
            "LOCAL_RANK=2 is not among the 2",
        ),
        ("t-0", 1, {"SIZE": 4}, "'t-0', does not end with -1"),
        ("t-0", "x", {"SIZE": 4}, "JOB_COMPLETION_INDEX='x' is not a number"),
    ],
)
def test_indexed_job_wrong_variables_raise(pod, host, index, variables, message):
    with pytest.raises(ValueError, match=f"KubernetesJob: .*{message}"):
        membership_of(pod(host, index, **variables))


def test_task_id_cannot_be_set(pod):
    resolver = pod("t-1", 1, SIZE=2)
    with pytest.raises(ValueError, match="JOB_COMPLETION_INDEX determines it"):
        resolver.task_id = 0
    assert KubernetesJobClusterResolver(4, port=1).cluster_spec().num_tasks("worker") == 4
