"""Compare all-reduce over TCP with the rate of the same connection in both directions, in one run.

Run with ``pycollective run --transport tcp -n 2 benchmarks/tcp_limit.py [bytes ...]``. For the limit,
two processes exchange the bytes of a ring of two ranks. These are the whole array in each
direction, in pieces of 256 KiB. The processes do not use the bytes. Numbers are medians of the
slower rank, in turns.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
import time

import numpy as np

import pycollective as pc

PIECE = 256 * 1024


def connect(comm: pc.Communicator) -> socket.socket:
    """Return a connection of the two ranks."""
    if comm.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            comm.broadcast(np.array([server.getsockname()[1]]))
            sock, _ = server.accept()
    else:
        port = int(comm.broadcast(np.array([0]))[0])
        sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


def exchange(sock: socket.socket, source: memoryview, target: memoryview) -> None:
    """Send one buffer and receive the other, in both directions at once."""
    sent = received = 0
    while sent < len(source) or received < len(target):
        before = sent + received
        try:
            if sent < len(source):
                sent += sock.send(source[sent : sent + PIECE])
        except BlockingIOError:
            pass
        try:
            if received < len(target):
                received += sock.recv_into(target[received : received + PIECE])
        except BlockingIOError:
            pass
        if sent + received == before:
            readers = [sock] if received < len(target) else []
            select.select(readers, [sock] if sent < len(source) else [], [])


def main() -> None:
    """Measure and print a line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", type=int, metavar="BYTES",
                        default=[1 << 20, 16 << 20, 64 << 20])  # fmt: skip
    args = parser.parse_args()
    comm = pc.init(timeout=60)
    if comm.size != 2:
        sys.exit("two ranks are measured: pycollective run --transport tcp -n 2 ...")
    sock = connect(comm)
    for size in args.sizes:
        x = np.zeros(size // 4, "float32")
        source, target = np.ones(size, "uint8"), np.ones(size, "uint8")
        times = []
        for turn in range(max(7, min(200, (256 << 20) // size))):
            row = []
            for work in (
                lambda x=x: comm.all_reduce(x, out=x, algorithm="ring"),
                lambda s=source, t=target: exchange(sock, s.data, t.data),
            ):
                comm.barrier()
                began = time.perf_counter()
                work()
                row.append(time.perf_counter() - began)
            if turn:
                times.append(row)
        reduced, limit = comm.all_reduce(np.median(times, axis=0), "max")
        if comm.rank == 0:
            print(
                f"{size:>10} B  all_reduce {reduced * 1e3:8.3f} ms   exchange {limit * 1e3:8.3f} ms"
                f"   {limit / reduced:4.0%} of the limit",
                flush=True,
            )


if __name__ == "__main__":
    main()
