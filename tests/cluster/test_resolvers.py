"""Resolvers: given, from TF_CONFIG, joined, from Slurm, Kubernetes and Compute Engine."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest

from pycollective.cluster import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from pycollective.cluster.membership import membership_of
from pycollective.cluster.slurm import expand_hostlist, expand_tasks_per_node
from pycollective.cluster.sources import resolver_of_environment

TWO = ClusterSpec({"worker": ["w0:1", "w1:1"]})


@pytest.fixture
def tf_config(monkeypatch):
    def put(value):
        monkeypatch.setenv("TF_CONFIG", value if isinstance(value, str) else json.dumps(value))

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return put


# Simple -------------------------------------------------------------------------------------------


def test_simple_resolver_returns_given_values():
    resolver = SimpleClusterResolver(
        TWO, "m:1", "worker", 1, "google", num_accelerators={"GPU": 2}, rpc_layer="grpc"
    )
    assert isinstance(resolver, ClusterResolver)
    assert resolver.cluster_spec() == TWO
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == "google"
    assert resolver.num_accelerators() == {"GPU": 2}
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://w0:1"
    assert resolver.master("worker", 0, rpc_layer="other") == "other://w0:1"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "m:1")


def test_simple_resolver_defaults_are_empty():
    resolver = SimpleClusterResolver(TWO)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.master(), resolver.environment, resolver.num_accelerators()) == ("", "", {})
    with pytest.raises(TypeError, match="cluster_spec must be a `tf.train.ClusterSpec`."):
        SimpleClusterResolver({"worker": ["w0:1"]})
    with pytest.raises(TypeError, match="master must be a string"):
        SimpleClusterResolver(TWO, master=1)


def test_resolver_subclass_needs_only_cluster_spec():
    class OnlySpec(ClusterResolver):
        def cluster_spec(self):
            return TWO

    resolver = OnlySpec()
    assert resolver.master() == ""
    assert resolver.master("worker", 1, "grpc") == "grpc://w1:1"
    assert resolver.environment == ""
    assert set(resolver.num_accelerators()) <= {"GPU"}
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
        resolver.master("ps", 0)
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


# TF_CONFIG ----------------------------------------------------------------------------------------


def test_tf_config_resolver_reads_the_variable_each_time(tf_config):
    tf_config(
        {
            "cluster": {"chief": ["c:1"], "worker": {"1": "w1:1"}},
            "task": {"type": "worker", "index": "1"},
            "rpc_layer": "grpc",
        }
    )
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == {"chief": ["c:1"], "worker": {1: "w1:1"}}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.master() == "grpc://w1:1"
    assert resolver.master("chief", 0, "other") == "other://c:1"
    # The variable is read each time.
    tf_config({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
    assert resolver.master() == "a:1"
    # Given values and values set later take precedence.
    resolver.task_id = "1"
    resolver.rpc_layer = "x"
    assert (resolver.task_id, resolver.master()) == (1, "x://b:1")
    given = TFConfigClusterResolver("ps", "3", "rpc", "google")
    assert (given.task_type, given.task_id) == ("ps", 3)
    assert (given.rpc_layer, given.environment) == ("rpc", "google")


def test_tf_config_that_is_missing_gives_an_empty_cluster(tf_config):
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.master(), resolver.environment) == ("", "")
    tf_config({})
    assert not resolver.cluster_spec()


def test_tf_config_resolver_has_the_session_master(tf_config):
    resolver = TFConfigClusterResolver()
    tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert resolver.master() == ""
    tf_config({"cluster": {"worker": ["a:1", "b:1"]}, "session_master": "any thing"})
    assert resolver.master("worker", 0, "grpc") == "any thing"


@pytest.mark.parametrize("ask", ["cluster_spec", "master"])
def test_malformed_tf_config_raises(tf_config, ask):
    tf_config("{not json")
    resolver = TFConfigClusterResolver()  # the variable is read at the first use
    with pytest.raises(json.JSONDecodeError):
        getattr(resolver, ask)()
    with pytest.raises(ValueError, match="Expecting"):
        _ = resolver.task_type
    tf_config("[1]")
    with pytest.raises(ValueError, match=r"TF_CONFIG must be a JSON object, not \[1\]"):
        getattr(resolver, ask)()
    tf_config({"task": 3})
    with pytest.raises(ValueError, match="TF_CONFIG's task must be a JSON object, not 3"):
        _ = resolver.task_id


# Union --------------------------------------------------------------------------------------------


def simple(cluster, **more):
    return SimpleClusterResolver(ClusterSpec(cluster), **more)


def test_union_of_lists_joins_the_tasks_of_a_job():
    union = UnionResolver(
        simple({"worker": ["a:1"], "ps": ["p:1"]}),
        simple({"worker": ["b:1"], "chief": {1: "c:1"}}),
    )
    assert union.cluster_spec() == {
        "worker": ["a:1", "b:1"],
        "ps": ["p:1"],
        "chief": {1: "c:1"},
    }


def test_union_of_dicts_sorts_by_index_and_refuses_duplicates():
    union = UnionResolver(simple({"worker": {1: "b:1"}}), simple({"worker": ["a:1"]}))
    assert union.cluster_spec() == {"worker": ["a:1", "b:1"]}
    twice = UnionResolver(simple({"worker": {0: "a:1", 5: "b:1"}}), simple({"worker": ["c:1"]}))
    with pytest.raises(
        KeyError, match="Duplicate keys detected when merging two ClusterSpecs: {0}"
    ):
        twice.cluster_spec()


def test_union_takes_other_values_from_the_first_resolver():
    first = simple(
        {"worker": ["a:1"]},
        master="m:1",
        task_type="worker",
        task_id=3,
        environment="google",
        num_accelerators={"GPU": 4},
        rpc_layer="grpc",
    )
    union = UnionResolver(first, simple({"worker": ["b:1"]}, task_type="ps", rpc_layer="no"))
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 3, "grpc")
    assert (union.environment, union.num_accelerators()) == ("google", {"GPU": 4})
    assert union.master() == "grpc://m:1"
    assert union.master("worker", 1) == "grpc://b:1"
    given = UnionResolver(first, task_type="ps", task_id=0, rpc_layer="own")
    assert (given.task_type, given.task_id, given.rpc_layer) == ("ps", 0, "own")
    union.task_type, union.task_id, union.rpc_layer = "chief", 0, "x"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 0, "x")


def test_union_wrong_arguments_raise():
    with pytest.raises(ValueError, match="At least one ClusterResolver is required."):
        UnionResolver()
    with pytest.raises(ValueError, match="Unexpected kwargs provided {'tasks': 1}"):
        UnionResolver(simple({}), tasks=1)
    with pytest.raises(TypeError, match="All arguments must be a sub-class of `ClusterResolver.`"):
        UnionResolver(simple({}), TWO)


# Slurm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2,5,07-09]", ["n1", "n2", "n5", "n07", "n08", "n09"]),
        ("a1,b[3],c-x[10-11]-ib,d", ["a1", "b3", "c-x10-ib", "c-x11-ib", "d"]),
        ("node[01-03,7],gpu-a[1-2]", "node01 node02 node03 node7 gpu-a1 gpu-a2".split()),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[08-09]s", ["r1n08s", "r1n09s", "r2n08s", "r2n09s"]),
        ("login", ["login"]),
    ],
)
def test_expand_hostlist_returns_each_host(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n[a-b]", "n[1-2-3]", "n]1[", "[1-2]", "n[1][2]", "n[1,,2]", "n[5-3]", "a,,b", ""],
)
def test_expand_hostlist_malformed_raises_value_error(text):
    with pytest.raises(ValueError, match="Invalid hostlist format"):
        expand_hostlist(text)


def test_expand_tasks_per_node_returns_each_count():
    assert expand_tasks_per_node("3(x2),2,1") == [3, 3, 2, 1]
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match='Invalid tasks-per-node list format "3x2"'):
        expand_tasks_per_node("3x2")


@pytest.fixture
def slurm(monkeypatch):
    """Set the variables of rank 1 in a step of 3 tasks on one host and 1 task on another."""
    for name, value in {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "t[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_slurm_step_gives_tasks_gpus_and_addresses(slurm):
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == (None, None)
    assert resolver.master() == ""
    assert resolver.cluster_spec() == {"worker": ["t1:8888", "t1:8889", "t1:8890", "t2:8888"]}
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert resolver.master() == "grpc://t1:8889"
    assert resolver.master("worker", 3, "x") == "x://t2:8888"


def test_slurm_deals_ranks_to_jobs_by_name(slurm):
    resolver = SlurmClusterResolver(
        {"worker": 2, "ps": 1, "chief": 1},
        port_base=7000,
        gpus_per_node=4,
        gpus_per_task=1,
        tasks_per_node={"t2": 2, "t1": 2},
        auto_set_gpu=False,
        rpc_layer="rpc",
    )
    slurm.delenv("CUDA_VISIBLE_DEVICES")
    assert resolver.cluster_spec() == {
        "chief": ["t1:7000"],
        "ps": ["t1:7001"],
        "worker": ["t2:7000", "t2:7001"],
    }
    assert resolver.get_task_info() == ("ps", 0)
    assert resolver.num_accelerators() == {"GPU": 1}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert SlurmClusterResolver(tasks_per_node=2, gpus_per_node=0).cluster_spec() == {
        "worker": ["t1:8888", "t1:8889", "t2:8888", "t2:8889"]
    }


@pytest.mark.parametrize(
    "name", ["PROCID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE"]
)
def test_slurm_resolver_outside_a_step_raises(slurm, name):
    slurm.delenv(f"SLURM_{name}")
    with pytest.raises(
        RuntimeError, match=f"SLURM_{name} not found in environment. Not running inside a SLURM"
    ):
        SlurmClusterResolver()


def test_slurm_resolver_of_more_than_the_step_has_raises(slurm):
    with pytest.raises(RuntimeError, match="Requested more GPUs per node than available."):
        SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1)
    with pytest.raises(RuntimeError, match="Requested 3 tasks but only 4 were assigned."):
        SlurmClusterResolver({"worker": 3})
    with pytest.raises(RuntimeError, match="Requested 4 tasks but only 0 were assigned."):
        SlurmClusterResolver(tasks_per_node={})
    slurm.setenv("SLURM_PROCID", "4")
    with pytest.raises(RuntimeError, match="SLURM_PROCID is 4, but there are 4 tasks."):
        SlurmClusterResolver()
    slurm.setenv("SLURM_STEP_TASKS_PER_NODE", "4")
    with pytest.raises(
        ValueError, match="names 2 hosts, but SLURM_STEP_TASKS_PER_NODE has the tasks of 1"
    ):
        SlurmClusterResolver()


# Variables that srun's manual lists for a task; the cases below give only the differences.
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[01-03,7],gpu-a[1-2]",
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_TASKS_PER_NODE": "2(x6)",
    "SLURM_NTASKS": "12",
}
MIXED = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-03,7],gpu-a[1-2]",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x3)",
}


def in_step(monkeypatch, variables, rank, node, local, **more):
    for name in [name for name in os.environ if name.startswith(("SLURM", "PMI"))]:
        monkeypatch.delenv(name)
    task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": node}
    for name, value in {**variables, **task, "CUDA_VISIBLE_DEVICES": "", **more}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "hosts", "places"),
    [
        (
            MIXED,
            "node01 node01 node02 node02 node03 node03 node7 gpu-a1 gpu-a2",
            [(0, "node01", 0), (5, "node03", 1), (6, "node7", 0), (8, "gpu-a2", 0)],
        ),
        (  # srun alone, without sbatch: hosts are numbered, not sorted as texts
            {
                "SLURM_JOB_ID": "1",
                "SLURM_JOB_NODELIST": "n[9-11]",
                "SLURM_STEP_NODELIST": "n[9-11]",
                "SLURM_STEP_NUM_TASKS": "3",
                "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
            },
            "n9 n10 n11",
            [(0, "n9", 0), (1, "n10", 0), (2, "n11", 0)],
        ),
        (  # a step on a part of the job's hosts: srun --nodes=2 --nodelist=node02,gpu-a1
            {
                **JOB,
                "SLURM_STEP_ID": "3",
                "SLURM_STEP_NODELIST": "node02,gpu-a1",
                "SLURM_STEP_NUM_TASKS": "3",
                "SLURM_STEP_TASKS_PER_NODE": "2,1",
            },
            "node02 node02 gpu-a1",
            [(1, "node02", 1), (2, "gpu-a1", 0)],
        ),
        (  # --distribution=cyclic: round all hosts
            {**MIXED, "SLURM_DISTRIBUTION": "cyclic:block"},
            "node01 node02 node03 node7 gpu-a1 gpu-a2 node01 node02 node03",
            [(1, "node02", 0), (6, "node01", 1), (8, "node03", 1)],
        ),
        (  # --distribution=plane=2
            {
                **JOB,
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_NUM_TASKS": "7",
                "SLURM_STEP_TASKS_PER_NODE": "4,3",
                "SLURM_DISTRIBUTION": "plane",
                "SLURM_DIST_PLANESIZE": "2",
            },
            "a a b b a a b",
            [(2, "b", 0), (5, "a", 3), (6, "b", 2)],
        ),
    ],
)
def test_slurm_recorded_steps_give_each_rank_its_host(monkeypatch, variables, hosts, places):
    """Every rank's host is the one on which Slurm has started the rank."""
    for rank, node, local in places:
        in_step(monkeypatch, variables, rank, node, local)
        resolver = SlurmClusterResolver()
        addresses = resolver.cluster_spec().job_tasks("worker")
        assert [address.split(":")[0] for address in addresses] == hosts.split()
        assert resolver.get_task_info() == ("worker", rank)
        assert addresses[rank] == f"{node}:{8888 + local}"
        assert len(set(addresses)) == len(addresses)
        member = membership_of(resolver)
        assert (member.source, member.rank, member.size) == ("Slurm", rank, len(addresses))


def test_slurm_step_with_an_unknown_distribution_of_tasks_raises(monkeypatch):
    """With --distribution=arbitrary, no rank may assume the host of another rank."""
    arbitrary = {**MIXED, "SLURM_DISTRIBUTION": "arbitrary"}
    in_step(monkeypatch, arbitrary, 1, "gpu-a2", 0)
    with pytest.raises(
        RuntimeError,
        match="Task 1 should be number 1 on node01, and Slurm says that it is number 0 on gpu-a2 "
        r"\(SLURM_DISTRIBUTION='arbitrary'\). Start it with srun --distribution=block",
    ):
        SlurmClusterResolver()
    in_step(monkeypatch, {**MIXED, "SLURM_DISTRIBUTION": "plane"}, 0, "node01", 0)
    with pytest.raises(RuntimeError, match="is plane, and its size '.*' is not a number from 1"):
        SlurmClusterResolver()
    # In a step of several components, ranks continue after the last rank of a component.
    in_step(monkeypatch, MIXED, 9, "other", 0, SLURM_HET_SIZE="2")
    with pytest.raises(RuntimeError, match="components of a heterogeneous job need TF_CONFIG"):
        SlurmClusterResolver()


def test_a_batch_script_without_srun_is_no_step(monkeypatch):
    in_step(monkeypatch, JOB, 0, "node01", 0)
    for name in ("TF_CONFIG", "PYCOLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SM_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    assert resolver_of_environment() is None


@pytest.mark.parametrize(
    ("visible", "of_each", "given", "expected"),
    [
        ("0,1,2,3,4,5", None, {}, "2,3"),
        ("9,8,7,6,5,4", None, {}, "7,6"),  # the GPUs of the job, on a machine with more
        ("4", None, {}, "4"),  # --gpu-bind: a task sees only its own GPU
        ("4,5,6", "a100:3", {}, "4,5,6"),  # --gpus-per-task=a100:3
        ("4,5,6", "a100:3", {"gpus_per_task": 2}, "4,5"),
        ("", None, {}, ""),
    ],
)
def test_slurm_resolver_limits_the_visible_gpus_once(slurm, visible, of_each, given, expected):
    """Another resolver in the same process finds the same GPUs as the first one."""
    slurm.setenv("CUDA_VISIBLE_DEVICES", visible)
    if of_each:
        slurm.setenv("SLURM_GPUS_PER_TASK", of_each)
    for _ in range(2):
        resolver = SlurmClusterResolver(**given)
        for _ in range(2):
            resolver.cluster_spec()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
        assert resolver.num_accelerators() == {"GPU": len(expected.split(",")) if expected else 0}
    slurm.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # another program sets the variable again
    slurm.delenv("SLURM_GPUS_PER_TASK", raising=False)
    SlurmClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(("listed", "gpus"), [("GPU 0: x\nGPU 1: y\nno\n", 2), ("", 0)])
def test_slurm_resolver_counts_gpus_with_nvidia_smi(slurm, tmp_path, listed, gpus):
    slurm.delenv("CUDA_VISIBLE_DEVICES")
    slurm.setenv("SLURM_PROCID", "0")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    tool.chmod(0o755)
    slurm.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    resolver = SlurmClusterResolver({"worker": 1}, tasks_per_node={"t1": 1}, auto_set_gpu=False)
    assert resolver.num_accelerators() == {"GPU": gpus}
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(RuntimeError, match="Could not get number of GPUs from nvidia-smi"):
        SlurmClusterResolver({"worker": 1}, tasks_per_node={"t1": 1})
    slurm.setenv("PATH", str(tmp_path / "empty"))
    resolver = SlurmClusterResolver({"worker": 1}, tasks_per_node={"t1": 1}, auto_set_gpu=False)
    assert resolver.num_accelerators() == {"GPU": 0}


# Kubernetes ---------------------------------------------------------------------------------------


class Pods:
    """A Kubernetes client that has these pods."""

    def __init__(self, **pods_of_selectors):
        self.pods = pods_of_selectors

    def list_pod_for_all_namespaces(self, label_selector):
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(name=name),
                    status=SimpleNamespace(phase=phase, host_ip=address),
                )
                for name, phase, address in self.pods[label_selector]
            ]
        )


def test_kubernetes_running_pods_of_jobs_give_the_cluster():
    client = Pods(
        first=[("b", "Running", "10.0.0.2"), ("a", "Running", "10.0.0.1")],
        second=[("c", "Running", "10.0.0.3")],
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["first", "second"], "ps": ["second"]}, override_client=client
    )
    assert resolver.cluster_spec() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"],
        "ps": ["10.0.0.3:8470"],
    }
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "grpc://10.0.0.3:8470"
    client.pods["second"] = [("c", "Pending", None)]
    with pytest.raises(RuntimeError, match='Pod "c" is not running; phase: "Pending"'):
        resolver.cluster_spec()


def test_kubernetes_by_default_selects_the_job_tensorflow():
    client = Pods(**{"job-name=tensorflow": [("a", "Running", "10.0.0.1")]})
    resolver = KubernetesClusterResolver(tf_server_port=1, rpc_layer="", override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:1"]}
    assert resolver.master("worker", 0) == "10.0.0.1:1"


def test_kubernetes_without_its_client_raises_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="The Kubernetes Python client must be installed before"):
        KubernetesClusterResolver()
    with pytest.raises(ValueError, match="The executable location provided is invalid"):
        KubernetesClusterResolver(executable_location="here")


@pytest.mark.parametrize("location", KubernetesExecutableLocation)
def test_kubernetes_with_the_installed_client_loads_its_configuration(monkeypatch, location):
    loaded = []
    client = Pods(all=[("a", "Running", "10.0.0.1")])
    module = SimpleNamespace(
        config=SimpleNamespace(
            load_kube_config=lambda: loaded.append(KubernetesExecutableLocation.OFF_CLUSTER),
            load_incluster_config=lambda: loaded.append(
                KubernetesExecutableLocation.WITHIN_CLUSTER
            ),
        ),
        client=SimpleNamespace(CoreV1Api=lambda: client),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", module)
    resolver = KubernetesClusterResolver({"worker": ["all"]}, executable_location=location)
    assert loaded == [location]
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}


# Compute Engine -----------------------------------------------------------------------------------


class Service:
    """A Compute Engine client with pages of instances, given by their addresses."""

    def __init__(self, pages):
        self.pages = pages
        self.asked = None

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, project, zone, instanceGroup, body, orderBy):
        self.asked = (project, zone, instanceGroup, body, orderBy)
        return self._page(0)

    def listInstances_next(self, previous_request, previous_response):
        return self._page(previous_request.number + 1)

    def _page(self, number):
        if number >= len(self.pages):
            return None
        items = [{"instance": f"https://some/where/{a}"} for a in self.pages[number]]
        response = {"items": items} if items else {}  # without instances there is no list
        return SimpleNamespace(number=number, execute=lambda: response)

    def get(self, project, zone, instance):
        details = {"networkInterfaces": [{"networkIP": instance}]}
        return SimpleNamespace(execute=lambda: details)


def test_compute_engine_instance_group_gives_the_cluster():
    service = Service([["10.0.0.3", "10.0.0.1"], [], ["10.0.0.2"]])
    resolver = GCEClusterResolver("project", "zone", "group", 8470, service=service)
    assert resolver.cluster_spec() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]
    }
    assert service.asked == ("project", "zone", "group", {"instanceState": "RUNNING"}, "name")
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://10.0.0.1:8470"
    resolver.task_id, resolver.rpc_layer = 2, None
    assert resolver.master() == "10.0.0.3:8470"
    with pytest.raises(RuntimeError, match="You cannot reset the task_type of the GCEClusterRes"):
        resolver.task_type = "ps"
    other = GCEClusterResolver("p", "z", "g", 1, "ps", 1, "rpc", service=service)
    assert other.master() == "rpc://10.0.0.2:1"


def test_compute_engine_without_its_client_raises_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ImportError, match="googleapiclient must be installed before using the GCE"):
        GCEClusterResolver("project", "zone", "group", 8470)


@pytest.mark.parametrize(("given", "passed"), [("default", None), ("mine", "mine")])
def test_compute_engine_with_the_installed_client_passes_the_credentials(
    monkeypatch, given, passed
):
    built = []
    module = SimpleNamespace(
        build=lambda name, version, credentials: (
            built.append((name, version, credentials)) or Service([["10.0.0.1"]])
        )
    )
    monkeypatch.setitem(sys.modules, "googleapiclient", SimpleNamespace(discovery=module))
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", module)
    resolver = GCEClusterResolver("project", "zone", "group", 8470, credentials=given)
    assert built == [("compute", "v1", passed)]
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
