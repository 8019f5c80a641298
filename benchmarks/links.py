"""Measure TCP over a link of a known rate, beside plain sockets: two network namespaces on this machine.

    python benchmarks/links.py [--rates 1,10] [--interfaces 1,2] [--streams 1,2,4] [--mib 1,16,64]
                               [--json FILE]

Needs Linux, the right to make namespaces, `ip` and `tc`. Pairs of virtual interfaces join the
namespaces, and a token bucket on each interface limits its rate. Frames have at most 1,500 bytes, so
that payload can have at most 95.6 % of the rate. Streams are spread over the interfaces in turns. For
each number of interfaces and streams two ranks measure, in turns:

* For `all_reduce`, float32 sums in place in the ring of two ranks. Each rank sends and receives the
  array's size, both at once.
* For `exchange`, plain sockets, as many as there are streams, carry the same bytes in both directions.
* For `send`, a message one way, acknowledged by 8 bytes. Messages have their own connection.
* For `one way`, plain sockets carry the bytes of `send` in one direction.

With `--trials`, two ways to send are added that the library does not use:

* For `threads`, `exchange` is run with a thread for each socket and direction.
* For `zero-copy`, `exchange` is run with MSG_ZEROCOPY, until the kernel has released all memory.

A time is the median over the turns, each of which counts with the slower rank. The report has GB/s in
each direction, and the share of the interfaces' rate together. A rate of 0 means a link without a limit,
so that the processor is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import secrets
import selectors
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 256 * 1024
NETWORKS = ("10.214.9", "10.214.10", "10.214.11", "10.214.12")
"""The first parts of the addresses of eth0, eth1 and so on; rank 0's end with 1, and rank 1's with 2."""
PORTS = (29411, 29412)  # for the group, and for the plain sockets


def run(*words: str) -> None:
    """Run a command; if it fails, raise an error with its output."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def link(gbit: float, interfaces: int) -> Iterator[tuple[str, str]]:
    """Yield the names of two namespaces, joined by links with this rate in each direction."""
    names = (f"pclink{os.getpid()}a", f"pclink{os.getpid()}b")
    with contextlib.ExitStack() as cleanup:
        for name in names:
            run("ip", "netns", "add", name)
            cleanup.callback(run, "ip", "netns", "del", name)  # with the interface in it
            run("ip", "-n", name, "link", "set", "lo", "up")
        for number, network in enumerate(NETWORKS[:interfaces]):
            device = f"eth{number}"
            run("ip", "link", "add", device, "netns", names[0], "type", "veth",
                "peer", "name", device, "netns", names[1])  # fmt: skip
            for rank, name in enumerate(names):
                run("ip", "-n", name, "addr", "add", f"{network}.{rank + 1}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
                if not gbit:
                    continue
                # The bucket holds the bytes of 1 ms, because timers are late, and its queue those
                # of 20 ms. An array that fits into the bucket is faster than the rate.
                burst = max(128 * 1024, int(gbit * 1e9 / 8 / 1000))
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                    f"{int(gbit * 1000)}mbit", "burst", str(burst), "latency", "20ms")  # fmt: skip
        yield names


# One rank -----------------------------------------------------------------------------------------


def connect(rank: int, streams: int, interfaces: int) -> list[socket.socket]:
    """Return plain connections between the two ranks, over the interfaces in turns."""
    socks = []
    if rank == 0:
        with socket.create_server(("", PORTS[1])) as server:
            socks = [server.accept()[0] for _ in range(streams)]
    else:
        deadline = time.monotonic() + 20
        while len(socks) < streams:
            try:
                network = NETWORKS[len(socks) % interfaces]
                socks.append(socket.create_connection((f"{network}.1", PORTS[1]), timeout=5))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return socks


def carry(socks: list[Any], source: memoryview, target: memoryview) -> None:
    """Send one buffer and receive the other at once, each cut evenly among the sockets."""
    with selectors.DefaultSelector() as ready:
        for i, sock in enumerate(socks):
            out, into = cut(source, len(socks))[i], cut(target, len(socks))[i]
            events = (selectors.EVENT_WRITE if out else 0) | (selectors.EVENT_READ if into else 0)
            ready.register(sock, events, [out, into])
        while ready.get_map():
            for key, _ in ready.select():
                sock, rest = key.fileobj, key.data
                with contextlib.suppress(BlockingIOError):
                    if rest[0]:
                        rest[0] = rest[0][sock.send(rest[0][:PIECE]) :]
                with contextlib.suppress(BlockingIOError):
                    if rest[1]:
                        rest[1] = rest[1][sock.recv_into(rest[1][:PIECE]) :]
                events = (selectors.EVENT_WRITE if rest[0] else 0) | (
                    selectors.EVENT_READ if rest[1] else 0
                )
                if not events:
                    ready.unregister(sock)
                elif events != key.events:
                    ready.modify(sock, events, rest)


def cut(memory: memoryview, count: int) -> list[memoryview]:
    """Return equal parts of a buffer."""
    return [memory[len(memory) * i // count : len(memory) * (i + 1) // count] for i in range(count)]


def carry_in_threads(socks: list[socket.socket], source: memoryview, target: memoryview) -> None:
    """Do the same as `carry`, with a thread for each socket and direction."""

    def receive(sock: socket.socket, into: memoryview) -> None:
        while into:
            into = into[sock.recv_into(into) :]

    for sock in socks:
        sock.settimeout(60)
    parts = zip(socks, cut(source, len(socks)), cut(target, len(socks)), strict=True)
    threads = [
        threading.Thread(target=what, args=(sock, memory))
        for sock, out, into in parts
        for what, memory in ((socket.socket.sendall, out), (receive, into))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sock in socks:
        sock.setblocking(False)


class ZeroCopy:
    """Sockets that send with MSG_ZEROCOPY, for `carry`."""

    _SO_ZEROCOPY, _MSG_ZEROCOPY = 60, 0x4000000

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sends = self._released = self.copied = 0
        self.fileno, self.recv_into = sock.fileno, sock.recv_into
        sock.setsockopt(socket.SOL_SOCKET, self._SO_ZEROCOPY, 1)

    def send(self, data: memoryview) -> int:
        sent = self._sock.send(data, self._MSG_ZEROCOPY)
        self.sends += 1
        self.release()
        return sent

    def release(self) -> bool:
        """Read the kernel's releases; return True if all memory is released."""
        with contextlib.suppress(BlockingIOError):
            while self._released < self.sends:
                _, about, _, _ = self._sock.recvmsg(0, 512, socket.MSG_ERRQUEUE)
                _, _, _, code, first, last = struct.unpack_from("=IBBBxII", about[0][2])
                self._released += last - first + 1
                self.copied += (last - first + 1) * (code & 1)
        return self._released >= self.sends


def measure(rank: int, sizes: list[int], options: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints a line of JSON for each size."""
    import pycollective as pc

    comm = pc.init(timeout=60)
    streams, interfaces, trials = int(options.streams), int(options.interfaces), options.trials
    socks = connect(rank, streams, interfaces)
    zero_copy = [ZeroCopy(s) for s in connect(rank, streams, interfaces)] if trials else []
    done, nothing = np.zeros(1), memoryview(b"")

    def send(x: Any) -> None:
        if rank == 0:
            comm.send(x, 1)
            comm.recv(done, 1)
        else:
            comm.recv(x, 0)
            comm.send(done, 0)

    def one_way(data: memoryview) -> None:
        back = memoryview(bytearray(8))
        carry(socks, data if rank == 0 else nothing, nothing if rank == 0 else data)
        carry(socks[:1], back if rank == 1 else nothing, back if rank == 0 else nothing)

    def without_copies(source: memoryview, target: memoryview) -> None:
        carry(zero_copy, source, target)
        while not all([sock.release() for sock in zero_copy]):
            time.sleep(0)

    for size in sizes:
        x = np.zeros(size // 4, "float32")
        source, target = np.ones(size, "uint8").data, np.ones(size, "uint8").data
        works: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda x=x: comm.all_reduce(x, out=x, algorithm="ring"),
            "exchange": lambda s=source, t=target: carry(socks, s, t),
            "send": lambda x=x: send(x),
            "one way": lambda s=source: one_way(s),
        }
        if trials:
            works["threads"] = lambda s=source, t=target: carry_in_threads(socks, s, t)
            works["zero-copy"] = lambda s=source, t=target: without_copies(s, t)
        times: dict[str, list[float]] = {name: [] for name in works}
        over = time.perf_counter() + options.seconds
        for turn in range(1, 1000):
            for name, work in works.items():
                comm.barrier()
                began = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - began)
            stop = turn >= 5 and time.perf_counter() > over
            if comm.broadcast(np.array([stop]))[0]:
                break
        row = {}
        for name, each in times.items():
            slower = comm.all_reduce(np.array(each[1:]), "max")
            row[name] = round(statistics.median(slower.tolist()) * 1e6, 1)
        if rank == 0:
            line: dict[str, Any] = {"bytes": size, "us": row}
            if trials:
                sent = sum(sock.sends for sock in zero_copy)
                line["copied_all_the_same"] = sum(sock.copied for sock in zero_copy) / sent
            print(json.dumps(line), flush=True)
    for sock in socks:
        sock.close()
    comm.close()


# All of them ---------------------------------------------------------------------------------------


def on_link(
    names: tuple[str, str], interfaces: int, streams: int, options: argparse.Namespace
) -> list[Any]:
    """Run the two ranks, one in each namespace; return the rows of rank 0."""
    secret = secrets.token_hex(16)
    processes = []
    try:
        for rank, name in enumerate(names):
            env = {
                **os.environ,
                "PYCOLLECTIVE_RANK": str(rank),
                "PYCOLLECTIVE_SIZE": "2",
                "PYCOLLECTIVE_ADDRESS": f"{NETWORKS[0]}.1:{PORTS[0]}",
                "PYCOLLECTIVE_SECRET": secret,
                "PYCOLLECTIVE_TRANSPORT": "tcp",
                "PYCOLLECTIVE_SOCKET_IFNAME": "eth",
                "PYCOLLECTIVE_SOCKET_STREAMS": str(streams),
            }
            words = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", str(rank),
                     "--interfaces", str(interfaces), "--streams", str(streams),
                     "--mib", options.mib, "--seconds", str(options.seconds)]  # fmt: skip
            if options.trials:
                words.append("--trials")
            processes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
        output = [p.communicate(timeout=300)[0] for p in processes]
        if any(p.returncode for p in processes):
            raise RuntimeError("a rank failed")
        return [json.loads(line) for line in output[0].splitlines()]
    finally:
        for p in processes:
            p.kill()
            p.wait()


def main() -> None:
    """Measure all cases, print a table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1,10", help="of the links, Gbit/s")
    parser.add_argument("--interfaces", default="1", help="of each rank, at most 4")
    parser.add_argument("--streams", default="1,2,4", help="connections of the two ranks")
    parser.add_argument("--mib", default="1,16,64", help="of the arrays")
    parser.add_argument("--seconds", type=float, default=3.0, help="for one size")
    parser.add_argument("--trials", action="store_true", help="also threads and MSG_ZEROCOPY")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        sizes = [int(float(mib) * (1 << 20)) for mib in options.mib.split(",")]
        measure(options.rank, sizes, options)
        return
    # SIGTERM must not leave a namespace behind either.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    about = {"benchmark": "links", "date": datetime.date.today().isoformat(), "mtu": 1500}
    rows: list[dict[str, Any]] = []
    cases = itertools.product(options.rates.split(","), options.interfaces.split(","))
    for gbit, interfaces in ((float(rate), int(count)) for rate, count in cases):
        with link(gbit, interfaces) as names:
            for streams in map(int, options.streams.split(",")):
                for row in on_link(names, interfaces, streams, options):
                    speed = {w: row["bytes"] / us / 1e3 for w, us in row["us"].items()}
                    row["gb_s"] = {w: round(g, 3) for w, g in speed.items()}
                    shares = {w: g * 8 / gbit / interfaces for w, g in speed.items() if gbit}
                    if gbit:
                        row["share"] = {w: round(share, 3) for w, share in shares.items()}
                    case = {"gbit_s": gbit, "interfaces": interfaces, "streams": streams}
                    rows.append({**case, **row})
                    print(
                        f"{gbit:4g} Gbit/s  {interfaces} interfaces  {streams} streams  "
                        f"{row['bytes'] >> 20:3} MiB  "
                        + "  ".join(
                            f"{w} {g:.3f} GB/s" + (f" ({shares[w]:.0%})" if gbit else "")
                            for w, g in speed.items()
                        ),
                        flush=True,
                    )
                if options.json:
                    text = json.dumps({**about, "rows": rows}, indent=1)
                    options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
