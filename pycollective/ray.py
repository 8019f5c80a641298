"""Workers as Ray actors: `run` starts them, gives them their ranks, and returns their results.

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

from pycollective.cluster.ports import UNKNOWN, reserved_address
from pycollective.errors import CollectiveError, RendezvousError, UnavailableError

__all__ = ["run"]

_PLACEMENT_TIMEOUT = 300.0
_CAUSE_SECONDS = 15.0
"""Seconds to wait for the error of another worker that caused a `CollectiveError`."""
_CHIEF_SECONDS = 1.0
"""Seconds to wait for the end of the chief after another task of a cluster with servers has ended."""


def run(
    train_fn: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_ps: int = 0,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    max_failures: int = 0,
    min_workers: int | None = None,
    placement_timeout: float = _PLACEMENT_TIMEOUT,
) -> Any:
    """Call a function in several Ray actors, in which `init` and strategies find their group.

    One placement group holds all actors that `run` needs to begin. Ray gives every actor all addresses
    and a secret, as ``TF_CONFIG`` and ``PYCOLLECTIVE_SECRET``. If Ray does not run, `run` starts it on
    this machine.

    ``ray list actors`` shows the actors as ``pycollective-RUN-JOB-INDEX``, such as
    ``pycollective-1f0c9a3e-worker-0``. RUN stands for eight hexadecimal digits, which are different in
    each call of `run`. JOB is ``worker``, ``chief`` or ``ps``. The name of the first replacement of an
    actor ends with ``-again-1``.

    Parameters
    ----------
    train_fn : callable
        ``train_fn(*args, **kwargs)`` makes the strategy and trains. With ``max_failures`` it must
        restore its last checkpoint, itself or in ``strategy.run_elastic``.
    num_workers : int
        Number of actors.
    args, kwargs
        Arguments of ``train_fn``, the same for every worker.
    num_ps : int
        Number of parameter servers. Above 0, there are ``1 + num_ps`` more actors, a chief and the
        servers, and all actors call ``train_fn``, which makes a `ParameterServerStrategy`.
    cpus_per_worker, gpus_per_worker : float
        Resources that Ray reserves for each actor.
    max_failures : int
        Number of lost workers that are replaced. A replacement calls ``train_fn`` from the beginning. So
        does a worker whose call failed because another worker was lost. If a machine is lost, its
        worker is replaced on another one. If that is worker 0, whose address all others use, every
        worker begins again.
    min_workers : int, optional
        Number of workers with which training continues, if ``train_fn`` uses ``strategy.run_elastic``:
        while a replacement waits for resources, and without a replacement after ``max_failures``. A
        replacement joins when the others save their next checkpoint. By default all workers are needed.

        With parameter servers, training also begins with this number of workers. Each of the others
        begins when Ray has resources for it, and the chief uses it from then on. The chief uses a
        replacement as soon as the replacement runs.
    placement_timeout : float
        Seconds to wait for resources for the workers that `run` needs to begin, and for a replacement
        if fewer than ``min_workers`` are left. After all other workers have ended, a replacement has
        the same time to end.

    Returns
    -------
    list, or the chief's result
        The workers' results by rank; None for a lost worker without which training continued. With
        parameter servers, not a list but the result of the chief.

    Raises
    ------
    ImportError
        Ray is not installed.
    ValueError
        The numbers of workers do not fit together.
    RendezvousError
        Ray has no resources for the actors that `run` needs to begin.
    Exception
        The first exception of a worker; the others are ended. For a lost worker that is not replaced it
        is Ray's ``RayActorError``. A worker's `CollectiveError` is a consequence of another worker's
        failure: `run` waits for that failure and raises it instead.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    if num_ps < 0:
        raise ValueError(f"num_ps must be at least 0, got {num_ps}")
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
    workers = (
        _Tasks(ray, num_ps, num_workers, bundle, placement_timeout, num_workers - least)
        if num_ps
        else _Workers(ray, num_workers, bundle, placement_timeout)
    )
    try:
        return workers.call(train_fn, tuple(args), dict(kwargs or {}), max_failures, least)
    finally:
        workers.end()


def _environment(
    cluster: dict[str, list[str]], job: str, index: int, secret: str
) -> dict[str, str]:
    """Return the variables by which a task finds the others."""
    config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    environment = {"TF_CONFIG": config, "PYCOLLECTIVE_SECRET": secret}
    if sum(map(len, cluster.values())) == 1:
        # These variables replace those of a launcher of several processes that started Ray.
        environment |= {"PYCOLLECTIVE_RANK": "0", "PYCOLLECTIVE_SIZE": "1"}
    return environment


class _Worker:
    """The object in an actor's process."""

    def place(self) -> tuple[str, str]:
        """Return the id of the machine, and an address on which this process can listen."""
        ray = importlib.import_module("ray")
        address = reserved_address(ray.util.get_node_ip_address())
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
    """The actors, one for each rank, and the resources that Ray reserves for them.

    The last ``later`` ranks have no actor yet. Each has a placement group of its own, which Ray makes
    when it has the resources.
    """

    def __init__(
        self, ray: Any, count: int, bundle: dict[str, float], timeout: float, later: int = 0
    ) -> None:
        self._ray = ray
        self._bundle = bundle
        self._timeout = timeout
        #: The actors by their ranks.
        self._actors: dict[int, Any] = {}
        #: The beginning of the actors' names, and the number of actors that each rank has had.
        self._name = f"pycollective-{secrets.token_hex(4)}"
        self._counts = [0] * count
        first = count - later
        group = self._reserved(first)
        #: For each rank, its placement group and its number in this group.
        self._reservations = [(group, rank) for rank in range(first)]
        try:
            ray.get(group.ready(), timeout=timeout)
        except BaseException as error:  # also KeyboardInterrupt
            ray.util.remove_placement_group(group)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise self._no_resources(f"{first} actors") from None
            raise
        self._reservations += [(self._reserved(1), 0) for _ in range(later)]
        for rank in range(first):
            self._actors[rank] = self._actor(rank)

    def _reserved(self, count: int) -> Any:
        return self._ray.util.placement_group([self._bundle] * count, strategy="PACK")

    def _no_resources(self, what: str) -> RendezvousError:
        return RendezvousError(
            f"Ray has no resources for {what} of {self._bundle} within {self._timeout:g} s; it has "
            f"{self._ray.available_resources()}"
        )

    def _actor(self, rank: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        placed = strategies.PlacementGroupSchedulingStrategy(*self._reservations[rank])
        kind = self._ray.remote(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=placed,
        )(_Worker)
        job, index = self._task(rank)
        name = f"{self._name}-{job}-{index}"
        if self._counts[rank]:  # Ray may still know the name of the previous actor
            name += f"-again-{self._counts[rank]}"
        self._counts[rank] += 1
        return kind.options(name=name).remote()

    def _task(self, rank: int) -> tuple[str, int]:
        """Return the job of a rank, and its number in this job."""
        return "worker", rank

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_failures: int,
        least: int,
    ) -> list[Any]:
        """Call the function on all workers, and return the results by rank."""
        ray, errors = self._ray, self._ray.exceptions
        count = len(self._actors)
        places = ray.get([self._actors[rank].place.remote() for rank in range(count)])
        secret = secrets.token_hex(32)
        under_way: dict[Any, int] = {}
        results: dict[int, Any] = {}
        deadlines = [math.inf] * count

        def begin(ranks: Iterable[int]) -> None:
            cluster = {"worker": [address for _, address in places]}
            for rank in ranks:
                results.pop(rank, None)
                environment = _environment(cluster, "worker", rank, secret)
                call = self._actors[rank].call.remote(environment, function, args, kwargs)
                under_way[call] = rank

        begin(range(count))
        coming: dict[Any, int] = {}  # replacements that do not have an address yet
        late: set[int] = set()  # replacements that began while the others were training
        lost, repeated = 0, [0] * count
        while under_way or (coming and len(results) < least):
            over = len(results) >= least and set(under_way.values()) <= late
            # If over, all others have ended, perhaps without a checkpoint at which these could join.
            limited = set(under_way.values()) if over else set()
            if len(under_way) + len(results) < least:
                limited.update(coming.values())
            end = time.monotonic() + self._timeout
            deadlines = [min(d, end) if r in limited else math.inf for r, d in enumerate(deadlines)]
            done = self._wait([*under_way, *coming], deadlines)
            if not done:
                if over:
                    break
                raise self._no_resources(
                    "a replacement of worker " + ", ".join(map(str, sorted(coming.values())))
                )
            if done in coming:
                rank = coming.pop(done)
                try:
                    place = ray.get(done)
                except errors.RayActorError:  # Ray notices only now that the machine is lost
                    if time.monotonic() >= deadlines[rank]:
                        raise
                    time.sleep(0.1)
                    coming[self._replaced(rank)] = rank
                    continue
                # A replacement on the same machine keeps the address of the lost worker.
                moved = place[0] != places[rank][0]
                if moved:
                    places[rank] = place
                if moved and rank == 0:  # all workers use this address
                    self._restarted(under_way.values())
                    under_way.clear()
                    late.clear()
                    begin(r for r in range(count) if r not in coming.values())
                    continue
                begin([rank])
                late.add(rank)
                if len(under_way) < least:  # too few without the workers that have ended
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
                # Another worker was lost; the notification by Ray may not have arrived yet.
                if not isinstance(cause, CollectiveError):
                    raise cause from None
                if over:  # the others ended before this replacement joined
                    continue
                if repeated[rank] >= max_failures:
                    raise self._cause(cause, list(under_way)) from None
                repeated[rank] += 1
                begin([rank])
        return [results.get(rank) for rank in range(count)]

    def _wait(self, refs: list[Any], deadlines: list[float]) -> Any:
        """Return a finished call, or None at the first deadline."""
        left = min(deadlines) - time.monotonic()
        done, _ = self._ray.wait(refs, timeout=None if left == math.inf else max(0.0, left))
        return done[0] if done else None

    def _cause(self, error: Exception, under_way: list[Any]) -> Exception:
        """Return the error of the worker that caused this error, or this error if none is found."""
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
        """Start an actor, perhaps for a lost worker; return the call that gives its address."""
        self._actors[rank] = self._actor(rank)
        return self._actors[rank].place.remote()

    def _restarted(self, ranks: Iterable[int]) -> None:
        """Replace the actors of workers that try to connect to the address of a lost worker."""
        for rank in ranks:
            self._ray.kill(self._actors[rank])
            self._actors[rank] = self._actor(rank)

    def end(self) -> None:
        """End the actors, and release their resources."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        for group in dict(self._reservations):
            self._ray.util.remove_placement_group(group)


class _Tasks(_Workers):
    """The actors of a chief, of its parameter servers and of its workers, in this order."""

    def __init__(
        self,
        ray: Any,
        servers: int,
        workers: int,
        bundle: dict[str, float],
        timeout: float,
        later: int,
    ) -> None:
        self._jobs = [("chief", 0)]
        self._jobs += [("ps", k) for k in range(servers)] + [("worker", k) for k in range(workers)]
        super().__init__(ray, len(self._jobs), bundle, timeout, later)

    def _task(self, rank: int) -> tuple[str, int]:
        return self._jobs[rank]

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_failures: int,
        least: int,
    ) -> Any:
        """Call the function on all tasks, and return the chief's result."""
        ray, errors = self._ray, self._ray.exceptions
        tasks = sorted(self._actors)
        found = ray.get([self._actors[task].place.remote() for task in tasks])
        #: The machines and addresses of the tasks that have begun.
        places: dict[int, tuple[str, str]] = dict(zip(tasks, found, strict=True))
        waiting = {
            group.ready(): task
            for task, (group, _) in enumerate(self._reservations)
            if task not in places
        }
        secret = secrets.token_hex(32)
        under_way: dict[Any, int] = {}
        coming: dict[Any, int] = {}  # actors that do not have an address yet

        def begin(tasks: Iterable[int]) -> None:
            cluster: dict[str, list[str]] = {}
            for task, (job, _) in enumerate(self._jobs):
                _, address = places.get(task, ("", UNKNOWN))
                cluster.setdefault(job, []).append(address)
            for task in tasks:
                environment = _environment(cluster, *self._task(task), secret)
                call = self._actors[task].call.remote(environment, function, args, kwargs)
                under_way[call] = task

        begin(places)
        lost = 0
        while True:
            done = self._wait([*under_way, *coming, *waiting], [math.inf])
            if done in waiting:
                task = waiting.pop(done)
                coming[self._replaced(task)] = task
                continue
            (chief,) = [call for call, task in under_way.items() if task == 0] or [None]
            if chief not in (None, done) and done in under_way:
                # The other tasks end with the chief. Its own end may be known a moment later.
                done = self._wait([chief], [time.monotonic() + _CHIEF_SECONDS]) or done
            has_come = done in coming
            task = coming.pop(done) if has_come else under_way.pop(done)
            job = self._jobs[task][0]
            failure: Exception | None = None
            try:
                found = ray.get(done)
            except errors.RayTaskError as error:
                failure = error.cause if isinstance(error.cause, Exception) else error
                if job != "worker" or not isinstance(failure, UnavailableError):
                    raise failure from None
                # A server was lost while the worker ran the program up to the first function.
                ray.kill(self._actors[task])
            except errors.RayActorError as error:
                failure = error
            if failure is not None:
                lost += 1
                workers = [k for k in under_way.values() if self._jobs[k][0] == "worker"]
                if lost > max_failures and (job != "worker" or len(workers) < least):
                    raise failure
                if job == "chief":  # all tasks begin again with its replacement
                    self._restarted(under_way.values())
                    under_way.clear()
                if lost <= max_failures:
                    coming[self._replaced(task)] = task
                continue
            if job == "chief" and not has_come:
                return found
            if not has_come:
                continue
            # A replacement on the same machine keeps the address of the lost task. A worker tells its
            # address to server 0, which the chief asks for it.
            on_same_machine = task in places and found[0] == places[task][0]
            if not on_same_machine:
                places[task] = found
            if job == "worker" or (on_same_machine and job != "chief"):
                begin([task])
                continue
            self._restarted(under_way.values())
            under_way.clear()
            begin(k for k in places if k not in coming.values())
