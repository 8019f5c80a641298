"""Rank 0's decisions, by the keys of a store without connections."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from pycollective.launch import leader
from pycollective.launch.description import Description
from pycollective.launch.leader import Leader
from pycollective.launch.store import Store

SECRET = b"0123456789abcdef"


class Group:
    """A leader, and the keys that the ranks set."""

    def __init__(self, size, **more):
        self.store = Store()
        about = Description(0, size, "127.0.0.1", 1, SECRET, **more)
        self.leader = Leader(about, self.store, 20.0, 3, lambda: 0)

    def says(self, *keys):
        """Set some keys, in one step of the leader."""
        for key, value in keys:
            self.store.set(key, value)
        self.leader.step(self.store.wait(0.0))

    def join(self, *ranks, process="one"):
        self.says(*((f"join/{rank}", request(process)) for rank in ranks))

    def answer(self, key, *values):
        name = self.get("table")["group"]
        for rank, value in zip(self.members, values, strict=True):
            self.says((f"{key}/{rank}", {"group": name, "value": value}))

    def get(self, key):
        return self.store.get(f"all/{key}")

    @property
    def members(self):
        return self.get("table") and self.get("table")["ranks"]


def request(process):
    place = {"host": "127.0.0.1", "port": 9000, "claim": "", "memory": "", "process": process}
    return {**place, "milliseconds": 20_000}


@pytest.fixture
def group():
    groups = []

    def make(size, **more):
        groups.append(Group(size, **more))
        return groups[-1]

    yield make
    for one in groups:
        one.store.close()


def test_leader_rank_that_comes_after_the_choice_changes_nothing(group):
    three = group(3, least=2, patience=0.0)
    three.join(0, 1)
    table = three.get("table")
    assert table["ranks"] == [0, 1]
    three.join(2)
    assert three.get("table") is table
    three.answer("near", 0, 1)
    three.answer("ready", False, False)
    assert three.get("ready")["hosts"] == [0, 1]
    assert (three.get("check"), three.get("failed")) == (None, None)


@pytest.mark.parametrize("comes_back", [False, True])
def test_leader_elastic_member_lost_in_the_middle_is_not_in_the_next_table(group, comes_back):
    """This holds also if its new process sets the key again in the same step."""
    three = group(3, least=2)
    three.join(0, 1, 2)
    first = three.get("table")
    three.answer("near", 0, 1, 2)
    again = [("join/1", request("another"))] if comes_back else []
    three.says(("join/1", None), *again)
    assert three.get("check") == 1
    three.says(("alive/0", 1))
    assert three.get("table") is first
    if comes_back:  # the rank sees that it is late
        three.says(("join/1", None))
    three.says(("alive/2", 1))
    assert three.members == [0, 2]
    assert three.get("table")["group"] != first["group"]


def test_leader_elastic_silent_member_is_left_out_and_too_few_wait_for_others(group, monkeypatch):
    monkeypatch.setattr(leader, "ATTEMPT_SECONDS", 0.0)
    monkeypatch.setattr(leader, "CHECK_SECONDS", 0.05)
    two = group(2, least=2)
    two.join(0, 1)
    two.says()
    assert two.get("check") == 1
    two.says(("alive/0", 1))
    time.sleep(0.1)
    two.says()
    assert two.members is None
    assert two.get("failed") is None


def test_leader_member_that_fails_ends_a_group_that_needs_all(group):
    three = group(3)
    three.join(0, 1, 2)
    reason = {"error": "rank 1 did not reach rank 2", "ranks": [2]}
    three.says(("failed/1", reason), ("failed/1", None), ("join/1", None))
    assert three.get("failed") == reason


def test_leader_member_lost_in_the_middle_ends_a_group_that_needs_all(group):
    three = group(3)
    three.join(0, 1, 2)
    three.says(("join/2", None))
    text = "rank 2 was lost before the group was made"
    assert three.get("failed") == {"error": text, "ranks": [2]}


def test_leader_rank_lost_before_the_choice_may_come_again(group):
    two = group(2)
    two.join(1)
    two.says(("join/1", None))
    two.join(0)
    assert (two.members, two.get("failed")) == (None, None)
    two.join(1, process="another")
    assert two.members == [0, 1]


@pytest.mark.parametrize(
    ("reached", "representatives", "shared", "hosts"),
    [
        ([0, 0, 2, 2], [0, 0, 2, 2], [True] * 4, [0, 0, 1, 1]),
        ([0, 0, 2, 2], [0, 0, 2, 2], [True, False, True, True], [0, 1, 2, 2]),
        ([0, 0, 1, 0], [0, 0, 2, 0], [True, True, False, True], [0, 0, 1, 0]),
        ([0, 7, [], 0], [0, 1, 2, 0], [True, False, False, True], [0, 1, 2, 0]),
    ],
)
def test_leader_hosts_are_what_ranks_have_reached_and_proved(
    group, reached, representatives, shared, hosts
):
    """A rank that reaches a rank which does not represent a host is alone on its host."""
    four = group(4)
    four.join(0, 1, 2, 3)
    four.answer("near", *reached)
    assert four.get("near")["hosts"] == representatives
    assert four.get("ready") is None
    four.answer("ready", *shared)
    assert four.get("ready")["hosts"] == hosts


def test_leader_first_rank_times_out_names_the_missing_ranks(group, monkeypatch):
    monkeypatch.setattr(leader, "_CONNECT_SECONDS", 0.0)
    three = group(3)
    three.join(0)
    three.says(("join/1", {**request("one"), "milliseconds": 0}))
    failed = three.get("failed")
    assert failed["ranks"] == [2]
    assert failed["error"].endswith("127.0.0.1:1, because rank 1 gives up then")


def test_leader_missing_ranks_are_logged_at_intervals(group, monkeypatch, caplog):
    now = time.monotonic()
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(leader, "LOG_EVERY", 3.0)
    three = group(3)
    three.join(0)
    for _ in range(11):
        now += 1.0
        three.says()
    assert caplog.messages == ["rank 0 waits for ranks 1, 2 of 3 to join at 127.0.0.1:1"] * 3


def test_leader_that_comes_late_names_rank_0_too(group, monkeypatch):
    monkeypatch.setattr(leader, "_CONNECT_SECONDS", 0.0)
    three = group(3)
    three.join(0)
    three.says(("join/1", {**request("one"), "milliseconds": 0, "waited": 7000}))
    failed = three.get("failed")
    assert failed["ranks"] == [0, 2]
    assert failed["error"].endswith("rank 0 joined only after 7.0 s")


@pytest.mark.parametrize(("pause", "ranks"), [(1.0, [2]), (15.0, [0, 2])])
def test_leader_that_paused_for_most_of_a_wait_names_itself(group, monkeypatch, pause, ranks):
    """A rank 0 that was stopped must not blame only the rank that timed out meanwhile."""
    now = time.monotonic()
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: now))
    three = group(3)
    three.join(0, 1)
    for step in (pause, *[1.0] * 25):
        now += step
        three.says()
        if three.get("failed"):
            break
    assert three.get("failed")["ranks"] == ranks
    assert ("rank 0 itself paused for 15.0 s" in three.get("failed")["error"]) == (0 in ranks)
