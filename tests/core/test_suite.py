"""Every collective over transport × algorithm × ranks × size × dtype × op × in place × layout.

The results are exact, and compared for equality. `cases.py` has the factors. The fast tests contain
each pair of values of two factors, where a transport with a number of ranks is one value. So every
algorithm, size and dtype occurs over every transport among every number of ranks.

All combinations would be some ten million calls. The slow tests have two products: algorithm, dtype and
op; and algorithm, size, layout, and in place or not. Every transport has half of a product, every number
of ranks a quarter, and each pair of them a sixteenth. All other factors are drawn at random.
"""

from __future__ import annotations

import functools
import itertools
import os
import random

import ml_dtypes
import numpy as np
import pytest
from cases import FACTORS, MOVES, RANKS, REDUCTIONS, Case, Shared, pairwise, play
from layouts import LAYOUTS
from rank_groups import ALL_KINDS, make_group

SANITIZED = "PYCOLLECTIVE_SANITIZED" in os.environ
TIMEOUT = 300.0 if SANITIZED else 60.0


@pytest.fixture
def group():
    """Return a function that makes a group, which is closed afterwards."""
    opened = []

    def make(kind, ranks):
        comms = make_group(kind, ranks, TIMEOUT)
        opened.extend(comms)
        return comms

    yield make
    for c in opened:
        c.close()


def on_all(comms, on_ranks, work):
    """Call work for each rank; a rank that raises fails the test, and the others at once."""

    def alone(c):
        try:
            return work(c)
        except BaseException as error:
            c.abort(f"a test failed: {error}")
            raise

    results = on_ranks(comms, alone)
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: not isinstance(e, AssertionError)):
        raise error
    return results


def play_all(comms, on_ranks, cases):
    shared = Shared()
    for begin in range(0, len(cases), 100):  # on_ranks waits for a minute only
        some = cases[begin : begin + 100]
        on_all(comms, on_ranks, lambda c, some=some: [play(c, case, shared(case)) for case in some])


GROUPS = list(itertools.product(ALL_KINDS, RANKS))


@functools.cache
def pairs(which):
    """Return few cases by transport and number of ranks that contain every pair of values."""
    found = {group: [] for group in GROUPS}
    for combination in pairwise({"group": GROUPS, **FACTORS[which]}):
        group = combination.pop("group")
        found[group].append(Case(group[1], **combination))
    return found


@pytest.mark.parametrize("which", FACTORS)
def test_cases_combine_every_two_values(which):
    factors = {"group": GROUPS, **FACTORS[which]}
    found = list(pairwise(factors))
    for a, b in itertools.combinations(factors, 2):
        combined = {(values[a], values[b]) for values in found}
        assert combined == set(itertools.product(factors[a], factors[b]))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("which", FACTORS)
def test_all_pairs_of_factors_are_right(which, kind, ranks, group, on_ranks):
    cases = pairs(which)[kind, ranks]
    play_all(group(kind, ranks), on_ranks, cases[::5] if SANITIZED else cases)


# The factors of each product; all other factors are drawn at random.
PRODUCTS = {
    "dtypes": ["what", "kind"],
    "shapes": ["what", "size", "target", "layout"],
}
SHAPES = {"target": ["new", "in place"], "layout": LAYOUTS}


def product(ranks, factors, names):
    """Yield a case for every combination of these factors; all others are drawn at random."""
    chance = random.Random(ranks)
    for values in itertools.product(*[factors[name] for name in names]):
        drawn = {name: chance.choice(others) for name, others in factors.items()}
        yield Case(ranks, **{**drawn, **dict(zip(names, values, strict=True))})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("of", PRODUCTS)
@pytest.mark.parametrize("which", FACTORS)
def test_all_products_of_factors_are_right(which, of, kind, ranks, group, on_ranks):
    factors = {**FACTORS[which], **(SHAPES if of == "shapes" else {})}
    cases = list(product(ranks, factors, PRODUCTS[of]))
    random.Random(0).shuffle(cases)  # in order, an eighth has a layout with one target only
    part = (4 * ALL_KINDS.index(kind) + RANKS.index(ranks)) % 16
    play_all(group(kind, ranks), on_ranks, cases[part::16])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kind"),
    [  # each algorithm over every second transport
        pytest.param(what, kind, id=f"{what}-{kind}")
        for i, what in enumerate([*REDUCTIONS, *MOVES])
        for kind in ALL_KINDS[i % 2 :: 2]
    ],
)
def test_collectives_of_many_blocks_are_right(what, kind, group, on_ranks):
    """The arrays are so long that the executor runs the schedule several times."""
    op = "sum" if what in REDUCTIONS else ""
    cases = [
        Case(3, what, ("float32", op), "blocks", "last", target, "C", "blocking")
        for target in ("new", "in place")
    ]
    play_all(group(kind, 3), on_ranks, cases)


# Bits -----------------------------------------------------------------------------------------

INEXACT = [
    w for w in REDUCTIONS if w.collective in ("all_reduce", "reduce_scatter") and w.algorithm
]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_results_have_equal_bits_on_all_ranks_and_in_every_run(kind, dtype, group, on_ranks):
    """The sum of these numbers depends on the order; it is the same on all ranks and in every run."""
    for ranks in (3, 5, 8):
        x = np.random.default_rng(ranks).standard_normal((ranks, 720 * ranks)).astype(dtype)

        def work(c, x=x):
            found = []
            for what in INEXACT:
                call = getattr(c, what.collective)
                one, again = (call(x[c.rank], algorithm=what.algorithm) for _ in range(2))
                assert one.tobytes() == again.tobytes(), what
                if what.collective == "reduce_scatter":
                    one = c.all_gather(one)
                found.append(one)
            return found

        results = on_all(group(kind, ranks), on_ranks, work)
        if ranks == 3:  # also in another group
            repeated = on_all(group(kind, ranks), on_ranks, work)
            for rank, rows in enumerate(repeated):
                assert [r.tobytes() for r in rows] == [r.tobytes() for r in results[rank]]
        close = x.astype("float64").sum(axis=0)
        for what, first, *others in zip(INEXACT, *results, strict=True):
            assert all(o.tobytes() == first.tobytes() for o in others), what
            np.testing.assert_allclose(first, close, atol=1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_zeros_with_signs_and_nans_have_equal_bits_on_all_ranks(ranks, group, on_ranks):
    """The maximum of 0.0 and -0.0, and the sum of two NaNs, depend on the order of the two."""
    nans = np.arange(ranks, dtype=np.uint32) + 0x7FC00000
    x = np.stack(
        [
            np.where(np.arange(ranks) % 2 == 0, np.float32(0), np.float32(-0.0)),
            nans.view(np.float32),
        ],
        axis=1,
    )

    def work(c):
        return [
            c.all_reduce(x[c.rank], op, algorithm=what.algorithm).tobytes()
            for what in INEXACT
            if what.collective == "all_reduce"
            for op in ("max", "sum")
        ]

    first, *others = on_all(group("threads", ranks), on_ranks, work)
    assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "complex64"])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_reproducible_bits_depend_on_the_contributions_alone(dtype, op, group, on_ranks):
    """The bits do not depend on the transport, the algorithm's name or the arrays' memory."""
    for ranks, size in [(2, 7), (3, 5_000), (4, 70_001)]:
        x = np.random.default_rng(3).standard_normal((ranks, size)).astype(dtype)
        want = x[0]
        for other in x[1:]:
            want = (want * other if op == "prod" else want + other).astype(dtype)
        if op == "mean":
            want = (want.astype("float32") if want.dtype.itemsize == 2 else want) / ranks
            want = want.astype(dtype)

        def work(c, x=x, size=size):
            mine = x[c.rank].copy()
            shared = c.empty(size, x.dtype)
            shared[...] = mine
            results = [
                c.all_reduce(mine, op, reproducible=True, algorithm=how, async_op=async_op)
                for how, async_op in [("auto", False), ("direct", False), ("auto", True)]
            ]
            results[2] = results[2].wait()
            return [
                *results,
                c.all_reduce(mine, op, out=mine, reproducible=True),
                c.all_reduce(shared, op, out=shared, reproducible=True),
                c.all_reduce(np.repeat(x[c.rank], 2)[::2], op, reproducible=True),
            ]

        results = [
            np.array(result)
            for kind in ALL_KINDS
            for of_rank in on_all(group(kind, ranks), on_ranks, work)
            for result in of_rank
        ]
        if dtype != "complex64" or op == "sum":  # NumPy fuses products, and divides otherwise
            assert results[0].tobytes() == want.tobytes()
        assert all(r.tobytes() == results[0].tobytes() for r in results)
