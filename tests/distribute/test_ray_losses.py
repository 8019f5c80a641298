"""`pycollective.ray.run` when workers are lost, with a fake Ray."""

from __future__ import annotations

import collections
import concurrent.futures
import json
import re
import sys
import threading
import time
import types

import pytest

import pycollective as tf
from pycollective.errors import UnavailableError


class RayActorError(Exception):
    pass


class RayTaskError(Exception):
    def __init__(self, cause):
        self.cause = cause


class GetTimeoutError(Exception):
    pass


class Group:
    def __init__(self, first):
        self.first = first


class Ray:
    """A fake Ray with threads as actors.

    ``nodes[rank]`` are the machines of a rank's actors, one after the other. None is a machine that is
    lost before the actor begins. "full" is a machine without resources.
    """

    exceptions = types.SimpleNamespace(
        RayActorError=RayActorError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError
    )

    def __init__(self, nodes):
        self.nodes = [list(names) for names in nodes]
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.util = types.SimpleNamespace(
            placement_group=self.reserve,
            remove_placement_group=lambda group: self.groups.remove(group),
        )
        self.calls, self.names, self.groups = [], [], []
        self.reserved = 0
        #: The first ranks of the placement groups that wait for resources, with their futures.
        self.waiting = {}

    def reserve(self, bundles, strategy):
        """Return a placement group, whose actors have the next ranks."""
        group = Group(self.reserved)
        ready = self.waiting.get(group.first, concurrent.futures.Future())
        if group.first not in self.waiting:
            ready.set_result(None)
        group.ready = lambda: ready
        self.reserved += len(bundles)
        self.groups.append(group)
        return group

    def is_initialized(self):
        return True

    def available_resources(self):
        return {}

    def remote(self, scheduling_strategy, **_):
        def options(name):
            assert name not in self.names
            self.names.append(name)
            return types.SimpleNamespace(remote=lambda: Actor(self, scheduling_strategy))

        return lambda kind: types.SimpleNamespace(options=options)

    def get(self, refs, timeout=None):
        if isinstance(refs, list):
            return [ref.result(20) for ref in refs]
        if timeout is not None and timeout <= 0:
            raise GetTimeoutError
        return refs.result(20)

    def wait(self, refs, timeout=20):
        done, _ = concurrent.futures.wait(refs, timeout, "FIRST_COMPLETED")
        first = [ref for ref in refs if ref in done][:1]
        return first, [ref for ref in refs if ref not in first]

    def kill(self, actor):
        actor.lost.set()


class Actor:
    def __init__(self, ray, rank):
        self.rank, self.node = rank, ray.nodes[rank].pop(0)
        self.lost = threading.Event()
        remote = types.SimpleNamespace
        self.place = remote(remote=lambda: ray.pool.submit(self._place))
        self.call = remote(remote=lambda *args: ray.pool.submit(self._call, ray, *args))

    def _place(self):
        if self.node == "full":
            self.lost.wait(20)
        if self.node in (None, "full"):
            raise RayActorError
        return self.node, f"{self.node}:1"

    def _call(self, ray, environment, function, args, kwargs):
        ray.calls.append((self.rank, json.loads(environment["TF_CONFIG"])["cluster"]))
        try:
            return function(self, *args)
        except RayActorError:
            raise
        except Exception as error:
            raise RayTaskError(error) from None


@pytest.fixture
def ray_of(monkeypatch):
    fakes = []

    def make(*nodes):
        ray = Ray(nodes)
        strategies = types.ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = lambda group, number: group.first + number
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
        fakes.append(ray)
        return ray

    yield make
    for ray in fakes:
        ray.pool.shutdown()


def workers_of(calls):
    """Return the rank of each call, and the addresses of the workers that it got."""
    return [(rank, cluster["worker"]) for rank, cluster in calls]


def dies(lost, waits):
    """Return a function for workers. In its first call, the worker of rank ``lost`` is lost.

    With ``waits``, the first calls of the other workers wait until they are stopped.
    """
    calls = [0, 0, 0]

    def train(actor):
        calls[actor.rank] += 1
        if calls[actor.rank] > 1:
            return f"{actor.rank} on {actor.node}"
        if actor.rank == lost:
            raise RayActorError
        if waits:
            actor.lost.wait(20)
            raise RayActorError
        return "undisturbed"

    return train


def test_lost_worker_0_is_replaced_and_all_workers_restart(ray_of):
    ray = ray_of(["a", None, "c"], ["b", "b"])
    assert tf.ray.run(dies(0, waits=True), 2, max_failures=1) == ["0 on c", "1 on b"]
    assert sorted(workers_of(ray.calls[:2])) == [(0, ["a:1", "b:1"]), (1, ["a:1", "b:1"])]
    assert sorted(workers_of(ray.calls[2:])) == [(0, ["c:1", "b:1"]), (1, ["c:1", "b:1"])]


def test_lost_worker_other_than_0_is_replaced_alone(ray_of):
    ray = ray_of(["a"], ["b", "c"])
    train, moved = dies(1, waits=False), threading.Event()

    def trains(actor):
        if actor.node == "c":
            moved.set()
        elif actor.rank == 0:
            moved.wait(20)
        return train(actor)

    assert tf.ray.run(trains, 2, max_failures=1) == ["undisturbed", "1 on c"]
    assert workers_of(ray.calls[2:]) == [(1, ["a:1", "c:1"])]


def test_finished_worker_restarts_with_a_replacement(ray_of):
    """Without the finished worker, the replacement would be alone."""
    ray = ray_of(["a"], ["b", "b"])
    ended, train = threading.Event(), dies(1, waits=False)

    def trains(actor):
        if actor.rank == 0:
            ended.set()
        ended.wait(20)
        return train(actor)

    assert tf.ray.run(trains, 2, max_failures=1) == ["0 on a", "1 on b"]
    assert sorted(rank for rank, _ in ray.calls) == [0, 0, 1, 1]


# Fewer workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failures", "nodes"), [(0, ["c"]), (1, ["c", "full"])])
def test_min_workers_others_continue_without_a_lost_worker(ray_of, failures, nodes):
    """The lost worker is not replaced, or there are no resources for a replacement."""
    ray = ray_of(["a"], ["b"], nodes)
    train = dies(2, waits=False)

    def trains(actor):
        if actor.rank < 2:
            time.sleep(0.4)  # longer than placement_timeout
        return train(actor)

    found = tf.ray.run(trains, 3, max_failures=failures, min_workers=2, placement_timeout=0.2)
    assert found == ["undisturbed", "undisturbed", None]
    assert len(ray.calls) == 3


def test_min_workers_fewer_left_raises(ray_of):
    ray_of(["a"], ["b"], ["c"])

    def train(actor):
        if actor.rank:
            raise RayActorError
        actor.lost.wait(20)

    with pytest.raises(RayActorError):
        tf.ray.run(train, 3, min_workers=2)
    ray_of(["a"], ["b", "full"], ["c", "full"])
    with pytest.raises(RuntimeError, match="no resources for a replacement of worker 1, 2"):
        tf.ray.run(train, 3, min_workers=2, max_failures=2, placement_timeout=0.2)


@pytest.mark.parametrize("how", ["waits", "fails"])
def test_min_workers_replacement_that_cannot_join_is_stopped(ray_of, how):
    """The other workers end without the replacement, which cannot join them and is stopped."""
    ray_of(["a"], ["b"], ["c", "d"])
    begun = threading.Event()

    def train(actor):
        if actor.node == "c":
            raise RayActorError
        if actor.node != "d":
            begun.wait(20)
            return actor.node
        begun.set()
        actor.lost.wait(20 if how == "waits" else 0.3)
        raise tf.errors.RendezvousError("nobody is there")

    found = tf.ray.run(train, 3, min_workers=2, max_failures=1, placement_timeout=0.5)
    assert found == ["a", "b", None]


def test_min_workers_replacement_that_joins_returns_its_result(ray_of):
    ray_of(["a"], ["b"], ["c", "d"])
    begun = threading.Event()

    def train(actor):
        if actor.node == "c":
            raise RayActorError
        if actor.node == "d":
            begun.set()
        begun.wait(20)
        return actor.node

    assert tf.ray.run(train, 3, min_workers=2, max_failures=1) == ["a", "b", "d"]
    with pytest.raises(ValueError, match="min_workers=4 is not from 1 to num_workers=3"):
        tf.ray.run(train, 3, min_workers=4)


def test_replacement_without_resources_raises(ray_of):
    ray_of(["a"], ["b", *[None] * 99])
    with pytest.raises((RuntimeError, RayActorError)):
        tf.ray.run(dies(1, waits=False), 2, max_failures=1, placement_timeout=0.2)
    ray_of(["a"], ["b"])
    with pytest.raises(RayActorError):
        tf.ray.run(dies(1, waits=False), 2)


@pytest.mark.parametrize("error", [KeyError("mine"), RayActorError("gone")])
def test_own_exception_of_a_worker_is_raised_before_earlier_peer_lost_errors(ray_of, error):
    """The other workers' calls fail first; Ray gets the error of the failed worker later."""
    heard = threading.Event()

    def train(actor):
        if actor.rank == 2:
            heard.wait(20)
            raise error
        if actor.rank == 1:
            threading.Timer(0.05, heard.set).start()
        raise tf.errors.PeerLostError(f"rank 2 is lost to rank {actor.rank}")

    ray_of(["a"], ["b"], ["c"])
    with pytest.raises(type(error)) as raised:
        tf.ray.run(train, 3)
    assert raised.value is error


def test_peer_lost_errors_alone_the_first_is_raised(ray_of, monkeypatch):
    monkeypatch.setattr(tf.ray, "_CAUSE_SECONDS", 0.05)
    hangs = threading.Event()

    def train(actor):
        if actor.rank == 2:
            hangs.wait(20)
        if actor.rank:
            return "done"
        raise tf.errors.PeerLostError("rank 2 is lost to rank 0")

    ray_of(["a"], ["b"], ["c"])
    with pytest.raises(tf.errors.UnavailableError, match="rank 2 is lost to rank 0"):
        tf.ray.run(train, 3)
    hangs.set()


# Clusters with parameter servers: task 0 is the chief, then come the servers, then the workers.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "error"), [(1, RayActorError), (2, RayActorError), (2, UnavailableError("a server"))]
)
def test_server_or_worker_is_replaced_at_its_address(ray_of, lost, error):
    """A worker raises UnavailableError if a server is lost while it runs the program."""
    nodes = [["a"], ["b"], ["c"], ["d"]]
    nodes[lost] *= 2
    ray = ray_of(*nodes)
    tasks = []

    def train(actor):
        tasks.append(actor.rank)
        if actor.rank == lost and tasks.count(lost) == 1:
            raise error
        if actor.rank == 0:
            until = time.monotonic() + 20
            while tasks.count(lost) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            return "trained"
        actor.lost.wait(20)
        raise RayActorError

    assert tf.ray.run(train, 2, num_ps=1, max_failures=1) == "trained"
    assert sorted(tasks) == sorted([0, 1, 2, 3, lost])
    names = ["chief-0", "ps-0", "worker-0", "worker-1"]
    names += [f"{names[lost]}-again-1"]
    job = re.fullmatch("pycollective-[0-9a-f]{8}-chief-0", ray.names[0])[0].removesuffix("chief-0")
    assert ray.names == [job + name for name in names]
    assert {tuple(workers) for _, workers in workers_of(ray.calls)} == {("c:1", "d:1")}


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "node"), [(0, "a"), (1, "new")])
def test_all_tasks_begin_again_with_a_new_chief_or_a_server_that_moved(ray_of, lost, node):
    nodes = [["a"] * 2, ["b"] * 2, ["c"] * 2, ["d"] * 2]
    nodes[lost][1] = node
    ray = ray_of(*nodes)
    tasks = []

    def all_have_begun(times):
        until = time.monotonic() + 20
        while min(map(tasks.count, range(4))) < times and time.monotonic() < until:
            time.sleep(0.01)

    def train(actor):
        tasks.append(actor.rank)
        if actor.rank == lost and tasks.count(lost) == 1:
            all_have_begun(1)
            raise RayActorError
        if actor.rank == 0 and tasks.count(0) == 2:
            all_have_begun(2)
            return "trained again"
        actor.lost.wait(20)
        raise RayActorError

    assert tf.ray.run(train, 2, num_ps=1, max_failures=1) == "trained again"
    servers = ["new:1" if lost == 1 else "b:1"]
    assert [cluster["ps"] for _, cluster in ray.calls[4:]] == [servers] * 4


@pytest.mark.slow
def test_worker_that_moved_begins_alone(ray_of):
    """The chief asks server 0 for the worker's new address."""
    ray = ray_of(["a"], ["b"], ["c", "new"], ["d"])
    moved = threading.Event()

    def train(actor):
        if actor.rank == 0:
            assert moved.wait(20)
            return "trained"
        if actor.node == "new":
            moved.set()
        elif actor.rank == 2:
            raise RayActorError
        actor.lost.wait(20)
        raise RayActorError

    assert tf.ray.run(train, 2, num_ps=1, max_failures=1) == "trained"
    assert workers_of(ray.calls[4:]) == [(2, ["new:1", "d:1"])]


def test_workers_above_the_least_number_begin_when_there_are_resources(ray_of):
    ray = ray_of(["a"], ["b"], ["c"], ["d"], ["e"])
    ray.waiting = {3: concurrent.futures.Future(), 4: concurrent.futures.Future()}
    begun = collections.defaultdict(threading.Event)

    def train(actor):
        begun[actor.rank].set()
        if actor.rank == 0:
            assert begun[1].wait(20) and begun[2].wait(20)
            ray.waiting[4].set_result(None)
            assert begun[4].wait(20)
            return "trained"
        actor.lost.wait(20)
        raise RayActorError

    assert tf.ray.run(train, 3, num_ps=1, min_workers=1) == "trained"
    assert sorted(rank for rank, _ in ray.calls) == [0, 1, 2, 4]
    unknown = tf.ray.UNKNOWN
    assert [workers for _, workers in workers_of(ray.calls[:3])] == [["c:1", unknown, unknown]] * 3
    assert ray.calls[3][1]["worker"] == ["c:1", unknown, "e:1"]
    assert ray.groups == []


def test_cluster_with_servers_without_resources_raises(ray_of):
    """The message counts the chief and the server, too."""
    ray = ray_of()
    with pytest.raises(RuntimeError, match="no resources for 4 actors"):
        tf.ray.run(len, 2, num_ps=1, placement_timeout=0)
    assert ray.groups == []


@pytest.mark.slow
def test_lost_server_without_a_replacement_raises(ray_of):
    ray_of(["a"], ["b"], ["c"], ["d"])

    def train(actor):
        if actor.rank != 1:
            actor.lost.wait(20)
        raise RayActorError

    with pytest.raises(RayActorError):
        tf.ray.run(train, 2, num_ps=1)


def test_chief_continues_without_a_worker_above_the_least_number(ray_of):
    ray_of(["a"], ["b"], ["c"], ["d"])
    ended = threading.Event()

    def train(actor):
        if actor.rank == 0:
            assert ended.wait(20)
            time.sleep(0.1)
            return "trained"
        if actor.rank == 3:
            ended.set()
        else:
            actor.lost.wait(20)
        raise RayActorError

    assert tf.ray.run(train, 2, num_ps=1, min_workers=1) == "trained"


def test_chiefs_exception_is_raised(ray_of):
    ray_of(["a"], ["b"], ["c"], ["d"])

    def train(actor):
        if actor.rank == 0:
            raise KeyError("mine")
        actor.lost.wait(20)
        raise RayActorError

    with pytest.raises(KeyError, match="mine"):
        tf.ray.run(train, 2, num_ps=1)
    with pytest.raises(ValueError, match="num_ps must be at least 0, got -1"):
        tf.ray.run(train, 2, num_ps=-1)
