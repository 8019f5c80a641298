"""Properties that hold for any call; hypothesis generates the calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, laid_out
from rank_groups import ALL_KINDS, make_group

from pycollective import algorithms

REDUCTIONS = {
    "sum": lambda a: a.sum(axis=0, dtype=a.dtype),
    "min": lambda a: a.min(axis=0),
    "max": lambda a: a.max(axis=0),
    "prod": lambda a: a.prod(axis=0, dtype=a.dtype),
}
ALGORITHMS = ["auto", *algorithms.names("all_reduce")]
without_deadline = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], database=None
)


def on_all(comms, work):
    results = [None] * len(comms)

    def run(c):
        try:
            results[c.rank] = work(c)
        except BaseException as error:
            results[c.rank] = error
            c.abort("a test failed")

    threads = [threading.Thread(target=run, args=(c,)) for c in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for c in comms:
        c.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@given(data=st.data())
@without_deadline
def test_all_reduce_of_random_arrays_is_right(data):
    ranks = data.draw(st.integers(1, 5), "ranks")
    kind = data.draw(st.sampled_from(ALL_KINDS), "transport")
    dtype = data.draw(st.sampled_from(["float32", "float64", "int8", "uint16", "int64"]), "dtype")
    op = data.draw(st.sampled_from(sorted(REDUCTIONS)), "op")
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 17, 90]), max_size=3), "shape"))
    layout = data.draw(st.sampled_from(LAYOUTS), "layout")
    target = data.draw(st.sampled_from(["new", "in place", "out", "out F"]), "target")
    algorithm = data.draw(st.sampled_from(ALGORITHMS), "algorithm")
    seed = data.draw(st.integers(0, 2**16), "seed")
    x = np.random.default_rng(seed).integers(0, 4, (ranks, *shape)).astype(dtype)
    want = REDUCTIONS[op](x)

    def work(c):
        mine = laid_out(np.array(x[c.rank]), layout)
        out = {
            "new": None,
            "in place": mine,
            "out": np.full(shape, 77, dtype),
            "out F": np.full(shape, 77, dtype, order="F"),
        }[target]
        result = c.all_reduce(mine, op, out=out, algorithm=algorithm)
        assert out is None or result is out
        if target != "in place":
            np.testing.assert_array_equal(mine, x[c.rank])
        return np.array(result)

    for result in on_all(make_group(kind, ranks), work):
        np.testing.assert_array_equal(result, want)
        assert result.dtype == want.dtype
        assert result.shape == want.shape


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
             "gather", "scatter", "barrier", "messages", "async"]
        ),
        st.sampled_from([1, 5, 64, 1_000, 9_001, 70_003]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(ranks=st.integers(1, 4), calls=CALLS)
@without_deadline
def test_random_sequences_of_calls_are_right(kind, ranks, calls):
    """No call disturbs the next one, of any kind."""

    def value(rank, turn, n):
        return (np.arange(n) * (rank + 2) + turn) % 251

    def work(c):
        works = []
        for turn, (what, n, root) in enumerate(calls):
            root %= ranks
            all_of_them = [value(r, turn, n * ranks) for r in range(ranks)]
            x, total = all_of_them[c.rank], sum(all_of_them)
            part = slice(n * c.rank, n * (c.rank + 1))
            if what == "all_reduce":
                np.testing.assert_array_equal(c.all_reduce(x), total)
            elif what == "async":
                works.append((c.all_reduce(x, async_op=True), total))
            elif what == "reduce":
                got = c.reduce(x, root=root)
                assert got is None or (got == total).all()
            elif what == "broadcast":
                np.testing.assert_array_equal(c.broadcast(x, root), all_of_them[root])
            elif what == "all_gather":
                np.testing.assert_array_equal(c.all_gather(x), np.concatenate(all_of_them))
            elif what == "gather":
                got = c.gather(x, root)
                assert got is None or (got == np.concatenate(all_of_them)).all()
            elif what == "scatter":
                np.testing.assert_array_equal(c.scatter(x, root), all_of_them[root][part])
            elif what == "reduce_scatter":
                np.testing.assert_array_equal(c.reduce_scatter(x), total[part])
            elif what == "all_to_all":
                want = np.concatenate([other[part] for other in all_of_them])
                np.testing.assert_array_equal(c.all_to_all(x), want)
            elif what == "messages" and ranks > 1:
                following, before = (c.rank + 1) % ranks, (c.rank - 1) % ranks
                sent = c.send(x, following, async_op=True)
                got = c.recv(np.empty_like(x), before)
                sent.wait()
                np.testing.assert_array_equal(got, all_of_them[before])
            else:
                c.barrier()
        for under_way, total in works:
            np.testing.assert_array_equal(under_way.wait(), total)

    on_all(make_group(kind, ranks), work)
