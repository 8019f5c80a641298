"""Asynchronous calls: order, errors, deadlines, references to arrays, closing, forks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import pycollective as pc
from pycollective import _core, local_group
from pycollective.comm import Work

RANKS = [1, 2, 5]


def progress_threads():
    """Count the core's threads by their name."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append((task / "comm").read_text().strip())
    return names.count("pc-progress")


def progress_threads_become(count):
    """Return True when `count` threads remain; the system lists joined threads for a moment."""
    gc.collect()  # communicators of earlier tests
    for _ in range(1000):
        if progress_threads() == count:
            return True
        time.sleep(0.01)
    return False


def ended(script, tmp_path):
    """Run a script in a process of its own, and return the ended process."""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def calls(c):
    """Return calls of collectives, each with its result; each call takes ``async_op``."""
    n, r = c.size, c.rank
    x = np.arange(6.0).reshape(6, 1) * (r + 1)
    total = np.arange(6.0).reshape(6, 1) * (n * (n + 1) // 2)
    everyone = np.arange(1.0, n + 1)
    strided = np.zeros((6, 2))
    ragged = np.repeat(everyone, np.arange(n))
    return [
        (lambda **k: c.all_reduce(x, **k), total),
        (lambda **k: c.all_reduce(x, out=strided[:, :1], **k), total),
        (lambda **k: c.reduce(x, root=n - 1, **k), total if r == n - 1 else None),
        (lambda **k: c.broadcast(np.full(3, r), n - 1, **k), np.full(3, n - 1)),
        (lambda **k: c.reduce_scatter(np.arange(2 * n), **k), np.arange(2 * n)[2 * r :][:2] * n),
        (lambda **k: c.all_gather([r + 1.0], **k), everyone),
        (lambda **k: c.all_gather(np.full(r, r + 1.0), ragged=True, **k), ragged),
        (lambda **k: c.gather([r + 1.0], **k), everyone if r == 0 else None),
        (lambda **k: c.scatter(everyone, **k), everyone[r : r + 1]),
        (lambda **k: c.all_to_all(np.full(n, r + 1.0), **k), everyone),
        (lambda **k: c.all_to_all(np.full(n, r + 1.0), [1] * n, **k), everyone),
        (lambda **k: c.all_to_all(np.full(n, r + 1.0), [1] * n, out_counts=[1] * n, **k), everyone),
        (lambda **k: c.barrier(**k), None),
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_async_op_returns_work_with_the_result(ranks, on_ranks):
    def work(c):
        works = [(call(async_op=True), want) for call, want in calls(c)]
        for under_way, want in reversed(works):
            assert isinstance(under_way, Work)
            np.testing.assert_array_equal(under_way.wait(20), want)
            assert under_way.done()
            assert under_way.exception() is None
            assert under_way.result() is under_way.wait()
        many = [np.full(3, c.rank), np.ones((2, 2)), np.array(2.0)]
        out = [np.zeros(3, int), np.zeros((2, 4))[:, ::2], np.array(0.0)]
        under_way = c.all_reduce_many(many, bytes_per_pack=8, out=out, async_op=True)
        wants = [c.size * (c.size - 1) // 2, c.size, 2 * c.size]
        for got, place, want in zip(under_way.wait(), out, wants, strict=True):
            assert got is place
            np.testing.assert_array_equal(got, np.full_like(got, want))
        return True

    assert on_ranks(local_group(ranks, timeout=30), work) == [True] * ranks


def test_async_calls_and_blocking_calls_keep_their_order(on_ranks):
    def work(c):
        x, works = np.array([c.rank + 1.0]), []
        for i in range(50):
            works.append(c.all_reduce(x, out=x, async_op=True))  # x → sum
            if i % 7 == 3:
                c.all_reduce(x, "mean", out=x)  # after all of them: nothing changes
                assert all(w.done() for w in works)
                x[...] = c.rank + 1.0
            elif i % 7 == 5:
                works.append(c.broadcast(x, 1, out=x, async_op=True))
                c.barrier()
                x /= x
                x *= c.rank + 1.0
        return [float(w.wait()[0]) for w in works][-1]

    got = on_ranks(local_group(3, timeout=30), work)
    assert len(set(got)) == 1
    assert isinstance(got[0], float)


def test_wait_after_a_failure_raises_on_all_ranks(on_ranks):
    def work(c):
        works = [c.all_reduce(np.ones(3 + c.rank), async_op=True) for _ in range(2)]
        with pytest.raises(
            pc.MismatchError, match=r"rank 0 called .*\[3\].* rank 1 called .*\[4\]"
        ):
            works[0].wait()
        with pytest.raises(pc.MismatchError):
            works[1].wait()
        assert isinstance(works[1].exception(), pc.MismatchError)
        with pytest.raises(pc.MismatchError):
            works[1].result()
        with pytest.raises(pc.MismatchError):
            c.barrier()
        c.close()
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


def test_async_op_invalid_arguments_raise_at_once():
    (c,) = local_group(1)
    out = np.zeros(2)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        c.all_reduce(np.ones(2), out=out, async_op=True)
    with pytest.raises(ValueError, match="no broadcast algorithm is called 'x'"):
        c.broadcast(np.ones(2), algorithm="x", async_op=True)


def test_wait_timeout_leaves_the_call_running():
    a, b = local_group(2, timeout=30)
    under_way = a.all_reduce(np.ones(2), async_op=True)
    assert not under_way.done()
    with pytest.raises(TimeoutError, match=r"not done after 0\.05 s; it still runs"):
        under_way.wait(0.05)
    with pytest.raises(RuntimeError, match="still runs"):
        under_way.result()
    with pytest.raises(RuntimeError, match="still runs"):
        under_way.exception()
    assert "under way" in repr(under_way)
    np.testing.assert_array_equal(b.all_reduce(np.ones(2)), [2, 2])
    np.testing.assert_array_equal(under_way.wait(20), [2, 2])


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.5])
def test_wait_invalid_timeout_raises_value_error(timeout):
    (comm,) = pc.local_group(1)
    work = comm.all_reduce(np.ones(3), async_op=True)
    with pytest.raises(ValueError, match="at least 0"):
        work.wait(timeout)
    assert work.wait(0).tolist() == [1, 1, 1]


def test_async_call_has_its_own_deadline():
    a, _b = local_group(2)
    with pytest.raises(pc.CollectiveTimeoutError, match="rank 0 waited until its deadline"):
        a.barrier(timeout=0.1, async_op=True).wait(20)


def test_wait_interrupted_leaves_the_call_running(ctrl_c):
    a, b = local_group(2, timeout=30)
    under_way = a.all_reduce(np.ones(2), async_op=True)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        under_way.wait(20)
    timer.join()
    b.all_reduce(np.ones(2))
    np.testing.assert_array_equal(under_way.wait(20), [2, 2])


def test_async_call_keeps_its_arrays_alive():
    a, b = local_group(2, timeout=30)
    a.all_reduce(np.arange(200_000.0), async_op=True)  # neither array nor work are kept
    gc.collect()
    rubbish = [np.full(200_000, 7.0) for _ in range(4)]  # would reuse freed memory
    np.testing.assert_array_equal(b.all_reduce(np.arange(200_000.0)), 2 * np.arange(200_000.0))
    assert len(rubbish) == 4


@pytest.mark.parametrize("ranks", [2, min(_core.usable_cores(), 8) + 1])
def test_async_call_progresses_while_the_gil_is_held(ranks):
    """Calls that depend on each other end while this thread holds the GIL."""
    import ctypes

    comms = local_group(ranks, timeout=30)
    x = [np.ones(300_000) for _ in comms]
    works = [c.all_reduce(x[c.rank], out=x[c.rank], async_op=True) for c in comms]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no thread asks this one for the GIL
    try:
        for _ in range(200):
            ctypes.PyDLL(None).usleep(100_000)  # a PyDLL keeps the GIL
            if all(task.done for w in works for task in w._tasks):  # no tasks: already ended
                break
        else:
            pytest.fail("the calls make no progress")
    finally:
        sys.setswitchinterval(interval)
    assert [w.wait()[0] for w in works] == [ranks] * ranks


def test_work_as_context_waits_at_the_end(on_ranks):
    def work(c):
        a, b = np.ones(2), np.full(3, 2.0)
        with c.all_reduce(a, out=a, async_op=True), c.all_reduce(b, out=b, async_op=True):
            pass
        return a.sum() + b.sum()

    assert on_ranks(local_group(2, timeout=30), work) == [16.0, 16.0]


def test_out_has_the_result_when_the_call_is_done(on_ranks):
    """The core cannot write some outputs itself, and a mean of a scan is divided at the end."""

    def work(comm):
        x, found = np.ones(2), []
        strided = [np.zeros((2, 2))[:, 0] for _ in range(3)]
        mean, one, (all_reduced, message, again) = np.zeros(2), np.zeros(2), strided
        other = 1 - comm.rank
        for begin, out in [
            (lambda: comm.all_reduce(x, out=all_reduced, async_op=True), all_reduced),
            (lambda: comm.scan(x, "mean", out=mean, async_op=True), mean),
            (lambda: comm.all_reduce_many([x], out=[one], async_op=True), one),
            (lambda: comm.sendrecv(x, other, message, other, async_op=True), message),
            (lambda: pc.Persistent(comm.all_reduce, x, out=again).start(), again),
        ]:
            call = begin()
            while not call.done():
                time.sleep(1e-4)
            found.append(out.tolist())
            call.wait()
            assert out.tolist() == found[-1]
        return found

    twos, ones = [2.0, 2.0], [1.0, 1.0]
    assert on_ranks(local_group(2), work) == [[twos, ones, twos, ones, twos]] * 2


def test_threads_that_wait_for_one_call_get_one_result(on_ranks):
    def work(comm):
        found = []
        for _ in range(10):
            call = comm.scan(np.full(100_000, 6.0 * (comm.rank + 1)), "mean", async_op=True)
            threads = [
                threading.Thread(target=lambda c=call: found.append(c.wait())) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return {float(value) for out in found for value in (out[0], out[-1])}

    assert on_ranks(local_group(2), work) == [{6.0}, {9.0}]


def test_close_waits_for_unfinished_calls(on_ranks):
    def work(c):
        under_way = c.all_reduce(np.ones(2), async_op=True)
        if c.rank:
            time.sleep(0.2)
        c.close()
        assert under_way.done()
        return under_way.wait().tolist()

    assert progress_threads_become(0)
    assert on_ranks(local_group(2, timeout=30), work) == [[2.0, 2.0]] * 2
    assert progress_threads_become(0)


def test_close_waits_until_the_deadline_of_a_call():
    a, _b = local_group(2)
    under_way = a.all_reduce(np.ones(2), timeout=0.2, async_op=True)
    a.close()
    assert isinstance(under_way.exception(), pc.CollectiveTimeoutError)


def test_dropped_communicator_fails_its_calls():
    assert progress_threads_become(0)
    a, b = local_group(2)
    under_way = a.all_reduce(np.ones(2), async_op=True)
    time.sleep(0.05)
    del a
    gc.collect()
    assert under_way.done()
    with pytest.raises(pc.AbortedError, match="rank 0 deleted its communicator before its calls"):
        under_way.wait()
    with pytest.raises(pc.AbortedError):
        b.barrier()
    assert progress_threads_become(0)


def test_progress_thread_starts_with_the_first_async_call(on_ranks):
    assert progress_threads_become(0)
    comms = local_group(2)
    on_ranks(comms, lambda c: c.barrier())
    assert progress_threads_become(0)
    on_ranks(comms, lambda c: c.all_reduce(np.ones(200_000), async_op=True).wait())
    assert progress_threads_become(2)
    for c in comms:
        c.close()
    assert progress_threads_become(0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_work_in_a_forked_child_raises():
    a, b = local_group(2, timeout=30)
    under_way = a.all_reduce(np.ones(2), async_op=True)
    child = os.fork()
    if not child:
        status = 1
        try:
            under_way.wait(10)
        except RuntimeError as error:
            status = 0 if "a call of its parent process" in str(error) else 2
        del a, b
        gc.collect()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    b.all_reduce(np.ones(2))
    np.testing.assert_array_equal(under_way.wait(20), [2, 2])


def test_cross_replica_reduce_follows_unfinished_calls():
    from pycollective.comm import all_reduce_together

    comms = local_group(2, timeout=30)
    works = [c.all_reduce(np.ones(2), async_op=True) for c in comms]
    both = all_reduce_together(comms, [np.ones(2), np.ones(2)], "sum")
    assert [w.wait().tolist() for w in works] == [x.tolist() for x in both] == [[2.0, 2.0]] * 2


def test_communicator_without_unfinished_calls_is_freed(on_ranks):
    """Calls that run Python code keep no reference to the communicator after they end."""

    def work(c):
        ragged = c.all_gather(np.ones(c.rank), ragged=True, async_op=True)
        split = c.split(0, async_op=True)
        assert len(ragged.wait()) == 1
        assert split.wait().all_reduce([1.0], async_op=True).wait() == [2.0]
        mismatch = c.split(0, async_op=True) if c.rank else c.barrier(async_op=True)
        for _ in range(2):  # a second time
            with pytest.raises(pc.MismatchError):
                mismatch.wait()
            assert isinstance(mismatch.exception(), pc.MismatchError)

    assert on_ranks(local_group(2, timeout=30), work) == [None] * 2
    assert progress_threads_become(0)


# The end of the interpreter -------------------------------------------------------------------


def test_interpreter_end_with_threads_in_calls_is_clean(tmp_path):
    """Python must not end these threads within the core's code."""
    script = """
import contextlib, threading, time
import numpy as np
import pycollective as pc
def again(comm):
    while True:
        comm.all_reduce(np.ones(10))
both, (waiting, absent), (first, second) = (pc.local_group(2) for _ in range(3))
for comm in both:
    threading.Thread(target=again, args=(comm,), daemon=True).start()
threading.Thread(target=waiting.barrier, daemon=True).start()
work = first.barrier(async_op=True)
def awaited():
    with contextlib.suppress(pc.AbortedError):  # Python's end aborts the group
        work.wait()
threading.Thread(target=awaited, daemon=True).start()
time.sleep(0.08)
print("ends", flush=True)
"""
    done = ended(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_communicator_deleted_while_a_thread_waits_ends():
    for _ in range(10):
        a, _b = local_group(2, timeout=60)
        waiting = a.all_reduce(np.ones(5), async_op=True)

        def wait(waiting=waiting):
            with contextlib.suppress(pc.AbortedError):
                waiting.wait()

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.06)  # the progress thread sleeps without a limit after 20 ms
        box = [a]
        del a
        deleting = threading.Thread(target=box.clear)
        deleting.start()
        deleting.join(10)
        assert not deleting.is_alive()
        waiter.join(10)


def test_process_ends_while_a_daemon_thread_waits_for_a_work(tmp_path):
    script = """
import threading, time
import numpy as np
import pycollective as pc
comms = pc.local_group(2, timeout=60)
work = comms[0].all_reduce(np.ones(5), async_op=True)
threading.Thread(target=work.wait, daemon=True).start()
time.sleep(0.2)
print("ends", flush=True)
"""
    done = ended(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done


def test_wait_releases_the_arrays_of_the_call(on_ranks):
    def work(c):
        x = np.ones(100_000)
        alive = weakref.ref(x)
        c.all_reduce(x, async_op=True).wait()
        del x
        until = time.monotonic() + 10
        while alive() is not None and time.monotonic() < until:
            gc.collect()  # returns at once while another thread collects
            time.sleep(0.001)
        return alive() is None

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


def test_wait_for_more_seconds_than_a_float_holds_is_without_a_limit():
    (comm,) = pc.local_group(1)
    work = comm.all_reduce(np.ones(3), async_op=True)
    assert work.wait(10**400).tolist() == [1, 1, 1]
