"""A trial as data: every choice follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from calls import CALLS, DTYPES, Step, ops
from faults import FAULTS, Fault

SETUPS = ("threads", "run-shm", "run-tcp", "address-shm", "address-tcp", "mixed")

_ALGORITHMS = {
    "all_reduce": ("ring", "hierarchical_copy", "reduce_to_one", "halving_doubling",
                   "recursive_doubling", "double_tree", "direct", "hierarchical"),
    "reduce_scatter": ("ring", "halving", "direct"),
    "broadcast": ("tree", "chain"),
    "all_gather": ("ring", "doubling", "direct"),
}  # fmt: skip
_ROWS = (0, 1, 2, 3, 17, 100, 1000, 4096, 20_000, 65_537, 200_000)
_LARGE_ROWS = (200_000, 500_000, 1_000_000)
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Trial:
    """Calls of the ranks, the fault, and its time."""

    seed: int
    setup: str
    fault: str
    ranks: int
    timeout: float
    """Seconds that each call waits for the other ranks."""
    victim: int
    """The rank that the fault hits."""
    moment: int
    """The index of the step at which the fault happens, or at which its delay begins."""
    delay: float
    """Seconds from step `moment` until the fault, if the fault has a delay."""
    variant: str
    """Variant of the fault."""
    seconds: float
    """Seconds for which the victim sleeps or is stopped, or a forked child lives."""
    colors: tuple[int, ...]
    """Each rank's part after the split."""
    steps: tuple[Step, ...]
    closes_at_once: bool
    """Ranks close the group as soon as they have an error."""
    closes: bool
    """Ranks close the group at all before they end."""
    planted: str = ""
    """A fault of the worker itself, which proves that the verdict can fail."""

    def members(self, rank: int, group: str) -> list[int]:
        """Return the ranks, as numbered in the world, of a rank's group."""
        if group == "world":
            return list(range(self.ranks))
        return [r for r in range(self.ranks) if self.colors[r] == self.colors[rank]]

    @property
    def split_at(self) -> int:
        """Return the index of the first step of the parts."""
        return next((i for i, s in enumerate(self.steps) if s.group == "part"), len(self.steps))

    @property
    def bound(self) -> float:
        """Seconds within which every process must have ended.

        On a machine with many other processes, the interpreters need most of this time to start.
        """
        if self.planted == "hang":
            return 3.0
        pauses = sum(max(s.pauses, default=0.0) for s in self.steps)
        return 90 + 4 * self.timeout + self.seconds + self.delay + pauses


def make(seed: int, setup: str = "", fault: str = "", planted: str = "") -> Trial:
    """Return the trial of a seed; set-up and fault are drawn where they are not given."""
    random_ = random.Random(f"{seed} {setup} {fault}")
    fault = fault or random_.choice([f for f in FAULTS if not setup or setup in FAULTS[f].setups])
    kind = FAULTS[fault]
    setup = setup or random_.choice([s for s in SETUPS if s in kind.setups])
    if setup not in kind.setups:
        raise ValueError(f"the fault {fault!r} is not for the set-up {setup!r}: {kind.setups}")
    ranks = random_.choice((3, 3, 4) if setup == "mixed" else (2, 2, 3, 3, 4))
    steps = _steps(random_, ranks, kind)
    moment = random_.randrange(len(steps))
    if kind.needs_blocking:
        steps[moment] = replace(steps[moment], later=0)
    if kind.repeats and random_.random() < 0.7:
        again = [replace(steps[moment], salt=steps[moment].salt + i, pauses=()) for i in range(20)]
        steps[moment + 1 : moment + 1] = again
    victim = 0 if setup == "threads" and kind.in_main_thread else random_.randrange(ranks)
    variants = kind.variants
    if kind.variants_of is not None:
        variants = kind.variants_of(steps[moment])
    return Trial(
        seed=seed,
        setup=setup,
        fault=fault,
        ranks=ranks,
        timeout=kind.timeout,
        victim=victim,
        moment=moment,
        delay=random_.choice([random_.uniform(0, most) for most in (0.0, 0.001, 0.01, 0.1)]),
        variant=random_.choice(variants),
        seconds=kind.timeout * random_.uniform(*kind.stopped),
        colors=tuple(random_.randrange(2) for _ in range(ranks)),
        steps=tuple(steps),
        closes_at_once=random_.random() < 0.5,
        closes=random_.random() < 0.8,
        planted=planted,
    )


def _steps(random_: random.Random, ranks: int, kind: Fault) -> list[Step]:
    """Return steps of the whole group, and in half of the trials steps of its parts after them."""
    count = random_.randrange(3, 9)
    in_parts = random_.randrange(1, 5) if random_.random() < 0.5 else 0
    salts = random_.sample(range(1000), count + in_parts)
    groups = ["world"] * count + ["part"] * in_parts
    return [
        # More than the repetitions of a step apart, and odd: "prod" takes the salt modulo 2.
        _step(random_, ranks, group, 101 * salt, kind)
        for group, salt in zip(groups, salts, strict=True)
    ]


def _step(random_: random.Random, ranks: int, group: str, salt: int, kind: Fault) -> Step:
    name = random_.choice([*CALLS, "all_reduce", "all_reduce"])
    if kind.large and random_.random() < 0.5:
        name = "all_reduce"
    call = CALLS[name]
    dtype = random_.choice(DTYPES)
    op = random_.choice(ops(dtype)) if call.reduces else "sum"
    algorithm = "auto" if random_.random() < 0.6 else _algorithm(random_, call.collective)
    memory = random_.choice(("ordinary", "ordinary", "strided", "shared", "shared"))
    if kind.shared and random_.random() < 0.7:
        memory = "shared"
    if memory == "shared" and not call.shared:
        memory = "ordinary"
    rows = random_.choice(_LARGE_ROWS if kind.large and random_.random() < 0.7 else _ROWS)
    if call.collective in ("all_to_all", "reduce_scatter", "scatter"):
        rows //= 4
    rows = min(rows, _MOST_BYTES // np.dtype(dtype).itemsize)
    pauses = (0.0,) * ranks
    if random_.random() < 0.3:
        pauses = tuple(random_.choice((0.0, random_.uniform(0, 0.03))) for _ in range(ranks))
    return Step(
        call=name,
        group=group,
        dtype=dtype,
        rows=rows,
        op=op,
        root=random_.randrange(12),
        algorithm=algorithm,
        memory=memory,
        in_place=call.in_place and random_.random() < 0.5,
        later=random_.choice((0, 0, 0, 1, 2, 3)),
        pauses=pauses,
        salt=salt,
    )


def _algorithm(random_: random.Random, collective: str) -> str:
    return random_.choice(("auto", *_ALGORITHMS.get(collective, ())))


__all__ = ["SETUPS", "Trial", "make"]
