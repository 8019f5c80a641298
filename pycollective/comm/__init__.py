"""Communicators: groups of ranks, and the collectives of one rank on NumPy and CuPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from pycollective import _core, observe, tuning
from pycollective.arguments import seconds, switch, whole
from pycollective.comm import gpu
from pycollective.comm.arrays import Array
from pycollective.comm.call import Call, Engine, GpuEngines
from pycollective.comm.cart import Cart
from pycollective.comm.extremes import Extremes, Located
from pycollective.comm.mpi import MPICore
from pycollective.comm.mpi_group import MPIGroup, join
from pycollective.comm.objects import Objects
from pycollective.comm.persistent import Persistent
from pycollective.comm.prefixes import Prefixes
from pycollective.comm.reductions import DEFAULT_ALGORITHM, all_reduce_together
from pycollective.comm.shared_arrays import shared_arrays
from pycollective.comm.signatures import Later, Now, Options
from pycollective.comm.split import GroupFactory, Threads, split_groups
from pycollective.comm.staged import Staged
from pycollective.comm.tracing import Traced, group_made, timeline
from pycollective.comm.ufuncs import ByFunction
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    """One rank of a group, with the collectives of that rank.

    Every rank of the group makes the same calls in the same order, each from its own thread. A call
    returns when this rank's part is done. All ranks get bit-identical results. After a failed call the
    group cannot be used: all calls of all ranks fail with the same reason. Make a new group instead.

    Communicators are made by `pycollective.init`, `pycollective.spawn`, `local_group`, `split` and
    `from_mpi`.

    Attributes
    ----------
    rank, size : int
        This rank, from 0 to size - 1, and the number of ranks.
    timeout : float
        Seconds that a call waits for the other ranks, unless the call has its own ``timeout``.
    """

    @classmethod
    def from_mpi(cls, comm: object, *, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
        """Make a communicator whose calls run on the MPI library, through mpi4py.

        Use it for networks that only MPI supports. Every rank of ``comm`` makes this call. MPI
        chooses the algorithms, so calls take no ``algorithm`` and no ``reproducible``.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            For example ``MPI.COMM_WORLD``. The communicator works on duplicates of it.
        timeout : float
            Seconds that a call waits for the other ranks.

        Raises
        ------
        ImportError
            mpi4py is not installed (``pip install 'pycollective[mpi]'``).
        TypeError
            ``comm`` is not an intracommunicator of mpi4py.
        """
        return _on_mpi(join(comm), seconds("timeout", timeout))

    def cart(self, dims: Sequence[int], periods: bool | Sequence[bool] = False) -> Cart:
        """Arrange the ranks of this group in a grid; they keep their numbers. No rank communicates.

        Parameters
        ----------
        dims : sequence of int
            The number of ranks along each axis; 0: choose it. The product must be the number of ranks.
        periods : bool or sequence of bool
            True for an axis whose ends are neighbours; one value is for all axes.

        Returns
        -------
        Cart
            The grid, with this rank's coordinates and neighbours.

        Raises
        ------
        ValueError
            No such grid has as many ranks as this group, or ``periods`` has more or fewer values
            than there are axes.

        Examples
        --------
        >>> grid = comm.cart([0, 0])
        >>> source, dest = grid.shift(axis=1)
        """
        return Cart(self, dims, periods)

    # fmt: off
    @overload
    def split(self, color: int | None, key: int = 0, *, async_op: Now = False,
              **options: Unpack[Options]) -> Communicator | None: ...
    @overload
    def split(self, color: int | None, key: int = 0, *, async_op: Later,
              **options: Unpack[Options]) -> Work[Communicator | None]: ...
    # fmt: on
    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Communicator | Work[Communicator | None] | None:
        """Make a new group of all ranks that give the same color, for each color.

        Every rank of this group makes the call. The new groups have the transport of this group. Calls
        of several groups may run concurrently, from several threads or with ``async_op``. A failure of
        one group leaves the others as they are. A process that ends is lost to all its groups.

        Parameters
        ----------
        color : int or None
            The number of the new group; None or a negative number: none.
        key : int
            The new ranks are in the order of the keys. Ranks with equal keys keep their order.
        async_op, timeout
            As in `all_reduce`; so are the other errors. The timeout applies to each of the parts of the
            call, and twice to the last one.

        Returns
        -------
        Communicator, None or Work
            This rank in its new group, with the timeout of this communicator; None without a color. The
            program closes it.

        Raises
        ------
        CollectiveError
            The new group cannot be made; the message gives the reason. This group still works.
        """
        color = None if color is None else whole("color", color, -(2**63), 2**63 - 1)
        key, limit = whole("key", key, -(2**63), 2**63 - 1), self._seconds(timeout)
        if switch("async_op", async_op):
            return self._run_later(lambda: self._split(color, key, limit))
        return self._split(color, key, limit)

    def _split(self, color: int | None, key: int, seconds: float) -> Communicator | None:
        if isinstance(self._group, MPIGroup):
            self.barrier(timeout=seconds)
            assert isinstance(self._core, MPICore)
            mpi_group = self._core.in_turn(functools.partial(self._group.split, color, key))
            if mpi_group is None:
                return None
            part = _on_mpi(mpi_group, self.timeout, self._lane)
        elif (found := split_groups(self, color, key, seconds)) is None:
            return None
        else:
            part = self._communicator_in(*found)
        part._family = self._family
        part._family.add(part)
        return part

    def _communicator_in(
        self, group: _core.Group, rank: int, factory: GroupFactory
    ) -> Communicator:
        """Make the communicator of a rank in a group that was split from this one."""
        choices = None
        if group.transport in ("threads", "shared memory"):  # all ranks read the same file
            choices = tuning.rows(group.transport, group.size)
        part = Communicator(group, rank, self.timeout, factory, self._lane, choices)
        who = f"rank {rank} of {part.size} (rank {self.rank} before), {group.transport}"
        group_made(part, who, f"split of {self.size} ranks", str(tuning.path()))
        return part

    def _engine_for(self, call: Call) -> Engine:
        """Choose the engine for a call."""
        array, host, tracer = call.array, self._core, self._tracer
        engine: Engine
        if call.function is not None:
            return ByFunction(self)  # makes calls that are traced themselves
        if array is None or type(array) is np.ndarray:
            engine = host
        elif call.collective in ("scan", "exscan"):  # of a GPU array, as in the rest
            engine = Staged(host)
        else:
            engine = self._on_gpus(array).choose(call)
        return engine if tracer is None else Traced(engine, tracer)

    def _on_gpus(self, like: Array) -> GpuEngines:
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
    """Return the communicators of a group of ranks that are threads of this process.

    Only one thread at a time may use a communicator.

    Parameters
    ----------
    size : int
        Number of ranks, 1 to 4096.
    timeout : float
        Seconds that a call waits for the other ranks.

    Returns
    -------
    list of Communicator
        The communicators, in rank order.

    Examples
    --------
    >>> import threading, numpy as np, pycollective as pc
    >>> def work(comm):
    ...     print(comm.all_reduce(np.ones(3)))
    >>> threads = [threading.Thread(target=work, args=(c,)) for c in pc.local_group(2)]
    """
    return threads(whole("size", size), seconds("timeout", timeout), "local_group")


def threads(size: int, timeout: float, source: str) -> list[Communicator]:
    """Make a group of threads; ``source`` describes the group in the log."""
    observe.settings()
    group = _core.ThreadGroup(size)
    factory = Threads()
    choices = tuning.rows(group.transport, size)
    communicators = [
        Communicator(group, rank, timeout, factory, choices=choices) for rank in range(size)
    ]
    ranks = "rank 0 of 1, alone" if size == 1 else f"ranks 0 to {size - 1}, threads of this process"
    group_made(communicators[0], ranks, source, str(tuning.path()))
    return communicators
