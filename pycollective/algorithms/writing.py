"""What an algorithm is written with: steps, spans, and the decorator that makes it runnable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from pycollective import _core
from pycollective._core import Buffer, Collective, Schedule, Span, Step, Verb
from pycollective.algorithms.clusters import Cluster
from pycollective.algorithms.simulation import Simulation, simulate
from pycollective.algorithms.text import text_of
from pycollective.arguments import whole

#: Up to so many ranks proofs are exact, and schedules of one's own run.
PROVED_RANKS = 64


def _size(size: int) -> int:
    found = whole("size", size)
    if found < 1:
        raise ValueError(f"a group has at least 1 rank, not {found}")
    return found


class Chunks:
    """A buffer of the rank: ``input[c]`` is a chunk, ``input[a:b]`` are several.

    Where chunks are ranks' parts, the first one follows the last: of four, ``input[3:5]`` are 3 and 0.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __getitem__(self, place: int | slice) -> Span:
        if isinstance(place, slice):
            if place.step not in (None, 1) or place.start is None or place.stop is None:
                raise TypeError("chunks are named by [first:end]")
            first, end = whole("a chunk", place.start), whole("a chunk", place.stop)
            return Span(self._buffer, first, end - first)
        return Span(self._buffer, whole("a chunk", place), 1)


input = Chunks(Buffer.input)
output = Chunks(Buffer.output)
scratch = Chunks(Buffer.scratch)


def _span(name: str, span: Span) -> Span:
    if not isinstance(span, Span):
        raise TypeError(
            f"{name} must be chunks such as input[0], output[0:2] or scratch[1], not {span!r}"
        )
    return span


def _peer(peer: int) -> int:
    return whole("peer", peer)


def send(peer: int, source: Span) -> Step:
    """Send chunks to a rank, which may read them until it has received them."""
    return Step(Verb.send, _peer(peer), _span("source", source))


def recv(peer: int, target: Span) -> Step:
    """Receive chunks from a rank."""
    return Step(Verb.recv, _peer(peer), target=_span("target", target))


def recv_reduce(peer: int, source: Span, target: Span) -> Step:
    """Receive chunks from a rank, and put their reduction with ``source`` into ``target``."""
    return Step(Verb.recv_reduce, _peer(peer), _span("source", source), _span("target", target))


def copy(source: Span, target: Span) -> Step:
    """Copy chunks of the rank's own."""
    return Step(Verb.copy, -1, _span("source", source), _span("target", target))


def reduce(source: Span, target: Span) -> Step:
    """Reduce chunks of the rank's own into others."""
    return Step(Verb.reduce, -1, _span("source", source), _span("target", target))


class Algorithm:
    """An algorithm of one's own; made by `algorithm`.

    The schedule for a number of ranks is worked out, proved and kept when it is first asked for.

    Attributes
    ----------
    name : str
        Its name in messages.
    collective : str
        What it does: the name of a `Communicator` method.
    """

    def __init__(
        self,
        steps: Callable[[int, int], Iterable[Step]],
        num_chunks: Callable[[int], int] | int,
        num_scratch: Callable[[int], int] | int = 0,
        collective: str = "all_reduce",
    ) -> None:
        if not isinstance(collective, str) or collective not in Collective.__members__:
            raise ValueError(
                f"no collective is called {collective!r}; there are {', '.join(Collective.__members__)}"
            )
        if not callable(steps):
            raise TypeError(f"an algorithm is made of a function steps(rank, size), not {steps!r}")
        self.name = str(getattr(steps, "__name__", "algorithm"))
        self.__doc__ = steps.__doc__
        self._steps = steps
        self._num_chunks = num_chunks
        self._num_scratch = num_scratch
        self.collective = collective
        self._proved: dict[int, _core.Algorithm] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Algorithm {self.name}>"

    def schedule(self, size: int) -> Schedule:
        """Return the steps of every rank, as they are written."""
        size = _size(size)
        chunks = self._num_chunks(size) if callable(self._num_chunks) else self._num_chunks
        chunks = whole(f"num_chunks of {self.name}", chunks)
        steps = [self._steps_of(rank, size) for rank in range(size)]
        which = Collective.__members__[self.collective]
        return Schedule(which, chunks, steps, self.num_scratch(size))

    def _steps_of(self, rank: int, size: int) -> list[Step]:
        given = self._steps(rank, size)
        if not isinstance(given, Iterable):
            raise TypeError(
                f"{self.name}({rank}, {size}) must yield steps, and returned {given!r}: write "
                "`yield send(...)` and the like"
            )
        steps = list(given)
        for number, step in enumerate(steps):
            if not isinstance(step, Step):
                raise TypeError(
                    f"{self.name}({rank}, {size}) yielded {step!r} as its step {number}: yield what "
                    "send, recv, recv_reduce, copy and reduce return"
                )
        return steps

    def num_scratch(self, size: int) -> int:
        """Return how many chunks of scratch each of so many ranks has."""
        found = self._num_scratch(size) if callable(self._num_scratch) else self._num_scratch
        return whole(f"num_scratch of {self.name}", found)

    def verify(self, size: int) -> None:
        """Prove the schedule for a number of ranks, as `pycollective.algorithms.verify` says.

        Raises
        ------
        ValueError
            The first thing that is wrong: rank, step and why; or there are more than 64 ranks.
        """
        self.for_ranks(size)

    def show(self, size: int) -> str:
        """Return the steps of every rank as text; see `pycollective.algorithms.rounds` for a picture."""
        return text_of(self.name, self.schedule(size))

    def simulate(
        self, cluster: int | Cluster, bytes: int = 1 << 20, *, root: int = 0
    ) -> Simulation:
        """Time the schedule on a cluster, as `pycollective.algorithms.simulate` does.

        All steps are written out first, by Python: feasible to some hundred ranks.

        Parameters
        ----------
        cluster : Cluster or int
            Where; a number means so many hosts of `Cluster.ethernet_10g`.
        bytes : int
            Size of each rank's array; where it is cut into ranks' parts, of all of them.
        root : int
            The root, where there is one.
        """
        return simulate(self, cluster, bytes, root=root)

    def for_ranks(self, size: int) -> _core.Algorithm:
        """Return what the core runs for a number of ranks; proved once."""
        size = _size(size)
        found = self._proved.get(size)
        if found is not None:
            return found
        if size > PROVED_RANKS:
            raise ValueError(
                f"{self.name}: schedules of one's own run among {PROVED_RANKS} ranks at most, where "
                f"they can be proved; this group has {size}"
            )
        with self._lock:
            if size not in self._proved:
                self._proved[size] = _core.Algorithm(self.name, self.schedule(size))
            return self._proved[size]


def algorithm(
    num_chunks: Callable[[int], int] | int,
    num_scratch: Callable[[int], int] | int = 0,
    *,
    collective: str = "all_reduce",
) -> Callable[[Callable[[int, int], Iterable[Step]]], Algorithm]:
    """Make an algorithm of a function that yields one rank's steps.

    Parameters
    ----------
    num_chunks : int or callable
        Equal chunks that the arrays are cut into; a function of the number of ranks.
    num_scratch : int or callable
        Chunks of scratch memory of each rank. Chunk i of it holds nothing but chunk i modulo
        ``num_chunks``.
    collective : str
        What the algorithm does: "all_reduce", "reduce", "broadcast", … as the `Communicator` methods
        are called. Where there is a root, it is rank 0; the call names the ranks anew for another.
        In gathers, scatters, reduce_scatter and all_to_all, chunk i is the part of rank i, and
        ``num_chunks`` the number of ranks.

    Returns
    -------
    callable
        Decorator of ``steps(rank, size)``, which yields `send`, `recv`, `recv_reduce`, `copy` and
        `reduce` in the order in which the rank does them.

    Examples
    --------
    >>> from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send
    >>> @algorithm(num_chunks=1)
    ... def star(rank, size):
    ...     '''Rank 0 adds everything and tells everyone.'''
    ...     if rank == 0:
    ...         yield copy(input[0], output[0])
    ...         for peer in range(1, size):
    ...             yield recv_reduce(peer, output[0], output[0])
    ...         for peer in range(1, size):
    ...             yield send(peer, output[0])
    ...     else:
    ...         yield send(0, input[0])
    ...         yield recv(0, output[0])
    >>> star.verify(5)
    """
    return lambda steps: Algorithm(steps, num_chunks, num_scratch, collective)
