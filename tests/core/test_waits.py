"""What a rank looks at while it waits: the clock, signals, what its peers are in."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc
from pycollective import _core
from pycollective.communicator import Communicator

SIZES = [64 << 20, 256 << 20, 1 << 30]
"""Bytes of arrays, until a call takes longer than a rank goes on between two looks at the clock."""

# Rank 0 only says where its memory is, or writes to its connections: rank 1, which combines, never
# waits for it.
MOVING = [("shm", "f2"), ("mixed", "f2"), ("tcp", "i1"), ("threads", "f2")]


def errors_of_ranks(calls):
    """Make rank 1's call here and rank 0's in a thread; return their errors, if any."""
    errors = [None, None]

    def run(rank):
        try:
            calls[rank]()
        except (pc.CollectiveError, KeyboardInterrupt) as error:
            errors[rank] = error

    other = threading.Thread(target=run, args=(0,))
    other.start()
    run(1)
    other.join(60)
    assert not other.is_alive()
    return errors


def arrays_of(comms, on_ranks, bytes, dtype):
    return on_ranks(comms, lambda c: c.empty(bytes // np.dtype(dtype).itemsize, dtype))


@pytest.mark.parametrize(("kind", "dtype"), MOVING)
def test_reduce_keeps_its_deadline_while_bytes_move(kind, dtype, on_ranks):
    for size in SIZES:
        comms = make_group(kind, 2, 60.0)
        x = arrays_of(comms, on_ranks, size, dtype)
        errors = errors_of_ranks(
            [
                lambda comms=comms, x=x: comms[0].reduce(x[0], "prod", root=1),
                lambda comms=comms, x=x: comms[1].reduce(x[1], "prod", root=1, timeout=0.001),
            ]
        )
        if errors[1]:
            assert str(errors[1]).startswith("rank 1 waited until its deadline")
            return
    pytest.fail("no call was given up at its deadline")


@pytest.mark.parametrize(("kind", "dtype"), MOVING)
def test_reduce_hears_signals_while_bytes_move(kind, dtype, on_ranks):
    over = False

    def interrupt(*_):
        if not over:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for size in SIZES:
            comms = make_group(kind, 2, 60.0)
            x = arrays_of(comms, on_ranks, size, dtype)

            def interrupted(comms=comms, x=x):
                nonlocal over
                over = False
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                comms[1].reduce(x[1], "prod", root=1)
                over = True

            errors = errors_of_ranks(
                [lambda comms=comms, x=x: comms[0].reduce(x[0], "prod", root=1), interrupted]
            )
            if comms[1]._group.failure:
                assert isinstance(errors[1], KeyboardInterrupt)
                return
        pytest.fail("no call was ended by a signal")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_describe_rank_in_another_process_gives_the_call_of_that_number():
    group = _core.ShmGroup.create(1)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        mine = _core.ShmGroup.open(group.descriptor)
        mine.join(0)
        comm = Communicator(mine, 0, 30.0, None)
        calls = [np.ones(n + 1) for n in range(5)]
        number, until = 0, time.monotonic() + 1.0
        os.write(go, b"!")
        while time.monotonic() < until:
            for _ in range(1000):
                number += 1
                comm.all_reduce(calls[number % 5])
        os._exit(0)
    os.read(ready, 1)
    seen = set()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        said = re.search(r"#(\d+) \(float64\[(\d)\]", group.describe())
        if said:
            number, items = map(int, said.groups())
            assert items == number % 5 + 1, said
            seen.add(number)
    os.close(ready)
    os.close(go)
    assert len(seen) > 3
