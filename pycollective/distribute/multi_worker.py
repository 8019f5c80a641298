"""`MultiWorkerMirroredStrategy`: replicas in several processes, on one machine or on many."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pycollective import launch, observe
from pycollective.cluster import ClusterResolver, TFConfigClusterResolver
from pycollective.cluster.membership import Membership, membership_of, source_of
from pycollective.cluster.sources import Source, sources_of_environment
from pycollective.comm import Communicator
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.devices import Device, parse_devices
from pycollective.distribute.mirrored import MirroredExtended
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.workers import Workers
from pycollective.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
)
from pycollective.launch.description import FirstRankLostError
from pycollective.launch.members import Roster

__all__ = ["MultiWorkerMirroredStrategy", "join_workers"]

_log = logging.getLogger("pycollective")

JOIN_TIMEOUT = launch.JOIN_TIMEOUT

PATIENCE = 30.0
_MEETING_SECONDS = 30.0
_MEETINGS = 10
"""Meetings in a row that may fail, besides one for each worker and each new process that is lost."""


class MultiWorkerExtended(MirroredExtended):
    """The replicas of this process as those of `MirroredStrategy`, and the other workers beyond."""

    input_per_replica = False
    experimental_between_graph = True

    def __init__(
        self,
        devices: Sequence[Device],
        options: CommunicationOptions,
        workers: Workers,
        resolver: ClusterResolver,
    ) -> None:
        super().__init__(devices, None, options)
        self.train_with(workers)
        self._cluster_resolver = resolver
        if options.timeout_seconds is not None:
            self.timeout = options.timeout_seconds

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.workers.count > 1:
            raise ValueError("MultiWorkerMirroredStrategy cannot be deep copied in eager mode.")
        return super().__deepcopy__(memo)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training by several processes: workers, each with a replica on each of its devices.

    Every worker runs the same program. The constructor waits until all have come, in any order of
    starting; it may be called at any time. Each variable has a copy on every device of every worker;
    worker 0's initial value is everyone's, and every copy gets the same updates.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Who the workers are, and which one this is. By default what the environment says, in the order
        that `pycollective.cluster.sources` lists: ``TF_CONFIG`` first. Where nothing names a
        cluster, and for an evaluator, this process trains alone.
    communication_options : CommunicationOptions, optional
        Hints for all reductions. Its timeout is how long workers wait for each other in a call.
    devices : sequence of str, optional
        The devices of this worker's replicas, as of `MirroredStrategy`: by default all visible GPUs,
        or the CPU as one replica. Every worker must have equally many.
    rendezvous_timeout : float
        Seconds to wait for all workers. Who is missing is said every ten seconds, and at the end.

    Raises
    ------
    ValueError
        If the description of the cluster is wrong, which is found out before anyone is waited for, all
        of it at once (see `pycollective.cluster.examined`); an argument is of another kind; or the
        workers have different numbers of replicas.
    RendezvousError
        If workers do not come in time or their secrets differ.

    Notes
    -----
    Every worker must make the same calls that need all workers, in the same order: creating a
    variable is one, and so are a step, `reduce`, `gather`, the next element of a distributed dataset,
    and reading a variable that is aggregated when it is read (metrics, checkpoints).
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | None = None,
        rendezvous_timeout: float = JOIN_TIMEOUT,
    ) -> None:
        options = communication_options or CommunicationOptions()
        if not isinstance(options, CommunicationOptions):
            raise ValueError(
                "communication_options must be an instance of "
                "tf.distribute.experimental.CommunicationOptions"
            )
        if not isinstance(cluster_resolver, (ClusterResolver, type(None))):
            raise ValueError(
                "cluster_resolver must be an instance of "
                "tf.distribute.cluster_resolver.ClusterResolver"
            )
        observe.settings()  # lines go where the environment wants them from the first one on
        sources = sources_of_environment()
        if cluster_resolver is not None:
            resolver = cluster_resolver
        else:
            resolver = sources[0].resolver(os.environ) if sources else TFConfigClusterResolver()
        on_mpi: Communicator | None = None
        member: Membership | None
        if options.implementation is CommunicationImplementation.MPI:
            on_mpi = _on_mpi()
            member = _member_of(on_mpi)
        else:
            listens = launch.LISTENER in os.environ
            if cluster_resolver is not None:
                member = membership_of(resolver, here=True, listens=listens)
            else:
                found = resolver if sources else None
                member = membership_of(found, here=True, listens=listens, environ=os.environ)
        # Only now: a resolver may have chosen this worker's GPUs among those of the machine.
        local = parse_devices(devices)
        options = _available(options, local)
        task = (resolver.task_type, resolver.task_id)
        names = tuple(map(str, local))
        how = options.implementation.value
        workers = Workers()
        self._member = member
        described = _described(member, resolver, cluster_resolver is not None, sources)
        if member is None or member.size == 1:
            _log.info(
                "Single-worker MultiWorkerMirroredStrategy with local_devices = %r, "
                "communication = %s%s",
                names,
                how,
                described,
            )
        else:
            _log.info(
                "MultiWorkerMirroredStrategy with cluster_spec = %r, task_type = %r, task_id = %r, "
                "num_workers = %r, local_devices = %r, communication = %s%s",
                resolver.cluster_spec().as_dict(),
                *task,
                member.size,
                names,
                how,
                described,
            )
            _log.info("Waiting for the cluster, timeout = %s", rendezvous_timeout)
            begin = time.monotonic()
            communicator = on_mpi or join_workers(member, rendezvous_timeout)
            left = rendezvous_timeout - (time.monotonic() - begin)
            # They are all here: who came late is not short of time for what is left to do.
            left = max(left, min(rendezvous_timeout, _MEETING_SECONDS))
            workers = _joined(communicator, member, len(local), left)
            _log.info("Cluster is ready.")
        super().__init__(MultiWorkerExtended(local, options, workers, resolver))

    def run_elastic(
        self,
        train_fn: Callable[[MultiWorkerMirroredStrategy], Any],
        min_workers: int | None = None,
        max_workers: int | None = None,
        *,
        patience: float = PATIENCE,
    ) -> Any:
        """Train, and begin again with the survivors or replacements when a worker is lost.

        Parameters
        ----------
        train_fn : callable
            ``train_fn(strategy)``. It is called anew each time: it makes model, optimizer and input
            in the strategy's scope, restores the last checkpoint that all workers can read, goes on
            from there, and saves. All that belongs to an earlier call is void.
        min_workers : int, optional
            How many are enough to go on; by default all, so that lost workers must be started again,
            with the same command. With fewer, those whose network is cut from the others may go on
            among themselves, unless this is more than half of all. A worker that is started again
            later is taken in when the next checkpoint is saved: `Checkpoint.save` ends in each
            ``train_fn`` with an `AbortedError` that is caught here, and all begin again from there.
        max_workers : int, optional
            With how many to train at most: not less than the cluster's number of workers, beyond which
            nobody has an address. To that number training grows again when lost workers are back.
        patience : float
            Seconds to wait for lost workers to come back, before fewer go on.

        Returns
        -------
        any
            What ``train_fn`` returned.

        Raises
        ------
        ValueError
            If the numbers do not fit the cluster.
        RuntimeError
            Where the workers have no addresses of their own at which they could meet again.
        RendezvousError
            If fewer than ``min_workers`` come.
        Exception
            What ``train_fn`` raises but for the loss of a worker.
        """
        member = self._member
        if member is None:
            return train_fn(self)
        least = member.size if min_workers is None else min_workers
        if not 1 <= least <= member.size <= (max_workers or member.size):
            raise ValueError(
                f"run_elastic: min_workers={min_workers} and max_workers={max_workers} do not fit a "
                f"cluster of {member.size} workers"
            )
        if len(member.addresses) < member.size:
            raise RuntimeError(
                f"run_elastic needs an address for each worker, which {member.source} does not give; "
                "describe the cluster by TF_CONFIG"
            )
        roster = Roster(member.size)
        while True:
            try:
                with _open_to_the_lost(member, self.extended.workers):
                    return train_fn(self)
            except (PeerLostError, AbortedError, CollectiveTimeoutError) as error:
                _log.warning("%s: meets the others again after: %s", self, error)
            if self.extended.workers.has_saved:
                roster.has_saved()
            self.extended.workers.close()
            replicas = self.extended.num_local_replicas
            self.extended.train_with(_those_who_are_left(member, least, patience, replicas, roster))
            self.extended.workers.wait_at_most(self.extended.timeout)
            _log.warning("goes on with %d of %d workers", self.extended.workers.count, member.size)

    def close(self) -> None:
        """Leave the other workers; the strategy cannot be used any more. The end of the process does."""
        self.extended.workers.close()


def _available(options: CommunicationOptions, devices: Sequence[Device]) -> CommunicationOptions:
    """Return options that these devices can follow."""
    if options.implementation is not CommunicationImplementation.NCCL:
        return options
    if all(device.kind != "GPU" for device in devices):
        _log.warning("Enabled NCCL communication but no GPUs detected/specified.")
        options = copy.copy(options)
        options.implementation = CommunicationImplementation.RING
    return options


def _on_mpi() -> Communicator:
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError:
        raise ImportError(
            "implementation='MPI' needs mpi4py: pip install 'pycollective[mpi]'"
        ) from None
    return Communicator.from_mpi(mpi.COMM_WORLD)


def _described(
    member: Membership | None, resolver: ClusterResolver, given: bool, sources: Sequence[Source]
) -> str:
    """Return which description of the cluster was taken, and which others there are."""
    name = member.source if member is not None else source_of(resolver)
    others = [str(source) for source in sources if source.name != name]
    if not given and not sources:
        return ""
    text = f"; described by {name}" + ", which was given" * given
    return text + f", not by {', '.join(others)}" * bool(others)


def _member_of(communicator: Communicator) -> Membership:
    names = tuple(f"worker {rank}" for rank in range(communicator.size))
    return Membership("MPI", communicator.rank, communicator.size, (), names)


def join_workers(member: Membership, seconds: float) -> Communicator:
    """Wait for the other workers."""
    begin = time.monotonic()
    try:
        if not member.addresses:
            return launch.again(join_timeout=seconds)
        return launch.meet(
            member.rank,
            member.size,
            member.addresses,
            member.source,
            join_timeout=seconds,
        )
    except RendezvousError as error:
        if time.monotonic() - begin < seconds:
            raise
        raise RendezvousError(
            f"Timeout waiting for the cluster, timeout is {seconds:g} seconds: {error}. Start the "
            "missing workers, or all workers again if the job has ended"
        ) from None


def _those_who_are_left(
    member: Membership, least: int, patience: float, replicas: int, roster: Roster
) -> Workers:
    """Meet the others; once more if one of them is lost before all is made."""
    meetings = _MEETINGS + member.size + roster.limit
    for again in range(meetings):
        met = _survivors(member, least, patience, roster)
        try:
            return _joined(met, member, replicas, patience + _MEETING_SECONDS)
        except CollectiveError as error:
            met.close()
            if again == meetings - 1:
                raise
            _log.warning("meets the others once more after: %s", error)
    raise AssertionError("the last meeting returns or raises")


def _survivors(member: Membership, least: int, patience: float, roster: Roster) -> Communicator:
    """Meet those who are left, or come back, at the first of their addresses.

    If nobody comes to an address for the length of the patience, its worker is taken for lost. If the
    worker there is lost while the others meet at its address, they look for the first one again.
    """
    last = min(member.rank, member.size - least)
    first = losses = 0
    while True:
        try:
            return launch.meet(
                member.rank - first,
                member.size - first,
                member.addresses[first:],
                member.source,
                join_timeout=patience + _MEETING_SECONDS,
                least=least,
                patience=patience,
                roster=roster,
            )
        except FirstRankLostError as error:
            losses += 1
            if losses == _MEETINGS + member.size:
                raise
            _log.warning("meets the others once more after: %s", error)
            first = 0
        except RendezvousError:
            if first == last:
                raise
            first += 1


@contextlib.contextmanager
def _open_to_the_lost(member: Membership, workers: Workers) -> Iterator[None]:
    """Let the first of those who are left notice when a lost worker is back.

    Lost workers look for the others at worker 0's address. Where that one is lost itself, it listens
    there when it is back.
    """
    if workers.index or workers.count == member.size:
        yield
    elif member.rank == 0:
        try:
            knocks = launch.listen_for_knocks(member.addresses)
        except RendezvousError as error:
            _log.warning("lost workers cannot come back: %s", error)
            yield
            return
        workers.somebody_waits = knocks.heard
        try:
            yield
        finally:
            knocks.close()
    else:
        workers.somebody_waits = partial(launch.is_there, member.addresses)
        yield


def _joined(
    communicator: Communicator, member: Membership, replicas: int, seconds: float
) -> Workers:
    """Return those who have met, having compared what they are; waits so long for each other."""
    all_came = communicator.size == member.size
    names = member.names if all_came else ("a worker",) * communicator.size
    watched = member.source != "MPI"  # whose launcher watches over its processes
    try:
        workers = Workers(
            communicator, names, member.addresses if all_came else (), watched=watched
        )
    except BaseException as error:  # the others wait for this one
        communicator.abort(f"{member.names[member.rank]}: {type(error).__name__}: {error}")
        communicator.close()
        raise
    try:
        table = communicator.all_gather(np.asarray([[member.rank, replicas]]), timeout=seconds)
    except BaseException:
        workers.close()
        raise
    names = tuple(member.names[r] for r in table[:, 0])
    if len(set(table[:, 1].tolist())) > 1:
        workers.close()
        each = ", ".join(f"{name} has {n}" for name, n in zip(names, table[:, 1], strict=True))
        raise ValueError(f"every worker must have the same number of replicas: {each}")
    if communicator.size == 1:
        workers.close()
        return Workers()
    addresses = member.addresses
    if len(addresses) == member.size:
        addresses = tuple(addresses[r] for r in table[:, 0])
    workers.call(names, addresses if len(addresses) == len(names) else ())
    return workers
