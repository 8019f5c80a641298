"""The simulator: times that can be computed by hand, and errors."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import own_algorithms
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective import algorithms
from pycollective._core import SEGMENT_BYTES, Buffer, Collective, Schedule, Span, Step, Verb
from pycollective.algorithms import (
    CLUSTERS,
    Cluster,
    Link,
    algorithm,
    copy,
    input,
    output,
    recv,
    send,
    simulate,
)

ALL = [(c, a) for c in Collective.__members__ for a in algorithms.names(c)]
CHUNK = 6400  # bytes; a multiple of the executor's alignment


def time_of(what, cluster, bytes, collective="all_reduce", **others):
    return simulate(what, cluster, bytes, collective, progress=False, **others).seconds


def span(buffer, first, count=1):
    return Span(getattr(Buffer, buffer), first, count)


@pytest.mark.parametrize("n", [2, 3, 7, 64, 100, 1000])
def test_simulate_latency_alone_counts_rounds(n):
    cluster = Cluster.flat(n, Link(latency=2e-6))
    rounds = math.ceil(math.log2(n))
    assert time_of("ring", cluster, n * 64) == pytest.approx(2 * (n - 1) * 2e-6)
    assert time_of("direct", cluster, n * 64) == pytest.approx(2 * 2e-6)
    assert time_of("reduce_to_one", cluster, 64) == pytest.approx(2 * 2e-6)
    assert time_of("double_tree", cluster, 2 * 64) == pytest.approx(2 * rounds * 2e-6)
    assert time_of("dissemination", cluster, 0, "barrier") == pytest.approx(rounds * 2e-6)
    # The depth of a binomial tree: a rank is as deep as its number has bits that are 1.
    depth = max(rank.bit_count() for rank in range(n))
    assert time_of("tree", cluster, 64, "broadcast") == pytest.approx(depth * 2e-6)
    assert time_of("ring", cluster, n, "all_gather") == pytest.approx((n - 1) * 2e-6)


@pytest.mark.parametrize("n", [2, 5, 8, 100])
def test_simulate_bandwidth_alone_counts_bytes(n):
    cluster = Cluster.flat(n, Link(0.0, bandwidth=1e9))
    one = CHUNK / 1e9
    assert time_of("ring", cluster, n * CHUNK) == pytest.approx(2 * (n - 1) * one)
    assert time_of("direct", cluster, n * CHUNK) == pytest.approx(2 * (n - 1) * one)
    # All data enter through the root's port, then leave through it.
    assert time_of("reduce_to_one", cluster, CHUNK) == pytest.approx(2 * (n - 1) * one)
    assert time_of("chain", cluster, 16 * CHUNK, "broadcast") == pytest.approx((n + 14) * one)
    assert time_of("direct", cluster, n * CHUNK, "all_to_all") == pytest.approx((n - 1) * one)
    assert time_of("direct", cluster, n * CHUNK, "gather") == pytest.approx((n - 1) * one)


def test_simulate_halving_doubling_is_the_sum_by_hand():
    cluster = Cluster.flat(8, Link(1e-6, bandwidth=1e9))
    moved = 2 * 8 * CHUNK * 7 / 8 / 1e9
    assert time_of("halving_doubling", cluster, 8 * CHUNK) == pytest.approx(2 * 3 * 1e-6 + moved)


@pytest.mark.parametrize("n", [2, 3, 8, 65, 300])
@pytest.mark.parametrize("copies", [False, True])
def test_simulate_ring_is_the_alpha_beta_gamma_formula(n, copies):
    """2(n-1) rounds of latency, two overheads and a chunk's transfer; n-1 reductions."""
    link = Link(3e-6, 2e9, 0.5e-6, sender_copies=copies, receiver_copies=copies)
    cluster = Cluster.flat(n, link, reduce_rate=8e9, copy_rate=5e9)
    cluster = replace(cluster, call_overhead=1e-5)
    one = 3e-6 + 2 * 0.5e-6 + CHUNK / 2e9
    want = 1e-5 + 2 * (n - 1) * one + (n - 1) * CHUNK / 8e9
    if copies:  # the sender always, the receiver unless it reduces
        want += 3 * (n - 1) * CHUNK / 5e9
    result = simulate("ring", cluster, n * CHUNK)
    assert result.seconds == pytest.approx(want, rel=1e-12)
    assert result.link_messages == (2 * (n - 1) * n,)
    assert result.link_bytes == (2 * (n - 1) * n * CHUNK,)
    assert result.steps == 4 * (n - 1) * n
    assert result.bus_bandwidth == pytest.approx(2 * (n - 1) * CHUNK / want)


def test_simulate_ring_takes_equal_times_for_blocks():
    n, blocks = 4, 5
    cluster = Cluster.flat(n, Link(1e-6, 1e9))
    one = time_of("ring", cluster, n * CHUNK)
    assert time_of("ring", cluster, blocks * n * CHUNK, segment_bytes=CHUNK) == pytest.approx(
        blocks * one
    )
    assert time_of("ring", cluster, n * SEGMENT_BYTES * 2) == pytest.approx(
        2 * time_of("ring", cluster, n * SEGMENT_BYTES)
    )


def test_simulate_reads_scratch_before_the_next_block():
    """Rank 1 receives nothing, but must not overwrite data that rank 0 has not read."""
    steps = [
        [Step(Verb.recv, 1, target=span("output", 0))],
        [Step(Verb.copy, -1, span("input", 0), span("scratch", 0)),
         Step(Verb.send, 0, span("scratch", 0))],
    ]  # fmt: skip
    cluster = Cluster.flat(2, Link(1.0))
    for blocks in (1, 2, 3):
        schedule = Schedule(Collective.all_reduce, 1, steps, 1)
        assert time_of(schedule, cluster, 64 * blocks, segment_bytes=64) == pytest.approx(blocks)
        schedule = Schedule(
            Collective.all_reduce, 1, [steps[0], [Step(Verb.send, 0, span("input", 0))]]
        )
        assert time_of(schedule, cluster, 64 * blocks, segment_bytes=64) == pytest.approx(1)


def test_simulate_short_arrays_send_fewer_bytes():
    cluster = Cluster.flat(8, Link(1e-6))
    assert simulate("ring", cluster, 64).messages == 14  # one chunk has bytes
    assert simulate("ring", cluster, 0).seconds == 0
    assert simulate("direct", cluster, 0, "all_to_all").seconds == 0


def exchange(k):
    """Rank i of the first host sends to rank k + i of the second."""
    first = [[Step(Verb.send, k + i, span("input", 0))] for i in range(k)]
    second = [[Step(Verb.recv, i, target=span("output", 0))] for i in range(k)]
    return Schedule(Collective.all_reduce, 1, first + second)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_simulate_shared_port_serves_messages_in_turn(k):
    one = CHUNK / 1e9
    for shared in (False, True):
        cluster = Cluster.grid(2, k, Link(0.0), Link(1e-6, 1e9, shared=shared))
        result = simulate(exchange(k), cluster, CHUNK)
        assert result.seconds == pytest.approx(1e-6 + (k if shared else 1) * one)
        if shared:
            arrived = sorted(result.finish[k:])
            np.testing.assert_allclose(arrived, [1e-6 + (i + 1) * one for i in range(k)])
        assert result.link_messages == (0, k)


def test_simulate_port_serves_in_order_of_arrival():
    """Rank 0 is busy with a copy: its message leaves after rank 1's, though its number is lower."""
    steps = [
        [Step(Verb.copy, -1, span("input", 0), span("output", 0)),
         Step(Verb.send, 2, span("input", 0))],
        [Step(Verb.send, 3, span("input", 0))],
        [Step(Verb.recv, 0, target=span("output", 0))],
        [Step(Verb.recv, 1, target=span("output", 0))],
    ]  # fmt: skip
    schedule = Schedule(Collective.all_reduce, 1, steps)
    between = Link(0.0, 1e9, shared=True)
    cluster = Cluster.of_hosts("aabb", Link(0.0), between, copy_rate=CHUNK / 1e-6)
    finish = simulate(schedule, cluster, CHUNK).finish
    assert finish[3] == pytest.approx(CHUNK / 1e9)
    assert finish[2] == pytest.approx(2 * CHUNK / 1e9)


def test_simulate_many_senders_share_the_receivers_port():
    """The root receives a late message first. The others arrive earlier: the port is not idle."""
    n = 5
    others = [[Step(Verb.send, 0, span("input", 0))] for _ in range(n - 1)]
    others[0].insert(0, Step(Verb.copy, -1, span("input", 0), span("output", 0)))
    root = [Step(Verb.recv, r, target=span("output", 0)) for r in range(1, n)]
    schedule = Schedule(Collective.all_reduce, 1, [root, *others])
    late = 3 * CHUNK / 1e9
    cluster = Cluster.flat(n, Link(0.0, 1e9), copy_rate=CHUNK / late)
    assert time_of(schedule, cluster, CHUNK) == pytest.approx(late + CHUNK / 1e9)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
def test_simulate_ranks_share_cores(cores):
    """Four ranks copy for a second each; all other steps take no time."""
    steps = [[Step(Verb.copy, -1, span("input", 0), span("output", 0))]] * 4
    schedule = Schedule(Collective.all_reduce, 1, steps)
    flat = replace(Cluster.flat(4, Link(0.0), copy_rate=64.0), cores=cores)
    assert time_of(schedule, flat, 64) == math.ceil(4 / cores)
    hosts = replace(Cluster.grid(2, 2, Link(0.0), Link(0.0), copy_rate=64.0), cores=cores)
    assert time_of(schedule, hosts, 64) == math.ceil(2 / cores)


def test_simulate_waiting_ranks_do_not_hold_a_core():
    """A rank that waits for a message does not occupy a core."""
    n, chunk = 6, 64
    link = Link(0.0, overhead=1.0)
    one = replace(Cluster.flat(n, link), cores=1)
    # Every message costs its sender a second and its receiver one, and there is one core.
    result = simulate("ring", one, n * chunk)
    assert result.seconds == pytest.approx(2 * result.messages)
    result = simulate("ring", replace(one, cores=n), n * chunk)
    assert result.seconds == pytest.approx(2 * (n - 1) * 2)


def test_simulate_innermost_shared_level_gives_the_link():
    """Sockets in hosts in racks: the innermost level that two ranks share decides."""
    ranks = range(8)
    places = [[r // d for r in ranks] for d in (2, 4)]
    cluster = Cluster(8, places, [Link(1e-6), Link(1e-5), Link(1e-4)])
    for peer, want in ((1, 1e-6), (2, 1e-5), (3, 1e-5), (4, 1e-4), (7, 1e-4)):
        steps = [[] for _ in ranks]
        steps[0] = [Step(Verb.send, peer, span("input", 0))]
        steps[peer] = [Step(Verb.recv, 0, target=span("output", 0))]
        assert time_of(Schedule(Collective.all_reduce, 1, steps), cluster, 64) == want


def test_ring_over_hosts_waits_for_the_slowest_link():
    within, between = Link(1e-6, 1e10), Link(5e-6, 1e9)
    spread = Cluster.grid(4, 4, within, between)
    slow = Cluster.flat(16, between)
    messages = simulate("ring", spread, 16 * CHUNK).link_messages
    assert messages == (2 * 15 * 12, 2 * 15 * 4)
    assert time_of("ring", spread, 16 * CHUNK) < time_of("ring", slow, 16 * CHUNK)
    # Each chunk passes each of the slow links.
    assert time_of("ring", spread, 16 * CHUNK) > time_of(
        "ring", Cluster.flat(16, within), 16 * CHUNK
    )


LINKS = st.builds(
    Link,
    st.floats(1e-9, 1e-3),
    st.floats(1e6, 1e12) | st.just(math.inf),
    st.floats(0, 1e-4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(ALL),
    st.integers(2, 20),
    st.data(),
    LINKS,
    LINKS,
    st.integers(0, 100_000),
    st.floats(1e8, 1e12),
)
def test_simulate_is_never_faster_than_the_ports(which, n, data, within, between, bytes, rate):
    collective, name = which
    hosts = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    cluster = Cluster.of_hosts(hosts, within, between, reduce_rate=rate, copy_rate=rate)
    result = simulate(name, cluster, bytes, collective)
    assert result.seconds == result.finish.max()
    assert np.isfinite(result.finish).all()
    assert (result.finish >= 0).all()
    if result.messages == 0:
        return
    used = [k for k, m in zip((within, between), result.link_messages, strict=True) if m]
    least = min(k.latency + 2 * k.overhead for k in used)
    assert result.seconds >= least * (1 - 1e-12)  # rounding
    if collective in ("all_reduce", "all_gather", "broadcast", "barrier") and len(set(hosts)) > 1:
        assert result.seconds >= between.latency
    # All data that leaves a host passes its port, or its ranks' ports.
    ports = len(set(hosts)) if between.shared else n
    through = result.link_bytes[1] / between.bandwidth / ports
    assert result.seconds >= through * (1 - 1e-9)
    assert result.seconds >= result.link_bytes[0] / within.bandwidth / n * (1 - 1e-9)
    # With one rank on each host, no port is shared.
    alone = Cluster.of_hosts(range(n), within, between, reduce_rate=rate, copy_rate=rate)
    other = replace(alone, links=(within, replace(between, shared=not between.shared)))
    both = [simulate(name, c, bytes, collective).finish for c in (alone, other)]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize(("collective", "name"), ALL)
@pytest.mark.parametrize("preset", CLUSTERS)
def test_simulate_every_algorithm_beyond_64_ranks_ends(collective, name, preset):
    result = simulate(name, CLUSTERS[preset](130), 1 << 20, collective)
    assert 1e-6 < result.seconds < 60
    assert len(result.finish) == 130


def test_simulate_deadlock_names_the_waiting_ranks():
    steps = [
        [Step(Verb.recv, 1 - r, target=span("output", 0)), Step(Verb.send, 1 - r, span("input", 0))]
        for r in range(2)
    ]
    schedule = Schedule(Collective.all_reduce, 1, steps)
    with pytest.raises(
        ValueError, match=r"deadlock: rank 0 waits in step 0 \(recv output\[0\] from 1"
    ):
        simulate(schedule, 2, 64)
    with pytest.raises(ValueError, match=r"rank 1 waits in step 0 \(recv output\[0\] from 0\)"):
        simulate(schedule, 2, 64)
    # A rank that waits in the shared port's queue is not stuck; one that waits for that rank is.
    between = Link(1e-6, 1e9, shared=True)
    schedule = exchange(2)
    broken = Schedule(
        Collective.all_reduce, 1, [*schedule.steps[:2], schedule.steps[2] * 2, schedule.steps[3]]
    )
    with pytest.raises(ValueError, match="deadlock: rank 2 waits in step 1"):
        simulate(broken, Cluster.grid(2, 2, Link(0.0), between), CHUNK)


def test_simulate_unmatched_messages_raise():
    unread = [[Step(Verb.send, 1, span("input", 0))], []]
    with pytest.raises(ValueError, match="rank 0 sends to rank 1 a message that is never received"):
        simulate(Schedule(Collective.all_reduce, 1, unread), 2, 64)
    differ = [[Step(Verb.send, 1, span("input", 0, 2))],
              [Step(Verb.recv, 0, target=span("output", 0))]]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"rank 1, step 0 .*: rank 0 sent another number of chunks"
    ):
        simulate(Schedule(Collective.all_reduce, 2, differ), 2, 1024)


def test_simulate_invalid_arguments_raise():
    good = Cluster.flat(2, Link(1e-6))
    peerless = Schedule(Collective.all_reduce, 1, [[Step(Verb.send, 7, span("input", 0))], []])
    outside = Schedule(Collective.all_reduce, 1, [[Step(Verb.copy, -1, span("input", 9),
                                                         span("output", 0))], []])  # fmt: skip
    link = good.links[0]
    for what, cluster, bytes, message in (
        (peerless, good, 64, "rank 0, step 0 .* no such peer among 2 ranks"),
        (outside, good, 64, "chunks outside 0:1"),
        (peerless, Cluster.flat(3, link), 64, "the schedule is for 2 ranks, not for 3"),
        ("bus", good, 64, "no all_reduce algorithm is called 'bus'; choose one of: ring"),
        ("ring", good, -1, "bytes must be 0 or more"),
        ("ring", good, 1 << 70, "bytes must be a number from 0 to"),
        ("ring", 0, 64, "at least 1 rank"),
        ("ring", Cluster.flat(1 << 25, link), 64, "at most 16777216 ranks"),
        ("ring", replace(good, links=()), 64, "a link for each level"),
        ("ring", replace(good, places=([0],), links=(link, link)), 64, "place of every rank"),
        (
            "ring",
            replace(good, places=([0, 5],), links=(link, link)),
            64,
            "places are numbers from 0",
        ),
        ("ring", replace(good, links=(Link(-1.0),)), 64, "latency and overhead"),
        ("ring", replace(good, links=(Link(math.nan),)), 64, "latency and overhead"),
        ("ring", replace(good, links=(Link(0.0, 0.0),)), 64, "bandwidth must be more than 0"),
        (
            "ring",
            replace(good, reduce_rate=math.nan),
            64,
            "reduce_rate and copy_rate must be more than 0",
        ),
        ("ring", replace(good, call_overhead=math.inf), 64, "call_overhead"),
        ("ring", replace(good, cores=-1), 64, "cores must be 0"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(what, cluster, bytes)
    with pytest.raises(ValueError, match="segment_bytes must be 64 or more"):
        simulate("ring", good, 64, segment_bytes=1)
    with pytest.raises(ValueError, match="segment_bytes must be 64 or more"):
        simulate("ring", good, 64, segment_bytes=0)
    with pytest.raises(ValueError, match="no collective is called 'bus'"):
        simulate("ring", good, 64, "bus")
    with pytest.raises(ValueError, match="a cluster needs at least 1 host"):
        Cluster.grid(0, 2, link, link)


@pytest.mark.parametrize("n", [1, 2, 7, 90])
def test_simulate_own_ring_equals_the_cores_ring(n):
    cluster = Cluster.infiniband_nvlink(n)
    mine, core = own_algorithms.ring.simulate(cluster, 1 << 20), simulate("ring", cluster, 1 << 20)
    assert mine.algorithm == "ring"
    assert mine.seconds == core.seconds
    assert mine.link_messages == core.link_messages
    np.testing.assert_array_equal(mine.finish, core.finish)
    assert own_algorithms.ring.simulate(n, 1 << 20).seconds == time_of("ring", n, 1 << 20)


def test_simulate_begins_at_the_root():
    """Two ranks of one host and a third elsewhere: it matters where the chain begins."""
    cluster = Cluster.of_hosts("aab", Link(1.0), Link(10.0))
    for root, finish in enumerate([[1, 11, 11], [20, 10, 20], [11, 11, 10]]):
        result = simulate("chain", cluster, 64, "broadcast", root=root)
        np.testing.assert_array_equal(result.finish, finish)
        assert my_chain.simulate(cluster, 64, root=root).collective == "broadcast"
        np.testing.assert_array_equal(my_chain.simulate(cluster, 64, root=root).finish, finish)
    with pytest.raises(ValueError, match="root 3 is not among the 3 ranks"):
        simulate("tree", cluster, 64, "reduce", root=3)
    with pytest.raises(ValueError, match="all_reduce has no root"):
        simulate("ring", cluster, 64, root=1)


@algorithm(num_chunks=1, collective="broadcast")
def my_chain(rank, size):
    yield recv(rank - 1, output[0]) if rank else copy(input[0], output[0])
    if rank + 1 < size:
        yield send(rank + 1, output[0])


def test_show_describes_the_simulation():
    text = simulate("ring", Cluster.grid(2, 2, Link(1e-6), Link(1e-3)), 4096).show()
    assert re.fullmatch(
        r"ring all_reduce of 4,096 bytes among 4 ranks \(cluster\)\n"
        r"time [\d.]+ ms, bus bandwidth [\d.]+ GB/s\n"
        r"ranks are done after [\d.]+ ms to [\d.]+ ms\n"
        r"link 0: 12 messages, 12,288 bytes\n"
        r"link 1: 12 messages, 12,288 bytes",
        text,
    )


def test_cluster_this_machine_has_plausible_rates():
    for ranks in (1, 2, 3):
        cluster = Cluster.this_machine(ranks, 1 << 16)
        assert cluster.ranks == ranks
        assert 1e6 < cluster.copy_rate < 1e13
        assert 1e6 < cluster.reduce_rate < 1e13
        assert 0 <= cluster.links[0].latency < 1
        assert simulate("ring", cluster, 1 << 16).seconds > 0
    with pytest.raises(ValueError, match="cannot measure 0 ranks"):
        Cluster.this_machine(0)


def test_cluster_fitted_finds_the_costs_of_messages():
    """Four ranks with a latency of 3 s, an overhead of half a second at each end, and 1 s a call."""
    cost = {"ring": 1 + 6 * (3 + 2 * 0.5), "reduce_to_one": 1 + 2 * 3 + 2 * 4 * 0.5}
    cluster = Cluster.fitted(
        4, 1, lambda name, bytes: cost[name], Link(0.0, 1e9), call_overhead=1.0
    )
    link = cluster.links[0]
    assert (link.latency, link.overhead, link.bandwidth) == (3.0, 0.5, 1e9)
    assert cluster.call_overhead == 1.0


def test_simulate_progress_callback_can_end_the_simulation():
    shares = []
    simulate("ring", 600, 1 << 20, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx((1 << 20) / (600 * 4 * 599))

    def enough(share):
        raise LookupError(share)

    with pytest.raises(LookupError):
        simulate("ring", 600, 1 << 20, progress=enough)
    with pytest.raises(LookupError):
        algorithms.verify("ring", 600, progress=enough)


@pytest.mark.parametrize("work", ["simulate", "verify"])
def test_simulate_interrupted_ends(ctrl_c, work):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            if work == "simulate":
                simulate("ring", 10_000, 1 << 30)
            else:
                algorithms.verify("ring", 6_000)
    finally:
        timer.join()


def test_simulate_hierarchical_uses_the_hosts_of_the_cluster():
    hosts = [0, 1, 0, 1, 0]
    spread = Cluster.of_hosts(["a", "b", "a", "b", "a"], Link(1e-6), Link(1e-5, 1e9))
    assert spread.hosts == hosts and Cluster.flat(2, Link(1e-6)).hosts == [0, 1]
    result = simulate("hierarchical", spread, 1 << 20)
    by_hand = simulate(algorithms.hierarchical(hosts), spread, 1 << 20)
    assert (result.algorithm, result.seconds) == ("hierarchical", by_hand.seconds)
    assert result.seconds < time_of("ring", spread, 1 << 20)
    with pytest.raises(ValueError, match="hierarchical"):
        simulate("hierarchical", spread, 1 << 20, "broadcast")


def test_simulate_plot_writes_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    marks = {"size of the array": ["1 KiB", "1 MiB"], "ranks": ["2", "4", "8"]}
    for name, ranks, sizes, start in (
        ("a.png", [2, 4, 8], [1 << 10, 1 << 20], b"\x89PNG"),
        ("b.svg", [4], [1 << 10, 1 << 20], b"<?xml"),
    ):
        figure = algorithms.plot(
            ["ring", own_algorithms.ring],
            Cluster.ethernet_10g,
            ranks=ranks,
            sizes=sizes,
            file=tmp_path / name,
        )
        assert (tmp_path / name).read_bytes().startswith(start)
        assert len(figure.axes) == (2 if len(ranks) > 1 else 1)
        for axes in figure.axes:
            assert [line.get_label() for line in axes.lines] == ["ring", "ring"]
            core, mine = axes.lines
            np.testing.assert_array_equal(core.get_ydata(), mine.get_ydata())
            shown = [text.get_text() for text in axes.get_xticklabels()]
            assert shown == marks[axes.get_xlabel()]
            assert axes.get_legend() is None and len(figure.legends) == 1  # below the axes
    want = [time_of("ring", Cluster.ethernet_10g(4), size) for size in (1 << 10, 1 << 20)]
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), want)


def test_simulate_plot_wrong_arguments_raise_type_error():
    with pytest.raises(TypeError, match="plot needs a list of algorithms, not 'ring'"):
        algorithms.plot("ring", Cluster.ethernet_10g, ranks=[2], sizes=[8])
    with pytest.raises(TypeError, match="plot needs a function of the number of ranks, not the"):
        algorithms.plot(["ring"], Cluster.ethernet_10g(2), ranks=[2], sizes=[8])


def test_simulate_plot_without_matplotlib_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[plot\]'"):
        algorithms.plot(["ring"], Cluster.ethernet_10g, ranks=[2], sizes=[8])


BIG = """
from pycollective import algorithms
from pycollective.algorithms import Cluster, Link, simulate
n, chunk = 10_000, 6400
algorithms.verify("ring", n)
cluster = Cluster.flat(n, Link(1e-6, 1e9, 1e-7), reduce_rate=1e10)
result = simulate("ring", cluster, n * chunk)
want = 2 * (n - 1) * (1e-6 + 2e-7 + chunk / 1e9) + (n - 1) * chunk / 1e10
assert abs(result.seconds / want - 1) < 1e-6, (result.seconds, want)
assert result.messages == 2 * (n - 1) * n
n = 2_000  # shared ports need no more memory, and twice the time
hosts = Cluster.grid(n // 8, 8, Link(1e-6, 1e11), Link(5e-6, 1e10, shared=True))
over = simulate("ring", hosts, n * chunk)
messages = 2 * (n - 1) * n
assert over.link_messages == (messages // 8 * 7, messages // 8)
assert over.seconds > 2 * (n - 1) * (5e-6 + chunk / 1e10) / 8
# The peak that getrusage reports includes the peak of pytest, the process before exec.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(int(peak.split()[1]) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_ring_among_10_000_ranks_fits_into_1_gib(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BIG], capture_output=True, text=True, timeout=900, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert 0.7 < float(done.stdout) < 1


@pytest.mark.parametrize("ranks_per_host", [0, -1])
@pytest.mark.parametrize("preset", [Cluster.ethernet_10g, Cluster.infiniband_nvlink])
def test_preset_without_ranks_on_a_host_raises(preset, ranks_per_host):
    with pytest.raises(ValueError, match="at least 1 rank per host"):
        preset(4, ranks_per_host)
