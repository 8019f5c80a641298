"""The verifier accepts every shipped algorithm, and rejects broken ones."""

from __future__ import annotations

import random

import pytest

from pycollective import algorithms
from pycollective._core import Buffer, Collective, Schedule, Span, Step, Verb, prove, verify
from pycollective.algorithms import Cluster, Link

ALL = [(c, a) for c in Collective.__members__ for a in algorithms.names(c)]


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_every_size_to_32_is_proved(collective, algorithm):
    for size in range(1, 33):
        algorithms.verify(algorithm, size, collective)


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_every_size_to_64_is_proved(collective, algorithm):
    for size in range(33, 65):
        algorithms.verify(algorithm, size, collective)


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_verify_beyond_64_ranks_proves_schedules(collective, algorithm):
    for size in (65, 100, 257):
        algorithms.verify(algorithm, size, collective)


def programs(algorithm: str, size: int) -> tuple[int, list[list[Step]]]:
    schedule = algorithms.schedule(algorithm, size)
    return schedule.chunks, [list(steps) for steps in schedule.steps]


def problem(chunks: int, steps: list[list[Step]], in_place: bool = False) -> str:
    return verify(Schedule(Collective.all_reduce, chunks, steps), in_place)


def with_steps(schedule: Schedule, steps: list[list[Step]]) -> Schedule:
    return Schedule(schedule.collective, schedule.chunks, steps, schedule.scratch)


def span(buffer: str, first: int, count: int = 1) -> Span:
    return Span(getattr(Buffer, buffer), first, count)


@pytest.mark.parametrize(("collective", "algorithm"), [a for a in ALL if a[0] != "barrier"])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_dropping_any_step_is_found(collective, algorithm, size):
    schedule = algorithms.schedule(algorithm, size, collective)
    good = schedule.steps
    assert prove(schedule) == ""
    for rank in range(size):
        for k in range(len(good[rank])):
            broken = [list(steps) for steps in good]
            del broken[rank][k]
            assert prove(with_steps(schedule, broken)), f"rank {rank} without step {k} was accepted"


@pytest.mark.parametrize(("collective", "algorithm"), [a for a in ALL if a[0] != "barrier"])
@pytest.mark.parametrize("size", [3, 4, 6])
def test_changing_any_field_is_found(collective, algorithm, size):
    """A schedule with another peer, chunk, number of chunks, verb or mark is rejected."""
    schedule = algorithms.schedule(algorithm, size, collective)
    good = schedule.steps
    harmless = []
    for rank in range(size):
        for k, step in enumerate(good[rank]):
            for change in changes(step, size, schedule.chunks):
                broken = [list(steps) for steps in good]
                broken[rank][k] = change
                if prove(with_steps(schedule, broken)) == "":
                    harmless.append(f"rank {rank} step {k}: {step} -> {change}")
    assert harmless == []


def changes(step: Step, size: int, chunks: int):
    """Yield wrong versions of a step."""

    def changed(**other):
        fields = {
            "verb": step.verb,
            "peer": step.peer,
            "source": step.source,
            "target": step.target,
            "completes": step.completes,
        }
        return Step(**{**fields, **other})

    if step.verb not in (Verb.copy, Verb.reduce):  # copy and reduce have no peer
        yield changed(peer=(step.peer + 1) % size)
    if step.verb in (Verb.recv_reduce, Verb.reduce):
        yield changed(completes=not step.completes)
    used = step.target if step.verb == Verb.recv else step.source
    name = "target" if step.verb == Verb.recv else "source"
    if chunks > 1:
        yield changed(**{name: Span(used.buffer, (used.first + 1) % chunks, used.count)})
    if step.verb == Verb.recv:
        yield changed(verb=Verb.recv_reduce, source=span("input", step.target.first))
    if step.verb == Verb.recv_reduce:
        yield changed(verb=Verb.recv)
    yield changed(**{name: Span(used.buffer, used.first, used.count + 1)})


def test_swapping_two_steps_is_mostly_found():
    """Two steps of a rank change places: most of these schedules are rejected."""
    chance = random.Random(4)
    found = 0
    for _ in range(300):
        chunks, steps = programs("hierarchical_copy", 5)
        rank = chance.randrange(5)
        i, j = chance.sample(range(len(steps[rank])), 2)
        steps[rank][i], steps[rank][j] = steps[rank][j], steps[rank][i]
        found += problem(chunks, steps) != ""
    assert found > 200


def test_verify_contribution_counted_twice_is_found():
    steps = [
        [Step(Verb.recv_reduce, 1, span("input", 0), span("output", 0), True),
         Step(Verb.reduce, -1, span("input", 0), span("output", 0)),
         Step(Verb.send, 1, span("output", 0))],
        [Step(Verb.send, 0, span("input", 0)), Step(Verb.recv, 0, target=span("output", 0))],
    ]  # fmt: skip
    assert "counted twice" in problem(1, steps)


def test_verify_deadlock_names_the_ranks():
    steps = [
        [Step(Verb.recv_reduce, 1 - r, span("input", 0), span("output", 0), True),
         Step(Verb.send, 1 - r, span("input", 0))]
        for r in range(2)
    ]  # fmt: skip
    text = problem(1, steps)
    assert text.startswith("deadlock: rank 0 waits in step 0")
    assert "rank 1 waits in step 0" in text


def test_verify_second_message_without_a_receiver_is_found():
    """Schedules may rely on one unreceived message between two ranks, not on two."""
    swap = [
        [Step(Verb.send, 1 - r, span("input", 0)), Step(Verb.send, 1 - r, span("input", 1)),
         Step(Verb.recv_reduce, 1 - r, span("input", 0), span("output", 0), True),
         Step(Verb.recv_reduce, 1 - r, span("input", 1), span("output", 1), True)]
        for r in range(2)
    ]  # fmt: skip
    assert "deadlock" in problem(2, swap)


def test_verify_write_to_data_that_a_peer_reads_is_found():
    """In place, rank 0 overwrites its chunk without a message that rank 1 has read it."""
    steps = [
        [Step(Verb.send, 1, span("input", 0)),
         Step(Verb.recv_reduce, 1, span("input", 0), span("output", 0), True)],
        [Step(Verb.send, 0, span("input", 0)),
         Step(Verb.recv_reduce, 0, span("input", 0), span("output", 0), True)],
    ]  # fmt: skip
    assert problem(1, steps) == ""
    assert "may still be reading" in problem(1, steps, in_place=True)


def test_verify_write_to_the_input_is_found():
    steps = [[Step(Verb.copy, -1, span("input", 0), span("input", 0))]]
    assert "writes to the input" in problem(1, steps)


def test_verify_schedule_of_another_number_of_ranks_raises():
    with pytest.raises(ValueError, match="the schedule has 4 ranks, not 5"):
        algorithms.verify(algorithms.schedule("ring", 4), 5)


def test_verify_missing_contribution_is_described():
    steps = [[Step(Verb.copy, -1, span("input", 0), span("output", 0))] for _ in range(2)]
    assert problem(1, steps) == (
        "rank 0 ends with a wrong output[0]: chunk 0 with the contribution of rank 0"
    )


def test_verify_message_to_an_unknown_rank_is_rejected():
    steps = [
        [Step(Verb.copy, -1, span("input", 0), span("output", 0)),
         Step(Verb.send, 0, span("output", 0))],
    ]  # fmt: skip
    assert "no such peer" in problem(1, steps)


def test_verify_barrier_that_does_not_wait_is_rejected():
    good = algorithms.schedule("dissemination", 4, "barrier")
    assert verify(Schedule(Collective.barrier, 1, [s[:2] for s in good.steps]), False) == (
        "rank 0 leaves the barrier before rank 1 has entered"
    )


def test_algorithm_names_are_listed_and_others_raise():
    assert algorithms.names()[0] == "ring"
    with pytest.raises(ValueError, match="no all_reduce algorithm is called 'bus'.*ring"):
        algorithms.schedule("bus", 4)
    with pytest.raises(ValueError, match="no collective is called 'bus'"):
        algorithms.names("bus")
    with pytest.raises(ValueError, match="at least 1 rank"):
        algorithms.schedule("ring", 0)


def test_show_prints_every_step():
    text = algorithms.show("ring", 2)
    assert text.splitlines()[:3] == [
        "ring all_reduce: 2 ranks, 2 chunks",
        "rank 0:",
        "    0  send input[0] to 1",
    ]
    assert "recv_reduce output[1] = input[1] + from 1, complete" in text


@pytest.mark.parametrize("size", range(2, 33))
def test_ring_moves_the_fewest_bytes(size):
    """Each rank sends 2 (size - 1) chunks of a buffer of `size` chunks: the lower bound."""
    schedule = algorithms.schedule("ring", size)
    for steps in schedule.steps:
        sent = sum(s.source.count for s in steps if s.verb == Verb.send)
        assert sent == 2 * (size - 1)
        assert schedule.chunks == size


@pytest.mark.parametrize("size", range(2, 33))
def test_hierarchical_copy_crosses_twice_per_chunk(size):
    schedule = algorithms.schedule("hierarchical_copy", size)
    half = (size + 1) // 2
    crossings = sum(
        s.source.count
        for rank, steps in enumerate(schedule.steps)
        for s in steps
        if s.verb == Verb.send and (rank < half) != (s.peer < half)
    )
    assert crossings == 2 * schedule.chunks


def sent_chunks(schedule: Schedule) -> list[int]:
    """Return the number of chunks that each rank sends."""
    return [sum(s.source.count for s in steps if s.verb == Verb.send) for steps in schedule.steps]


@pytest.mark.parametrize("size", range(2, 33))
def test_halving_doubling_moves_the_fewest_bytes_in_few_rounds(size):
    schedule = algorithms.schedule("halving_doubling", size)
    p = 1 << (size.bit_length() - 1)
    assert schedule.chunks == p
    for rank, sent in enumerate(sent_chunks(schedule)):
        folded = p if rank >= p or rank + p < size else 0
        assert sent == (0 if rank >= p else 2 * (p - 1)) + folded
        if size == p:
            assert len(schedule.steps[rank]) == 4 * (p.bit_length() - 1)


@pytest.mark.parametrize("size", range(2, 33))
def test_recursive_doubling_adds_the_sum_of_lower_ranks_first_in_few_rounds(size):
    """So all ranks compute the same bits, also of zeros with signs and of NaNs."""
    schedule = algorithms.schedule("recursive_doubling", size)
    doublings = size.bit_length() - 1
    p = 1 << doublings
    for rank, sent in enumerate(sent_chunks(schedule)):
        assert sent == (1 if rank >= p else doublings + (rank + p < size))
    for rank, steps in enumerate(schedule.steps):
        adding = [s.peer for s in steps if s.verb == Verb.recv_reduce]
        assert all(peer > rank for peer in adding)
        assert sum(s.verb in (Verb.recv_reduce, Verb.reduce) for s in steps) == sum(
            s.verb in (Verb.recv, Verb.recv_reduce) for s in steps
        ) - (rank >= p)


@pytest.mark.parametrize("size", range(2, 65))
def test_double_tree_shares_the_work(size):
    """No rank forwards in both trees, except the last rank of groups of odd size."""
    schedule = algorithms.schedule("double_tree", size)
    for rank, sent in enumerate(sent_chunks(schedule)):
        assert sent <= 4, rank
    depth = algorithms.rounds("double_tree", size).count("\n") - 1
    assert depth == 2 * (size - 1).bit_length()  # as many as one tree alone needs: both at once


@pytest.mark.parametrize("size", [2, 5, 8, 16])
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [(c, a) for c, a in ALL if c in ("reduce_scatter", "all_gather", "all_to_all")],
)
def test_schedules_of_parts_move_the_fewest_bytes(collective, algorithm, size):
    schedule = algorithms.schedule(algorithm, size, collective)
    sent = [sum(s.source.count for s in steps if s.verb == Verb.send) for steps in schedule.steps]
    assert sent == [size - 1] * size


@pytest.mark.parametrize("size", range(2, 33))
def test_halving_and_doubling_take_few_rounds(size):
    """A message in each round, to another rank."""
    rounds = (size - 1).bit_length()
    cluster = Cluster(size, places=[], links=[Link(latency=1.0)])
    for collective, algorithm in (("reduce_scatter", "halving"), ("all_gather", "doubling")):
        for rank, steps in enumerate(algorithms.schedule(algorithm, size, collective).steps):
            to = [(s.peer - rank) % size for s in steps if s.verb == Verb.send]
            distances = [1 << j for j in range(rounds)]
            if algorithm == "halving":
                assert to == distances[::-1]
            else:
                assert to == [-d % size for d in distances]
        assert algorithms.simulate(algorithm, cluster, 1000, collective).seconds == rounds
        picture = algorithms.rounds(algorithm, size, collective).splitlines()
        assert len(picture) == 2 + rounds


def test_schedules_of_short_arrays_are_proved():
    """Rank 1 answers one message of all chunks with a message for each chunk that is not empty."""
    c = [span("output", i) for i in range(3)]
    i = [span("input", i) for i in range(3)]
    everything = span("input", 0, 3), span("output", 0, 3)
    steps = [
        [Step(Verb.send, 1, everything[0]),
         Step(Verb.recv, 1, target=c[1]), Step(Verb.recv, 1, target=c[0]),
         Step(Verb.recv, 1, target=c[2])],
        [Step(Verb.recv_reduce, 0, *everything, True),
         Step(Verb.send, 0, c[1]), Step(Verb.send, 0, c[0]), Step(Verb.send, 0, c[2])],
    ]  # fmt: skip
    assert prove(Schedule(Collective.all_reduce, 3, steps)) == ""
    # In place, rank 1 sends sums instead of its input, so rank 0 counts its own chunks twice.
    steps = [
        [Step(Verb.send, 1, span("input", 0, 2)), Step(Verb.recv_reduce, 1, i[1], c[1], True),
         Step(Verb.recv_reduce, 1, i[0], c[0], True)],
        [Step(Verb.recv_reduce, 0, span("input", 0, 2), span("output", 0, 2), True),
         Step(Verb.send, 0, i[1]), Step(Verb.send, 0, i[0])],
    ]  # fmt: skip
    schedule = Schedule(Collective.all_reduce, 2, steps)
    assert verify(schedule, False) == ""
    assert "counted twice" in verify(schedule, True)


def test_verify_chunk_in_a_wrong_place_is_found():
    """The last chunk may be short: a full chunk does not fit there."""
    steps = [
        [Step(Verb.copy, -1, span("input", 0), span("output", 1)),
         Step(Verb.copy, -1, span("output", 1), span("output", 0)),
         Step(Verb.copy, -1, span("input", 1), span("output", 1))],
    ]  # fmt: skip
    assert "puts chunk 0 where chunk 1 belongs" in problem(2, steps)


def test_verify_scratch_outside_or_unwritten_is_found():
    through = [[Step(Verb.copy, -1, span("input", 0), span("scratch", 1)),
                Step(Verb.copy, -1, span("scratch", 1), span("output", 0))]]  # fmt: skip
    assert prove(Schedule(Collective.all_reduce, 1, through, 2)) == ""
    assert "chunks outside 0:1" in prove(Schedule(Collective.all_reduce, 1, through, 1))
    unwritten = [[Step(Verb.copy, -1, span("scratch", 0), span("output", 0))]]
    assert "never written" in prove(Schedule(Collective.all_reduce, 1, unwritten, 1))
    again = [
        [Step(Verb.copy, -1, span("input", 0), span("scratch", 0)),
         Step(Verb.send, 1, span("scratch", 0)),
         Step(Verb.copy, -1, span("input", 0), span("scratch", 0)),
         Step(Verb.recv_reduce, 1, span("input", 0), span("output", 0), True)],
        [Step(Verb.recv_reduce, 0, span("input", 0), span("output", 0), True),
         Step(Verb.send, 0, span("input", 0))],
    ]  # fmt: skip
    assert "may still be reading" in prove(Schedule(Collective.all_reduce, 1, again, 1))


def test_verify_parts_per_message_wrap_around_and_stay_inside():
    """Spans wrap around from the last part to the first, but not beyond the last chunk."""

    def by_rank_0(first, count=2):
        copies = [Step(Verb.copy, -1, span("input", 0), span("output", r)) for r in range(3)]
        steps = [[copies[0]], *([copies[r], Step(Verb.send, 0, span("output", r))] for r in (1, 2))]
        for r in (1, 2):
            steps[0].append(Step(Verb.recv, r, target=span("output", r)))
        for r in (1, 2):
            steps[0].append(Step(Verb.send, r, span("output", first(r), count)))
            steps[r].append(Step(Verb.recv, 0, target=span("output", first(r), count)))
        return prove(Schedule(Collective.all_gather, 3, steps))

    assert by_rank_0(lambda r: (r + 1) % 3) == ""
    assert "wrong output[1]: never written" in by_rank_0(lambda r: 2)
    assert "chunks outside 0:3" in by_rank_0(lambda r: 3)
    assert "chunks outside 0:3" in by_rank_0(lambda r: 0, 4)
    beyond = [[Step(Verb.copy, -1, span("input", 1, 2), span("output", 1, 2))]]
    assert "chunks outside 0:2" in prove(Schedule(Collective.all_reduce, 2, beyond))
    scratch = [[Step(Verb.copy, -1, span("input", 0), span("output", 0)),
                Step(Verb.copy, -1, span("output", 0, 1), span("scratch", 2, 1))]]  # fmt: skip
    assert "chunks outside 0:2" in prove(Schedule(Collective.all_gather, 1, scratch, 2))


def test_verify_reduce_in_a_move_is_found():
    steps = [
        [Step(Verb.copy, -1, span("input", 0), span("output", 0)),
         Step(Verb.send, 1, span("output", 0))],
        [Step(Verb.recv_reduce, 0, span("input", 0), span("output", 0))],
    ]  # fmt: skip
    assert "does not" in verify(Schedule(Collective.broadcast, 1, steps), False)


def test_rounds_prints_a_table_of_messages():
    assert algorithms.rounds("ring", 3).splitlines() == [
        "ring all_reduce: 3 ranks, 3 chunks",
        "round  rank 0  rank 1  rank 2",
        "    1  2+2     0+0     1+1",
        "    2  2+1     0+2     1+0",
        "    3  2<0     0<1     1<2",
        "    4  2<2     0<0     1<1",
    ]


@pytest.mark.parametrize(
    ("algorithm", "size", "collective"),
    [("ring", 4, "all_reduce"), ("hierarchical_copy", 7, "all_reduce"), ("tree", 5, "broadcast")],
)
def test_draw_has_an_arrow_for_each_message_and_a_line_for_each_rank(
    tmp_path, algorithm, size, collective
):
    pytest.importorskip("matplotlib")
    figure = algorithms.draw(algorithm, size, collective, file=tmp_path / "schedule.svg")
    (axes,) = figure.axes
    steps = algorithms.schedule(algorithm, size, collective).steps
    sent = sum(step.verb.name == "send" for rank_steps in steps for step in rank_steps)
    assert sum(text.arrow_patch is not None for text in axes.texts) == sent
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        f"rank {r}" for r in range(size)
    ]
    assert (tmp_path / "schedule.svg").read_text().startswith("<?xml")


def test_deadlock_cannot_be_drawn():
    def steps(rank, size):
        yield algorithms.recv(1 - rank, algorithms.output[0])
        yield algorithms.send(1 - rank, algorithms.input[0])

    deadlock = algorithms.algorithm(num_chunks=1)(steps)
    for draw in (algorithms.rounds, algorithms.draw):
        with pytest.raises(ValueError, match="rank 0 waits for ever in step 0 .*cannot be drawn"):
            draw(deadlock, 2)


def test_draw_of_one_rank_has_no_arrow():
    pytest.importorskip("matplotlib")
    assert list(algorithms.draw("ring", 1).axes[0].texts) == []


def test_schedule_of_several_hosts_is_shown_and_drawn():
    pytest.importorskip("matplotlib")
    schedule = algorithms.hierarchical([0, 0, 1, 1])
    first = "schedule all_reduce: 4 ranks, 4 chunks"
    assert algorithms.show(schedule).splitlines()[:2] == [first, "rank 0:"]
    assert algorithms.rounds(schedule, 4).splitlines()[0] == first
    assert algorithms.draw(schedule).axes[0].get_title() == first
    with pytest.raises(ValueError, match="the schedule has 4 ranks, not 5"):
        algorithms.draw(schedule, 5)
    with pytest.raises(TypeError, match="size is missing"):
        algorithms.rounds("ring")
    with pytest.raises(TypeError, match="an algorithm is a name from"):
        algorithms.show(3, 4)


@pytest.mark.parametrize("given", [(1 << 30,), (1, (1 << 31) - 1)])
def test_schedule_with_too_many_chunks_raises(given):
    @algorithms.algorithm(*given)
    def written(rank, size):
        if rank:
            yield algorithms.send(0, algorithms.input[0])

    with pytest.raises(ValueError, match="at most"):
        written.verify(3)
