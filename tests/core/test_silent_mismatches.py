"""Differing calls in which no rank receives data, and ranks that leave or do not join."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc

# The calls of rank 0 and rank 1, and their descriptions.
CASES = {
    "roots of a broadcast": (
        lambda c: c.broadcast(np.ones(4), c.rank),
        "broadcast #1 (float64[4], {way}, root 0)",
        "broadcast #1 (float64[4], {way}, root 1)",
    ),
    "roots of a reduce": (
        lambda c: c.reduce(np.ones(4), root=1 - c.rank),
        "reduce #1 (float64[4], sum, {way}, root 1)",
        "reduce #1 (float64[4], sum, {way}, root 0)",
    ),
    "roots of a gather": (
        lambda c: c.gather(np.ones(4), root=1 - c.rank),
        "gather #1 (float64[4], direct, root 1)",
        "gather #1 (float64[4], direct, root 0)",
    ),
    "roots of a scatter": (
        lambda c: c.scatter(np.ones(4), root=c.rank),
        "scatter #1 (float64[2], direct, root 0)",
        "scatter #1 (float64[2], direct, root 1)",
    ),
    "sizes of a broadcast": (
        lambda c: c.broadcast(np.ones(4 + c.rank), c.rank),
        "broadcast #1 (float64[4], {way}, root 0)",
        "broadcast #1 (float64[5], {way}, root 1)",
    ),
    "broadcast against reduce": (
        lambda c: c.broadcast(np.ones(4), 0) if c.rank == 0 else c.reduce(np.ones(4), root=0),
        "broadcast #1 (float64[4], {way}, root 0)",
        "reduce #1 (float64[4], sum, {way}, root 0)",
    ),
}


def error_of(call):
    try:
        call()
    except pc.CollectiveError as error:
        return error
    return None


def check(error, case, kind):
    way = "tree" if kind == "tcp" else "direct"
    of_0, of_1 = (text.format(way=way) for text in CASES[case][1:])
    assert isinstance(error, pc.MismatchError), error
    assert f"rank 0 called {of_0}, rank 1 called {of_1}. " in str(error)


@pytest.mark.parametrize("async_op", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_differing_calls_are_named_by_the_next_call_of_each_rank(on_ranks, kind, case, async_op):
    call = CASES[case][0]

    def work(group):
        x = np.ones(4)

        def calls():
            call(group)
            if async_op:
                group.all_reduce(x, async_op=True).wait()
            else:
                group.all_reduce(x)

        return error_of(calls)

    for error in on_ranks(make_group(kind, 2, 20), work):
        check(error, case, kind)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_differing_calls_are_named_by_close(on_ranks, kind, case):
    call = CASES[case][0]
    groups = make_group(kind, 2, 20)
    errors = on_ranks(groups, lambda group: error_of(lambda: call(group)))
    if not any(errors):  # threads wait until they have read each other's memory
        errors = on_ranks(groups, lambda group: error_of(group.close))
    found = [error for error in errors if error is not None]
    assert found
    for error in found:
        check(error, case, kind)


#: The calls of rank 0 and rank 1. The first part of a call for objects or for parts of different
#: lengths has the shape and dtype of the other rank's array.
WITH_TWO_PARTS = {
    "broadcast_object": (
        lambda c: c.broadcast_object({"a": 1}),
        lambda c: c.broadcast(np.zeros(2, np.int64)),
    ),
    "all_gather_object": (
        lambda c: c.all_gather_object(1),
        lambda c: c.all_gather(np.zeros((1, 2), np.int64)),
    ),
    "send_object": (
        lambda c: c.send_object("hi", 1),
        lambda c: c.recv(np.zeros(2, np.int64), 0),
    ),
    "ragged scatter": (
        lambda c: c.scatter(np.arange(2), ragged=True, counts=[1, 1]),
        lambda c: c.broadcast(np.zeros(2, np.int64)),
    ),
    "ragged all_gather": (
        lambda c: c.all_gather(np.ones(1, np.int64), ragged=True),
        lambda c: c.all_gather(np.ones(1, np.int64)),
    ),
    "ragged all_to_all": (
        lambda c: c.all_to_all(np.arange(2), [1, 1]),
        lambda c: c.all_to_all(np.arange(2)),
    ),
    "minloc": (lambda c: c.minloc(np.ones(2)), lambda c: c.all_reduce(np.ones(2), "min")),
}


@pytest.mark.parametrize("case", WITH_TWO_PARTS)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_call_for_arrays_does_not_match_the_first_part_of_another_call(on_ranks, kind, case):
    calls = WITH_TWO_PARTS[case]

    def work(group):
        return error_of(lambda: (calls[group.rank](group), group.barrier()))

    errors = on_ranks(make_group(kind, 2, 20), work)
    assert all(isinstance(error, pc.MismatchError) for error in errors), errors


def _message_of_another_type(group):
    if group.rank == 1:
        group.send(np.ones(4), 2)
    elif group.rank == 2:
        group.recv(source=1, shape=4, dtype="int16")


def _all_gather_among_scatters(group):
    return group.all_gather(np.ones(2)) if group.rank == 2 else group.scatter(np.ones(6), 0)


@pytest.mark.parametrize("call", [_message_of_another_type, _all_gather_among_scatters])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_rank_gets_a_mismatch_once_in_its_call_or_in_close(on_ranks, kind, call):
    groups = make_group(kind, 3, 20)
    in_call = on_ranks(groups, lambda group: error_of(lambda: call(group)))
    in_close = on_ranks(groups, lambda group: error_of(group.close))
    assert isinstance(in_call[2], pc.MismatchError), in_call
    for errors in zip(in_call, in_close, strict=True):
        (error,) = [error for error in errors if error is not None]
        assert isinstance(error, pc.MismatchError), error
        assert str(error) == str(in_call[2])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_close_after_a_raised_mismatch_does_not_raise_it_again(on_ranks, kind):
    groups = make_group(kind, 3, 20)
    on_ranks(groups, lambda group: error_of(lambda: _message_of_another_type(group)))
    refused = on_ranks(groups, lambda group: error_of(lambda: group.all_reduce(np.ones(4))))
    assert all(isinstance(error, pc.MismatchError) for error in refused), refused
    assert on_ranks(groups, lambda group: error_of(group.close)) == [None] * 3


def _all_reduce(group, x):
    return group.all_reduce(x, async_op=True)


def _by_messages(group, x):
    return group.all_reduce(x, algorithm="ring", async_op=True)


def _ragged(group, x):
    """Return the work of a call that makes several calls in Python."""
    return group.all_gather(x.astype("f4" if group.rank else "f8"), ragged=True, async_op=True)


def _receive(group, x):
    group.send(x, 1 - group.rank, async_op=True)
    return group.recv(np.empty(x.size), 1 - group.rank, async_op=True)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("call", [_all_reduce, _by_messages, _ragged, _receive])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_mismatch_of_an_asynchronous_call_is_raised_once(on_ranks, kind, call, waits):
    """The call, wait() or close() raises the error."""

    def work(group):
        def begin():
            under_way = call(group, np.ones(4 + group.rank))
            if waits:
                under_way.wait()

        return error_of(begin), error_of(group.close)

    for errors in on_ranks(make_group(kind, 2, 20), work):
        (error,) = [error for error in errors if error is not None]
        assert isinstance(error, pc.MismatchError), errors
        assert not waits or errors[1] is None


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_mismatch_with_a_later_call_names_the_peers_call_in_its_place(on_ranks, kind):
    """Rank 2 expects a message of its first call from rank 1, and gets one of the second."""

    def work(group):
        if group.rank == 2:
            return error_of(lambda: group.all_gather(np.ones(2), algorithm="direct"))
        group.scatter(np.ones(6), 0)
        return error_of(lambda: [group.gather(np.ones(1), 2), group.barrier()])

    for error in on_ranks(make_group(kind, 3, 20), work):
        assert isinstance(error, pc.MismatchError), error
        assert "called scatter #1" in str(error)
        assert "rank 2 called all_gather #1" in str(error)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_close_after_equal_calls_raises_nothing(on_ranks, kind):
    def work(group):
        group.broadcast(np.ones(4), 1)
        group.reduce(np.ones(4), root=0)
        group.all_gather(np.ones(group.rank + 1), ragged=True)
        group.all_to_all(np.ones(6), [2 * group.rank + i for i in (0, 6 - 4 * group.rank)])
        group.gather(np.ones((group.rank, 2)), 0, ragged=True)
        group.scatter(np.ones(6) if group.rank == 0 else None, 0, out=np.ones(3))
        part = group.split(group.rank)
        part.all_reduce(np.ones(group.rank + 1))
        if group.rank == 0:
            part.barrier()
            group.send(np.ones(3), 1)
        else:
            group.recv(source=0, shape=3, dtype=float)
        work = group.broadcast(np.ones(4), 0, async_op=True)
        work.wait()
        part.close()
        group.close()

    assert on_ranks(make_group(kind, 2, 20), work) == [None, None]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_close_of_a_rank_with_fewer_calls_raises_nothing(on_ranks, kind):
    def work(group):
        if group.rank == 1:
            group.send(np.ones(1), 0)
        else:
            group.recv(source=1, shape=1, dtype=float)
        group.close()

    assert on_ranks(make_group(kind, 2, 20), work) == [None, None]


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_mismatch_names_the_first_differing_calls(on_ranks, kind):
    def work(group):
        group.barrier()
        group.gather(np.ones(2), 1 if group.rank == 0 else 0)  # rank 0 and 2 exchange nothing
        return error_of(lambda: [group.barrier() for _ in range(3)])

    errors = on_ranks(make_group(kind, 3, 20), work)
    for error in errors:
        assert isinstance(error, pc.MismatchError), error
        assert str(error).count("gather #2 (float64[2], direct, root ") == 2


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_leaving_rank_is_lost_to_waiting_ranks_at_once(kind):
    first, second = make_group(kind, 2, 60)
    errors = []
    waits = threading.Thread(
        target=lambda: errors.append(error_of(lambda: first.all_reduce(np.ones(4))))
    )
    waits.start()
    second.close()
    waits.join(20)
    assert not waits.is_alive()
    (error,) = errors
    assert isinstance(error, pc.PeerLostError), error
    assert "rank 1 has left the group after 0 calls, while rank 0 is in all_reduce #1" in str(error)


@pytest.mark.parametrize("call", ["recv", "async all_reduce", "all_reduce"])
def test_dropped_rank_is_lost_at_once(call):
    """The communicator of rank 1 is dropped, as when the thread of rank 1 raises."""
    first, second = pc.local_group(2, timeout=60)
    errors = []

    def wait():
        calls = {
            "recv": lambda: first.recv(source=1, shape=4, dtype=float),
            "async all_reduce": lambda: first.all_reduce(np.ones(4), async_op=True).wait(),
            "all_reduce": lambda: first.all_reduce(np.ones(4)),
        }
        errors.append(error_of(calls[call]))

    waits = threading.Thread(target=wait)
    waits.start()
    del second
    gc.collect()
    waits.join(20)
    assert not waits.is_alive()
    assert isinstance(errors[0], pc.PeerLostError), errors
    assert "rank 1 has left the group" in str(errors[0])


def test_error_in_a_with_block_aborts_the_other_ranks_at_once(on_ranks):
    def work(group):
        with group:
            if group.rank == 1:
                raise KeyError("of the program")
            group.all_reduce(np.ones(4))

    aborted, raised = on_ranks(pc.local_group(2, timeout=60), work)
    assert isinstance(aborted, pc.AbortedError), aborted
    assert "rank 1 raised KeyError: 'of the program'" in str(aborted)
    assert isinstance(raised, KeyError)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_timeout_of_two_receiving_ranks_names_both(on_ranks, kind):
    both = threading.Barrier(2)

    def work(comm):
        both.wait(20)
        return str(error_of(lambda: comm.recv(source=1 - comm.rank, shape=3, dtype="int8", tag=5)))

    for error in on_ranks(make_group(kind, 2, 0.8), work):
        for rank in (0, 1):
            assert f"rank {rank} waits in recv (int8[3], tag 5) from rank {1 - rank}" in error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_timeout_does_not_name_a_message_that_has_arrived(on_ranks, kind):
    def work(comm):
        if comm.rank == 0:
            late = comm.recv(source=1, shape=1, dtype=float, async_op=True)
            with pytest.raises(TimeoutError):
                late.wait(0.3)
            comm.barrier()
            late.wait()
        else:
            comm.barrier()
            comm.send(np.ones(1), 0)
        comm.barrier()
        return comm.describe()

    for text in on_ranks(make_group(kind, 2, 20), work):
        assert "waits in" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_timeout_names_the_rank_that_did_not_join(on_ranks, kind):
    both = threading.Barrier(2)

    def work(comm):
        if comm.rank == 2:
            return None
        both.wait(20)
        return str(error_of(lambda: comm.all_reduce(np.ones(3))))

    for error in on_ranks(make_group(kind, 3, 0.8), work)[:2]:
        assert "waited until its deadline for rank 2, which has not entered this call. " in error
