"""The attributes of a group's errors: ranks, hosts and calls, over every transport."""

from __future__ import annotations

import copy
import pickle
import platform
import threading
import time

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective import _core, errors

every_kind = pytest.mark.parametrize("kind", ALL_KINDS)
HERE = platform.node()


def errors_of(comms, work):
    """Run the work on all ranks concurrently, and return its errors by rank."""
    found = {}

    def do(comm):
        try:
            work(comm)
        except pc.CollectiveError as error:
            found[comm.rank] = error

    threads = [threading.Thread(target=do, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@every_kind
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_lost_rank_is_in_ranks_with_its_host_and_the_call_under_way(kind, call):
    def work(comm):
        if comm.rank == 1:
            comm.close()
        elif call == "recv":
            comm.recv(np.ones(3), 1)
        else:
            comm.all_reduce(np.ones(3))

    found = errors_of(make_group(kind, 3), work)
    assert set(found) == {0, 2}
    for error in found.values():
        assert type(error) is pc.PeerLostError
        assert (error.ranks, error.hosts) == ((1,), (HERE,))
        assert error.call.startswith(f"{call} "), error.call
        assert "float64[3]" in error.call


@pytest.mark.slow
@every_kind
def test_late_rank_is_in_ranks_of_the_timeout(kind):
    both = threading.Barrier(2)

    def work(comm):
        if comm.rank != 1:
            both.wait(20)
            comm.barrier(timeout=0.8)

    found = errors_of(make_group(kind, 3), work)
    assert set(found) == {0, 2}
    for error in found.values():
        assert type(error) is pc.CollectiveTimeoutError
        assert (error.ranks, error.hosts) == ((1,), (HERE,))
        assert error.call.startswith("barrier #1")


@every_kind
def test_timeout_of_recv_has_the_rank_that_did_not_send(kind):
    comms = make_group(kind, 3)
    with pytest.raises(pc.CollectiveTimeoutError) as caught:
        comms[0].recv(np.ones(3), 2, tag=5, timeout=0.1)
    assert caught.value.ranks == (2,)
    assert caught.value.call == "recv (float64[3], tag 5) from rank 2"


@every_kind
def test_mismatch_has_the_call_of_each_rank(kind):
    comms = make_group(kind, 3)
    found = errors_of(comms, lambda c: c.all_reduce(np.ones(4 if c.rank == 2 else 3)))
    assert set(found) == {0, 1, 2}
    for error in found.values():
        assert type(error) is pc.MismatchError
        other, last = error.ranks
        assert (other in (0, 1), last) == (True, 2)
        assert list(error.calls) == [other, last]
        assert error.calls[other].startswith("all_reduce #1 (float64[3], sum")
        assert error.calls[2].startswith("all_reduce #1 (float64[4], sum")
        assert error.hosts == (HERE, HERE)


@every_kind
@pytest.mark.parametrize("receiver", [0, 1])
def test_mismatch_of_a_message_has_both_ends(kind, receiver):
    def work(comm):
        if comm.rank == receiver:
            comm.recv(np.ones(2), 1 - receiver, tag=4)
        else:
            comm.send(np.ones(3), receiver, tag=4)

    error = errors_of(make_group(kind, 2), work)[receiver]
    assert type(error) is pc.MismatchError
    assert error.calls == {
        receiver: f"recv (float64[2], tag 4) from rank {1 - receiver}",
        1 - receiver: f"send (float64[3], tag 4) to rank {receiver}",
    }
    assert error.ranks == (0, 1)


@every_kind
def test_mismatch_of_a_message_to_oneself_has_one_rank(kind):
    def work(comm):
        if comm.rank == 0:
            comm.sendrecv(np.ones(3), 0, np.ones(2), 0, tag=4)

    error = errors_of(make_group(kind, 2), work)[0]
    assert type(error) is pc.MismatchError
    assert error.ranks == (0,)
    both = "recv (float64[2], tag 4) from rank 0", "send (float64[3], tag 4) to rank 0"
    assert all(text in error.calls[0] for text in both)


@every_kind
def test_abort_has_the_rank_that_aborted(kind):
    def work(comm):
        if comm.rank == 1:
            comm.abort("enough")
        comm.barrier()

    found = errors_of(make_group(kind, 3), work)
    assert set(found) == {0, 1, 2}
    for error in found.values():
        assert (type(error), error.ranks, error.call) == (pc.AbortedError, (1,), None)


CALLS = {
    "barrier": (lambda comm: comm.barrier(), "barrier #1"),
    "all_reduce": (
        lambda comm: comm.all_reduce(np.ones(3)),
        "all_reduce #1 (float64[3], sum, direct)",
    ),
    "async": (
        lambda comm: comm.all_reduce(np.ones(3), async_op=True).wait(),
        "all_reduce #1 (float64[3], sum, direct)",
    ),
    "recv": (
        lambda comm: comm.recv(np.ones(3), 1 - comm.rank),
        "recv (float64[3], tag 0) from rank {}",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_lost_rank_that_the_launcher_reports_has_the_call_of_each_rank(call):
    comms = make_group("shm", 3)
    launcher = _core.ShmGroup.open(comms[0]._group.descriptor)
    make, text = CALLS[call]

    def work(comm):
        if comm.rank < 2:
            make(comm)
        else:
            time.sleep(0.2)
            launcher.abort("rank 2 was killed", peer_lost=True, ranks=[2])

    found = errors_of(comms, work)
    for rank in (0, 1):
        assert type(found[rank]) is pc.PeerLostError
        assert (found[rank].ranks, found[rank].call) == ((2,), text.format(1 - rank))
    with pytest.raises(pc.PeerLostError) as caught:
        comms[2]._group.check()
    assert caught.value.call is None


@pytest.mark.parametrize("split", [False, True])
def test_lost_rank_that_the_launcher_reports_has_the_call_in_a_split_group(split):
    comms = make_group("shm", 3)
    launcher = _core.ShmGroup.open(comms[0]._group.descriptor)

    def work(comm):
        part = comm.split(0) if split else comm
        if comm.rank < 2:
            part.broadcast(np.ones(3), 2)
        else:
            time.sleep(0.2)
            launcher.abort("rank 2 was killed", peer_lost=True, ranks=[2])

    found = errors_of(comms, work)
    for rank in (0, 1):
        assert found[rank].ranks == (2,)
        assert found[rank].call.startswith("broadcast #"), found[rank].call


@pytest.mark.parametrize("kind", ["tcp", "mixed"])
def test_broken_connection_has_the_message_that_it_interrupts(kind):
    comms = make_group(kind, 2)

    def work(comm):
        if comm.rank == 0:
            comm.recv(np.ones(3), 1)
        else:
            time.sleep(0.3)
            comm._group.abandon()

    error = errors_of(comms, work)[0]
    assert type(error) is pc.PeerLostError
    assert (error.ranks, error.call) == ((1,), "recv (float64[3], tag 0) from rank 1")


def test_abort_sorts_ranks_and_refuses_those_outside_the_group():
    group = make_group("threads", 2)[0]._group
    with pytest.raises(ValueError, match="not in the group"):
        group.abort("enough", ranks=[2])
    group.abort("they are gone", peer_lost=True, ranks=[1, 0, 1])
    with pytest.raises(pc.PeerLostError) as caught:
        group.check()
    assert caught.value.ranks == (0, 1)


def test_part_of_a_group_has_the_numbers_of_its_own_ranks():
    """A split group reports ranks lost to the first group, but no ranks outside the split group."""
    for lost, expected in ((2, (1,)), (0, ())):
        comms = make_group("shm", 3)
        parts: dict[int, pc.Communicator] = {}

        def split(comm, parts=parts):
            part = comm.split(0 if comm.rank else 1)
            parts[comm.rank] = part

        assert errors_of(comms, split) == {}
        comms[1]._group.abort(f"rank {lost} was killed", peer_lost=True, ranks=[lost])
        with pytest.raises(pc.PeerLostError, match="that this one was split from") as caught:
            parts[1].barrier(timeout=10)
        assert caught.value.ranks == expected
        assert caught.value.hosts == (HERE,) * len(expected)


def test_fail_as_drops_the_ranks_outside_with_their_calls():
    whole = make_group("threads", 3)
    found = errors_of(whole, lambda c: c.all_reduce(np.ones(4 if c.rank == 2 else 3)))
    first = found[0].ranks[0]
    part = make_group("threads", 2)[0]._group
    part.fail_as(whole[0]._group, [2, 3])
    with pytest.raises(pc.MismatchError) as caught:
        part.check()
    assert first != 2
    assert caught.value.calls == {0: found[0].calls[2]}


@every_kind
def test_titles_are_in_texts_and_ranks_stay_numbers(kind):
    comms = make_group(kind, 3)
    for comm in comms:
        comm._group.set_titles([f"rank {r} (worker {r})" for r in range(3)])
    assert comms[0]._group.title(2) == "rank 2 (worker 2)"
    assert "; rank 1 (worker 1) has " in comms[0].describe()
    comms[2].close()
    found = errors_of(comms[:2], lambda c: c.barrier())
    assert set(found) == {0, 1}
    for error in found.values():
        assert str(error).startswith(
            "rank 2 (worker 2) has left the group after 0 calls, while rank "
        )
        assert error.ranks == (2,)


EXAMPLES = [
    pc.PeerLostError("gone", ranks=[1, 2], hosts=["a", "b"], call="barrier #1"),
    pc.CollectiveTimeoutError("late", ranks=[0], hosts=["a"], call="barrier #1"),
    pc.AbortedError("enough", ranks=[3], hosts=["c"]),
    pc.MismatchError("differ", calls={0: "barrier #1", 2: "send"}, hosts=["a", "c"]),
    errors.RendezvousError("nobody came", ranks=[1]),
    errors.CollectiveError("not made", ranks=[1]),
    pc.PeerLostError("of nobody known"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_copies_of_errors_keep_text_and_attributes(error, again):
    other = again(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
    other = errors.with_text(error, "another text")
    assert str(other) == "another text" != str(error)
    assert (other.ranks, other.hosts, other.call) == (error.ranks, error.hosts, error.call)


def test_error_of_an_asynchronous_call_has_its_attributes():
    comms = make_group("shm", 2)
    work = comms[0].all_reduce(np.ones(1 << 20), async_op=True)
    time.sleep(0.01)
    comms[1].close()
    with pytest.raises(pc.PeerLostError) as caught:
        work.wait()
    assert caught.value.ranks == (1,)
