"""Who is in the group: from what the environment says to a communicator.

So far: the processes that ``pycollective run`` starts on this host. The launcher makes the shared
memory of the group and hands its descriptor down; whoever has it is on this host and was meant to
come, so there is nothing to find and nobody to keep out.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping

from pycollective import _core
from pycollective.communicator import DEFAULT_TIMEOUT, Communicator, local_group
from pycollective.errors import CollectiveError

__all__ = ["RendezvousError", "init", "launched_environment"]

RANK = "PYCOLLECTIVE_RANK"
SIZE = "PYCOLLECTIVE_SIZE"
MEMORY = "PYCOLLECTIVE_MEMORY_FD"
TRANSPORT = "PYCOLLECTIVE_TRANSPORT"


class RendezvousError(CollectiveError):
    """The group cannot be made as the environment describes it."""


_live: weakref.WeakSet[Communicator] = weakref.WeakSet()


def launched_environment(rank: int, size: int, descriptor: int) -> dict[str, str]:
    """Return the variables by which `init` in a launched process finds its group."""
    return {RANK: str(rank), SIZE: str(size), MEMORY: str(descriptor)}


def init(
    *, timeout: float = DEFAULT_TIMEOUT, environment: Mapping[str, str] | None = None
) -> Communicator:
    """Return this process's communicator.

    Under ``pycollective run`` it is this process's rank of the launched group, through shared memory;
    without a launcher a group of one rank, so that the same script runs alone.

    Parameters
    ----------
    timeout : float
        Seconds that a call waits for the other ranks.
    environment : mapping, optional
        Instead of ``os.environ``.

    Raises
    ------
    RendezvousError
        If the environment contradicts itself, the rank is taken, or the transport is not there.
    """
    env = os.environ if environment is None else environment
    given = [name for name in (RANK, SIZE, MEMORY) if name in env]
    wanted = env.get(TRANSPORT, "")
    if wanted not in ("", "shm", "thread"):
        raise RendezvousError(
            f"{TRANSPORT}={wanted!r}: there are 'shm' (processes of one host) and 'thread'"
        )
    if not given:
        if wanted == "shm":
            raise RendezvousError(
                f"{TRANSPORT}=shm needs a launcher: pycollective run -n 2 python script.py"
            )
        (alone,) = local_group(1, timeout=timeout)
        return alone
    if len(given) < 3:
        missing = [name for name in (RANK, SIZE, MEMORY) if name not in env]
        raise RendezvousError(f"{', '.join(given)} is set and {', '.join(missing)} is not")
    try:
        rank, size, descriptor = (int(env[name]) for name in (RANK, SIZE, MEMORY))
        group = _core.ShmGroup.open(descriptor)
        if group.size != size:
            raise ValueError(f"{SIZE} is {size}, and the group has {group.size} ranks")
        group.join(rank)
    except (ValueError, OSError, RuntimeError) as error:
        raise RendezvousError(
            f"cannot join the group that {RANK}={env[RANK]!r}, {SIZE}={env[SIZE]!r} and "
            f"{MEMORY}={env[MEMORY]!r} describe: {error}"
        ) from None
    communicator = Communicator(group, rank, timeout)
    _live.add(communicator)
    return communicator


@atexit.register
def _leave_all() -> None:
    for communicator in list(_live):
        communicator.close()


def _forget_after_fork() -> None:
    """In a forked child: the parent's ranks are not ours."""
    for communicator in list(_live):
        communicator._disown()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
