"""Several hosts on one machine: network namespaces with addresses of their own, on bridges."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

_numbers = itertools.count()


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the ip command."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=10)


@contextlib.contextmanager
def hosts(count: int, interfaces: int = 1) -> Iterator[list[str]]:
    """Yield names of namespaces with the addresses 10.213.7.1 and so on; skip without the privilege.

    The addresses of their second interface, eth1, are 10.213.8.1 and so on.
    """
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs network namespaces: Linux, ip, and the right to make them")
    tag = f"pc{os.getpid() % 10000}{next(_numbers)}"  # a deletion takes effect a moment later
    names = [f"{tag}n{i}" for i in range(count)]
    deletions = []
    try:
        for name in names:
            if ip("netns", "add", name, check=False).returncode:
                pytest.skip("this machine allows no network namespaces")
            deletions.append(("netns", "del", name))
            ip("-n", name, "link", "set", "lo", "up")
        for k in range(interfaces):
            bridge, inner = f"{tag}b{k}", f"eth{k}"
            if ip("link", "add", bridge, "type", "bridge", check=False).returncode:
                pytest.skip("this machine allows no network namespaces")
            deletions.append(("link", "del", bridge))
            ip("link", "set", bridge, "up")
            for i, name in enumerate(names):
                outer = f"{tag}v{i}e{k}"
                ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
                # A namespace outlives its name while a socket in it is still open.
                deletions.append(("link", "del", outer))
                ip("link", "set", outer, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"10.213.{7 + k}.{i + 1}/24", "dev", inner)
                ip("-n", name, "link", "set", inner, "up")
        yield names
    finally:
        for words in reversed(deletions):
            ip(*words, check=False)
