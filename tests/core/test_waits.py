"""A waiting rank checks the clock, signals and its peers' calls."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
import rank_groups
from rank_groups import make_group

import pycollective as pc
from pycollective import _core
from pycollective.algorithms import algorithm, input, output, recv, recv_reduce, scratch, send
from pycollective.comm import Communicator

SIZES = [64 << 20, 256 << 20, 1 << 30]
"""Bytes of arrays, for which a call takes longer than the time between two readings of the clock."""

# Rank 0 only announces its memory, or writes to its connections: rank 1, which combines, never
# waits for rank 0.
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), MOVING)
def test_reduce_handles_signals_while_bytes_move(kind, dtype, on_ranks):
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
                try:
                    comms[1].reduce(x[1], "prod", root=1)
                except KeyboardInterrupt:
                    if comms[1]._group.failure:
                        raise
                    comms[1].abort("the signal came before the call, or after it")
                over = True

            errors = errors_of_ranks(
                [lambda comms=comms, x=x: comms[0].reduce(x[0], "prod", root=1), interrupted]
            )
            if errors[1]:
                assert isinstance(errors[1], KeyboardInterrupt)
                return
        pytest.fail("no call was ended by a signal")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_describe_rank_in_another_process_gives_the_call_of_that_number():
    group = _core.ShmGroup.create(1)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        member = _core.ShmGroup.open(group.descriptor)
        member.join(0)
        comm = Communicator(member, 0, 30.0, None)
        calls = [np.ones(n + 1) for n in range(5)]
        number, until = 0, time.monotonic() + 60.0
        os.write(go, b"!")
        while time.monotonic() < until:
            for _ in range(1000):
                number += 1
                comm.all_reduce(calls[number % 5])
        os._exit(0)
    os.read(ready, 1)
    seen, soon = set(), time.monotonic() + 1.0
    try:
        while time.monotonic() < soon or len(seen) <= 3:
            said = re.search(r"#(\d+) \(float64\[(\d)\]", group.describe())
            if said:
                number, items = map(int, said.groups())
                assert items == number % 5 + 1, said
                seen.add(number)
            assert time.monotonic() < soon + 30, seen
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(go)


class Relay:
    """A connection of two ranks through a thread, which records the data for rank 0."""

    def __init__(self):
        (self.end_of_0, near), (far, self.end_of_other) = socket.socketpair(), socket.socketpair()
        self.received = b""
        self._ends = {near: far, far: near}
        self._near = near
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self):
        with contextlib.suppress(OSError):  # an end may close with data on its way
            while True:
                for end in select.select(list(self._ends), [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if self._ends[end] is self._near:
                        self.received += data
                    self._ends[end].sendall(data)

    def close(self):
        self._thread.join(10)
        for end in self._ends:
            end.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_mixed_wait_for_memory_and_tcp_is_ended_by_a_rank_of_the_host(monkeypatch, on_ranks):
    connected, relay = rank_groups._connected, Relay()

    def through_the_relay(size):
        ends = connected(size)
        for one, peer, end in ((0, 2, relay.end_of_0), (2, 0, relay.end_of_other)):
            ends[one][peer][0].close()
            ends[one][peer][0] = end
        return ends

    monkeypatch.setattr(rank_groups, "_connected", through_the_relay)
    comms = make_group("mixed", 3)
    assert [c.hosts for c in comms] == [[0, 1, 0]] * 3

    # Rank 0 waits for rank 1 over TCP, and for rank 2 to read the memory.
    @algorithm(num_chunks=1, num_scratch=1)
    def both(rank, size):
        if rank == 0:
            yield send(2, input[0])
            yield recv(1, scratch[0])
            yield recv(2, output[0])
        elif rank == 1:
            yield recv(2, scratch[0])
            yield send(0, scratch[0])
            yield send(2, input[0])
            yield recv(2, output[0])
        else:
            yield recv_reduce(0, input[0], output[0])
            yield send(1, output[0])
            yield recv_reduce(1, output[0], output[0])
            yield send(0, output[0])
            yield send(1, output[0])

    def reduce(c):
        if c.rank == 2:
            time.sleep(0.05)
        return c.all_reduce(np.ones(4 << 20, "u1"), algorithm=both)[-1]

    wake_up = (8).to_bytes(2, "little")
    for _ in range(100):
        assert on_ranks(comms, reduce) == [3, 3, 3]
        frames = [relay.received[i : i + 64] for i in range(0, len(relay.received), 64)]
        if any(frame[6:8] == wake_up for frame in frames):
            break
    else:
        raise AssertionError("rank 2 has never ended a poll() of rank 0")
    on_ranks(comms, lambda c: c.close())
    relay.close()


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_measure_handshake_waits_for_every_rank(oversubscribed):
    lines = np.zeros((3, 64), np.uint8)
    threads = [
        threading.Thread(target=_core.measure_handshake, args=(lines, r, 3, 7, oversubscribed))
        for r in range(3)
    ]
    for thread in threads[:2]:
        thread.start()
    deadline = time.monotonic() + 30
    while lines[:2, 0].tolist() != [1, 1] and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    assert lines[:, 0].tolist() == [1, 1, 0]
    threads[2].start()
    for thread in threads:
        thread.join(30)
    assert lines[:, 0].tolist() == [7, 7, 7]


def test_measure_handshake_refuses_too_little_memory():
    with pytest.raises(ValueError, match="a cache line for each rank"):
        _core.measure_handshake(np.zeros(127, np.uint8), 0, 2, 1, False)
