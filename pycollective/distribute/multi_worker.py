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
from pycollective.distribute.blas_threads import limit_to_share
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
from pycollective.launch.description import LISTENER, FirstRankLostError
from pycollective.launch.join_requests import JoinRequests, is_listening
from pycollective.launch.members import Admissions

_log = logging.getLogger("pycollective")

JOIN_TIMEOUT = launch.JOIN_TIMEOUT

PATIENCE = 30.0
_RENDEZVOUS_SECONDS = 30.0
_ATTEMPTS = 10
"""The most failed rendezvous in a row; each worker and each new process adds one."""


class MultiWorkerExtended(MirroredExtended):
    """The replicas of this process as in `MirroredStrategy`, together with those of other workers."""

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
    """Synchronous training by several processes, each with a replica on each of its devices.

    Every worker runs the same program. The constructor waits for all workers, and may be called at any
    time. Each variable has a copy on every device of every worker. All copies start with worker 0's
    initial value, and get the same updates.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        The workers' addresses, and the number of this one. By default read from the environment, in
        the order of `pycollective.cluster.sources`: ``TF_CONFIG`` first. Without a cluster, and in an
        evaluator, this process trains alone.
    communication_options : CommunicationOptions, optional
        Hints for all reductions. Its timeout is the deadline of each call.
    devices : sequence of str, optional
        The devices of this worker's replicas, with the default and the errors of `MirroredStrategy`.
        Every worker must have the same number.
    rendezvous_timeout : float
        Seconds to wait for all workers. Every ten seconds the log names the missing workers.

    Raises
    ------
    ValueError
        The description of the cluster is wrong, and the error lists all faults before any wait (see
        `pycollective.cluster.examined`). Or an argument has another type, or the workers have
        different numbers of replicas.
    RendezvousError
        Workers are missing at the deadline, or their secrets differ.
    ImportError
        ``communication_options`` ask for MPI, and mpi4py is not installed.

    Notes
    -----
    Every worker must make the same collective calls in the same order. These are the creation of a
    variable, a step, `reduce`, `gather`, the next element of a distributed dataset, and the read of
    an ``ON_READ`` variable. Metrics and checkpoints read such variables.
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
        observe.settings()  # the environment chooses the destination of the log
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
            listens = LISTENER in os.environ
            if cluster_resolver is not None:
                member = membership_of(resolver, here=True, listens=listens)
            else:
                found = resolver if sources else None
                member = membership_of(found, here=True, listens=listens, environ=os.environ)
        # A resolver may set CUDA_VISIBLE_DEVICES, so the devices are parsed afterwards.
        local = parse_devices(devices)
        options = _available(options, local)
        task = (resolver.task_type, resolver.task_id)
        names = tuple(map(str, local))
        how = options.implementation.value
        workers = Workers()
        self._member = member
        described = _described(member, resolver, cluster_resolver is not None, sources)
        if member is None or member.size == 1:
            if launch.thread_ranks.count > 1:
                raise RuntimeError(
                    f"this thread is one of {launch.thread_ranks.count} ranks of spawn, but workers are "
                    "processes: leave threads=True out of spawn, or use MirroredStrategy in one rank"
                )
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
            # All workers have joined. If one came late, the exchange below still gets time.
            left = max(left, min(rendezvous_timeout, _RENDEZVOUS_SECONDS))
            workers = _workers_of(communicator, member, len(local), left)
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
        """Train, and restart with the other workers, or replacements, when a worker is lost.

        Parameters
        ----------
        train_fn : callable
            Called as ``train_fn(strategy)`` at each start. It must make model, optimizer and input in
            the strategy's scope, restore the last checkpoint that all workers can read, train, and
            save. Objects of an earlier call cannot be used.
        min_workers : int, optional
            The smallest number of workers; by default all, so that each lost worker must be started
            again with the same command. More than half of the workers prevents two groups that
            train independently after a network fault. A worker that is started later joins when the
            next checkpoint is saved. `Checkpoint.save` then raises an `AbortedError`, which this
            method catches, and all workers restart from that checkpoint.
        max_workers : int, optional
            The largest number of workers, at least the cluster's number. A larger number has no
            effect, because only the cluster's workers have addresses.
        patience : float
            Seconds to wait for lost workers before fewer continue.

        Returns
        -------
        any
            The result of ``train_fn``.

        Raises
        ------
        ValueError
            The numbers do not match the cluster.
        RuntimeError
            The workers have no addresses for another rendezvous.
        RendezvousError
            Fewer than ``min_workers`` join.
        Exception
            The error of ``train_fn``, except `PeerLostError`, `AbortedError` and
            `CollectiveTimeoutError`.
        """
        member = self._member
        if member is None:
            return train_fn(self)
        least = member.size if min_workers is None else min_workers
        if not 1 <= least <= member.size <= (max_workers or member.size):
            raise ValueError(
                f"run_elastic: min_workers={min_workers} and max_workers={max_workers} do not match a "
                f"cluster of {member.size} workers"
            )
        if len(member.addresses) < member.size:
            raise RuntimeError(
                f"run_elastic needs an address for each worker, but {member.source} gives none; "
                "describe the cluster by TF_CONFIG"
            )
        admissions = Admissions(member.size)
        while True:
            try:
                with _watching_for_workers(member, self.extended.workers):
                    return train_fn(self)
            except (PeerLostError, AbortedError, CollectiveTimeoutError) as error:
                _log.warning("%s: a new rendezvous after: %s", self, error)
            if self.extended.workers.has_saved:
                admissions.has_saved()
            self.extended.workers.close()
            replicas = self.extended.num_local_replicas
            self.extended.train_with(_rejoin(member, least, patience, replicas, admissions))
            self.extended.workers.wait_at_most(self.extended.timeout)
            _log.warning(
                "training continues with %d of %d workers", self.extended.workers.count, member.size
            )

    def close(self) -> None:
        """Leave the group of workers, as at the end of the process; do not use the strategy any more."""
        self.extended.workers.close()


def _available(options: CommunicationOptions, devices: Sequence[Device]) -> CommunicationOptions:
    """Return options that are possible on these devices."""
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
    """Return the name of the cluster's description, and of those that were ignored."""
    name = member.source if member is not None else source_of(resolver)
    others = [str(source) for source in sources if source.name != name]
    if not given and not sources:
        return ""
    text = f"; described by {name}" + ", an argument" * given
    return text + f", not by {', '.join(others)}" * bool(others)


def _member_of(communicator: Communicator) -> Membership:
    names = tuple(f"worker {rank}" for rank in range(communicator.size))
    return Membership("MPI", communicator.rank, communicator.size, (), names)


def join_workers(member: Membership, seconds: float) -> Communicator:
    """Wait for the other workers."""
    begin = time.monotonic()
    try:
        if not member.addresses:
            return launch.init_again(join_timeout=seconds)
        return launch.rendezvous(
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
            "missing workers, or all workers if the job has ended"
        ) from None


def _rejoin(
    member: Membership, least: int, patience: float, replicas: int, admissions: Admissions
) -> Workers:
    """Join a new group; repeat the rendezvous if a worker is lost meanwhile."""
    attempts = _ATTEMPTS + member.size + admissions.limit
    for attempt in range(attempts):
        communicator = _rendezvous(member, least, patience, admissions)
        try:
            return _workers_of(communicator, member, replicas, patience + _RENDEZVOUS_SECONDS)
        except CollectiveError as error:
            communicator.close()
            if attempt == attempts - 1:
                raise
            _log.warning("another rendezvous after: %s", error)
    raise AssertionError("the last rendezvous returns or raises")


def _rendezvous(
    member: Membership, least: int, patience: float, admissions: Admissions
) -> Communicator:
    """Join the remaining and returning workers at the first address that answers.

    If nobody answers at an address for ``patience`` seconds, its worker counts as lost. If that worker
    is lost during the rendezvous, the search begins at the first address again.
    """
    last = min(member.rank, member.size - least)
    first = losses = 0
    while True:
        try:
            return launch.rendezvous(
                member.rank - first,
                member.size - first,
                member.addresses[first:],
                member.source,
                join_timeout=patience + _RENDEZVOUS_SECONDS,
                least=least,
                patience=patience,
                admissions=admissions,
            )
        except FirstRankLostError as error:
            losses += 1
            if losses == _ATTEMPTS + member.size:
                raise
            _log.warning("another rendezvous after: %s", error)
            first = 0
        except RendezvousError:
            if first == last:
                raise
            first += 1


@contextlib.contextmanager
def _watching_for_workers(member: Membership, workers: Workers) -> Iterator[None]:
    """Let rank 0 of the remaining workers notice a lost worker that wants to join again.

    A lost worker connects to worker 0's address. If worker 0 was lost itself, it listens there after
    its restart.
    """
    if workers.index or workers.count == member.size:
        yield
    elif member.rank == 0:
        try:
            requests = JoinRequests(member.addresses)
        except RendezvousError as error:
            _log.warning("lost workers cannot join again: %s", error)
            yield
            return
        workers.worker_waits = requests.waiting
        try:
            yield
        finally:
            requests.close()
    else:
        workers.worker_waits = partial(is_listening, member.addresses)
        yield


def _workers_of(
    communicator: Communicator, member: Membership, replicas: int, seconds: float
) -> Workers:
    """Return the workers of a communicator, after a check of their numbers of replicas."""
    complete = communicator.size == member.size
    names = member.names if complete else ("a worker",) * communicator.size
    watched = member.source != "MPI"  # MPI's launcher finds lost processes
    try:
        workers = Workers(
            communicator, names, member.addresses if complete else (), watched=watched
        )
    except BaseException as error:  # the other workers wait for this one
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
    hosts = communicator.hosts
    limit_to_share(hosts.count(hosts[communicator.rank]))
    if communicator.size == 1:
        workers.close()
        return Workers()
    addresses = member.addresses
    if len(addresses) == member.size:
        addresses = tuple(addresses[r] for r in table[:, 0])
    workers.set_names(names, addresses if len(addresses) == len(names) else ())
    return workers
