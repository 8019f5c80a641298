"""What befalls a rank of a real process: all hear of it, nobody hangs, and a new group works.

Every fault over every transport; what a rank may be in is `in_ranks.CALLS`.
"""

from __future__ import annotations

import sys

import pytest
from in_ranks import CALLS
from processes import TRANSPORTS, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def some_fast(cases, fast):
    """Mark as slow what is not among the fast cases."""
    return [
        pytest.param(*case, id="-".join(case), marks=[] if case in fast else pytest.mark.slow)
        for case in cases
    ]


# A rank that is no more -----------------------------------------------------------------------

DEATHS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit 0": "os._exit(0)",
    "exit 3": "os._exit(3)",
}
_DYING = [(t, d, c) for t in TRANSPORTS for d in DEATHS for c in CALLS]
_DYING_FAST = [
    *((t, "kill", "large") for t in TRANSPORTS), *((t, "exit 0", "small") for t in TRANSPORTS),
    ("shm", "exit 3", "send"), ("tcp", "kill", "split"), ("mixed", "exit 3", "async"),
]  # fmt: skip


@pytest.mark.parametrize(("transport", "death", "call"), some_fast(_DYING, _DYING_FAST))
def test_a_rank_that_dies_in_a_call(tmp_path, transport, death, call):
    body = f"""
assert repr(comm).endswith(", {TRANSPORTS[transport]}>"), comm
before = held()
call = CALLS["{call}"](comm)
call()
if comm.rank == 1:
    def die():
        {DEATHS[death]}
    threading.Timer(0.1, die).start()
print(until_error(call), flush=True)
comm.close()
call = comm = None
rank = int(os.environ["PYCOLLECTIVE_RANK"])
again = meet(0, rank // 2, 2)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError('broken')", "comm.close()"])
def test_a_rank_that_leaves_early(tmp_path, transport, end):
    body = f"""
comm.barrier()
if comm.rank == 1:
    {end}
else:
    print(until_error(lambda: comm.all_reduce(np.ones(4))))
"""
    done = run(tmp_path, transport, 3, body)
    for rank in (0, 2):
        assert "rank 1 has left the group after 1 calls, while rank" in done.outputs[rank], done
        assert "is in all_reduce #2" in done.outputs[rank], done
    assert ("ValueError: broken" in done.errors) == ("broken" in end)


@pytest.mark.parametrize("transport", ["shm"])  # where nobody waits for it at the start
def test_a_rank_that_never_comes(tmp_path, transport):
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


# A rank that goes on --------------------------------------------------------------------------

IN_TURN = """
import itertools
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
        if "KeyboardInterrupt" in error:
            group.abort("rank 1 was interrupted")  # for what goes on by itself
        caught.touch()
        return error
    if comm.rank == 0:  # so that the others cannot go on
        assert wait_for(caught.exists)
    return until_error(call)

def stop(group, call):
    group.timeout = 0.6
    if victim:
        later(0.05, os.kill, os.getpid(), signal.SIGSTOP)
    if comm.rank == 0:
        return stop_until(pids[1], lambda: until_error(call))
    return until_error(call)

def cut(group, call):
    mine = [sock for number, sock in connections().items() if number not in others]
    def shut():
        for sock in mine:
            sock.shutdown(socket.SHUT_RDWR)
    if victim:
        later(0.05, shut)
    error = until_error(call)
    for sock in mine:
        sock.close()
    return error

before = None
for turn, (fault, name) in enumerate(CASES):
    others = connections()
    for sock in others.values():
        sock.close()
    group = comm.split(0)
    call = CALLS[name](group)
    call()
    print(fault, name, globals()[fault](group, call), sep=" | ", flush=True)
    group.timeout = 20
    group.close()
    del group, call
    comm.barrier()
    caught.unlink(missing_ok=True)
    before = before or held()  # after the first: what is made once is there
assert comm.all_reduce(np.ones(70_000))[-1] == comm.size
print("held", grown(before))
"""

EXPECTED = {  # of the rank itself, and of the others
    "abort": ("AbortedError on purpose", "AbortedError on purpose"),
    "leave": ("None", "PeerLostError rank 1"),
    "interrupt": ("KeyboardInterrupt", "AbortedError rank 1"),
    "stop": ("CollectiveTimeoutError", "CollectiveTimeoutError"),
    "cut": ("PeerLostError", "PeerLostError"),
}
_IN_TURN = [(t, f) for t in TRANSPORTS for f in EXPECTED if (t, f) != ("shm", "cut")]
_FAST_CALLS = ["large", "send"]


@pytest.mark.parametrize(("transport", "fault"), _IN_TURN)
@pytest.mark.parametrize("calls", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_a_rank_that_goes_on(tmp_path, transport, fault, calls):
    """One group after the other fails, and the one that they are made of stays as it is."""
    names = _FAST_CALLS if calls == "some" else list(CALLS)
    cases = [(fault, name) for name in names]
    body = IN_TURN.replace("CASES", repr(cases)).replace("TRANSPORT", TRANSPORTS[transport])
    done = run(tmp_path, transport, 3, body)
    own, others = EXPECTED[fault]
    for rank, output in enumerate(done.outputs):
        lines = output.splitlines()
        assert len(lines) == len(cases) + 1, done
        for name, line in zip(names, lines, strict=False):
            assert line.startswith(f"{fault} | {name} | {own if rank == 1 else others}"), done
            assert "rank 1" in line or fault in ("abort", "leave") or rank == 1, done
        assert lines[-1] == "held ", done
    assert set(done.codes) == {0}, done
