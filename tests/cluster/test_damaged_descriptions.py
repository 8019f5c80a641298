"""Damaged descriptions of clusters raise only the documented errors, without delay."""

from __future__ import annotations

import contextlib
import json
import random
import socket

import pytest

import pycollective as pc
from pycollective.cluster import TFConfigClusterResolver
from pycollective.cluster.membership import examine, membership_of
from pycollective.cluster.sources import SOURCES, sources_of_environment
from pycollective.errors import RendezvousError

DEEP = 100_000
DAMAGED = [
    "[" * DEEP,
    "[" * DEEP + "]" * DEEP,
    '{"cluster": ' * DEEP,
    '{"cluster": {"worker": ' + "[" * DEEP + "]" * DEEP + "}}",
    "9" * 5000,
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": ' + "9" * 5000 + "}}",
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}',
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": NaN}}',
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": []}}',
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": [], "index": {}}, "rpc_layer": 3}',
    json.dumps({"cluster": {"worker": ["a:" + "9" * 5000, "\ud800:1", "a\0b:1"]}}),
]  # fmt: skip
ATOMS = [
    None, True, False, 0, 1, -1, 1.5, 1e308, float("inf"), float("nan"), 10**30, "", "worker", "chief",
    "a:1", "a:b:1", "[::1]:5", "[::1", "a:65536", "a:0", "a:１", "é:1", "\ud800:1", "a\0b:1",
    "x" * 300 + ":1", "a..b:1", "a:" + "9" * 5000, "-1", "0", "１", "9" * 30, {}, [], [[]], {"0": "a:1"},
    {"-1": "a:1"}, {"x": "a:1"}, {"0": "a:1", "00": "b:1"}, "grpc://a:1", " :1", "127.1:1",
]  # fmt: skip
KEYS = ["worker", "chief", "ps", "evaluator", "type", "index", "0", "", "\ud800"]


def anything(rng, depth=0):
    kind = rng.random()
    if kind < 0.6 or depth > 2:
        return rng.choice(ATOMS)
    if kind < 0.8:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def description(rng):
    """Return a description that is partly valid."""
    good = ["127.0.0.1:9", "127.0.0.1:10", "127.0.0.1:11"]
    jobs = rng.sample(["worker", "chief", "ps", "evaluator"], rng.randrange(1, 4))
    cluster = {
        job: [rng.choice([*good, anything(rng, 2)]) for _ in range(rng.randrange(4))]
        for job in jobs
    }
    task = {"type": rng.choice(["worker", "chief", anything(rng, 2)]), "index": anything(rng, 2)}
    config = {"cluster": cluster, "task": task}
    for key in ("cluster", "task", "rpc_layer", "session_master"):
        if rng.random() < 0.2:
            config[key] = anything(rng)
    return config if rng.random() < 0.9 else anything(rng)


@pytest.fixture(autouse=True)
def _numeric_addresses(monkeypatch):
    """Resolve numeric addresses only, without a name server."""
    real = socket.getaddrinfo

    def lookup(host, port, family=0, type=0, proto=0, flags=0):
        return real(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.fixture
def tf_config(monkeypatch):
    """Return a function that sets TF_CONFIG, and returns its resolver."""

    def put(text):
        monkeypatch.setenv("TF_CONFIG", text)
        return TFConfigClusterResolver()

    return put


def raises_only(named, *calls):
    for call in calls:
        with contextlib.suppress(named):
            call()


@pytest.mark.parametrize("seed", range(4))
def test_tf_config_of_anything_raises_only_the_documented_errors(tf_config, seed):
    rng = random.Random(seed)
    texts = [json.dumps(description(rng)) for _ in range(250)]
    for text in [*DAMAGED, *texts] if seed == 0 else texts:
        resolver = tf_config(text)
        sources_of_environment()
        _, wrong, doubtful = examine(resolver)
        assert all(isinstance(line, str) and len(line) < 2000 for line in [*wrong, *doubtful]), text
        assert not any("Exceeds the limit" in line for line in wrong if "not JSON" not in line)
        raises_only(
            ValueError,
            lambda r=resolver: membership_of(r),
            lambda r=resolver: r.task_type,
            lambda r=resolver: r.task_id,
            lambda r=resolver: r.rpc_layer,
        )
        raises_only((ValueError, TypeError), resolver.cluster_spec, resolver.master)


@pytest.mark.parametrize("text", DAMAGED[:5])
def test_tf_config_that_cannot_be_read_is_named(tf_config, text):
    tf_config(text)
    with pytest.raises(ValueError, match=r"\ATF_CONFIG: "):
        pc.distribute.MultiWorkerMirroredStrategy()
    with pytest.raises(RendezvousError, match=r"\ATF_CONFIG: "):
        pc.init()


@pytest.mark.parametrize("text", DAMAGED[:5])
def test_strategy_of_one_process_ignores_a_damaged_tf_config(tf_config, caplog, text):
    tf_config(text)
    caplog.set_level("INFO", "pycollective")
    pc.distribute.MirroredStrategy(["cpu:0"])
    assert "TF_CONFIG will be ignored" in caplog.text


def test_tf_config_too_deep_says_so(tf_config):
    tf_config('{"cluster": ' * DEEP)
    with pytest.raises(ValueError, match="TF_CONFIG: not JSON: .* nested too deeply"):
        pc.distribute.MultiWorkerMirroredStrategy()


def test_keys_that_stand_twice_are_named_once(tf_config):
    pairs = ", ".join('"worker": []' for _ in range(20_000))
    _, wrong, _ = examine(tf_config(f'{{"cluster": {{{pairs}}}, "task": {{}}}}'))
    assert wrong[0] == "'worker' occurs twice in one JSON object"


@pytest.mark.parametrize("host", ["w{}.test:9", "10.0.{}.1:9", "x{}"])
def test_more_workers_than_a_group_may_have_are_refused_before_any_lookup(monkeypatch, host):
    def lookup(*words, **how):
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    workers = [host.format(i) for i in range(3000)]
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": workers}, "task": task}))
    with pytest.raises(
        ValueError, match="3000 workers are too many: at most 1024 are supported"
    ) as caught:
        pc.distribute.MultiWorkerMirroredStrategy()
    assert len(str(caught.value)) < 4000
    with pytest.raises(RendezvousError, match=r"\ATF_CONFIG: "):
        pc.init()


NUMBERS = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
    "pycollective run": {
        "PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "2", "PYCOLLECTIVE_ADDRESS": "127.0.0.1:9"
    },
    "Kubeflow": {
        "PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "9"
    },
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"
    },
    "PMI": {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
    "SageMaker": {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"},
    "Slurm": {
        "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "CUDA_VISIBLE_DEVICES": "",
    },
    "KubernetesJob": {
        "JOB_COMPLETION_INDEX": "0", "PYCOLLECTIVE_SIZE": "2", "HOSTNAME": "j-0",
        "PYCOLLECTIVE_LOCAL_RANK": "0", "PYCOLLECTIVE_LOCAL_SIZE": "1",
    },
}  # fmt: skip
WRONG = ["", "x", "-1", "1.5", "1e3", "²", "１", "9" * 5000, str(10**17), "[" * DEEP, "0x1", "a:1:2",
         "n[1-99999999999]", "n[9-1]", "1(x99999999999)", "65536"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source", NUMBERS)
def test_launchers_variables_of_anything_raise_only_the_named_error(monkeypatch, source):
    assert source in [one.name for one in SOURCES]
    monkeypatch.setattr(socket, "getfqdn", lambda name: name)

    def rendezvous(*words, **how):
        raise RendezvousError("everything is right")

    monkeypatch.setattr("pycollective.launch.rendezvous", rendezvous)
    good = {"PYCOLLECTIVE_CHECK_ADDRESSES": "0", **NUMBERS[source]}
    with pytest.raises(RendezvousError, match="everything is right"):
        pc.init(environment=good)
    for name in NUMBERS[source]:
        for value in WRONG:
            environment = {**good, name: value}
            try:
                pc.init(environment=environment).close()
            except RendezvousError as error:
                assert len(str(error)) < 2000
                assert "Exceeds the limit" not in str(error)


@pytest.mark.parametrize(
    ("address", "right"), [("127.0.0.1:1", True), ("127.0.0.1:65535", True), ("127.0.0.1:0", False),
                           ("127.0.0.1:65536", False), ("127.0.0.1:065535", True)],
)  # fmt: skip
def test_port_from_1_to_65535_is_accepted_and_others_are_refused(monkeypatch, address, right):
    task = {"type": "worker", "index": 1}
    workers = [address, "127.0.0.1:2"]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": workers}, "task": task}))
    _, wrong, _ = examine(TFConfigClusterResolver(), here=False)
    assert (not wrong) is right
    by_hand = {"PYCOLLECTIVE_RANK": "1", "PYCOLLECTIVE_SIZE": "2", "PYCOLLECTIVE_ADDRESS": address}
    said = "did not reach rank 0" if right else "not host:port with a port from 1 to 65535"
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(RendezvousError, match=said):
        pc.init(environment=by_hand, join_timeout=0.01)


def test_torchrun_port_after_the_last_one_is_refused():
    """torchrun's own store has port 65535, and no port follows it."""
    with pytest.raises(RendezvousError, match="MASTER_PORT=65535: torchrun listens there"):
        pc.init(
            environment={
                **NUMBERS["torchrun"],
                "MASTER_PORT": "65535",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        )


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        ({}, "task_type, task_id"),
        ({"type": "worker"}, "task_id"),
        ({"index": 0}, "task_type"),
    ],
)
def test_task_in_part_names_what_is_missing(monkeypatch, task, missing):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError) as caught:
        membership_of(TFConfigClusterResolver())
    assert str(caught.value).endswith(f"`task_type` and `task_id`. Missing: {missing}")
