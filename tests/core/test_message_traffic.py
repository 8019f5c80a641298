"""Random messages among several ranks at once, over every transport: every value is checked."""

from __future__ import annotations

import os
import random
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import rank_groups

SANITIZED = "PYCOLLECTIVE_SANITIZED" in os.environ
#: Sizes in bytes at which the way of moving a message changes, and one above that of any ring.
EDGES = [0, 32, 224, 2048, 4096, 16 << 10, 64 << 10, 128 << 10, 2 << 20, 5 << 20]
DTYPES = ["uint8", "float32", "complex128", "S3"]


class Sent(NamedTuple):
    """One message of a plan, which all ranks know."""

    number: int
    source: int
    dest: int
    tag: int
    nbytes: int
    dtype: str

    def array(self) -> np.ndarray[Any, Any]:
        """Return the data: no two messages have the same bytes."""
        kind = np.dtype(self.dtype)
        count = self.nbytes // kind.itemsize
        words = np.arange(-(-count * kind.itemsize // 4), dtype=np.uint32) * np.uint32(2654435761)
        words += np.uint32((self.number * 40503 + 1) % 2**32)
        return words.view(np.uint8)[: count * kind.itemsize].view(kind)

    def empty(self, rng: random.Random) -> np.ndarray[Any, Any]:
        """Return memory for the message, at a random place within a cache line."""
        kind = np.dtype(self.dtype)
        count = self.nbytes // kind.itemsize
        memory = np.full(count * kind.itemsize + 64, 0xEE, np.uint8)
        begin = rng.randrange(0, 64 // kind.alignment) * kind.alignment
        return memory[begin : begin + count * kind.itemsize].view(kind)


def plan(seed: int, ranks: int, count: int, tags: range) -> list[Sent]:
    rng = random.Random(seed)
    messages = []
    for number in range(count):
        edge = rng.choice(EDGES[:7] if rng.random() < 0.9 else EDGES)
        nbytes = max(0, edge + rng.randrange(-70, 70)) if rng.random() < 0.7 else rng.randrange(300)
        source, dest = rng.randrange(ranks), rng.randrange(ranks)
        messages.append(
            Sent(
                seed * 100_000 + number, source, dest, rng.choice(tags), nbytes, rng.choice(DTYPES)
            )
        )
    return messages


def shuffled(window: list[Sent], rng: random.Random) -> list[Sent]:
    """Shuffle a window; messages with one tag between the same two ranks keep their order."""
    mixed = rng.sample(window, len(window))
    in_order = iter(sorted(mixed, key=lambda m: (m.source, m.dest, m.tag, m.number)))
    places = sorted(
        range(len(mixed)), key=lambda i: (mixed[i].source, mixed[i].dest, mixed[i].tag, i)
    )
    result = list(mixed)
    for place, message in zip(places, in_order, strict=True):
        result[place] = message
    return result


def exchange(c: Any, messages: list[Sent], seed: int, with_collectives: bool) -> int:
    """Make one rank's sends and receives; return how many messages it has checked."""
    rng = random.Random(seed)
    checked = 0
    for begin in range(0, len(messages), 24):
        window = messages[begin : begin + 24]
        # Receives of a shuffled window must not wait: the sender may first wait for this rank.
        is_mixed = rng.random() < 0.5
        waits: list[tuple[Any, Sent, Any]] = []

        def check(message: Sent, got: np.ndarray[Any, Any]) -> None:
            nonlocal checked
            np.testing.assert_array_equal(got, message.array(), err_msg=str(message))
            checked += 1

        for message in shuffled(window, rng) if is_mixed else window:
            sends = message.source == c.rank
            if sends:
                later = rng.random() < 0.5
                x = message.array()
                if rng.random() < 0.3:  # memory that other ranks can read
                    x, ordinary = c.empty(x.shape, x.dtype), x
                    x[...] = ordinary
                work = c.send(x, message.dest, message.tag, async_op=later)
                if later:
                    waits.append((work, message, None))
            if message.dest == c.rank:
                later = is_mixed or rng.random() < 0.5
                target = message.empty(rng)
                got = c.recv(target, message.source, message.tag, async_op=later)
                if later:
                    waits.append((got, message, target))
                else:
                    check(message, got)
        if with_collectives:
            assert c.all_reduce(np.ones(3)).tolist() == [c.size] * 3
        for work, message, target in rng.sample(waits, len(waits)):
            work.wait(60)
            if target is not None:
                check(message, target)
    return checked


@pytest.mark.parametrize("seed", range(1 if SANITIZED else 3))
@pytest.mark.parametrize("kind", rank_groups.ALL_KINDS)
def test_messages_of_two_threads_per_rank_arrive_in_order(kind, seed, on_ranks):
    ranks, count = 2 + seed % 3, 100 if SANITIZED else 240
    plans = [
        plan(10 * seed + 1, ranks, count, range(3)),
        plan(10 * seed + 2, ranks, count, range(3, 6)),
    ]

    def work(c):
        found: list[Any] = [None, None]

        def second() -> None:
            try:
                found[1] = exchange(c, plans[1], 77 * c.rank + seed, False)
            except BaseException as error:
                found[1] = error

        other = threading.Thread(target=second)
        other.start()
        found[0] = exchange(c, plans[0], 99 * c.rank + seed, True)
        other.join(60)
        c.barrier()
        return found

    got = on_ranks(rank_groups.make_group(kind, ranks), work)
    assert got == [[sum(m.dest == r for m in p) for p in plans] for r in range(ranks)]
