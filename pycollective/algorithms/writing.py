"""Building blocks of an algorithm: steps, spans, and the decorator that makes it runnable."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable

from pycollective import _core
from pycollective._core import Buffer, Collective, Schedule, Span, Step, Verb
from pycollective.algorithms.clusters import Cluster
from pycollective.algorithms.simulation import Simulation, simulate
from pycollective.algorithms.text import text_of
from pycollective.arguments import whole

#: The largest number of ranks for which proofs are exact, and for which users' schedules run.
PROVED_RANKS = 64


def _size(size: int) -> int:
    found = whole("size", size)
    if found < 1:
        raise ValueError(f"a group needs at least 1 rank, not {found}")
    return found


class Chunks:
    """Chunks of a rank's buffer: ``input[c]`` is one chunk, ``input[a:b]`` are several.

    If chunks are ranks' parts, ranges wrap around: of four parts, ``input[3:5]`` is 3 and 0.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __getitem__(self, index: int | slice) -> Span:
        if isinstance(index, slice):
            if index.step not in (None, 1) or index.start is None or index.stop is None:
                raise TypeError(f"chunks are a range [first:end] without a step, not {index!r}")
            first, end = whole("a chunk", index.start), whole("a chunk", index.stop)
            return Span(self._buffer, first, end - first)
        return Span(self._buffer, whole("a chunk", index), 1)


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
    """Send chunks to a rank; the chunks must not change until the peer has received them."""
    return Step(Verb.send, _peer(peer), _span("source", source))


def recv(peer: int, target: Span) -> Step:
    """Receive chunks from a rank."""
    return Step(Verb.recv, _peer(peer), target=_span("target", target))


def recv_reduce(peer: int, source: Span, target: Span) -> Step:
    """Receive chunks from a rank, and store their reduction with ``source`` in ``target``."""
    return Step(Verb.recv_reduce, _peer(peer), _span("source", source), _span("target", target))


def copy(source: Span, target: Span) -> Step:
    """Copy chunks within the rank."""
    return Step(Verb.copy, -1, _span("source", source), _span("target", target))


def reduce(source: Span, target: Span) -> Step:
    """Reduce chunks of the rank into other chunks of the rank."""
    return Step(Verb.reduce, -1, _span("source", source), _span("target", target))


class Algorithm:
    """An algorithm that a user wrote; made by `algorithm`.

    The schedule for a number of ranks is made, proved and kept at its first use.

    Attributes
    ----------
    name : str
        The name in messages.
    collective : str
        The collective that it carries out: the name of a `Communicator` method.
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
                f"no collective is called {collective!r}; "
                f"the collectives are {', '.join(Collective.__members__)}"
            )
        if not callable(steps):
            raise TypeError(f"an algorithm needs a function steps(rank, size), not {steps!r}")
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
        """Return the steps of every rank, as the function yields them."""
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
                f"{self.name}({rank}, {size}) must yield steps, but returned {given!r}: write "
                "`yield send(...)`"
            )
        steps = list(given)
        for number, step in enumerate(steps):
            if not isinstance(step, Step):
                raise TypeError(
                    f"{self.name}({rank}, {size}) yielded {step!r} as its step {number}: yield "
                    "results of send, recv, recv_reduce, copy and reduce"
                )
        return steps

    def num_scratch(self, size: int) -> int:
        """Return the number of scratch chunks that each of ``size`` ranks has."""
        found = self._num_scratch(size) if callable(self._num_scratch) else self._num_scratch
        return whole(f"num_scratch of {self.name}", found)

    def verify(self, size: int) -> None:
        """Prove the schedule for a number of ranks; see `pycollective.algorithms.verify`.

        Raises
        ------
        ValueError
            The schedule is wrong (the text names rank, step and reason), or ``size`` exceeds 64.
        """
        self.for_ranks(size)

    def show(self, size: int) -> str:
        """Return the steps of every rank as text; `pycollective.algorithms.rounds` draws them."""
        return text_of(self.name, self.schedule(size))

    def simulate(
        self, cluster: int | Cluster, bytes: int = 1 << 20, *, root: int = 0
    ) -> Simulation:
        """Time the schedule on a cluster; see `pycollective.algorithms.simulate`.

        Python makes all steps first, which is feasible for some hundred ranks.

        Parameters
        ----------
        cluster : Cluster or int
            The cluster; a number n means n hosts of `Cluster.ethernet_10g`.
        bytes : int
            Size of each rank's array; if it consists of ranks' parts, of all parts.
        root : int
            The root, for a collective that has one.
        """
        return simulate(self, cluster, bytes, root=root)

    def for_ranks(self, size: int) -> _core.Algorithm:
        """Return the compiled algorithm for a number of ranks, proved at the first call."""
        size = _size(size)
        found = self._proved.get(size)
        if found is not None:
            return found
        if size > PROVED_RANKS:
            raise ValueError(
                f"{self.name}: a user's schedule runs among {PROVED_RANKS} ranks at most, up to "
                f"which it can be proved; this group has {size}"
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
    """Make an algorithm from a function that yields one rank's steps.

    Parameters
    ----------
    num_chunks : int or callable
        Number of equal chunks of the arrays; a callable gets the number of ranks.
    num_scratch : int or callable
        Number of scratch chunks of each rank. Chunk i of scratch holds only data of chunk i modulo
        ``num_chunks``.
    collective : str
        The name of the collective, as the `Communicator` method is called. Write rooted collectives for
        root 0; calls renumber the ranks for another root. In gathers, scatters, reduce_scatter and
        all_to_all, ``num_chunks`` is the number of ranks. Chunk i of an array of all parts is the part
        of rank i; an array of one part has only chunk 0.

    Returns
    -------
    callable
        Decorator of ``steps(rank, size)``, which yields `send`, `recv`, `recv_reduce`, `copy` and
        `reduce` in the order in which the rank carries them out. It raises a ``ValueError`` for an
        unknown collective, and a ``TypeError`` if ``steps`` is not callable.

    Examples
    --------
    >>> from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send
    >>> @algorithm(num_chunks=1)
    ... def star(rank, size):
    ...     '''Rank 0 adds all inputs and sends the sum to every rank.'''
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
    if callable(num_chunks) and len(inspect.signature(num_chunks).parameters) == 2:
        raise TypeError(
            f"algorithm got the function {getattr(num_chunks, '__name__', num_chunks)!r} in place of "
            "num_chunks: write @algorithm(num_chunks=1), or another number, above a function of steps"
        )
    return lambda steps: Algorithm(steps, num_chunks, num_scratch, collective)
