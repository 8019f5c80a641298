"""Algorithms written in Python, for the tests: at least one for each collective."""

from __future__ import annotations

from pycollective.algorithms import (
    algorithm,
    copy,
    input,
    output,
    recv,
    recv_reduce,
    reduce,
    scratch,
    send,
)


@algorithm(num_chunks=lambda size: size)
def ring(rank, size):
    """The textbook's ring, to be compared with the core's."""
    if size == 1:
        yield copy(input[0], output[0])
        return
    following, previous = (rank + 1) % size, (rank - 1) % size
    for turn in range(size - 1):
        c = (rank - turn) % size
        yield send(following, output[c] if turn else input[c])
        c = (rank - turn - 1) % size
        yield recv_reduce(previous, input[c], output[c])
    for turn in range(size - 1):
        yield send(following, output[(rank + 1 - turn) % size])
        yield recv(previous, output[(rank - turn) % size])


@algorithm(num_chunks=3, num_scratch=3)
def through_scratch(rank, size):
    """Rank 0 collects in scratch, several chunks at a time, then adds its own chunks."""
    if rank == 0:
        for peer in range(1, size):
            if peer == 1:
                yield recv(peer, scratch[0:3])
            else:
                yield recv_reduce(peer, scratch[0:3], scratch[0:3])
        yield copy(input[0:3], output[0:3])
        if size > 1:
            yield reduce(scratch[0:2], output[0:2])
            yield reduce(scratch[2], output[2])
        for peer in range(1, size):
            yield send(peer, output[0:3])
    else:
        yield send(0, input[0:3])
        yield recv(0, output[0:3])


@algorithm(num_chunks=2, collective="reduce")
def fan_in(rank, size):
    """Rank 0 adds the arrays of the other ranks, one after the other."""
    if rank == 0:
        yield copy(input[0:2], output[0:2])
        for peer in range(1, size):
            yield recv_reduce(peer, output[0:2], output[0:2])
    else:
        yield send(0, input[0:2])


@algorithm(num_chunks=1, collective="broadcast")
def fan(rank, size):
    """Rank 0 sends to every rank."""
    if rank == 0:
        yield copy(input[0], output[0])
        for peer in range(1, size):
            yield send(peer, output[0])
    else:
        yield recv(0, output[0])


@algorithm(num_chunks=lambda size: size, collective="gather")
def funnel(rank, size):
    """Rank 0 receives the parts in turn."""
    if rank == 0:
        yield copy(input[0], output[0])
        for peer in range(1, size):
            yield recv(peer, output[peer])
    else:
        yield send(0, input[0])


@algorithm(num_chunks=lambda size: size, collective="scatter")
def deal(rank, size):
    """Rank 0 gives the parts in turn, the last one first."""
    if rank == 0:
        for peer in reversed(range(1, size)):
            yield send(peer, input[peer])
        yield copy(input[0], output[0])
    else:
        yield recv(0, output[0])


@algorithm(num_chunks=lambda size: size, collective="all_gather")
def everyone(rank, size):
    """Every rank sends to every rank."""
    yield copy(input[0], output[rank])
    for turn in range(1, size):
        yield send((rank + turn) % size, input[0])
    for turn in range(1, size):
        peer = (rank - turn) % size
        yield recv(peer, output[peer])


@algorithm(num_chunks=lambda size: size, collective="all_to_all")
def swap(rank, size):
    """Every rank exchanges with one rank after the other."""
    yield copy(input[rank], output[rank])
    for turn in range(1, size):
        yield send((rank + turn) % size, input[(rank + turn) % size])
        peer = (rank - turn) % size
        yield recv(peer, output[peer])


@algorithm(num_chunks=lambda size: size, num_scratch=lambda size: size, collective="reduce_scatter")
def collect(rank, size):
    """Every rank adds up its own part in scratch."""
    for turn in range(1, size):
        yield send((rank + turn) % size, input[(rank + turn) % size])
    yield copy(input[rank], scratch[rank])
    for turn in range(1, size):
        yield recv_reduce((rank - turn) % size, scratch[rank], scratch[rank])
    yield copy(scratch[rank], output[0])


@algorithm(num_chunks=1, num_scratch=1, collective="scan")
def onward(rank, size):
    """Every rank sends a copy to all later ranks: an output in place overwrites the input."""
    yield copy(input[0], scratch[0])
    for later in range(rank + 1, size):
        yield send(later, scratch[0])
    yield copy(input[0], output[0])
    for earlier in range(rank):
        yield recv_reduce(earlier, output[0], output[0])
