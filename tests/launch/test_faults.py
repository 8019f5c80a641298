"""Faults of one rank in a real process: all ranks get an error, none hangs, and a new group works.

Every fault is tested over every transport, during the calls of `in_ranks.CALLS`.
"""

from __future__ import annotations

import platform
import re
import sys

import pytest
from fast_cases import some_fast
from in_ranks import CALLS, SYSTEM_CALLS
from processes import TRANSPORTS, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# Ranks that end -------------------------------------------------------------------------------

DEATHS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit 0": "os._exit(0)",
    "exit 3": "os._exit(3)",
}
# Every call over two transports, with the deaths in turn. The trials of tests/faults combine all.
_DYING = [
    (t, list(DEATHS)[(i + j) % len(DEATHS)], c)
    for i, t in enumerate(TRANSPORTS)
    for j, c in enumerate(CALLS)
    if (i + j) % 2 == 0
]
_DYING_FAST = [
    ("shm", "kill", "large"), ("shm", "exit 3", "send"), ("host", "exit 0", "small"),
    ("tcp", "kill", "large"), ("tcp", "exit 0", "split"), ("mixed", "exit 3", "async"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("transport", "death", "call"),
    some_fast([*_DYING_FAST, *(case for case in _DYING if case not in _DYING_FAST)], _DYING_FAST),
)
def test_call_rank_dies_others_raise_and_make_a_new_group(tmp_path, transport, death, call):
    body = f"""
assert repr(comm).endswith(", {TRANSPORTS[transport]}>"), comm
before = held()
call = CALLS["{call}"](comm)
call()
comm.barrier()
if comm.rank == 1:
    def die():
        {DEATHS[death]}
    threading.Timer(0.1, die).start()
print(until_error(call), flush=True)
comm.close()
call = comm = None
rank = int(os.environ["PYCOLLECTIVE_RANK"])
again = rendezvous(0, rank // 2, 2)
assert again.all_reduce(np.ones(70_000))[-1] == 2
again.close()
again = None
print("again", grown(before))
"""
    done = run(tmp_path, transport, 3, body)
    for rank in (0, 2):
        assert done.outputs[rank].startswith("PeerLostError"), done
        assert "rank 1" in done.outputs[rank], done
        assert done.outputs[rank].endswith("\nagain \n"), done
    assert done.outputs[1] == ""
    code = {"kill": -9, "exit 0": 0, "exit 3": 3}[death]
    assert done.codes in ([0, code, 0], [code % 256 if code >= 0 else 137])


_EARLY = [
    (end, t)
    for end in ("sys.exit(0)", "raise ValueError('broken')", "comm.close()")
    for t in TRANSPORTS
]
_EARLY_FAST = [
    ("sys.exit(0)", "shm"), ("raise ValueError('broken')", "shm"), ("comm.close()", "host"),
    ("sys.exit(0)", "mixed"), ("comm.close()", "tcp"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("end", "transport"), some_fast(_EARLY, _EARLY_FAST))
def test_call_rank_leaves_early_others_raise_peer_lost_error(tmp_path, end, transport):
    body = f"""
comm.barrier()
if comm.rank == 1:
    {end}
else:
    print(until_error(lambda: comm.all_reduce(np.ones(4))))
"""
    done = run(tmp_path, transport, 3, body)
    for rank in (0, 2):
        if (
            "PeerLostError rank 1 (process" in done.outputs[rank]
        ):  # the launcher reported the end first
            assert "exited with status 1" in done.outputs[rank] and "broken" in end, done
            continue
        assert "rank 1 has left the group after 1 call" in done.outputs[rank], done
        assert "is in all_reduce #2" in done.outputs[rank], done
    assert ("ValueError: broken" in done.errors) == ("broken" in end)


@pytest.mark.parametrize("transport", ["shm"])  # no rank waits for it at the start
def test_call_rank_never_joins_others_raise_peer_lost_error(tmp_path, transport):
    preamble = """
import os, sys
if os.environ["PYCOLLECTIVE_RANK"] == "1":
    sys.exit(0)
from in_ranks import *
comm = pc.init(timeout=20)
"""
    body = "print(until_error(lambda: comm.all_reduce(np.ones(4))))"
    done = run(tmp_path, transport, 2, body, preamble)
    assert "PeerLostError rank 1 has left the group after 0 calls" in done.outputs[0]


# Ranks that survive ---------------------------------------------------------------------------

IN_TURN = """
assert repr(comm).endswith(", TRANSPORT>"), comm
pids = [int(p) for p in comm.all_gather(np.array([os.getpid()]))]
victim = comm.rank == 1
caught = Path("caught")

def later(seconds, what, *args):
    timer = threading.Timer(seconds, what, args)
    timer.start()

def abort(group, call):
    if victim:
        later(0.05, group.abort, "on purpose")
    return until_error(call)

def leave(group, call):
    if not victim:
        return until_error(call)
    call()
    group.close()

def interrupt(group, call):
    if victim:
        later(0.1, os.kill, os.getpid(), signal.SIGINT)
        error = until_error(call)
        if name.startswith("async"):  # the call continues after the interrupt
            group.abort("rank 1 was interrupted")
        caught.touch()
        return error
    if comm.rank == 0:  # without rank 0, the call cannot end before the interrupt
        assert wait_for(caught.exists)
    return until_error(call)

def stop(group, call):
    group.timeout = 0.8
    if victim:
        later(0.05, os.kill, os.getpid(), signal.SIGSTOP)
    if comm.rank == 0:
        return resume_after(pids[1], lambda: until_error(call))
    return until_error(call)

def cut(group, call):
    sockets = [sock for number, sock in connections().items() if number not in others]
    def shut():
        for sock in sockets:
            sock.shutdown(socket.SHUT_RDWR)
    if victim:
        later(0.05, shut)
    error = until_error(call)
    for sock in sockets:
        sock.close()
    return error

before = None
for fault, name in CASES:
    others = connections()
    for sock in others.values():
        sock.close()
    group = comm.split(0)
    call = CALLS[name](group)
    call()
    comm.barrier()  # every rank has returned from the call
    print(fault, name, globals()[fault](group, call), sep=" | ", flush=True)
    group.timeout = 20
    group.close()
    del group, call
    comm.barrier()
    caught.unlink(missing_ok=True)
    before = before or held()  # after the first fault, as some objects are made only once
assert comm.all_reduce(np.ones(70_000))[-1] == comm.size
print("held", grown(before))
"""

EXPECTED = {  # the results of rank 1, and of the other ranks
    "abort": ("AbortedError on purpose", "AbortedError on purpose"),
    "leave": ("None", "PeerLostError rank 1"),
    "interrupt": ("KeyboardInterrupt", "AbortedError rank 1"),
    "stop": ("CollectiveTimeoutError", "CollectiveTimeoutError"),
    "cut": ("PeerLostError", "PeerLostError"),
}
_FAST_CALLS = ["large", "send"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "transport"),
    some_fast([("some", "shm"), *(("all", t) for t in TRANSPORTS)], [("some", "shm")]),
)
def test_call_rank_fails_and_survives_parent_group_still_works(tmp_path, transport, calls):
    """One split group after the other fails, and their parent group still works."""
    # The fault `cut` needs a transport with connections.
    faults = [f for f in EXPECTED if f != "cut" or transport in ("tcp", "mixed")]
    names = _FAST_CALLS if calls == "some" else list(CALLS)
    cases = [(fault, name) for fault in faults for name in names]
    body = IN_TURN.replace("CASES", repr(cases)).replace("TRANSPORT", TRANSPORTS[transport])
    done = run(tmp_path, transport, 3, body, seconds=180)
    for rank, output in enumerate(done.outputs):
        lines = output.splitlines()
        assert len(lines) == len(cases) + 1, done
        for (fault, name), line in zip(cases, lines, strict=False):
            own, others = EXPECTED[fault]
            # A rank stopped within a split may have made its calls, and join the new group too late.
            refused = f"{fault} | {name} | CollectiveError the group of color 0 could not be made"
            if not (fault == "stop" and name == "split" and line.startswith(refused)):
                assert line.startswith(f"{fault} | {name} | {own if rank == 1 else others}"), done
            assert "rank 1" in line or fault in ("abort", "leave") or rank == 1, done
        assert lines[-1] == "held ", done
    assert set(done.codes) == {0}, done


@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["mixed"]))
def test_forked_child_has_no_rank_and_does_not_affect_the_group(tmp_path, transport):
    """The child has no rank; neither its calls nor its end affect the group."""
    body = """
comm.barrier()
comm.all_reduce(np.ones(3), async_op=True).wait()  # there are threads, which the child lacks
child = os.fork()
if child == 0:
    for call in (comm.barrier, lambda: comm.all_reduce(np.ones(3)), lambda: comm.split(0)):
        assert "belongs to the parent process: a forked child has no rank" in until_error(call)
    comm.abort("by the child")
    comm.close()
    print(pc.local_group(1)[0].all_reduce(np.ones(3)).sum(), len(connections()), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert comm.all_reduce(np.ones(3)).sum() == 3 * comm.size
Path(f"past{comm.rank}").touch()
if comm.rank == 1:  # the others have their sums
    assert wait_for(lambda: Path("past0").exists() and Path("past2").exists())
if comm.rank == 1 and os.fork() == 0:  # the child outlives the killed rank 1
    os.close(1), os.close(2)
    time.sleep(30)
    os._exit(0)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print(until_error(comm.barrier), flush=True)
"""
    done = run(tmp_path, transport, 3, body)
    assert [output.startswith("3.0 0\n") for output in done.outputs] == [True] * 3, done
    for rank in (0, 2):
        assert "\nPeerLostError rank 1 " in done.outputs[rank], done


@pytest.mark.slow
@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["mixed"]))
def test_forked_children_end_regardless_of_other_threads(tmp_path, transport):
    """A thread that makes asynchronous calls may hold any mutex when its process forks."""
    body = """
works = [comm.all_reduce(np.ones(3), async_op=True) for _ in range(3000)]
while comm.rank == comm.size - 1 and not works[-1].done():
    child = os.fork()
    if child == 0:
        os._exit(0)
    until = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        assert time.monotonic() < until
        time.sleep(0.0001)
assert all(work.wait()[0] == comm.size for work in works)
"""
    done = run(tmp_path, transport, 3, body)
    assert set(done.codes) == {0}, done


def test_forked_children_that_drop_and_end_leave_the_arrays_of_all_ranks(tmp_path):
    body = """
arrays = [comm.empty(100_000), comm.empty(100)]
for x in arrays:
    x.fill(comm.rank + 1)
comm.barrier()
for ends in (lambda: os._exit(0), sys.exit, sys.exit) if comm.rank == 0 else ():
    child = os.fork()
    if child == 0:
        if ends is not sys.exit:
            arrays.clear()
            gc.collect()
        else:
            arrays = None
        ends()
    assert os.waitpid(child, 0)[1] == 0
comm.barrier()
for x in arrays:
    assert (x == comm.rank + 1).all()
    assert (comm.all_reduce(x) == 3).all()
"""
    done = run(tmp_path, "shm", 2, body)
    assert set(done.codes) == {0}, done


# A rank that is stopped in the middle of its work ---------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", some_fast(["shm", "host"], ["shm"]))
def test_rank_stopped_in_the_middle_of_a_sum_writes_nothing_when_it_resumes(tmp_path, transport):
    """Rank 0 times out and reuses its array; the resumed rank must not write to that array."""
    body = """
ITEMS = 8_000_000
half = ITEMS // 2  # rank 1 writes the second one, on both ranks
pids = [int(p) for p in comm.all_gather(np.array([os.getpid()]))]
for attempt in range(100):  # a busy machine often stops rank 1 too late
    group = comm.split(0)
    x = group.empty(ITEMS)
    x.fill(1)
    comm.barrier()
    group.timeout = 0.4
    over = False
    def watch():
        while x[half] == 1 and not over:
            pass
        os.kill(pids[1], signal.SIGSTOP)
    if comm.rank == 0:
        watcher = threading.Thread(target=watch)
        watcher.start()
    try:
        group.all_reduce(x, out=x)
        error = ""
    except pc.CollectiveError as caught:
        error = type(caught).__name__
    over = True
    inside = False
    if comm.rank == 0:
        watcher.join()
        assert wait_for(lambda: is_stopped(pids[1]))
        inside = bool((x[half:] == 2).any() and (x[half:] == 1).any())
        x.fill(-1)
        os.kill(pids[1], signal.SIGCONT)
    comm.barrier()  # rank 1 calls it after it has left the other call
    if comm.rank == 0:
        assert (x == -1).all(), (attempt, inside, int((x != -1).sum()))
    both = comm.all_gather(np.array([inside, error != ""]))
    if both[0]:
        assert both[1] and both[3], (error, both)  # no rank uses a result of the failed sum
        print("met")
    group.timeout = 20
    group.close()
    del x, group
    gc.collect()
    if both[0]:
        break
"""
    done = run(tmp_path, transport, 2, body, seconds=120)
    assert done.outputs == ["met\n"] * 2, done


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_stopped_in_a_call_that_all_entered_is_named_at_the_deadline(tmp_path, transport):
    """Around the ring, rank 0 waits for rank 3, rank 3 for rank 2, and rank 2 for rank 1."""
    body = """
pids = [int(p) for p in comm.all_gather(np.array([os.getpid()]))]
comm.timeout = 6
if comm.rank == 1:  # handlers run while it waits in the call
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
if comm.rank == 0:
    assert wait_for(lambda: is_stopped(pids[1]))
try:
    comm.all_reduce(np.ones(300_000), algorithm="ring")
except pc.CollectiveError as error:
    print(error)
Path(f"over-{comm.rank}").touch()
if comm.rank == 0:  # the rank that found the error has told rank 1 before it leaves the call
    assert wait_for(lambda: len(list(Path().glob("over-*"))) == 3)
    os.kill(pids[1], signal.SIGCONT)
"""
    done = run(tmp_path, transport, 4, body, seconds=60)
    for text in done.outputs:
        assert "until its deadline for rank 1, which is in this call but silent" in text, done


@pytest.mark.parametrize("call", ["all_reduce", "ring", "message"])
@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["shm"]))
def test_rank_that_resumes_after_its_deadline_finishes_the_call(tmp_path, transport, call):
    """Rank 0 has time, and rank 1 was not running when its own deadline passed."""
    body = f"""
pids = [int(p) for p in comm.all_gather(np.array([os.getpid()]))]
comm.timeout = 20 if comm.rank == 0 else 0.5
x = np.ones(5_000_000)  # more than a poll copies
call = {{
    "all_reduce": lambda: comm.all_reduce(x, out=x),
    "ring": lambda: comm.all_reduce(x, out=x, algorithm="ring"),
    "message": lambda: comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0),
}}["{call}"]
if comm.rank == 1:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
else:
    assert wait_for(lambda: is_stopped(pids[1]))
    threading.Timer(1, os.kill, (pids[1], signal.SIGCONT)).start()
call()
comm.timeout = 20
comm.barrier()
print(x[0], x[-1])
"""
    done = run(tmp_path, transport, 2, body, seconds=60)
    sums = "1.0 1.0\n" if call == "message" else "2.0 2.0\n"
    assert done.outputs == [sums] * 2, done


@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["shm"]))
def test_init_with_a_bad_argument_can_be_repeated(tmp_path, transport):
    body = """
for bad in ({"timeout": -1}, {"join_timeout": float("nan")}, {"timeout": "long"}):
    try:
        pc.init(**bad)
    except (TypeError, ValueError) as error:
        assert "must be a positive number of seconds" in str(error), error
    else:
        raise AssertionError(bad)
print(pc.init(timeout=20).all_reduce(np.ones(2)))
"""
    done = run(tmp_path, transport, 2, body, "from in_ranks import *\n")
    assert done.outputs == ["[2. 2.]\n"] * 2, done


# Ranks without a privilege --------------------------------------------------------------------

knows_numbers = pytest.mark.skipif(
    platform.machine() not in SYSTEM_CALLS, reason="system calls have unknown numbers here"
)


@knows_numbers
@pytest.mark.parametrize("transport", some_fast(["shm", "host"], ["shm"]))
def test_rank_without_membarrier_is_woken_by_a_fence(tmp_path, transport):
    """The other ranks learn that this rank cannot take part in the light barrier."""
    preamble = """
from in_ranks import *
if os.environ["PYCOLLECTIVE_RANK"] == "1":
    refuse("membarrier")
comm = pc.init(timeout=20)
"""
    body = """
comm.barrier()
print(getattr(comm._group, "needing_fences", "mixed"))  # an attribute of `ShmGroup` alone
for turn in range(300):
    if turn % 100 == comm.rank:
        time.sleep(0.02)  # the others sleep
    assert comm.all_reduce(np.ones(3))[0] == 3
"""
    done = run(tmp_path, transport, 3, body, preamble)
    assert done.outputs == ["[1]\n" if transport == "shm" else "mixed\n"] * 3, done


@pytest.mark.slow
@knows_numbers
@pytest.mark.parametrize("is_refused", [False, True])
def test_arrays_of_peers_are_read_remotely_only_if_every_rank_may_read_them(tmp_path, is_refused):
    """28 turns use staging memory. The next six read the peers' arrays, if every rank may."""
    preamble = f"""
from in_ranks import *
if {is_refused} and os.environ["PYCOLLECTIVE_RANK"] == "1":
    refuse("process_vm_readv")
comm = pc.init(timeout=20)
"""
    body = """
length, ranks, rank = 70_001, comm.size, comm.rank
for turn in range(35):
    root = turn % 2
    array = np.arange(ranks * length, dtype="f4").reshape(ranks, length) + turn

    def check(call, expected, *arguments, out, **options):
        given = array.copy()
        got = call(given, *arguments, out=out, **options)
        given.fill(-1)  # nobody reads it any more
        assert got is None or (got == expected).all(), (call, turn)
        if out is not None:
            out.fill(-1)

    whole, part = np.empty_like(array), np.empty(length, "f4")
    check(comm.all_reduce, 3 * array, out=whole)
    check(lambda given, out: comm.all_reduce(given, out=given).copy(), 3 * array, out=None)
    check(comm.reduce, 3 * array, root=root, out=whole if rank == root else None)
    check(comm.reduce_scatter, 3 * array[rank], out=part)
    check(comm.broadcast, array, root=root, out=whole)
    check(comm.all_to_all, np.stack([array[rank]] * ranks), out=whole)
    check(lambda given, **options: comm.all_gather(given[rank], **options), array, out=whole)
    check(
        lambda given, **options: comm.gather(given[rank], **options),
        array, root=root, out=whole if rank == root else None,
    )
    check(
        lambda given, **options: comm.scatter(given if rank == root else None, **options),
        array[rank], root=root, out=part,
    )
for turn in range(43):  # the first eight use each page of the staging memory
    sent = np.full(length, rank + turn, "f4")
    work = comm.send(sent, (rank + 1) % ranks, async_op=True)
    got = comm.recv(np.empty(length, "f4"), (rank - 1) % ranks)
    work.wait()
    sent.fill(-1)  # nobody reads it any more
    assert (got == (rank - 1) % ranks + turn).all(), turn
print(comm._group.all_read_remotely)
"""
    done = run(tmp_path, "shm", 3, body, preamble)
    assert done.outputs == [f"{not is_refused}\n"] * 3, done


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_to_all_of_a_rank_that_stages_and_reads_its_peers_ends(tmp_path, ranks):
    """A rank with an ordinary array ends its trials before ranks whose arrays are mapped."""
    body = """
length = 300_000  # a part has more bytes than a rank stages ahead
array = np.arange(comm.size * length, dtype="f4").reshape(comm.size, length)
mapped = comm.empty(array.shape, "f4")
mapped[...] = array
expected = np.stack([array[comm.rank]] * comm.size)
for _ in range(16):
    assert (comm.all_to_all(array if comm.rank == 0 else mapped) == expected).all()
for _ in range(8):
    assert (comm.all_to_all(array) == expected).all()
print("done")
"""
    done = run(tmp_path, "shm", ranks, body)
    assert done.outputs == ["done\n"] * ranks, done


@pytest.mark.slow
@knows_numbers
@pytest.mark.parametrize("call", ["all_to_all", "recv"])
def test_rank_that_can_no_longer_read_its_peer_names_the_peer_and_its_call(tmp_path, call):
    """The fourteenth long call reads the peer's array, as do six messages."""
    body = f"""
x = np.zeros((2, 1 << 20), "f4")

def exchange():
    if {call!r} == "all_to_all":
        comm.all_to_all(x)
    else:  # without another thread, which could still read
        for call in (comm.send, comm.recv)[:: 1 - 2 * comm.rank]:
            call(x, 1 - comm.rank)

comm.barrier()
for turn in range(13):
    exchange()
if comm.rank == 0:
    refuse("process_vm_readv")
try:
    if {call!r} == "all_to_all":
        comm.all_to_all(x)
    for _ in range(6):
        comm.recv(x, 1) if comm.rank == 0 else comm.send(x, 0)
except pc.PeerLostError as error:
    print(error.ranks, error.call, flush=True)
"""
    done = run(tmp_path, "host", 2, body)
    calls = {
        "all_to_all": "all_to_all #15 (float32[2, 1048576], direct)",
        "recv": "recv (float32[2, 1048576], tag 0) from rank 1",
    }
    assert done.outputs[0] == f"(1,) {calls[call]}\n", done


TRIALS = """
trials = ["plain"] * 6 + ["past_cache"] * 6 + ["remote_read"] * 6
x, y = np.zeros((2, 2, 1 << 20), "f4")
ways = []
def calls(many):
    for turn in range(many):
        comm.all_to_all(x, out=y)
        ways.append(comm._group.copy_way)
def beginnings():
    return [n for n in range(len(ways)) if ways[n : n + len(trials)] == trials]
"""


@knows_numbers
@pytest.mark.slow
def test_long_calls_try_all_ways_of_copying_again_after_1024_calls(tmp_path):
    body = """
calls(2100)
begun = beginnings()
print(begun[0], 2 <= len(begun) < 20, all(np.diff(begun) <= 1024), flush=True)
"""
    done = run(tmp_path, "shm", 2, TRIALS + body)
    assert done.outputs == ["1 True True\n"] * 2, done


@knows_numbers
@pytest.mark.slow
def test_long_calls_that_become_slow_try_all_ways_of_copying_again(tmp_path):
    """A rank that is stopped for most of the time makes each call slow."""
    body = """
pids = comm.all_gather(np.array([os.getpid()]))
calls(200)
while len(ways) < beginnings()[-1] + 150:  # a busy machine has begun trials, and these have a rest
    calls(10)
before = len(ways)
if comm.rank == 0 and not os.fork():
    for _ in range(10_000):  # a minute, if the machine is busy
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.005)
        os.kill(pids[1], signal.SIGCONT)
        time.sleep(0.0002)  # shorter than a call
        if Path("over").exists():
            break
    os._exit(0)
calls(90)  # eleven of them are checked
if comm.rank == 0:
    Path("over").touch()
    os.wait()
comm.barrier()
print(any(n >= before for n in beginnings()), flush=True)
"""
    done = run(tmp_path, "shm", 2, TRIALS + body)
    assert done.outputs == ["True\n"] * 2, done


def test_messages_are_timed_after_each_page_of_the_staging_memory_was_used(tmp_path):
    """The first use of a page costs more than a copy, so a choice by time would be wrong."""
    body = """
x = np.zeros(1 << 14, "f4")
for turn in range(34):  # 32 of them fill the memory
    work = comm.send(x, 1 - comm.rank, async_op=True)
    comm.recv(x.copy(), 1 - comm.rank)
    work.wait()
    comm.barrier()
    if turn in (30, 33):
        print(comm._group.all_read_remotely)  # tested by the first message that is timed
    comm.barrier()
"""
    done = run(tmp_path, "shm", 2, body)
    assert done.outputs == ["False\nTrue\n"] * 2, done


@pytest.mark.slow
@pytest.mark.parametrize("call", ["comm.all_to_all(x)", "comm.send(x, 1 - comm.rank)"])
def test_rank_that_is_killed_while_a_peer_reads_its_array_is_named(tmp_path, call):
    """Rank 0 either cannot read the memory, or has already learned that rank 1 has ended."""
    body = f"""
x = np.zeros((2, 1 << 20), "f4")
y = np.empty_like(x)

def exchange():
    if {call!r}.startswith("comm.send"):
        work = comm.send(x, 1 - comm.rank, async_op=True)
        comm.recv(y, 1 - comm.rank)
        work.wait()
    else:
        {call}

for turn in range(20):
    exchange()
if comm.rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        exchange()
except pc.PeerLostError as error:
    print(error.ranks)
"""
    done = run(tmp_path, "host", 2, body)
    assert done.outputs[0] == "(1,)\n", done


@pytest.mark.slow
@knows_numbers
@pytest.mark.parametrize("transport", ["shm", "mixed"])
def test_rank_that_sleeps_passes_the_heavy_barrier(tmp_path, transport):
    """The rank that wakes it passes no heavy barrier in its place."""
    body = """
comm.barrier()
heard = []
if comm.rank == 0:
    refuse("membarrier", heard)
comm.barrier()
for _ in range(50):  # rank 0 may come so late that it does not sleep
    if comm.rank != 0:  # so that rank 0 waits in the memory that it shares with rank 1
        time.sleep(0.3)
    comm.all_reduce(np.ones(100_000))
    if comm.broadcast(np.array([len(heard) > 0]))[0]:
        break
print(len(heard) > 0)
comm.barrier()
"""
    done = run(tmp_path, transport, 3, body)
    assert done.outputs == ["True\n", "False\n", "False\n"], done


# Calls that take long --------------------------------------------------------------------------

SLOWLY = """
from in_ranks import *
os.environ["PYCOLLECTIVE_WARN_AFTER"] = "1.2"
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
comm = pc.init(timeout=40)
pids = [int(p) for p in comm.all_gather(np.array([os.getpid()]))]

def slowly(call):
    # Rank 1 works for some milliseconds at a time, so that bytes move all the time.
    began, over = time.monotonic(), threading.Event()
    def hold_up():
        while not over.is_set():
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(0.15)
            os.kill(pids[1], signal.SIGCONT)
            time.sleep(0.005)
    if comm.rank == 0:
        thread = threading.Thread(target=hold_up)
        thread.start()
    call()
    over.set()
    if comm.rank == 0:
        thread.join()
    return time.monotonic() - began

def long_enough(make):
    items = 4_000_000
    while True:
        call = make(items)
        comm.barrier()
        seconds = slowly(call)
        comm.barrier()
        if comm.broadcast(np.array([seconds]), 0)[0] > 2.5:
            return
        items *= 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "call", ["comm.all_reduce(x, 'max', out=x)", "comm.all_reduce(x, 'max', out=x, algorithm='ring')",
             "comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)"],
)  # fmt: skip
def test_long_call_in_which_bytes_move_does_not_warn(tmp_path, transport, call):
    body = f"""
def make(items):
    x = np.ones(items)
    return lambda: {call}
long_enough(make)
"""
    done = run(tmp_path, transport, 2, body, SLOWLY, seconds=120)
    # On a busy machine, a rank may still make its array while the other one waits in the barrier.
    warnings = [line for line in "".join(done.outputs).splitlines() if "in barrier #" not in line]
    assert not warnings, done
    assert done.codes == [0], done


# Exhausted resources ---------------------------------------------------------------------------


@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["shm"]))
def test_group_without_descriptors_still_calls_and_refuses_split(tmp_path, transport):
    """Calls and arrays need no descriptors; split fails on every rank, and the group still works."""
    body = """
comm.barrier()  # a process may start seconds after another
comm.timeout = 4  # the others wait this long in split
comm.all_reduce(np.ones(3), async_op=True).wait()
comm.all_gather(np.ones(1))  # both ways
with without_descriptors() if comm.rank == 1 else contextlib.nullcontext():
    assert (comm.all_reduce(np.ones(500_000)) == comm.size).all()
    CALLS["send"](comm)()
    print(until_error(lambda: comm.split(0)))
    for items in (10, 100_000):
        x = comm.empty(items)
        x.fill(1)
        assert (comm.all_reduce(x, out=x) == 3).all()
comm.timeout = 20.0
assert comm.split(0).all_reduce(np.ones(3)).sum() == 9
"""
    done = run(tmp_path, transport, 3, body)
    assert set(done.codes) == {0}, done
    for rank, output in enumerate(done.outputs):
        assert output.startswith("CollectiveError the group of color 0 could not be made"), done
        assert "Too many open files" in output or rank != 1, done


RENDEZVOUS = """
from in_ranks import *
import pycollective.launch.tcp  # a module is a file too
from pycollective.launch import RendezvousError
wait_for_processes(3)
before = held()
with {limit} if os.environ["PYCOLLECTIVE_RANK"] == "1" else contextlib.nullcontext():
    try:
        comm = pc.init(timeout=20, join_timeout=4)
        comm.barrier()
        said = "made"
    except (RendezvousError, pc.PeerLostError) as error:
        said = in_words(error)
print(said)
"""


@pytest.mark.parametrize(
    ("transport", "left"),
    some_fast(
        [("mixed", n) for n in (0, 1, 2, 3, 4, 5, 7, 9)] + [("host", 1), ("tcp", 1), ("tcp", 4)],
        [("tcp", 4)],
    ),
)
def test_rendezvous_with_few_descriptors_raises_at_once_and_can_be_repeated(
    tmp_path, transport, left
):
    """Rank 1 reports at once that it has run out of descriptors. More than five are enough."""
    preamble = RENDEZVOUS.format(limit=f"without_descriptors({left})")
    body = """
comm = None
assert not grown(before), grown(before)
again = rendezvous(0)
assert again.all_reduce(np.ones(70_000))[-1] == again.size
print("again")
"""
    done = run(tmp_path, transport, 3, body, preamble)
    assert set(done.codes) == {0}, done
    assert done.outputs[1].startswith("RendezvousError") or left > 5, done
    assert "Too many open files" in done.outputs[1] or left > 5, done
    assert all(output.endswith("again\n") for output in done.outputs), done


@pytest.mark.slow
@pytest.mark.parametrize("left", some_fast([0, 1, 2, 4], [1]))
def test_split_without_descriptors_leaves_none_open(tmp_path, left):
    """Rank 0, which listens for the new group, has `left` free descriptors."""
    body = f"""
before = held()
comm.barrier()
comm.timeout = 4.0
with without_descriptors({left}) if comm.rank == 0 else contextlib.nullcontext():
    try:
        comm.split(0)
    except pc.CollectiveError as error:
        print("Too many open files" in str(error) or "no secret" in str(error))
assert not grown(before), grown(before)
comm.timeout = 20.0
assert comm.split(0).all_reduce(np.ones(3))[0] == 2
"""
    done = run(tmp_path, "host", 2, body)
    assert set(done.codes) == {0}, done
    assert all(output == "True\n" for output in done.outputs), done


@pytest.mark.slow
@pytest.mark.parametrize("transport", some_fast(["shm", "mixed"], ["shm"]))
def test_empty_asks_no_other_rank_and_needs_no_address_space(tmp_path, transport):
    body = """
from pycollective import _core
x = comm.empty(1000)
if comm.rank == 1:
    with at_most(resource.RLIMIT_AS, 1 << 28):
        large = comm.empty(40_000_000)
    assert _core.is_shared(large)
y, z = comm.empty(1000), comm.empty(100_000)
for a in (x, y, z):
    a.fill(comm.rank)
comm.barrier()
for a in (x, y, z):
    assert (a == comm.rank).all()
    assert (comm.all_reduce(a, out=a) == 3).all()
"""
    done = run(tmp_path, transport, 3, body)
    assert set(done.codes) == {0}, done


@pytest.mark.slow
@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["shm", "mixed"]))
def test_group_without_memory_raises_memory_error_and_still_works(tmp_path, transport):
    body = """
x, tiny = np.ones(3_000_000), np.ones(100)
ragged, scratch = comm.split(0), comm.split(0)
def attempt(call):
    try:
        call()
        return "done"
    except (MemoryError, pc.AbortedError) as error:
        return in_words(error)
comm.all_reduce(tiny)
comm.barrier()
with without_memory() if comm.rank == 1 else contextlib.nullcontext():
    if comm.rank == 1:  # it cannot even begin, and may try again
        print(attempt(lambda: comm.all_reduce(x[::2])))  # needs memory for a copy
    said = attempt(lambda: comm.empty(3_000_000))
    assert said == "done" or comm.rank == 1, said
    # Calls that have begun fail on all ranks.
    print(attempt(lambda: ragged.all_gather(x[:1_000_000], ragged=True, out=x)))  # copies the overlap
    print(attempt(lambda: scratch.reduce(x, root=2, algorithm="tree")))  # needs scratch
assert (comm.all_reduce(tiny) == 3).all()
print("goes on", flush=True)
if comm.rank == 1:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
print(until_error(lambda: comm.all_reduce(np.ones(50_000_000))) if comm.rank != 1 else
      comm.all_reduce(np.ones(50_000_000)))  # ends with a MemoryError
"""
    done = run(tmp_path, transport, 3, body)
    for rank, output in enumerate(done.outputs):
        lines = output.splitlines()
        if rank == 1:
            assert [line.split()[0] for line in lines] == 3 * ["MemoryError"] + ["goes"], done
            continue
        assert len(lines) == 4, done
        assert lines[0] == (
            "AbortedError rank 1 left a ragged all_gather because of an error of its own: MemoryError"
        ), done
        assert lines[1].startswith("AbortedError rank 1 left reduce because of an error"), done
        assert lines[2] == "goes on", done
        assert lines[3].startswith("PeerLostError rank 1 "), done
    assert "MemoryError" in done.errors, done


@pytest.mark.parametrize(
    ("transport", "fault"),
    some_fast(
        [(t, f) for t in ("host", "tcp", "mixed") for f in ("kill", "interrupt", "stop")],
        [],
    ),
)
def test_rendezvous_fault_of_one_rank_raises_on_all_ranks(tmp_path, transport, fault):
    """Ranks 0 and 1 wait for rank 2, which joins late or never; a fault hits rank 1."""
    preamble = """
from in_ranks import *
rank = int(os.environ["PYCOLLECTIVE_RANK"])
wait_for_processes(3)
before = held()
"""
    deed = {"kill": "SIGKILL", "interrupt": "SIGINT", "stop": "SIGSTOP"}[fault]
    body = f"""
came = Path("came")
if rank == 1:
    Path("pid").write_text(str(os.getpid()))
    def deed():
        time.sleep(0.3)
        came.touch()
        os.kill(os.getpid(), signal.{deed})
    threading.Thread(target=deed).start()
if rank == 2:
    assert wait_for(came.exists)
    pid = Path("pid").read_text()
    assert wait_for(lambda: is_stopped(pid)) if "{fault}" == "stop" else not time.sleep(0.5)
def call():
    comm = pc.init(timeout=20, join_timeout=2.5)
    comm.barrier()
    comm.close()
    raise MemoryError("made")  # for until_error
print(until_error(call), flush=True)
call = None
if rank == 0 and "{fault}" == "stop":
    os.kill(int(Path("pid").read_text()), signal.SIGCONT)
assert not grown(before), grown(before)
number = rank // 2 if "{fault}" == "kill" else rank
again = rendezvous(0, number, 2 if "{fault}" == "kill" else 3)
assert again.all_reduce(np.ones(70_000))[-1] == again.size
print("again")
"""
    done = run(tmp_path, transport, 3, body, preamble)
    own = {"kill": "", "interrupt": "KeyboardInterrupt", "stop": "RendezvousError"}[fault]
    assert done.outputs[1].startswith(own), done
    for rank, output in enumerate(done.outputs):
        if rank != 1:
            assert output.startswith(("RendezvousError", "PeerLostError")), done
            assert re.search("rank 1|ranks 1, 2|gone", output) or rank == 2, done
        assert output.endswith("again\n") or (rank == 1 and fault == "kill"), done
