"""All-reduce among threads: cases that test_suite.py does not cover, and errors instead of hangs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import algorithms, local_group
from pycollective.comm import all_reduce_together

ALGORITHMS = algorithms.names("all_reduce")


def contributions(ranks, shape, dtype, seed=0):
    """Small whole numbers: sums and products are exact in any order."""
    high = 3 if ranks > 8 else 5
    random = np.random.default_rng(seed)
    return random.integers(-high, high, size=(ranks, *shape)).astype(dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_all_reduce_in_place_of_many_blocks_is_right(ranks, algorithm, on_ranks):
    comms = local_group(ranks, timeout=30)
    x = contributions(ranks, (2_300_007,), "float32")  # several blocks of segments
    want = x.sum(axis=0)

    def work(c):
        mine = x[c.rank].copy()
        for _ in range(3):
            mine[:] = x[c.rank]
            assert c.all_reduce(mine, out=mine, algorithm=algorithm) is mine
        return mine

    for result in on_ranks(comms, work):
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_reduce_auto_is_right_and_one_of_the_algorithms(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for size in (0, 1, 33_000, 300_000):
        x = contributions(ranks, (size,), "float32")
        for result in on_ranks(comms, lambda c, x=x: c.all_reduce(x[c.rank], algorithm="auto")):
            np.testing.assert_array_equal(result, x.sum(axis=0))
        last = comms[0].describe().split(";")[0]
        assert any(f"sum, {name})" in last for name in ALGORITHMS), last


def test_all_reduce_wraps_ints_and_keeps_nan(on_ranks):
    comms = local_group(2, timeout=30)
    top = np.array([np.iinfo("int32").max], "int32")
    for result in on_ranks(comms, lambda c: c.all_reduce(top)):
        np.testing.assert_array_equal(result, [-2])
    x = np.array([[np.nan, 1.0, np.nan], [2.0, np.nan, np.nan]])
    for op in ("min", "max"):
        for result in on_ranks(comms, lambda c, op=op: c.all_reduce(x[c.rank], op)):
            assert np.isnan(result).all()


def test_all_reduce_of_read_only_arrays_and_lists_is_right(on_ranks):
    comms = local_group(3, timeout=30)
    x = contributions(3, (4, 6), "float64")
    frozen = [np.frombuffer(a.tobytes()).reshape(a.shape) for a in x]
    for given in (frozen, x.tolist()):
        for result in on_ranks(comms, lambda c, given=given: c.all_reduce(given[c.rank])):
            np.testing.assert_array_equal(result, x.sum(axis=0))


def test_all_reduce_into_strided_or_overlapping_out_is_right(on_ranks):
    comms = local_group(2, timeout=30)
    x = contributions(2, (5,), "float64")

    def strided(c):
        memory = np.zeros(10)
        assert c.all_reduce(x[c.rank], out=memory[::2]).base is memory
        return memory

    for memory in on_ranks(comms, strided):
        np.testing.assert_array_equal(memory[::2], x.sum(axis=0))
        np.testing.assert_array_equal(memory[1::2], 0)

    def shifted(c):
        memory = np.append(x[c.rank], 0.0)
        return c.all_reduce(memory[:-1], out=memory[1:])

    for result in on_ranks(comms, shifted):
        np.testing.assert_array_equal(result, x.sum(axis=0))


def test_all_reduce_keeps_scalars_and_shapes(on_ranks):
    comms = local_group(2, timeout=30)
    for shape in ((), (1, 1), (2, 0, 3), (2, 3)):
        for result in on_ranks(comms, lambda c, s=shape: c.all_reduce(np.ones(s))):
            assert result.shape == shape
            np.testing.assert_array_equal(result, np.full(shape, 2.0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_barrier_returns_after_all_ranks_have_called_it(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    arrived = []

    def work(c):
        for turn in range(20):
            arrived.append(turn)
            c.barrier()
            assert arrived.count(turn) == ranks
            c.barrier()

    assert on_ranks(comms, work) == [None] * ranks


def test_all_reduce_together_gives_the_bits_of_all_reduce(on_ranks):
    x = np.random.default_rng(3).standard_normal((3, 5000)).astype("float32")
    for algorithm in ALGORITHMS:
        separate = on_ranks(
            local_group(3, timeout=30), lambda c, a=algorithm: c.all_reduce(x[c.rank], algorithm=a)
        )
        together = all_reduce_together(local_group(3), list(x), "sum", algorithm)
        for one, other in zip(separate, together, strict=True):
            assert one.tobytes() == other.tobytes()


def test_all_reduce_together_of_large_arrays_is_right():
    x = contributions(2, (600_000,), "float64")
    for result in all_reduce_together(local_group(2), list(x), "sum"):
        np.testing.assert_array_equal(result, x.sum(axis=0))


# Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([lambda c: c.all_reduce(np.zeros(3)), lambda c: c.all_reduce(np.zeros(4))],
         ["float64[3]", "float64[4]"]),
        ([lambda c: c.all_reduce(np.zeros((2, 3))), lambda c: c.all_reduce(np.zeros((3, 2)))],
         ["float64[2, 3]", "float64[3, 2]"]),
        ([lambda c: c.all_reduce(np.zeros(3)), lambda c: c.all_reduce(np.zeros(3, "f4"))],
         ["float64[3]", "float32[3]"]),
        ([lambda c: c.all_reduce(np.zeros(3)), lambda c: c.all_reduce(np.zeros(3), "max")],
         ["sum", "max"]),
        ([lambda c: c.all_reduce(np.zeros(3), algorithm="ring"),
          lambda c: c.all_reduce(np.zeros(3), algorithm="reduce_to_one")],
         ["ring", "reduce_to_one"]),
        ([lambda c: c.barrier(), lambda c: c.all_reduce(np.zeros(3))], ["barrier", "all_reduce"]),
        ([lambda c: c.all_reduce(np.zeros(3)), lambda c: c.all_reduce(np.zeros(3), reproducible=True)],
         ["float64[3]", "direct, reproducible"]),
        ([lambda c: c.all_to_all(np.zeros(3), [2, 1], out_counts=[2, 2 - c.rank])] * 2,
         ["all_to_all", "differ in something that is not shown, such as counts"]),
        ([lambda c: c.all_reduce(np.zeros(0)), lambda c: c.all_reduce(np.zeros(1))],
         ["float64[0]", "float64[1]"]),
    ],
)  # fmt: skip
def test_differing_calls_raise_mismatch_error_on_all_ranks(calls, named, on_ranks):
    for order in (calls, calls[::-1]):
        comms = local_group(2, timeout=30)
        results = on_ranks(comms, lambda c, order=order: order[c.rank](c))
        for error in results:
            assert isinstance(error, pc.MismatchError), results
            for name in [*named, "rank 0", "rank 1"]:
                assert name in str(error)
        with pytest.raises(pc.MismatchError):
            comms[0].barrier()


def test_timeout_names_the_missing_rank(on_ranks):
    comms = local_group(3, timeout=1.0)
    both = threading.Barrier(2)

    def work(c):
        if c.rank != 1:
            both.wait(20)
            c.all_reduce(np.ones(4), algorithm="ring")

    results = on_ranks(comms, work)
    for rank in (0, 2):
        assert isinstance(results[rank], pc.CollectiveTimeoutError)
        assert isinstance(results[rank], TimeoutError)
        assert "rank 1 has made no collective call yet" in str(results[rank])
        assert "rank 0 is in all_reduce #1 (float64[4], sum, ring)" in str(results[rank])


def test_abort_ends_the_wait_of_all_ranks(on_ranks):
    comms = local_group(3, timeout=30)

    def work(c):
        if c.rank == 2:
            time.sleep(0.05)
            c.abort("the user said so")
            return None
        c.barrier()
        return None

    began = time.monotonic()
    results = on_ranks(comms, work)
    assert time.monotonic() - began < 20
    assert all("the user said so" in str(results[r]) for r in (0, 1))
    assert all(isinstance(results[r], pc.AbortedError) for r in (0, 1))
    with pytest.raises(pc.AbortedError):
        comms[2].barrier()
    assert on_ranks(local_group(3, timeout=30), lambda c: c.barrier()) == [None] * 3


def test_concurrent_calls_of_one_rank_raise():
    comms = local_group(2, timeout=30)
    first = threading.Thread(target=comms[0].barrier)
    first.start()
    until = time.monotonic() + 20
    while "rank 0 is in barrier" not in comms[1].describe():
        assert time.monotonic() < until
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="rank 0 is already in a collective call"):
        comms[0].barrier()
    comms[1].barrier()
    first.join(30)
    assert not first.is_alive()


def test_interrupt_ends_a_wait(ctrl_c):
    comms = local_group(2, timeout=60)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        comms[0].barrier()
    assert time.monotonic() - began < 30
    with pytest.raises(pc.AbortedError):
        comms[1].barrier()


def test_interrupt_while_a_dtype_is_named_is_raised():
    """NumPy's Python code names dtypes that the core does not know; Python checks signals there."""
    (comm,) = local_group(1)
    x = np.ones(3, "M8[s]")

    def interrupt(frame, event, argument):
        if frame.f_code.co_filename.endswith("_dtype.py"):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            comm.broadcast(x)
    finally:
        sys.setprofile(None)
    assert comm.broadcast(x) is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x: c.broadcast(x),
        lambda c, x: c.all_to_all(x, [2], out_counts=[2]),
        lambda c, x: c.all_to_all(x, [2], out_counts=[2], async_op=True),
        lambda c, x: c.send(x, 0),
        lambda c, x: c.recv(x, 0),
        lambda c, x: c.all_reduce_many([x]),
    ],
)
def test_close_while_a_dtype_is_named_ends_the_call_with_an_error(call):
    """NumPy's Python code names dtypes, and a signal handler in it may close the communicator."""
    (comm,) = local_group(1, timeout=5)
    closed = []

    def close(frame, event, argument):
        if frame.f_code.co_filename.endswith("_dtype.py"):
            sys.setprofile(None)
            comm.close()
            closed.append(True)

    sys.setprofile(close)
    try:
        with pytest.raises((pc.CollectiveError, TypeError)):
            call(comm, np.ones(2, "M8[s]"))
    finally:
        sys.setprofile(None)
    assert closed


@pytest.mark.slow
def test_deadline_is_kept_while_another_thread_has_the_gil():
    comms = local_group(2, timeout=3.0)
    numbers, ended = np.random.default_rng(0).random(1_000_000).tolist(), threading.Event()

    def busy():
        while not ended.is_set():
            sorted(numbers)  # has the GIL for about 0.6 s

    other = threading.Thread(target=busy)
    other.start()
    try:
        began = time.monotonic()
        with pytest.raises(pc.CollectiveTimeoutError):
            comms[0].all_reduce(np.ones(3))
        assert time.monotonic() - began < 20  # 39 s when waits for the GIL extended the deadline
    finally:
        ended.set()
        other.join()


def test_rank_and_size_are_read_only():
    (comm,) = local_group(1)
    for name in ("rank", "size"):
        with pytest.raises(AttributeError):
            setattr(comm, name, 2)


def test_all_reduce_wrong_arguments_raise():
    (comm,) = local_group(1)
    with pytest.raises(
        ValueError, match="unknown op 'avg'; choose one of: sum, prod, min, max, mean, and"
    ):
        comm.all_reduce(np.ones(2), "avg")
    with pytest.raises(ValueError, match="no all_reduce algorithm is called 'bus'"):
        comm.all_reduce(np.ones(2), algorithm="bus")
    with pytest.raises(
        TypeError, match="dtype datetime64.*bool, int8, .*bfloat16.*complex128: conv"
    ):
        comm.all_reduce(np.zeros(2, "M8[s]"))
    with pytest.raises(TypeError, match="no 'sum' of bool arrays.*'or'"):
        comm.all_reduce([True, False])
    with pytest.raises(TypeError, match="no 'min' of complex128 arrays"):
        comm.all_reduce(np.ones(2, complex), "min")
    with pytest.raises(TypeError, match=">f4"):
        comm.all_reduce(np.ones(2, ">f4"))
    with pytest.raises(TypeError, match="Python objects"):
        comm.all_reduce([object()])
    with pytest.raises(ValueError, match="out must be like the input"):
        comm.all_reduce(np.ones(2), out=np.ones(3))
    with pytest.raises(ValueError, match="read-only"):
        comm.all_reduce(np.ones(2), out=np.broadcast_to(1.0, (2,)))
    with pytest.raises(TypeError, match="out must be an array, not list"):
        comm.all_reduce(np.ones(2), out=[0.0, 0.0])
    with pytest.raises(ValueError, match="root 1 is not among the 1 ranks"):
        comm.broadcast(np.ones(2), root=1)
    with pytest.raises(ValueError, match="timeout"):
        comm.barrier(timeout=0)
    with pytest.raises(ValueError, match="1 to 4096 ranks"):
        local_group(0)


def test_groups_can_be_made_and_dropped_repeatedly(on_ranks):
    before = threading.active_count()
    for _ in range(200):
        assert on_ranks(local_group(2, timeout=30), lambda c: c.barrier()) == [None] * 2
    gc.collect()
    assert threading.active_count() <= before  # a thread of an earlier test may have ended


@pytest.mark.slow
def test_many_calls_of_many_ranks_are_right(on_ranks):
    """More ranks than cores, calls in a random order of algorithms and sizes."""
    ranks = 24
    comms = local_group(ranks, timeout=120)
    random = np.random.default_rng(7)
    plan = [(random.choice(ALGORITHMS), int(random.integers(0, 5000))) for _ in range(150)]

    def work(c):
        for algorithm, size in plan:
            mine = np.arange(size, dtype="int64") + c.rank
            c.all_reduce(mine, out=mine, algorithm=str(algorithm))
            want = np.arange(size) * ranks + ranks * (ranks - 1) // 2
            np.testing.assert_array_equal(mine, want)

    assert on_ranks(comms, work) == [None] * ranks


# Limits of the system ---------------------------------------------------------------------------

_LIMITED = """
import resource
from pathlib import Path
import numpy as np
import pycollective as pc
from pycollective.comm import all_reduce_together

def limited(call, memory):
    "Call with `memory` more bytes available; return the result, or the text of the error."
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
"""


def lines_of(body):
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED + body],
        cwd="/",  # not beside the sources, which have no core
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout.splitlines()


linux = pytest.mark.skipif(
    sys.platform != "linux" or "PYCOLLECTIVE_SANITIZED" in os.environ,
    reason="limits of Linux, which leave a sanitizer no memory",
)


@linux
def test_all_reduce_together_starts_no_threads():
    body = """
groups = pc.local_group(12, timeout=10)
arrays, outs = ([np.ones(1 << 17) for _ in groups] for _ in range(2))
def together(name):
    return {float(y[-1]) for y in all_reduce_together(groups, arrays, "sum", name, outs)}
all_reduce_together(groups, [np.ones(9) for _ in groups], "sum", "ring")
for name in ("direct", "ring"):
    print(limited(lambda: together(name), 4 << 20), together(name))
"""
    assert lines_of(body) == ["{12.0} {12.0}"] * 2


@linux
def test_async_call_without_a_thread_raises_and_can_be_repeated():
    body = """
x = np.ones(4)
groups = pc.local_group(32, timeout=10)
for c in groups:  # allocates the memory of messages
    c.send(x, c.rank)
calls = [lambda c: c.all_reduce(x, async_op=True), lambda c: c.send(x, (c.rank + 1) % 32, async_op=True)]
for call in calls:
    print(limited(lambda: [call(c) for c in groups], 6 << 20))
for c in groups:
    c.abort("enough")
    c.close()
"""
    collectives, messages = lines_of(body)
    assert collectives.startswith("RuntimeError the system starts no further thread: ")
    assert "ulimit" in collectives
    assert messages.startswith("[<Work")  # messages move when the rank waits for any of them


@linux
def test_close_after_a_message_without_memory_returns():
    body = """
(group,) = pc.local_group(1, timeout=10)
group.send(np.ones(1), 0)
group.recv(source=0, shape=1, dtype=float)
x = np.ones(1 << 26, np.uint8)
print(limited(lambda: group.send(x, 0), 1 << 24))
group.send(x[:9], 0)
print(group.recv(source=0, shape=9, dtype=np.uint8).tolist())
group.close()
"""
    error, received = lines_of(body)
    assert error.startswith("MemoryError")
    assert received == str([1] * 9)
