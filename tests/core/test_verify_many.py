"""The verifier beyond 64 ranks accepts correct schedules and rejects faulty ones."""

from __future__ import annotations

import random

import pytest

from pycollective import _core, algorithms
from pycollective._core import Buffer, Collective, Schedule, Span, Step, Verb, prove, verify_many
from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send

ALL = [(c, a) for c in Collective.__members__ for a in algorithms.names(c)]


def span(buffer, first, count=1):
    return Span(getattr(Buffer, buffer), first, count)


def fault_in(schedule: Schedule) -> str:
    return verify_many(schedule.collective, schedule, len(schedule.steps))


def with_steps(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    every = list(schedule.steps)
    every[rank] = steps
    return Schedule(schedule.collective, schedule.chunks, every, schedule.scratch)


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

    used = step.target if step.verb == Verb.recv else step.source
    name = "target" if step.verb == Verb.recv else "source"
    if step.verb not in (Verb.copy, Verb.reduce):
        yield changed(peer=(step.peer + 1) % size)
    if step.verb in (Verb.recv_reduce, Verb.reduce):
        yield changed(completes=not step.completes)
    if chunks > 1:
        yield changed(**{name: Span(used.buffer, (used.first + 1) % chunks, used.count)})
    if step.verb == Verb.recv:
        yield changed(verb=Verb.recv_reduce, source=span("input", step.target.first))
    if step.verb == Verb.recv_reduce:
        yield changed(verb=Verb.recv)
    yield changed(**{name: Span(used.buffer, used.first, used.count + 1)})


@pytest.mark.parametrize(("collective", "name"), ALL)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 64])
def test_verify_many_agrees_with_the_exact_verifier(collective, name, size):
    kind = Collective.__members__[collective]
    assert verify_many(kind, name, size) == ""


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_verify_many_every_algorithm_at_300_ranks_is_proved(collective, name):
    algorithms.verify(name, 300, collective)


@pytest.mark.parametrize(("collective", "name"), [a for a in ALL if a[0] != "barrier"])
@pytest.mark.parametrize("size", [4, pytest.param(70, marks=pytest.mark.slow)])
def test_verify_many_finds_faults(collective, name, size):
    """A schedule is rejected if any rank misses a step, or has a step with another field."""
    chance = random.Random(11)
    schedule = algorithms.schedule(name, size, collective)
    assert fault_in(schedule) == ""
    for _ in range(12):
        rank = chance.randrange(size)
        steps = schedule.steps[rank]
        if not steps:
            continue
        k = chance.randrange(len(steps))
        without = with_steps(schedule, rank, steps[:k] + steps[k + 1 :])
        assert fault_in(without), f"rank {rank} without step {k}: {steps[k]}"
        for change in changes(steps[k], size, schedule.chunks):
            broken = with_steps(schedule, rank, [*steps[:k], change, *steps[k + 1 :]])
            assert fault_in(broken), f"rank {rank} step {k}: {steps[k]} -> {change}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 70])
def test_verify_many_rejects_only_what_the_exact_verifier_rejects(size):
    """Two steps of a rank change places; where ``verify_many`` rejects this, so does `prove`."""
    chance = random.Random(4)
    schedule = algorithms.schedule("hierarchical_copy", size)
    rejected = 0
    for _ in range(40):
        rank = chance.randrange(size)
        steps = list(schedule.steps[rank])
        i, j = chance.sample(range(len(steps)), 2)
        steps[i], steps[j] = steps[j], steps[i]
        broken = with_steps(schedule, rank, steps)
        problem = fault_in(broken)
        rejected += problem != ""
        if size <= 64 and problem:
            assert prove(broken)
    assert rejected > 20


def star_with_steps(size: int, wrong: dict[int, list[Step]]) -> Schedule:
    """Return a star in which some ranks have other steps."""
    schedule = algorithms.schedule("reduce_to_one", size)
    return Schedule(
        schedule.collective, 1, [wrong.get(r, steps) for r, steps in enumerate(schedule.steps)]
    )


def test_verify_many_describes_faults():
    n = 100
    late = [Step(Verb.recv, 0, target=span("output", 0)), Step(Verb.send, 0, span("input", 0))]
    text = fault_in(star_with_steps(n, {5: late}))
    assert text.startswith("deadlock: rank 0 waits in step 4 (recv_reduce output[0]")
    assert "rank 5 waits in step 0 (recv output[0] from 0)" in text
    good = algorithms.schedule("reduce_to_one", n).steps
    again = [*good[5], Step(Verb.send, 6, span("output", 0))]
    assert fault_in(star_with_steps(n, {5: again})) == (
        "rank 5 sends to rank 6 a message that is never received"
    )
    twice = [*good[5], Step(Verb.reduce, -1, span("output", 0), span("output", 0))]
    assert fault_in(star_with_steps(n, {5: twice})) == (
        "rank 5 ends with a wrong output[0]: not the right contributions, each once"
    )
    forgets = [good[5][0], Step(Verb.copy, -1, span("output", 0), span("output", 0))]
    assert "reads a chunk that was never written" in fault_in(star_with_steps(n, {5: forgets}))
    outside = [Step(Verb.send, 0, span("input", 3)), good[5][1]]
    assert fault_in(star_with_steps(n, {5: outside})) == (
        "rank 5, step 0 (send input[3] to 0): chunks outside 0:1"
    )
    onto = [*good[5], Step(Verb.copy, -1, span("output", 0), span("input", 0))]
    assert "writes to the input" in fault_in(star_with_steps(n, {5: onto}))
    unmarked = [Step(s.verb, s.peer, s.source, s.target, False) for s in good[0]]
    assert "completes the chunk and is not marked so" in fault_in(star_with_steps(n, {0: unmarked}))


def test_verify_many_overwritten_input_in_place_is_found():
    """Out of place this is a sum of two ranks; in place, rank 1's input has been overwritten."""
    n = 66
    schedule = algorithms.schedule("reduce_to_one", n)
    steps = list(schedule.steps)
    steps[1] = [*steps[1], Step(Verb.copy, -1, span("input", 0), span("output", 0))]
    text = fault_in(Schedule(schedule.collective, 1, steps))
    assert "rank 1, step 2" in text
    assert "in place: reads input that has been overwritten" in text


def test_verify_many_overwritten_sent_data_are_found():
    """Rank 1 receives into data that rank 2 has not read yet."""
    n = 66
    schedule = algorithms.schedule("reduce_to_one", n)
    steps = list(schedule.steps)
    steps[1] = [steps[1][0], Step(Verb.copy, -1, span("input", 0), span("output", 0)),
                Step(Verb.send, 2, span("output", 0)), steps[1][1]]  # fmt: skip
    steps[2] = [*steps[2], Step(Verb.recv, 1, target=span("output", 0)),
                Step(Verb.send, 3, span("output", 0))]  # fmt: skip
    steps[3] = [*steps[3], Step(Verb.recv, 2, target=span("output", 0))]
    text = fault_in(Schedule(schedule.collective, 1, steps))
    assert "rank 1 has overwritten the chunks that it sent in step 2 before it was read" in text


def test_verify_many_two_messages_of_one_pair_are_checked():
    n = 66
    schedule = algorithms.schedule("reduce_to_one", n)
    steps = list(schedule.steps)
    # Ranks 1 and 2 each send two messages to the other before they receive one.
    for rank, peer in ((1, 2), (2, 1)):
        sending = Step(Verb.send, peer, span("output", 0))
        receiving = Step(Verb.recv, peer, target=span("output", 0))
        steps[rank] = [*steps[rank], sending, sending, receiving, receiving]
    assert "deadlock" in fault_in(Schedule(schedule.collective, 1, steps))


@pytest.mark.parametrize("size", [3, 70, 130])
def test_verify_many_short_barrier_is_rejected(size):
    good = algorithms.schedule("dissemination", size, "barrier")
    assert fault_in(good) == ""
    short = Schedule(Collective.barrier, 1, [steps[:-2] for steps in good.steps])
    assert "leaves the barrier before rank" in fault_in(short)


def test_verify_many_chunk_of_another_part_is_found():
    """All-to-all: two parts of one sender change places."""
    schedule = algorithms.schedule("direct", 70, "all_to_all")
    steps = list(schedule.steps[9])
    sends = [k for k, s in enumerate(steps) if s.verb == Verb.send]
    a, b = sends[3], sends[40]
    steps[a], steps[b] = (
        Step(Verb.send, steps[a].peer, steps[b].source),
        Step(Verb.send, steps[b].peer, steps[a].source),
    )
    assert "belongs" in fault_in(with_steps(schedule, 9, steps))


@algorithm(num_chunks=1)
def star(rank, size):
    if rank == 0:
        yield copy(input[0], output[0])
        for peer in range(1, size):
            yield recv_reduce(peer, output[0], output[0])
        for peer in range(1, size):
            yield send(peer, output[0])
    else:
        yield send(0, input[0])
        yield recv(0, output[0])


@algorithm(num_chunks=1)
def forgetful(rank, size):
    yield from [s for s in star._steps(rank, size) if s.peer != size - 1]


def test_verify_many_own_algorithm_is_proved_or_rejected():
    algorithms.verify(star, 5)
    algorithms.verify(star, 100)
    with pytest.raises(ValueError, match="never received|deadlock"):
        algorithms.verify(forgetful, 100)
    with pytest.raises(ValueError, match="64 ranks at most"):
        star.verify(100)


def test_marks_of_many_ranks_are_the_last_reductions():
    schedule = _core.Algorithm("star", star.schedule(100)).schedule
    marked = [
        (r, k) for r, steps in enumerate(schedule.steps) for k, s in enumerate(steps) if s.completes
    ]
    assert marked == [(0, 99)]


@pytest.mark.slow
def test_verify_many_too_many_ranks_raise():
    with pytest.raises(ValueError, match="too many chunks"):
        verify_many(Collective.all_to_all, "direct", 50_000)
    with pytest.raises(MemoryError):  # more than there are addresses
        verify_many(Collective.all_reduce, "ring", 4_400_000)
