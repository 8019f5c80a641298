"""Hosts as network namespaces, and a network that can delay and drop packets.

Each namespace has a TUN device. A thread of the test reads the packets, and writes each to the device
of its destination, with a delay, or drops it. Linux's netem does the same, but many kernels do not
have it, and it cannot drop the same packets again.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from namespaces import ip

SECRET = "0123456789abcdef0123456789abcdef"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LONGEST_PACKET = 1 << 16

_numbers = itertools.count()


class Network:
    """The network between hosts, for the length of the block of `network`.

    Attributes
    ----------
    names : list of str
        The names of the namespaces.
    addresses : list of str
        The hosts' addresses, in the same order.
    lost, passed : int
        The numbers of packets that were dropped at random, and that were delivered.
    """

    def __init__(self, names: list[str], addresses: list[str], devices: list[int]) -> None:
        self.names = names
        self.addresses = addresses
        self.lost = self.passed = 0
        self._devices = devices
        self._host_of = {bytes(map(int, a.split("."))): i for i, a in enumerate(addresses)}
        self._delay, self._loss = 0.0, 0.0
        self._cut: frozenset[tuple[int, int]] = frozenset()
        self._chance = random.Random(0)
        self._over, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="network")
        self._thread.start()

    def on(self, host: int) -> list[str]:
        """Return the first words of a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def behave(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """Set the delay of packets in seconds, and the probability of their loss."""
        self._delay, self._loss = delay, loss

    def cut(self, host: int, *, sends: bool = True, receives: bool = True) -> float:
        """Drop packets from a host, to it, or both; return the time (`time.monotonic`)."""
        others = [i for i in range(len(self.names)) if i != host]
        ways = {(host, i) for i in others if sends} | {(i, host) for i in others if receives}
        self._cut |= ways
        return time.monotonic()

    def mend(self) -> None:
        """Deliver all packets again."""
        self._cut = frozenset()

    def close(self) -> None:
        """Stop the thread that delivers packets."""
        os.close(self._wake)
        self._thread.join(10)
        os.close(self._over)

    def _carry(self) -> None:
        ready = select.poll()
        for descriptor in (self._over, *self._devices):
            ready.register(descriptor, select.POLLIN)
        source_of = {device: i for i, device in enumerate(self._devices)}
        later: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        while True:
            wait = None if not later else max(0.0, later[0][0] - time.monotonic()) * 1e3
            for descriptor, _ in ready.poll(wait):
                if descriptor == self._over:
                    return
                for _ in range(64):  # more packets must wait for those of the other devices
                    try:
                        packet = os.read(descriptor, _LONGEST_PACKET)
                    except BlockingIOError:
                        break
                    source, target = source_of[descriptor], self._host_of.get(packet[16:20])
                    if packet[0] >> 4 != 4 or target is None or (source, target) in self._cut:
                        continue
                    if self._loss and self._chance.random() < self._loss:
                        self.lost += 1
                        continue
                    due = time.monotonic() + self._delay
                    heapq.heappush(later, (due, next(order), target, packet))
            now = time.monotonic()
            while later and later[0][0] <= now:
                _, _, target, packet = heapq.heappop(later)
                with contextlib.suppress(OSError):  # a full device drops the packet, as a real one
                    os.write(self._devices[target], packet)
                    self.passed += 1


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make hosts with addresses from 10.213.7.1 on, and the network between them.

    Skip the test if namespaces or TUN devices are not allowed. Remove the namespaces at the end.
    """
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs network namespaces: Linux, ip, and the right to make them")
    with contextlib.ExitStack() as cleanup:
        names, addresses, devices = [], [], []
        for number in range(1, count + 1):
            name = f"pc{os.getpid()}-{next(_numbers)}"
            if ip("netns", "add", name, check=False).returncode:
                pytest.skip("this machine allows no network namespaces")
            cleanup.callback(ip, "netns", "del", name, check=False)
            try:
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                pytest.skip(f"this machine allows no TUN devices: {error}")
            devices.append(device)
            cleanup.callback(os.close, device)
            try:
                request = fcntl.ioctl(
                    device, _TUNSETIFF, struct.pack("16sH22x", b"", _IFF_TUN | _IFF_NO_PI)
                )
            except OSError as error:
                pytest.skip(f"this machine allows no TUN devices: {error}")
            interface = request[:16].rstrip(b"\0").decode()
            ip("link", "set", interface, "netns", name, "name", "eth0")
            address = f"10.213.7.{number}"
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *words)
            names.append(name)
            addresses.append(address)
        hosts = Network(names, addresses, devices)
        cleanup.callback(hosts.close)
        yield hosts
