"""Errors of wrong descriptions: one error names every wrong key, task and address."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading

import pytest

import pycollective as tf
from pycollective.cluster import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from pycollective.cluster import examined as module
from pycollective.cluster.membership import examine, membership_of

STRATEGY = tf.distribute.MultiWorkerMirroredStrategy
DOTTED = {"here.test": "127.0.0.1", "also-here.test": "127.0.0.1", "there.test": "198.51.100.7"}


@pytest.fixture
def names(monkeypatch):
    """Resolve only these names, without a network."""
    asked = []
    real = socket.getaddrinfo

    def lookup(host, port, family=0, type=0, proto=0, flags=0):
        if flags & socket.AI_NUMERICHOST or re.fullmatch(r"[\d.]+|[\da-f:]+", host):
            return real(host, port, family, type, proto, flags)
        asked.append(host)
        if host.lower() not in DOTTED:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(DOTTED[host.lower()], port, family, type, proto, flags)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "1")
    monkeypatch.delenv("PYCOLLECTIVE_LISTEN_FD", raising=False)
    return asked


@pytest.fixture
def tf_config(monkeypatch, names):
    def put(value):
        monkeypatch.setenv("TF_CONFIG", value if isinstance(value, str) else json.dumps(value))

    return put


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        number = sock.getsockname()[1]
    return number


def task(index=0, type="worker"):
    return {"type": type, "index": index}


def cluster(*addresses, index=0):
    return {"cluster": {"worker": list(addresses)}, "task": task(index)}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{not json", ["not JSON: Expecting property name", "near '{not json'"]),
        ("[1]", [r"TF_CONFIG must be a JSON object, not \[1\]"]),
        ({"cluster": []}, [r"cluster must be a JSON object, from jobs to lists .* not \[\]"]),
        ({"cluster": {"worker": "a:1"}}, [r"cluster\['worker'\] must be a list .*, not 'a:1'"]),
        (cluster("a:1", 7), [r"cluster\['worker'\]\[1\] must be a text, host:port, not 7"]),
        (
            '{"cluster": {"worker": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}}',
            ["'worker' occurs twice in one JSON object"],
        ),
        ({"cluster": {"worker": {"x": "a:1"}}}, [r"cluster\['worker'\] has 'x' for a task's number"]),
        ({**cluster("a:1"), "task": 3}, ["task must be a JSON object, not 3"]),
        ({**cluster("a:1"), "task": {"type": 3, "index": 0}}, [r"task\['type'\] must be a text"]),
        ({**cluster("a:1"), "task": task("x")}, [r"task\['index'\] must be a number from 0, not 'x'"]),
        ({**cluster("a:1"), "task": task(True)}, [r"task\['index'\] must be .* not True"]),
        ({**cluster("a:1"), "task": task(1.5)}, [r"task\['index'\] must be .* not 1.5"]),
        ({**cluster("a:1"), "task": task(-1)}, [r"task\['index'\] must be .* not -1"]),
        ({**cluster("a:1"), "task": {}}, ["you must also specify `task_type` and `task_id`"]),
        ({**cluster("a:1"), "task": task(2)}, ["The `task_id` 2 exceeds .*There are 1, numb"]),
        ({**cluster("a:1"), "task": task(0, "chief")}, ["`task_type` 'chief' not found"]),
        (cluster("grpc://a:1", "127.0.0.1:2"), [r"\['worker'\]\[0\] .*\(leave out 'grpc://'\)"]),
        (cluster("a:b:1", "127.0.0.1:2"), [r"\['worker'\]\[0\] is 'a:b:1', which is not host:port"]),
    ],
)  # fmt: skip
def test_examine_wrong_description_names_the_problem(tf_config, config, said):
    tf_config(config)
    with pytest.raises(ValueError, match=r"(?s)\ATF_CONFIG: .*" + ".*".join(said)):
        STRATEGY()


def test_examine_several_problems_are_all_named(tf_config, port):
    """One error lists all problems, from JSON types to names that do not resolve."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        jobs = {
            "worker": [busy, f"here.test:{port}", f"HERE.test:{port}", "nowhere.test:1", 9, "x"],
            "boss": [f"also-here.test:{port}", "y:99999"],
            "evaluator": ["198.51.100.1:1", "198.51.100.2:1"],
        }
        tf_config({"cluster": jobs, "task": task(0)})
        with pytest.raises(ValueError) as caught:
            STRATEGY(rendezvous_timeout=1)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "TF_CONFIG: 8 things are wrong:"
    for line, words in zip(
        lines,
        (
            r"cluster\['worker'\]\[4\] must be a text, host:port, not 9",
            "Disallowed task type found in cluster spec",
            "There must be at most one 'evaluator' job",
            rf"\['worker'\]\[2\] and cluster\['worker'\]\[1\] have the same address HERE.test:{port}",
            r"cluster\['worker'\]\[5\] is 'x', which is not host:port",
            r"cluster\['boss'\]\[1\] is 'y:99999', which is not host:port with a port from 1 to 65535",
            rf"cluster\['worker'\]\[0\] \(worker 0\), this process, is {busy}, where no socket can "
            "listen: Address already in use",
            r"cluster\['worker'\]\[3\] \(worker 3\) is nowhere.test:1, and the name does not resolve",
        ),
        strict=True,
    ):
        assert re.search(words, line), (words, line)


def test_examine_wrong_description_raises_before_the_rendezvous(tf_config, monkeypatch, port):
    def joined(*words):
        raise AssertionError("the others were waited for")

    monkeypatch.setattr("pycollective.distribute.multi_worker.join_workers", joined)
    tf_config(cluster(f"127.0.0.1:{port}", "nowhere.test:1"))
    with pytest.raises(
        ValueError, match=r"cluster\['worker'\]\[1\] \(worker 1\) is nowhere.test:1"
    ):
        STRATEGY()
    tf_config(cluster(f"127.0.0.1:{port}", "there.test:1"))
    with pytest.raises(AssertionError, match="waited for"):
        STRATEGY()


def test_two_names_of_one_address_raise(tf_config, port):
    tf_config(cluster(f"here.test:{port}", f"also-here.test:{port}"))
    with pytest.raises(ValueError, match=r"is one address, 127.0.0.1: each task") as caught:
        STRATEGY()
    assert f"are also-here.test:{port} and here.test:{port}" in str(caught.value)


def test_own_address_that_belongs_to_another_host_raises_or_warns(tf_config, monkeypatch, caplog):
    """Such an address is an error. It is a warning if a host between the workers may have it."""
    tf_config(cluster("198.51.100.1:9000", "198.51.100.2:9000"))
    with pytest.raises(
        ValueError, match=r"\(worker 0\), this process, is 198.51.100.1:9000, which is not an "
    ):
        STRATEGY()
    resolver = TFConfigClusterResolver()
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "0")
    caplog.set_level(logging.WARNING, "pycollective")
    assert membership_of(resolver, here=True).rank == 0
    assert (
        "not an address of this host: other workers could reach it only through a host"
        in caplog.text
    )


def test_index_of_another_machine_raises(tf_config, monkeypatch, port):
    """A TF_CONFIG was copied with its index: an error also in a container."""
    assert not module._is_own(socket.AF_INET, ("127.0.0.1", 80))  # every host has this address
    assert not module._is_own(socket.AF_INET, ("198.51.100.1", 80))
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this host has loopback addresses only")
        host = sock.getsockname()[0]
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "0")
    tf_config(cluster("198.51.100.1:9000", f"{host}:{port}"))
    with pytest.raises(
        ValueError,
        match=r"cluster\['worker'\]\[0\] \(worker 0\), this process, is 198.51.100.1:9000, which is not "
        rf"an address of this host, but cluster\['worker'\]\[1\] \(worker 1\), {host}:{port}, is: this "
        "process has another task's number",
    ):
        STRATEGY()


@pytest.mark.parametrize(
    ("environ", "files", "errors"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, False),
        ({"PYCOLLECTIVE_CHECK_ADDRESSES": "1"}, True, True),
        ({"PYCOLLECTIVE_CHECK_ADDRESSES": "0"}, False, False),
    ],
)
def test_in_containers_names_may_come_later(monkeypatch, environ, files, errors):
    monkeypatch.setattr(module.Path, "exists", lambda path: files)
    assert module.are_errors(environ) is errors


def test_examine_wrong_value_of_the_switch_is_an_error():
    with pytest.raises(ValueError, match="PYCOLLECTIVE_CHECK_ADDRESSES='no': must be 0 or 1"):
        module.are_errors({"PYCOLLECTIVE_CHECK_ADDRESSES": "no"})


def test_names_that_come_later_are_logged(tf_config, monkeypatch, caplog, port):
    tf_config(cluster(f"127.0.0.1:{port}", "nowhere.test:1", "there.test:1"))
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "0")
    caplog.set_level(logging.WARNING, "pycollective")
    assert membership_of(TFConfigClusterResolver(), here=True).size == 3
    assert (
        "TF_CONFIG: cluster['worker'][1] (worker 1) is nowhere.test:1, and the name" in caplog.text
    )
    assert "there.test" not in caplog.text


def test_port_on_which_the_launcher_listens_is_accepted(names):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        spec = ClusterSpec({"chief": [busy], "worker": ["198.51.100.1:1"]})
        resolver = SimpleClusterResolver(spec, "", "chief", 0)
        assert membership_of(resolver, here=True, listens=True).names == ("chief 0", "worker 0")
        with pytest.raises(
            ValueError, match=r"Simple: cluster\['chief'\]\[0\] \(chief 0\), this pro"
        ):
            membership_of(resolver, here=True)
        # The port of another worker is not tried, and a single worker needs no port.
        other = SimpleClusterResolver(spec, "", "worker", 0)
        assert "no socket can listen" not in str(examine(other)[1])
        alone = SimpleClusterResolver(ClusterSpec({"worker": [busy]}), "", "worker", 0)
        assert membership_of(alone, here=True).size == 1


def test_an_evaluator_needs_no_address(names):
    spec = ClusterSpec({"worker": ["nowhere.test:1", "b.test:1"], "evaluator": ["c.test:1"]})
    assert membership_of(SimpleClusterResolver(spec, "", "evaluator", 0), here=True) is None
    assert not names
    with pytest.raises(ValueError, match="There is no id for task_type 'ps'"):
        membership_of(SimpleClusterResolver(ClusterSpec({"ps": ["p:1"]}), "", "ps", 0))


def test_examine_large_cluster_each_worker_resolves_some_names(names):
    spec = ClusterSpec({"worker": [f"w{i}.test:1" for i in range(100)]})
    found = examine(SimpleClusterResolver(spec, "", "worker", 7))[2]
    assert [re.findall(r"w\d+", line)[0] for line in found] == ["w0", "w7"]
    assert sorted(names) == ["w0.test", "w7.test"]


@pytest.mark.slow
def test_names_are_looked_up_at_the_same_time(monkeypatch):
    """A name server that does not answer costs one bounded timeout."""
    together = threading.Barrier(3, timeout=10)
    forever = threading.Event()

    def lookup(host, port, type=0, flags=0):
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        together.wait()
        if host == "slow":
            forever.wait(10)
        raise socket.gaierror(socket.EAI_FAIL, "it fails")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(module, "_LOOKUP_SECONDS", 1.0)
    places = [module.TaskAddress(h, h, f"{h}:1") for h in ("a", "slow", "b")]
    try:
        assert module._resolve_all(places) == ["it fails", "no answer within 1 s", "it fails"]
    finally:
        forever.set()


def test_examine_name_server_that_fails_for_a_moment_is_asked_again(monkeypatch):
    answers = [socket.gaierror(socket.EAI_AGAIN, "later"), [(2, 1, 6, "", ("198.51.100.9", 1))]]

    def lookup(host, port, type=0, flags=0):
        answer = socket.gaierror(socket.EAI_NONAME, "no number") if flags else answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)
    assert module._resolve_all([module.TaskAddress("a", "a", "a:1")]) == [(2, ("198.51.100.9", 1))]
