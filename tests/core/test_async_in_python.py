"""Asynchronous calls that make several calls, with Python between them: ragged calls and `split`."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref

import leftovers
import numpy as np
import pytest

import pycollective as pc


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_gather(np.ones(1 + comm.rank), ragged=True, async_op=True),
        lambda comm: comm.split(0, async_op=True),
    ],
    ids=["all_gather", "split"],
)
def test_communicator_dropped_after_an_unawaited_call_is_freed(on_ranks, call):
    comms = pc.local_group(2, timeout=20)
    alive = [weakref.ref(comm) for comm in comms]

    def work(comm):
        done = call(comm)
        assert wait_until(done.done)

    assert on_ranks(comms, work) == [None, None]
    del comms
    gc.collect()
    assert wait_until(lambda: not any(ref() for ref in alive))
    leftovers.assert_no_threads()


def test_communicator_released_on_the_progress_thread_leaves_the_group():
    """A thread cannot join itself, so the end of the next communicator joins it."""
    released, other = pc.local_group(2, timeout=20)
    let_go = threading.Event()

    def call(comm):
        let_go.wait(20)

    done = released._run_later(functools.partial(call, released))
    core = done._tasks[0]
    del released, done
    gc.collect()
    let_go.set()
    with pytest.raises(pc.PeerLostError, match="rank 0 has left the group"):
        other.barrier()
    assert core.wait(20)
    del core
    other.close()
    leftovers.assert_no_threads()


def test_async_call_with_an_error_of_its_own_aborts_the_group(on_ranks):
    def fail():
        raise MemoryError("no memory is left")

    def work(comm):
        if comm.rank == 1:
            done = comm._run_later(fail)
            for _ in range(2):
                with pytest.raises(MemoryError, match="no memory is left"):
                    done.wait()
        try:
            comm.barrier()
        except pc.AbortedError as error:
            return str(error)
        finally:
            comm.close()

    text = "rank 1 left an asynchronous call because of an error of its own: MemoryError"
    assert on_ranks(pc.local_group(2, timeout=20), work) == [text] * 2


def test_work_raises_the_python_error_of_its_task():
    (comm,) = pc.local_group(1, timeout=20)
    done = pc.Work([comm._core.run_later(lambda: 1 / 0)], lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            done.wait()
    comm.close()
