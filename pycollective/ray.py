"""Workers as Ray actors: `run` starts them, tells them who they are, and returns what they return.

Needs Ray (``pip install 'pycollective[ray]'``).
"""

from __future__ import annotations

import importlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pycollective.errors import CollectiveError, RendezvousError

__all__ = ["run"]

_PLACEMENT_TIMEOUT = 300.0
_CAUSE_SECONDS = 15.0
"""How long to look for the failure of one worker because of which another one's call has failed."""


def run(
    train_fn: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    max_failures: int = 0,
    min_workers: int | None = None,
    placement_timeout: float = _PLACEMENT_TIMEOUT,
) -> list[Any]:
    """Call a function in several Ray actors, in which `init` and strategies find their group.

    The actors are placed together (one placement group); each one's address, and a secret for all, are
    handed out through Ray, as ``TF_CONFIG`` and ``PYCOLLECTIVE_SECRET``. Ray is started on this machine
    if it does not run yet.

    Parameters
    ----------
    train_fn : callable
        ``train_fn(*args, **kwargs)`` makes the strategy and trains. With ``max_failures`` it restores
        its last checkpoint itself, or does so in ``strategy.run_elastic``.
    num_workers : int
        How many actors.
    args, kwargs
        For every worker the same.
    cpus_per_worker, gpus_per_worker : float
        What Ray reserves for each.
    max_failures : int
        How many lost workers are replaced. A replacement begins ``train_fn`` anew, and so does a worker
        whose ``train_fn`` has ended, be it because another one was lost. One whose machine is lost is
        replaced on another; if it is worker 0, at whose address all meet, all of them begin anew.
    min_workers : int, optional
        How many are enough to go on, where ``train_fn`` says so to ``strategy.run_elastic``: while a
        replacement waits for room, and without one after ``max_failures``. A replacement is let in when
        the others save their next checkpoint, so that there are ``num_workers`` again. By default all.
    placement_timeout : float
        Seconds to wait for Ray to have room for all workers, or for a replacement if fewer than
        ``min_workers`` are left; and for a replacement to end after all others have.

    Returns
    -------
    list
        What the workers returned, by rank; None for one that was lost, where the others were enough.

    Raises
    ------
    ImportError
        Without Ray.
    ValueError
        If the numbers of workers do not fit together.
    RendezvousError
        If Ray has no room for the workers.
    Exception
        The first exception of a worker; the others are ended. Ray's ``RayActorError`` for one that is
        lost, if it is not replaced. A worker's `CollectiveError` says that something has happened to
        another one: what that is, is waited for, and raised instead.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    least = num_workers if min_workers is None else min_workers
    if not 1 <= least <= num_workers:
        raise ValueError(f"min_workers={min_workers} is not from 1 to num_workers={num_workers}")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ImportError("pycollective.ray needs Ray: pip install 'pycollective[ray]'") from None
    if not ray.is_initialized():
        ray.init()
    bundle = {"CPU": cpus_per_worker, **({"GPU": gpus_per_worker} if gpus_per_worker else {})}
    workers = _Workers(ray, num_workers, bundle, placement_timeout)
    try:
        return workers.call(train_fn, tuple(args), dict(kwargs or {}), max_failures, least)
    finally:
        workers.end()


def _environment(addresses: list[str], rank: int, secret: str) -> dict[str, str]:
    """Return the variables by which a worker finds the others."""
    task = {"type": "worker", "index": rank}
    config = json.dumps({"cluster": {"worker": addresses}, "task": task})
    environment = {"TF_CONFIG": config, "PYCOLLECTIVE_SECRET": secret}
    if len(addresses) == 1:  # alone, also where a launcher of several processes has started Ray
        environment |= {"PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "1"}
    return environment


class _Worker:
    """What runs in an actor's process."""

    def place(self) -> tuple[str, str]:
        """Return the machine, and where this worker can listen: a port that nobody listens at now."""
        import socket

        ray = importlib.import_module("ray")
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as sock:
            address = f"{host}:{sock.getsockname()[1]}"
        return ray.get_runtime_context().get_node_id(), address

    def call(
        self,
        environment: dict[str, str],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function in an environment."""
        import os

        os.environ.update(environment)
        return function(*args, **kwargs)


class _Workers:
    """The actors, and the calls that are under way."""

    def __init__(self, ray: Any, count: int, bundle: dict[str, float], timeout: float) -> None:
        self._ray = ray
        self._bundle = bundle
        self._timeout = timeout
        self._actors: list[Any] = []
        self._group = ray.util.placement_group([bundle] * count, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(self._group)
            raise self._no_room(f"{count} workers") from None
        self._actors = [self._actor(rank) for rank in range(count)]

    def _no_room(self, what: str) -> RendezvousError:
        return RendezvousError(
            f"Ray has no room for {what} of {self._bundle} within {self._timeout:g} s; it has "
            f"{self._ray.available_resources()}"
        )

    def _actor(self, rank: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        placed = strategies.PlacementGroupSchedulingStrategy(self._group, rank)
        kind = self._ray.remote(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=placed,
        )(_Worker)
        return kind.remote()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_failures: int,
        least: int,
    ) -> list[Any]:
        """Call the function on all of them, and return the results by rank."""
        ray, errors = self._ray, self._ray.exceptions
        count = len(self._actors)
        places = ray.get([actor.place.remote() for actor in self._actors])
        secret = secrets.token_hex(32)
        under_way: dict[Any, int] = {}
        results: dict[int, Any] = {}
        deadlines = [math.inf] * count

        def begin(ranks: Iterable[int]) -> None:
            addresses = [address for _, address in places]
            for rank in ranks:
                results.pop(rank, None)
                environment = _environment(addresses, rank, secret)
                call = self._actors[rank].call.remote(environment, function, args, kwargs)
                under_way[call] = rank

        begin(range(count))
        coming: dict[Any, int] = {}  # replacements, until they have a place
        late: set[int] = set()  # those that were begun when the others were under way
        lost, repeated = 0, [0] * count
        while under_way or (coming and len(results) < least):
            over = len(results) >= least and set(under_way.values()) <= late
            # Over: the others have ended, perhaps without having let these in.
            limited = set(under_way.values()) if over else set()
            if len(under_way) + len(results) < least:
                limited.update(coming.values())
            end = time.monotonic() + self._timeout
            deadlines = [min(d, end) if r in limited else math.inf for r, d in enumerate(deadlines)]
            done = self._wait([*under_way, *coming], deadlines)
            if not done:
                if over:
                    break
                raise self._no_room(
                    "a replacement of worker " + ", ".join(map(str, sorted(coming.values())))
                )
            if done in coming:
                rank = coming.pop(done)
                try:
                    place = ray.get(done)
                except errors.RayActorError:  # on a machine that is lost, as Ray hears only now
                    if time.monotonic() >= deadlines[rank]:
                        raise
                    time.sleep(0.1)
                    coming[self._replaced(rank)] = rank
                    continue
                # In its place of the group: where that is still the same machine, its address stays.
                moved = place[0] != places[rank][0]
                if moved:
                    places[rank] = place
                if moved and rank == 0:  # where all meet
                    self._anew(under_way.values())
                    under_way.clear()
                    late.clear()
                    begin(r for r in range(count) if r not in coming.values())
                    continue
                begin([rank])
                late.add(rank)
                if len(under_way) < least:  # too few without those who have ended
                    begin(sorted(results))
                continue
            rank = under_way.pop(done)
            try:
                results[rank] = ray.get(done)
            except errors.RayActorError:
                lost += 1
                if lost <= max_failures:
                    coming[self._replaced(rank)] = rank
                elif len(under_way) + len(results) < least:
                    raise
            except errors.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                # Because of a loss that is, or will be, heard of here.
                if not isinstance(cause, CollectiveError):
                    raise cause from None
                if over:  # it was not let in
                    continue
                if repeated[rank] >= max_failures:
                    raise self._cause(cause, list(under_way)) from None
                repeated[rank] += 1
                begin([rank])
        return [results.get(rank) for rank in range(count)]

    def _wait(self, refs: list[Any], deadlines: list[float]) -> Any:
        """Return one that is done, or None at the first deadline."""
        left = min(deadlines) - time.monotonic()
        done, _ = self._ray.wait(refs, timeout=None if left == math.inf else max(0.0, left))
        return done[0] if done else None

    def _cause(self, error: Exception, under_way: list[Any]) -> Exception:
        """Return what one of the other workers ends with, if that is why this one had an error."""
        ray, errors = self._ray, self._ray.exceptions
        deadline = time.monotonic() + _CAUSE_SECONDS
        while under_way:
            done, under_way = ray.wait(under_way, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            try:
                ray.get(done[0])
            except errors.RayActorError as lost:
                found: Exception = lost
                return found
            except errors.RayTaskError as failed:
                found = failed.cause if isinstance(failed.cause, Exception) else failed
                if not isinstance(found, CollectiveError):
                    return found
        return error

    def _replaced(self, rank: int) -> Any:
        """Give a lost worker another process; return the call that says its place."""
        self._actors[rank] = self._actor(rank)
        return self._actors[rank].place.remote()

    def _anew(self, ranks: Iterable[int]) -> None:
        """Give workers that look for the others in vain another process."""
        for rank in ranks:
            self._ray.kill(self._actors[rank])
            self._actors[rank] = self._actor(rank)

    def end(self) -> None:
        """End the actors, and give back their places."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)
