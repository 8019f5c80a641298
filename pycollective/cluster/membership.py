"""The membership of this process: its rank, the number of workers, and the addresses."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pycollective import environment
from pycollective.cluster import rules
from pycollective.cluster.examined import (
    Examined,
    TaskAddress,
    address_problems,
    are_errors,
    host_and_port_of,
    places_of,
    problems_here,
)
from pycollective.cluster.ports import has_port
from pycollective.cluster.ranked import RankedClusterResolver
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.sources import overlooked_variables, resolver_of_environment
from pycollective.cluster.spec import ClusterSpec
from pycollective.cluster.tf_config import TFConfigClusterResolver
from pycollective.environment import MAX_RANKS

_log = logging.getLogger("pycollective")


@dataclass(frozen=True)
class Membership:
    """The rank of a process among the workers, and the workers' addresses and names."""

    source: str  # the launcher or variable that describes the cluster
    rank: int
    size: int
    addresses: tuple[str, ...]  # of all workers, of worker 0 alone, or empty if none is needed
    names: tuple[str, ...]  # such as "chief 0"


def examine(
    resolver: ClusterResolver | None,
    *,
    servers: bool = False,
    here: bool = True,
    listens: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[Membership | None, list[str], list[str]]:
    """Return this process's membership and the problems of the description, one sentence each.

    Parameters
    ----------
    resolver : ClusterResolver or None
        Describes the cluster. None: there is no description.
    servers : bool
        True: in a cluster with parameter servers, they are members too. Workers of such a cluster may
        have port 0: they choose a port when they begin.
    here : bool
        True: look up the names, and test the address of this process.
    listens : bool
        True if the launcher already listens at the address.
    environ : mapping, optional
        The environment from which the resolver was made. A misspelt variable in it is an error. So are
        variables that mean several processes if this process would be alone.

    Returns
    -------
    tuple
        The membership, the errors, and the doubts (see `pycollective.cluster.examined`). The membership
        is None for an empty cluster, for the evaluator, and if there is an error.
    """
    misspelt: list[str] = []
    if environ is not None:
        try:
            environment.check(environ)
        except ValueError as error:
            misspelt = [str(error)]
    if resolver is None:
        return None, misspelt + ([] if environ is None else overlooked_variables(environ)), []
    member, wrong, doubtful = _examined(resolver, servers, here, listens)
    wrong = misspelt + wrong
    if environ is not None and not wrong:
        alone = resolver.task_type != "evaluator" if member is None else member.size == 1
        wrong = overlooked_variables(environ) if alone else []
    return (None if wrong else member), wrong, doubtful


def _examined(
    resolver: ClusterResolver, servers: bool, here: bool, listens: bool
) -> tuple[Membership | None, list[str], list[str]]:
    source = source_of(resolver)
    member: Membership | None
    try:
        if isinstance(resolver, RankedClusterResolver):
            member = ranked = _ranked(resolver)
            places = [
                TaskAddress("worker 0", resolver.address_key(), address)
                for address in ranked.addresses
            ]
            wrong, own = address_problems(places), None if ranked.rank else 0
        else:
            seen = resolver.examined() if isinstance(resolver, TFConfigClusterResolver) else None
            if seen is None:
                cluster = resolver.cluster_spec()
                seen = Examined(cluster, resolver.task_type, resolver.task_id)
            if not seen.cluster and not seen.problems:
                return None, [], []
            member, places, own, wrong = _numbered(source, seen, servers)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        return None, [str(error.args[0]) if isinstance(error, KeyError) else str(error)], []
    if len(places) > MAX_RANKS:
        return (
            None,
            [f"{len(places)} workers are too many: at most {MAX_RANKS} are supported", *wrong],
            [],
        )
    doubtful: list[str] = []
    sound = [i for i, place in enumerate(places) if host_and_port_of(place.address)]
    alone = len(places) == 1 if member is None else member.size == 1
    if here and sound and not alone:
        index = sound.index(own) if own in sound else None
        more, doubtful = problems_here([places[i] for i in sound], index, listens)
        wrong += more
    return (None if wrong else member), wrong, doubtful


def source_of(resolver: ClusterResolver | None) -> str:
    """Return the name of a resolver in messages."""
    if resolver is None:
        return "the environment"
    if isinstance(resolver, RankedClusterResolver):
        return resolver.launcher
    name = type(resolver).__name__.removesuffix("ClusterResolver").removesuffix("Resolver")
    return {"TFConfig": "TF_CONFIG"}.get(name, name)


def membership_of(
    resolver: ClusterResolver | None,
    *,
    here: bool = False,
    listens: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Membership | None:
    """Return this process's membership; None for an empty cluster, and for the evaluator.

    The parameters are those of `examine`.

    Raises
    ------
    ValueError
        There is an error; the message names the source, the key and the task of each one. Doubts
        are errors too if `are_errors` returns True; otherwise they are logged.
    """
    member, wrong, doubtful = examine(resolver, here=here, listens=listens, environ=environ)
    if are_errors(os.environ if environ is None else environ):
        wrong, doubtful = [*wrong, *doubtful], []
    for doubt in doubtful:
        _log.warning("%s: %s", source_of(resolver), doubt)
    if wrong:
        raise ValueError(_text(resolver, wrong))
    return member


def membership_of_environment(environ: Mapping[str, str]) -> Membership | None:
    """Return this process's membership from its environment; None if it is alone or the evaluator.

    Raises
    ------
    ValueError
        As `membership_of`.
    """
    try:
        resolver = resolver_of_environment(environ)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    listens = "PYCOLLECTIVE_LISTEN_FD" in environ
    return membership_of(resolver, here=True, listens=listens, environ=environ)


_MOST_SAID = 20


def _text(resolver: ClusterResolver | None, wrong: list[str]) -> str:
    source = source_of(resolver)
    if len(wrong) == 1:
        return f"{source}: {wrong[0]}"
    lines = wrong[:_MOST_SAID]
    if len(wrong) > _MOST_SAID:
        lines.append(f"and {len(wrong) - _MOST_SAID} more")
    return f"{source}: {len(wrong)} things are wrong:" + "".join(f"\n  {line}" for line in lines)


def _numbered(
    source: str, seen: Examined, servers: bool
) -> tuple[Membership | None, list[TaskAddress], int | None, list[str]]:
    """Return this process's membership, the members, its index in them, and the errors."""
    cluster, wrong = seen.cluster, list(seen.problems)
    task_type, task_id = seen.task_type, seen.task_id
    servers = servers and "ps" in cluster.jobs
    jobs = ("chief", "ps", "worker") if servers else ("chief", "worker")
    if servers and not rules.task_count(cluster, "worker"):
        wrong.append("There must be at least one worker.")
    if seen.knows_task and (task_type is None or task_id is None):
        given = {"task_type": task_type, "task_id": task_id}
        missing = [key for key, value in given.items() if value is None]
        wrong.append(
            "When `cluster_spec` is given, you must also specify `task_type` and `task_id`. "
            f"Missing: {', '.join(missing)}"
        )
        task_type = task_id = None
    wrong += rules.broken(cluster, task_type, task_id)
    wrong += _gaps(cluster, jobs)
    places = places_of(cluster, jobs)
    known = [
        place
        for place in places_of(cluster, cluster.jobs)
        if not (servers and place.task.startswith("worker") and not has_port(place.address))
    ]
    wrong += address_problems(known)
    own = None
    if task_type in jobs and task_id is not None:
        matches = [i for i, place in enumerate(places) if place.task == f"{task_type} {task_id}"]
        own = matches[0] if matches else None
    if task_type == "evaluator" and not wrong:
        return None, [], None, []
    if task_type == "ps" and not servers and not wrong:
        wrong.append("There is no id for task_type 'ps'")
    if wrong or own is None:
        return None, places, own, wrong
    addresses, names = zip(*[(place.address, place.task) for place in places], strict=True)
    return Membership(source, own, len(places), addresses, names), places, own, wrong


def _ranked(resolver: RankedClusterResolver) -> Membership:
    rank, size = resolver.task_id or 0, resolver.num_tasks
    if rank >= size:
        raise ValueError(
            f"{resolver.needs[0]}={rank} is not among the {size} tasks of {resolver.needs[1]}"
        )
    if size > MAX_RANKS:
        raise ValueError(
            f"{resolver.needs[1]}={size} workers are too many: at most {MAX_RANKS} are supported"
        )
    address = resolver.address()
    names = tuple(f"worker {i}" for i in range(size))
    return Membership(resolver.launcher, rank, size, (address,) if address else (), names)


def _gaps(cluster: ClusterSpec, jobs: Sequence[str]) -> list[str]:
    """Return a line for each gap in the numbers of the members."""
    found = []
    for job in jobs:
        numbers = cluster.task_indices(job) if job in cluster.jobs else []
        absent = sorted(set(range(len(numbers))) - set(numbers))
        if absent:
            found.append(
                f"cluster[{job!r}] has tasks {numbers}, but not {', '.join(map(str, absent))}: tasks "
                "are numbered from 0 without gaps"
            )
    return found
