"""The rendezvous of a process group through PyTorch's store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycollective.comm import Communicator, local_group
from pycollective.errors import RendezvousError
from pycollective.launch import rendezvous
from pycollective.launch.description import LISTENER
from pycollective.launch.interfaces import choose, interface_addresses
from pycollective.launch.secret import SECRET, SECRET_FILE

_KEY = "pycollective"


def join(store: Any, rank: int, size: int, timeout: float) -> Communicator:
    """Return this process's communicator in a group whose processes share a store of PyTorch.

    Rank 0 stores the address at which it listens, and a secret that is used if the environment has none.
    The rendezvous is that of `pycollective.init`: every connection is authenticated, and ranks use
    shared memory only if they prove that they are on one host.

    Parameters
    ----------
    store : torch.distributed.Store
        The store of the new group.
    rank, size : int
        This process's rank, and the number of ranks.
    timeout : float
        Seconds that this function and each call wait for the other ranks.

    Raises
    ------
    RendezvousError
        As `pycollective.init`.
    """
    if size == 1:
        return local_group(1, timeout=timeout)[0]
    environment = dict(os.environ)
    if rank == 0:
        host = _own_address(store, environment)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=min(size, 1024))
        address, secret = f"{host}:{listener.getsockname()[1]}", secrets.token_hex(32)
        _keep_private(store)
        environment[LISTENER] = str(listener.detach())
        store.set(_KEY, json.dumps([address, secret]))
    else:
        try:
            store.wait([_KEY], timedelta(seconds=timeout))
        except dist.DistStoreError as error:
            raise RendezvousError(
                f"rank 0 has not joined the group of {size} ranks in {timeout:g} s: {error}",
                ranks=[0],
            ) from error
        address, secret = json.loads(store.get(_KEY))
    if SECRET not in environment and SECRET_FILE not in environment:
        environment[SECRET] = secret
    communicator = rendezvous(
        rank,
        size,
        [address],
        "torch.distributed",
        timeout=timeout,
        join_timeout=timeout,
        environment=environment,
    )
    if rank == 0:  # all ranks have read the key; a later group in the same store sets it again
        store.delete_key(_KEY)
    return communicator


def _keep_private(store: Any) -> None:
    """Let no other user read a store that is a file, which never forgets a value."""
    store = _unwrapped(store)
    if isinstance(store, dist.FileStore):
        with contextlib.suppress(OSError):  # another user's file
            os.chmod(store.path, 0o600)


def _unwrapped(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _own_address(store: Any, environment: dict[str, str]) -> str:
    """Return the address of this host at which the other ranks reach it."""
    if pattern := environment.get("PYCOLLECTIVE_SOCKET_IFNAME"):
        return choose(pattern, interface_addresses())[0][1]
    store = _unwrapped(store)
    try:
        if not isinstance(store, dist.TCPStore):  # a file: no address is known
            return socket.gethostbyname(socket.gethostname())
        # The address from which this host reaches the store's host; connect() of UDP sends nothing.
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
