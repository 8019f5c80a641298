"""Communicators: the collectives of one rank, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np

from pycollective import _core, observe, tuning
from pycollective.arguments import seconds, switch, whole
from pycollective.comm import gpu
from pycollective.comm.arrays import Array
from pycollective.comm.call import Call, Engine
from pycollective.comm.cart import Cart
from pycollective.comm.extremes import Extremes, Located
from pycollective.comm.mpi_group import MPIGroup, join
from pycollective.comm.objects import Objects
from pycollective.comm.persistent import Persistent
from pycollective.comm.prefixes import Prefixes
from pycollective.comm.reductions import DEFAULT_ALGORITHM, all_reduce_together
from pycollective.comm.shared_arrays import shared_arrays
from pycollective.comm.split import Threads, split_groups
from pycollective.comm.staged import Staged
from pycollective.comm.tracing import Traced, group_made, timeline
from pycollective.comm.ufuncs import ByFunction
from pycollective.comm.work import Work

__all__ = [
    "DEFAULT_ALGORITHM",
    "DEFAULT_TIMEOUT",
    "Cart",
    "Communicator",
    "Located",
    "Persistent",
    "Work",
    "all_reduce_together",
    "local_group",
    "shared_arrays",
    "timeline",
]

DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective call waits for the other ranks."""


class Communicator(Extremes, Prefixes, Objects):
    """One rank of a group.

    Every rank of the group makes the same calls in the same order, each from its own thread; a call
    returns when this rank's part is done. All ranks get bit-identical results. A call that fails
    leaves the whole group dead: every other rank's call fails too, with the same reason. Make a new
    group to go on.

    Communicators come from `local_group`.

    Attributes
    ----------
    rank, size : int
        This rank, 0 to size - 1, and the number of ranks.
    timeout : float
        Seconds a call waits for the other ranks, unless the call says otherwise.
    """

    @classmethod
    def from_mpi(cls, comm: object, *, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Make a communicator whose collectives run on the MPI library, through mpi4py.

        For clusters whose network only MPI knows; every rank of ``comm`` calls it. It takes no
        algorithms and no ``reproducible``: the library chooses, and the bits of a sum are its own.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            For example ``MPI.COMM_WORLD``. Its own messages are not touched.
        timeout : float
            Seconds that a call waits for the other ranks.

        Raises
        ------
        ImportError
            Without mpi4py (``pip install 'pycollective[mpi]'``).
        TypeError
            If ``comm`` is no intracommunicator of mpi4py.
        """
        return _on_mpi(join(comm), seconds("timeout", timeout))

    def cart(self, dims: Sequence[int], periods: bool | Sequence[bool] = False) -> Cart:
        """Arrange the ranks of this group in a grid. No rank communicates, and none gets a new number.

        Parameters
        ----------
        dims : sequence of int
            The number of ranks along each axis; 0 leaves the choice to the library. Their product is the
            number of ranks.
        periods : bool or sequence of bool
            True for an axis whose ends are neighbours; one value is for all axes.

        Returns
        -------
        Cart
            The grid, with this rank's coordinates and neighbours.

        Raises
        ------
        ValueError
            No such grid has as many ranks as this group.

        Examples
        --------
        >>> grid = comm.cart([0, 0])
        >>> source, dest = grid.shift(axis=1)
        """
        return Cart(self, dims, periods)

    @overload
    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Communicator | None: ...

    @overload
    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[Communicator | None]: ...

    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Communicator | Work[Communicator | None] | None:
        """Make new groups of this group's ranks: one of all ranks that give the same color.

        Every rank of this group calls it. The new groups are independent: their calls have numbers of
        their own and may go on at the same time as this group's (from another thread, or with
        ``async_op``), and one that fails leaves this one as it is. A process that dies is lost to
        both. They use the transport of this group.

        Parameters
        ----------
        color : int or None
            Ranks of one color are in one new group; None or a negative number: in none.
        key : int
            The new ranks are in the order of the keys, and of the ranks here where those are equal.
        async_op : bool
            Return a `Work` at once, whose ``wait()`` gives the communicator. Calls of this group that
            come after it begin when it is done.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        Communicator, None or Work
            This rank's, with this one's timeout; None where it has no color. To be closed by itself.

        Raises
        ------
        CollectiveError
            The new group cannot be made; the message says why. This group goes on.
        MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            As `all_reduce`.
        """
        color = None if color is None else whole("color", color, -(2**63), 2**63 - 1)
        key, limit = whole("key", key, -(2**63), 2**63 - 1), self._seconds(timeout)
        if switch("async_op", async_op):
            return self._run_later(lambda: self._part(color, key, limit))
        return self._part(color, key, limit)

    def _part(self, color: int | None, key: int, seconds: float) -> Communicator | None:
        if isinstance(self._group, MPIGroup):
            self.barrier(timeout=seconds)
            mpi_group = self._group.split(color, key)
            return None if mpi_group is None else _on_mpi(mpi_group, self.timeout, self._lane)
        made = split_groups(self, color, key, seconds)
        if made is None:
            return None
        group, rank, family = made
        part = Communicator(group, rank, self.timeout, family, self._lane)
        if group.transport in ("threads", "shared memory"):  # of which all read one table
            part._prefer(tuning.rows(group.transport, part.size))
        who = f"rank {rank} of {part.size} (rank {self.rank} before), {group.transport}"
        group_made(part, who, f"split of {self.size} ranks", str(tuning.path()))
        return part

    def _engine_for(self, call: Call) -> Engine:
        """Choose the engine that carries a call out."""
        array, host, tracer = call.array, self._core, self._tracer
        engine: Engine
        if call.function is not None:
            return ByFunction(self)  # by calls that are traced themselves
        if array is None or type(array) is np.ndarray:
            engine = host
        elif call.collective in ("scan", "exscan"):  # of an array on a GPU, as all that follow
            engine = Staged(host)
        else:
            engine = self._on_gpus(array).choose(call)
        return engine if tracer is None else Traced(engine, tracer)

    def _on_gpus(self, like: Array) -> gpu.Engines:
        if self._gpu is None:
            self._gpu = gpu.engines_for(self, like, self._copy)
        return self._gpu

    def _copy(self) -> Communicator:
        """Make a second group of the same ranks."""
        made = self.split(0, self.rank)
        assert made is not None  # it has a color
        return made


def _on_mpi(group: MPIGroup, timeout: float, lane: int | None = None) -> Communicator:
    communicator = Communicator(group, group.rank, timeout, None, lane)
    who = f"rank {group.rank} of {group.size}, through MPI"
    group_made(communicator, who, "MPI", "")
    return communicator


def local_group(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[Communicator]:
    """Make a group of ``size`` ranks that are threads of this process.

    Parameters
    ----------
    size : int
        Number of ranks, at least 1.
    timeout : float
        Seconds that a call waits for the other ranks.

    Returns
    -------
    list of Communicator
        One for each rank; each is used by one thread at a time.

    Examples
    --------
    >>> import threading, numpy as np, pycollective as pc
    >>> def work(comm):
    ...     print(comm.all_reduce(np.ones(3)))
    >>> threads = [threading.Thread(target=work, args=(c,)) for c in pc.local_group(2)]
    """
    return threads(whole("size", size), seconds("timeout", timeout), "local_group")


def threads(size: int, timeout: float, source: str) -> list[Communicator]:
    """Make a group of threads, because ``source`` says so."""
    observe.settings()
    group = _core.ThreadGroup(size)
    family = Threads()
    choices = tuning.rows(group.transport, size)
    communicators = [Communicator(group, rank, timeout, family) for rank in range(size)]
    for communicator in communicators:
        communicator._prefer(choices)
    ranks = "rank 0 of 1, alone" if size == 1 else f"ranks 0 to {size - 1}, threads of this process"
    group_made(communicators[0], ranks, source, str(tuning.path()))
    return communicators
