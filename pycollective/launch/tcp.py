"""Groups of processes that make their rendezvous over TCP, and splits of such groups."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Sequence

from pycollective import _core
from pycollective.errors import RendezvousError
from pycollective.launch.description import Description
from pycollective.launch.handshake import HandshakeError, SecretsDifferError
from pycollective.launch.joining import Joining
from pycollective.launch.sockets import is_unspecified

_ABOUT_SECRETS = {
    True: ". All ranks need the same PYCOLLECTIVE_SECRET",
    False: ". This rank has no secret, so it joins only processes of its own user on this machine. To "
    "join others, such as those of another container, set the same PYCOLLECTIVE_SECRET on every rank",
}


def connect(
    about: Description, seconds: float, old: _core.Group | None = None
) -> tuple[_core.Group, str, str, list[str]]:
    """Do the rendezvous.

    For a split, ``old`` is the group that is split.

    Returns
    -------
    group : Group
        The core's group.
    name, transport : str
        Its random name, and its transport in words.
    hosts : list of str
        The address at which this rank listens, and those by which it reaches the others, by rank.

    Raises
    ------
    RendezvousError
        If ranks are missing, fail the handshake, or report an error; if ``old`` fails.
    """
    if about.size == 1:
        return _core.TcpGroup(0, [[]], [-1]), "of one", "over TCP", [about.host]
    try:
        with contextlib.closing(Joining(about, seconds, old)) as joining:
            return joining.group()
    except RendezvousError:
        raise
    except HandshakeError as error:
        text = f"{about.title(about.rank)} was refused at {about.host}:{about.port}: {error}"
        if isinstance(error, SecretsDifferError):
            text += _ABOUT_SECRETS[bool(about.secret)]
        raise RendezvousError(text, ranks=error.ranks) from None
    except (OSError, RuntimeError, MemoryError, UnicodeError) as error:  # also from the core
        raise RendezvousError(
            f"{about.title(about.rank)} cannot join the group at {about.host}:{about.port}: "
            f"{error or 'out of memory'}"
        ) from None


class Addresses:
    """The factory of splits over TCP, whose ranks make a rendezvous at their first rank.

    ``hosts`` are the ranks' addresses, as `connect` returns them.
    """

    def __init__(self, about: Description, hosts: list[str], group: _core.Group) -> None:
        self._about = about
        self._hosts = hosts
        self._group = group
        self._listener: socket.socket | None = None

    def offer(self, size: int) -> tuple[str, int]:
        """Listen for the ranks of a split; return the address."""
        host = self._hosts[self._about.rank]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=min(size, 1024))
        return host, self._listener.getsockname()[1]

    def accept(
        self, offer: tuple[str, int], rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, Addresses]:
        """Do the rendezvous of a split at an offered address, with the secret of this group."""
        listener, self._listener = self._listener, None
        size = len(members)
        if size == 1 and listener:
            listener.close()
            listener = None
        host, port = offer
        if is_unspecified(host) and rank > 0:  # the first rank listens at all of its addresses
            host = self._hosts[members[0]]
        about = dataclasses.replace(
            self._about,
            rank=rank,
            size=size,
            host=host,
            port=port,
            listener=listener.detach() if listener else -1,
            own=(self._hosts[self._about.rank], 0) if rank else None,
            least=0,  # a split needs all of its ranks
            patience=0.0,
            admissions=None,
            known_as=tuple(members),
        )
        group, _, _, hosts = connect(about, min(seconds, 300.0), self._group)
        return group, Addresses(about, hosts, group)
