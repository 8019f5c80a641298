"""Rank and addresses of a process from recorded environments of launchers, and their precedence."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import types
from pathlib import Path

import pytest

from pycollective import cluster
from pycollective.cluster import ClusterSpec, SimpleClusterResolver, over_mpi
from pycollective.cluster.membership import Membership, membership_of
from pycollective.cluster.sources import (
    SOURCES,
    resolver_of_environment,
    sources_of_environment,
)


def tf_config(index=0, **jobs):
    cluster = jobs or {"worker": ["a:1", "b:2"]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node0-4711@1",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_FD": "7"}
LAUNCHED = {"PYCOLLECTIVE_RANK": "1", "PYCOLLECTIVE_SIZE": "2", "PYCOLLECTIVE_MEMORY_FD": "5"}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
KUBEFLOW = {
    "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "2", "PYCOLLECTIVE_SIZE": "3", "HOSTNAME": "train-2"}


@pytest.fixture
def environ(monkeypatch):
    """Return a function that replaces all launchers' variables, and returns their resolver."""

    def put(*parts):
        for name in list(os.environ):
            if name.startswith(("TF_", "PYCOLLECTIVE_", "OMPI_", "PMI", "SLURM_", "SM_", "PET_")):
                monkeypatch.delenv(name)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX"):
            monkeypatch.delenv(name, raising=False)
        for part in parts:
            for name, value in part.items():
                monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
        return resolver_of_environment()

    return put


@pytest.mark.parametrize(
    ("parts", "source", "rank", "size", "addresses"),
    [
        ([{"TF_CONFIG": tf_config(1)}], "TF_CONFIG", 1, 2, ["a:1", "b:2"]),
        ([LAUNCHED], "pycollective run", 1, 2, []),
        ([LAUNCHED, {"PYCOLLECTIVE_ADDRESS": "c:3"}], "pycollective run", 1, 2, ["c:3"]),
        ([SAGEMAKER], "SageMaker", 1, 2, ["algo-1:2223", "algo-2:2223"]),
        ([TORCHRUN], "torchrun", 1, 4, ["node0:29500"]),
        ([TORCHRUN, {"TORCHELASTIC_USE_AGENT_STORE": "True"}], "torchrun", 1, 4, ["node0:29501"]),
        ([KUBEFLOW], "Kubeflow", 1, 2, ["job-node-0-0.job:29400"]),
        ([OPEN_MPI, {"PYCOLLECTIVE_ADDRESS": "n1:8"}], "Open MPI", 1, 2, ["n1:8"]),
        ([SLURM], "Slurm", 2, 3, ["n1:8888", "n1:8889", "n2:8888"]),
        # srun with PMI describes the same rank twice; mpirun in a step belongs to another program.
        ([SLURM, {"PMI_RANK": "2", "PMI_SIZE": "3"}], "Slurm", 2, 3, None),
        ([SLURM, MPICH, {"MASTER_ADDR": "n", "MASTER_PORT": "1"}], "PMI", 0, 2, ["n:1"]),
        ([POD], "KubernetesJob", 2, 3, ["train-0:8470", "train-1:8470", "train-2:8470"]),
        # The order of precedence.
        ([{"TF_CONFIG": tf_config()}, LAUNCHED, SAGEMAKER], "TF_CONFIG", 0, 2, None),
        ([{"TF_CONFIG": "{}"}, LAUNCHED, SAGEMAKER, TORCHRUN], "pycollective run", 1, 2, None),
        ([SAGEMAKER, TORCHRUN, KUBEFLOW], "SageMaker", 1, 2, None),
        ([TORCHRUN, KUBEFLOW, OPEN_MPI], "torchrun", 1, 4, None),
        ([KUBEFLOW, OPEN_MPI, SLURM], "Kubeflow", 1, 2, None),
        ([OPEN_MPI, SLURM, POD], "Open MPI", 1, 2, None),
        ([SLURM, POD], "Slurm", 2, 3, None),
        ([MPICH, POD], "PMI", 0, 2, None),
    ],
)
def test_membership_recorded_environments_give_rank_and_addresses(
    environ, monkeypatch, parts, source, rank, size, addresses
):
    monkeypatch.setattr(socket, "getfqdn", lambda name: name)
    member = membership_of(environ(*parts))
    assert (member.source, member.rank, member.size) == (source, rank, size)
    assert len(member.names) == size
    if addresses is not None:
        assert list(member.addresses) == addresses


def test_sources_all_launchers_set_first_in_order_decides(environ):
    """With the variables of all launchers, the first launcher in the order decides."""
    everything = [{"TF_CONFIG": tf_config()}, LAUNCHED, SAGEMAKER, TORCHRUN, KUBEFLOW, OPEN_MPI]
    everything += [SLURM, {"PMI_RANK": "2", "PMI_SIZE": "3"}, POD]
    environ(*everything)
    assert sources_of_environment() == list(SOURCES)
    names = [source.name for source in SOURCES]
    while everything:
        assert sources_of_environment()[0].name == names.pop(0)
        gone = everything.pop(0)
        if gone is LAUNCHED:  # the pods have this variable, too
            gone = {"PYCOLLECTIVE_RANK": ""}
        for name in gone:
            os.environ.pop(name)
        if everything and "PMI_RANK" in everything[0]:
            os.environ["PMI_RANK"] = "0"  # not from srun
    assert not names
    assert resolver_of_environment() is None


def test_sources_have_the_order_of_the_documentation():
    """The table in docs/reference/launchers.md has the same variables in the same order."""
    text = (Path(__file__).parents[2] / "docs/reference/launchers.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(number) for number, _, _ in rows] == list(range(1, len(SOURCES) + 1))
    for source, (_, variables, _) in zip(SOURCES, rows, strict=True):
        assert re.findall(r"`(\w+)`", variables)[: len(source.variables)] == list(source.variables)


def test_membership_without_a_cluster_is_none(environ):
    assert environ() is None
    assert environ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}) is None


def test_mpi_on_one_host_needs_no_address(environ):
    first, second = (
        membership_of(environ(OPEN_MPI, {"OMPI_COMM_WORLD_RANK": rank})) for rank in "01"
    )
    assert first.addresses == second.addresses
    assert first.addresses[0].startswith("127.0.0.1:")
    other = membership_of(environ(OPEN_MPI, {"PMIX_NAMESPACE": "another"}))
    assert other.addresses != first.addresses
    assert membership_of(environ(MPICH)).addresses[0].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"TF_CONFIG": tf_config(worker=["a:1", "a:1"])}],
         r"TF_CONFIG: cluster\['worker'\]\[1\] and cluster\['worker'\]\[0\] have the same address a:1"),
        ([{"TF_CONFIG": tf_config(worker=["a:1", "b:x"])}], r"cluster\['worker'\]\[1\] is 'b:x'"),
        ([{"TF_CONFIG": tf_config(2)}], "`task_id` 2 exceeds the maximum id of worker"),
        ([{"TF_CONFIG": tf_config(boss=["a:1"])}], "Disallowed task type found in cluster spec"),
        ([TORCHRUN, {"RANK": "x"}], "RANK='x' is not a number"),
        ([TORCHRUN, {"RANK": "4"}], "RANK=4 is not among the 4 tasks of WORLD_SIZE"),
        ([KUBEFLOW, {"PET_NNODES": "1:4"}], "PET_NNODES='1:4'.*elastic"),
        ([OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}], "Open MPI does not tell the address of"),
        ([SAGEMAKER, {"SM_CURRENT_HOST": "x"}], "SM_CURRENT_HOST='x' is not among SM_HOSTS"),
        ([POD, {"HOSTNAME": "node7"}], "'node7', does not end with -2"),
        ([LAUNCHED, {"PYCOLLECTIVE_ADDRESS": "c"}], "pycollective run: PYCOLLECTIVE_ADDRESS is 'c'"),
        ([TORCHRUN, {"MASTER_PORT": "70000"}], "MASTER_ADDR, MASTER_PORT is 'node0:70000', which is"),
        ([TORCHRUN, {"MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}],
         "MASTER_PORT=65535: torchrun listens there"),
        ([KUBEFLOW, {"PET_MASTER_ADDR": "tcp://a"}], r"PET_MASTER_PORT is .* \(leave out 'tcp://'\)"),
    ],
)  # fmt: skip
def test_membership_wrong_environment_raises(environ, monkeypatch, parts, message):
    monkeypatch.setattr(socket, "getfqdn", lambda name: name)
    with pytest.raises(ValueError, match=message):
        membership_of(environ(*parts))


def test_clusters_that_cannot_be_merged_raise():
    parts = [SimpleClusterResolver(ClusterSpec({"worker": {1: a}}), "", "worker", 0) for a in "ab"]
    with pytest.raises(
        ValueError, match=r"\AUnion: Duplicate keys detected when merging two Cluster"
    ):
        membership_of(cluster.UnionResolver(*parts))


def test_a_chief_is_the_first_worker_and_an_evaluator_is_none():
    spec = ClusterSpec({"chief": ["c:1"], "worker": ["a:1"], "evaluator": ["e:1"]})
    member = membership_of(SimpleClusterResolver(spec, "", "worker", 0))
    assert member == Membership("Simple", 1, 2, ("c:1", "a:1"), ("chief 0", "worker 0"))
    assert membership_of(SimpleClusterResolver(spec, "", "evaluator", 0)) is None


def test_tasks_that_the_launcher_numbers_cannot_be_renumbered():
    resolver = cluster.TorchrunClusterResolver(TORCHRUN)
    assert (resolver.task_type, resolver.task_id, resolver.num_tasks) == ("worker", 1, 4)
    assert resolver.cluster_spec() == ClusterSpec({"worker": {0: "node0:29500"}})
    with pytest.raises(ValueError, match="torchrun determines it"):
        resolver.task_id = 0


def test_membership_mpi_broadcasts_the_address_of_worker_0(monkeypatch):
    class World:
        rank, size = 0, 2

        def Allgather(self, own, names):
            names[0] = own
            names[1, :9] = list(b"127.0.0.1")  # the address of the interface to other hosts

        def Bcast(self, said, root):
            self.said = bytes(said).rstrip(b"\0").decode()

    world = World()
    mpi = types.SimpleNamespace(COMM_WORLD=world, Get_processor_name=lambda: "me")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    for name in ("PYCOLLECTIVE_SECRET", "PYCOLLECTIVE_SECRET_FILE", "PYCOLLECTIVE_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    over_mpi._agreed.clear()
    monkeypatch.setenv("PYCOLLECTIVE_SECRET", "")  # so that monkeypatch removes it in the end
    monkeypatch.delenv("PYCOLLECTIVE_SECRET")
    try:
        address = over_mpi.worker_0(2, os.environ)
        assert over_mpi.worker_0(2, os.environ) == address  # MPI is asked once
        host, port = address.split(":")
        assert host == "127.0.0.1"
        assert 0 < int(port) < 65536
        secret = os.environ["PYCOLLECTIVE_SECRET"]
        assert world.said == f"{address} {secret}"
        assert len(secret) == 64
        assert over_mpi.worker_0(2, mapping := {}) == address
        assert mapping == {"PYCOLLECTIVE_SECRET": secret}
        over_mpi._agreed.clear()
        over_mpi.worker_0(2, os.environ)
        assert os.environ["PYCOLLECTIVE_SECRET"] == secret
        assert world.said.endswith(" ")
        with pytest.raises(LookupError, match="mpi4py sees 2 of the processes"):
            over_mpi.worker_0(3, os.environ)
    finally:
        over_mpi._agreed.clear()
