"""Collectives of thread ranks: right answers, equal bits, and errors instead of hangs."""

from __future__ import annotations

import gc
import signal
import threading
import time

import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc
from pycollective import algorithms, local_group
from pycollective.communicator import all_reduce_together

ALGORITHMS = algorithms.names("all_reduce")
DTYPES = ["float32", "float64", "int32", "int64"]
OPS = {
    "sum": lambda a: a.sum(axis=0, dtype=a.dtype),
    "min": lambda a: a.min(axis=0),
    "max": lambda a: a.max(axis=0),
    "prod": lambda a: a.prod(axis=0, dtype=a.dtype),
}
WORLDS = [1, 2, 3, 4, 5, 7, 8, 16]


def contributions(ranks, shape, dtype, seed=0):
    """Small whole numbers: sums and products are exact in any order."""
    high = 3 if ranks > 8 else 5
    random = np.random.default_rng(seed)
    return random.integers(-high, high, size=(ranks, *shape)).astype(dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_every_dtype_op_and_size(ranks, algorithm, on_ranks):
    comms = local_group(ranks, timeout=30)
    # Around the alignment of chunks (64 bytes), and primes.
    sizes = [0, 1, 2, 15, 16, 17, 97, 16 * ranks + 1, 40_009]
    for dtype in DTYPES:
        for size in sizes:
            x = contributions(ranks, (size,), dtype, size)
            for op, reference in OPS.items():
                want = reference(x)
                got = on_ranks(
                    comms,
                    lambda c, x=x, op=op: c.all_reduce(x[c.rank], op, algorithm=algorithm),
                )
                for result in got:
                    np.testing.assert_array_equal(result, want, err_msg=f"{dtype} {op} {size}")
                    assert result.dtype == want.dtype


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_every_dtype_and_size_between_processes(kind, ranks, algorithm, on_ranks):
    """The same through memory and sockets; the ranks are threads here, too, so that it is quick."""
    comms = make_group(kind, ranks)
    for size in [0, 1, 16, 97, 16 * ranks + 1, 40_009]:
        for op, reference in OPS.items():
            for dtype in DTYPES if size < 1000 else DTYPES[:1]:
                x = contributions(ranks, (size,), dtype, size)
                want = reference(x)

                def work(c, x=x, op=op):
                    mine = x[c.rank].copy()
                    apart = c.all_reduce(mine, op, algorithm=algorithm)
                    return apart, c.all_reduce(mine, op, out=mine, algorithm=algorithm)

                for results in on_ranks(comms, work):
                    for result in results:
                        np.testing.assert_array_equal(result, want, err_msg=f"{dtype} {op} {size}")
    for c in comms:
        c.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_in_place_and_many_blocks(ranks, algorithm, on_ranks):
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_mean(ranks, algorithm, on_ranks):
    comms = local_group(ranks, timeout=30)
    x = contributions(ranks, (1000,), "float64") * ranks
    for result in on_ranks(comms, lambda c: c.all_reduce(x[c.rank], "mean", algorithm=algorithm)):
        np.testing.assert_array_equal(result, x.sum(axis=0) / ranks)
    whole = contributions(ranks, (1000,), "int32", 1) * 3
    want = np.trunc(whole.sum(axis=0) / ranks).astype("int32")
    for result in on_ranks(
        comms, lambda c: c.all_reduce(whole[c.rank], "mean", algorithm=algorithm)
    ):
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_auto_is_right_and_one_of_them(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for size in (0, 1, 33_000, 300_000):
        x = contributions(ranks, (size,), "float32")
        for result in on_ranks(comms, lambda c, x=x: c.all_reduce(x[c.rank], algorithm="auto")):
            np.testing.assert_array_equal(result, x.sum(axis=0))
        last = comms[0].describe().split(";")[0]
        assert any(f"sum, {name})" in last for name in ALGORITHMS), last


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bits_are_equal_on_all_ranks_and_every_time(algorithm, on_ranks):
    comms = local_group(5, timeout=30)
    x = np.random.default_rng(0).standard_normal((5, 20_011)).astype("float32")
    first = on_ranks(comms, lambda c: c.all_reduce(x[c.rank], algorithm=algorithm))
    again = on_ranks(comms, lambda c: c.all_reduce(x[c.rank], algorithm=algorithm))
    for result in first + again:
        assert result.tobytes() == first[0].tobytes()
    np.testing.assert_allclose(first[0], x.astype("float64").sum(axis=0), atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_other_dtype_travels(algorithm, on_ranks):
    """The kernels have tests of their own; here, that sizes and alignments of elements are right."""
    comms = local_group(3, timeout=30)
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for dtype in ["int8", "int16", "uint8", "uint16", "uint32", "uint64", "float16", bfloat16,
                  "complex64", "complex128"]:  # fmt: skip
        for size in (0, 1, 131, 40_009):
            x = np.abs(contributions(3, (size,), "int32", size)).astype(dtype)
            got = on_ranks(comms, lambda c, x=x: c.all_reduce(x[c.rank], algorithm=algorithm))
            for result in got:
                assert result.dtype == x.dtype
                np.testing.assert_array_equal(result, x[0] + x[1] + x[2])
    bits = contributions(3, (1000,), "int16").astype("uint16")
    for op, ufunc in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        for x in (bits, bits & 1 == 1):
            got = on_ranks(
                comms, lambda c, x=x, op=op: c.all_reduce(x[c.rank], op, algorithm=algorithm)
            )
            for result in got:
                np.testing.assert_array_equal(result, ufunc.reduce(x))


def test_int_sums_wrap_and_nan_wins(on_ranks):
    comms = local_group(2, timeout=30)
    top = np.array([np.iinfo("int32").max], "int32")
    for result in on_ranks(comms, lambda c: c.all_reduce(top)):
        np.testing.assert_array_equal(result, [-2])
    x = np.array([[np.nan, 1.0, np.nan], [2.0, np.nan, np.nan]])
    for op in ("min", "max"):
        for result in on_ranks(comms, lambda c, op=op: c.all_reduce(x[c.rank], op)):
            assert np.isnan(result).all()


LAYOUTS = {
    "fortran": lambda a: np.asfortranarray(a),
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "list": lambda a: a.tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_right_answer(layout, on_ranks):
    comms = local_group(3, timeout=30)
    x = contributions(3, (4, 6), "float64")
    got = on_ranks(comms, lambda c: c.all_reduce(LAYOUTS[layout](x[c.rank])))
    for result in got:
        np.testing.assert_array_equal(result, x.sum(axis=0))


def test_strided_and_overlapping_out(on_ranks):
    comms = local_group(2, timeout=30)
    x = contributions(2, (5,), "float64")

    def strided(c):
        room = np.zeros(10)
        assert c.all_reduce(x[c.rank], out=room[::2]).base is room
        return room

    for room in on_ranks(comms, strided):
        np.testing.assert_array_equal(room[::2], x.sum(axis=0))
        np.testing.assert_array_equal(room[1::2], 0)

    def shifted(c):
        room = np.append(x[c.rank], 0.0)
        return c.all_reduce(room[:-1], out=room[1:])

    for result in on_ranks(comms, shifted):
        np.testing.assert_array_equal(result, x.sum(axis=0))


def test_scalars_and_shapes_are_kept(on_ranks):
    comms = local_group(2, timeout=30)
    for shape in ((), (1, 1), (2, 0, 3), (2, 3)):
        for result in on_ranks(comms, lambda c, s=shape: c.all_reduce(np.ones(s))):
            assert result.shape == shape
            np.testing.assert_array_equal(result, np.full(shape, 2.0))


@pytest.mark.parametrize("ranks", WORLDS)
def test_broadcast_from_every_root(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for root in range(ranks):
        for dtype in ("float16", "complex128", "bool", "S5", "int32"):
            x = contributions(ranks, (77,), "int32", root).astype(dtype)
            for result in on_ranks(comms, lambda c, x=x, r=root: c.broadcast(x[c.rank], r)):
                np.testing.assert_array_equal(result, x[root])

    def in_place(c):
        mine = np.full(3, float(c.rank))
        return c.broadcast(mine, root=ranks - 1, out=mine)

    for result in on_ranks(comms, in_place):
        np.testing.assert_array_equal(result, ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_barrier_holds_everybody_back(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    arrived = []

    def work(c):
        for turn in range(20):
            arrived.append(turn)
            c.barrier()
            assert arrived.count(turn) == ranks
            c.barrier()

    assert on_ranks(comms, work) == [None] * ranks


def test_together_runs_the_same_schedule(on_ranks):
    x = np.random.default_rng(3).standard_normal((3, 5000)).astype("float32")
    for algorithm in ALGORITHMS:
        apart = on_ranks(
            local_group(3, timeout=30), lambda c, a=algorithm: c.all_reduce(x[c.rank], algorithm=a)
        )
        together = all_reduce_together(local_group(3), list(x), "sum", algorithm)
        for one, other in zip(apart, together, strict=True):
            assert one.tobytes() == other.tobytes()


def test_together_with_threads_for_large_arrays():
    x = contributions(2, (600_000,), "float64")
    for result in all_reduce_together(local_group(2), list(x), "sum"):
        np.testing.assert_array_equal(result, x.sum(axis=0))


# What goes wrong ------------------------------------------------------------------------------


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
        ([lambda c: c.broadcast(np.zeros(3), 0), lambda c: c.broadcast(np.zeros(3), 1)],
         ["root 0", "root 1"]),
        ([lambda c: c.barrier(), lambda c: c.all_reduce(np.zeros(3))], ["barrier", "all_reduce"]),
        ([lambda c: c.all_reduce(np.zeros(0)), lambda c: c.all_reduce(np.zeros(1))],
         ["float64[0]", "float64[1]"]),
    ],
)  # fmt: skip
def test_calls_that_do_not_belong_together(calls, named, on_ranks):
    for order in (calls, calls[::-1]):
        comms = local_group(2, timeout=30)
        results = on_ranks(comms, lambda c, order=order: order[c.rank](c))
        for error in results:
            assert isinstance(error, pc.MismatchError), results
            for name in [*named, "rank 0", "rank 1"]:
                assert name in str(error)
        with pytest.raises(pc.MismatchError):
            comms[0].barrier()


def test_who_is_missing_is_named(on_ranks):
    comms = local_group(3, timeout=0.3)
    results = on_ranks(
        comms, lambda c: c.all_reduce(np.ones(4), algorithm="ring") if c.rank != 1 else None
    )
    for rank in (0, 2):
        assert isinstance(results[rank], pc.CollectiveTimeoutError)
        assert isinstance(results[rank], TimeoutError)
        assert "rank 1 has not called anything yet" in str(results[rank])
        assert "rank 0 is in all_reduce #1 (float64[4], sum, ring)" in str(results[rank])


def test_abort_wakes_everybody(on_ranks):
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


def test_one_call_at_a_time_per_rank(on_ranks):
    comms = local_group(2, timeout=5)
    started = threading.Event()

    def waits():
        started.set()
        comms[0].barrier()

    first = threading.Thread(target=waits)
    first.start()
    started.wait()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="rank 0 is already in a collective call"):
        comms[0].barrier()
    comms[1].barrier()
    first.join(30)
    assert not first.is_alive()


def test_ctrl_c_ends_a_wait(ctrl_c):
    comms = local_group(2, timeout=60)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        comms[0].barrier()
    assert time.monotonic() - began < 30
    with pytest.raises(pc.AbortedError):
        comms[1].barrier()


def test_bad_arguments():
    (comm,) = local_group(1)
    with pytest.raises(
        ValueError, match="unknown op 'avg'; there are: sum, prod, min, max, mean, and"
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


def test_groups_come_and_go(on_ranks):
    before = threading.active_count()
    for _ in range(200):
        on_ranks(local_group(2, timeout=30), lambda c: c.barrier())
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.slow
def test_many_ranks_and_calls(on_ranks):
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
