"""Python objects between ranks: JSON, pickles only where they are asked for, bounded sizes."""

from __future__ import annotations

import datetime
import threading

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective.comm import objects

OBJECTS = [None, 0.1, "grüße", [1, [2.5, {"a": None}]], {"rates": [0.1] * 10_000}, ""]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_objects_arrive_as_they_were_sent(kind, on_ranks):
    def work(comm):
        with comm:
            for i, obj in enumerate(OBJECTS):
                root = i % comm.size
                mine = [comm.rank, obj] * comm.rank
                each = [[r, obj] * r for r in range(comm.size)]
                assert comm.broadcast_object(obj if comm.rank == root else "x", root) == obj
                assert comm.all_gather_object(mine) == each
                assert comm.gather_object(mine, root) == (each if comm.rank == root else None)
                comm.send_object(mine, (comm.rank + 1) % comm.size, tag=i)
                before = (comm.rank - 1) % comm.size
                assert comm.recv_object(before, tag=i) == each[before]
        return True

    assert on_ranks(make_group(kind, 3), work) == [True] * 3


def test_object_that_is_not_json_needs_pickle(on_ranks):
    day = datetime.date(2026, 11, 25)

    def work(comm):
        with pytest.raises(TypeError, match="date is not JSON serializable"):
            comm.all_gather_object(day)  # before anything is sent
        assert comm.all_gather_object(day, pickle=True) == [day] * 2
        assert comm.broadcast_object((1, {2: day}), 1, pickle=True) == (1, {2: day})
        assert comm.gather_object({day}, pickle=True) in ([{day}] * 2, None)
        comm.send_object(day, 1 - comm.rank, pickle=True)
        return comm.recv_object(1 - comm.rank, pickle=True)

    assert on_ranks(pc.local_group(2, timeout=20), work) == [day] * 2


openers: list[int] = []
"""The threads that have unpickled a bomb."""


def explode() -> None:
    openers.append(threading.get_ident())


class Bomb:
    """Unpickling it calls a function."""

    def __reduce__(self):
        return explode, ()


@pytest.mark.parametrize("call", ["broadcast_object", "all_gather_object", "gather_object", "send"])
def test_pickled_object_without_pickle_true_is_not_unpickled(call, on_ranks):
    def work(comm):
        with pytest.raises((pc.MismatchError, pc.AbortedError), match="Give the same pickle="):
            if call != "send":
                getattr(comm, call)(Bomb() if comm.rank == 0 else 1, pickle=comm.rank == 0)
            elif comm.rank == 0:
                comm.send_object(Bomb(), 1, pickle=True)
            else:
                comm.recv_object(0)
            comm.barrier()
        return threading.get_ident()

    threads = on_ranks(pc.local_group(2, timeout=20), work)
    assert [type(thread) for thread in threads] == [int, int]
    assert threads[1] not in openers
    openers.clear()


def test_object_longer_than_the_limit_raises_on_both_ranks(monkeypatch, on_ranks):
    monkeypatch.setattr(objects, "MOST_BYTES", 100)

    def work(comm):
        with pytest.raises(ValueError, match="has 202 bytes, more than 100"):
            comm.all_gather_object("x" * 200)
        if comm.rank == 0:  # a sender that keeps to no bound
            header = np.array([1 << 50, 0])
            comm._core.send(header, 1, 0, 20.0, False, "object")
            return "sent"
        with pytest.raises(pc.MismatchError, match=f"rank 0 sends .* of {1 << 50} bytes"):
            comm.recv_object(0)
        return "refused"

    assert on_ranks(pc.local_group(2, timeout=20), work) == ["sent", "refused"]


@pytest.mark.parametrize("obj", [{1: "a", "1": "b"}, [{"a": ({None: 1},)}], {2.5: 0}])
def test_object_with_keys_that_are_no_strings_is_refused_as_json(obj):
    """JSON would turn the keys into strings, and lose one of two that become the same."""
    (comm,) = pc.local_group(1)
    with pytest.raises(
        TypeError, match="the keys of a dict must be strings in JSON, not .* pickle="
    ):
        comm.broadcast_object(obj)
    assert comm.broadcast_object(obj, pickle=True) == obj


@pytest.mark.parametrize("obj", [np.float32(1), b"bytes", {1, 2}, np.ones(2)])
def test_object_that_json_has_no_form_for_says_what_to_do(obj):
    (comm,) = pc.local_group(1)
    with pytest.raises(TypeError, match=r"not JSON serializable: .* item\(\), or give pickle=True"):
        comm.all_gather_object(obj)


def test_object_that_contains_itself_is_a_value_error():
    (comm,) = pc.local_group(1)
    obj: list[object] = []
    obj.append(obj)
    with pytest.raises(ValueError, match="nested too deeply"):
        comm.all_gather_object(obj)


def test_objects_of_two_forms_name_both_ranks(on_ranks):
    def work(comm):
        with pytest.raises((pc.MismatchError, pc.AbortedError)) as caught:
            comm.all_gather_object(1, pickle=comm.rank == 0)
            comm.barrier()
        return caught.value

    errors = on_ranks(pc.local_group(2, timeout=20), work)
    found = [error for error in errors if isinstance(error, pc.MismatchError)]
    assert found
    assert all(error.ranks in ((0, 1), (1, 0)) and set(error.calls) == {0, 1} for error in found)
