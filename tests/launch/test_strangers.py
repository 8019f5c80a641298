"""Connections without the secret to the ports of a working group do not disturb it, and never join."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import SECRET, environments, surroundings, write

from pycollective.launch import handshake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SIZE = 3
OVERSIZED = struct.pack("!I", 16 << 20) + bytes(16 << 20)
ENOUGH = 12
"""Number of oversized messages to rank 0. Its memory would exceed the limit if it kept them."""
PREPARED = """
from in_ranks import *
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
memory = resident()
comm = pc.init(timeout=20)
"""


def listening(pids):
    """Return the TCP ports on which some processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(entry.readlink()))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(f[1].split(":")[1], 16) for f in lines if f[3] == "0A" and f"socket:[{f[9]}]" in inodes
    }


def noise(rng):
    """Yield data of a process without the secret: noise, broken greetings, wrong lengths."""
    hello = {"pycollective": 2, "nonce": "00" * 16, "purpose": "join", "rank": 1, "size": SIZE}
    data = json.dumps(hello).encode()
    whole = struct.pack("!I", len(data)) + data
    yield rng.randbytes(rng.randrange(1, 3000))
    yield struct.pack("!I", 0xFFFFFFFF) + rng.randbytes(100)
    yield OVERSIZED
    yield struct.pack("!I", 1024) + b"[" * 1024
    yield whole[: rng.randrange(1, len(whole))]  # truncated
    yield struct.pack("!I", 4) + b"null"
    yield whole + struct.pack("!I", 14) + b'{"proof": "0"}'
    yield whole + whole
    yield b"GET / HTTP/1.1\r\n\r\n"


class Recorder:
    """Proxy between a rank and rank 0 during the rendezvous; records the rank's data."""

    def __init__(self, port):
        self.said = []
        self._port = port
        self._open = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # rank 0 does not listen yet: the rank tries again
                    near.close()
                    continue
                self._open += [near, far]
                for ends in ((near, far, self.said), (far, near, [])):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source, target, kept):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self._server.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
            sock.close()


def bother(pids, replay, stop, seed, sent, replayed):
    """Send to every listening port; hold some connections open."""
    rng = random.Random(seed)
    held = []
    while not stop.is_set():
        recorded = b"".join(list(replay))
        for data in [*noise(rng), recorded, recorded[: len(recorded) // 2]]:
            for port in listening(pids):
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                    held.append(sock)
                    sock.settimeout(0.05)
                    sent.append(data)
                    sock.sendall(data)
                    replayed.append(data is recorded and bool(recorded))
            while len(held) > 20:
                held.pop(rng.randrange(20)).close()
        time.sleep(0.01)
    for sock in held:
        sock.close()


BODY = """
x = np.arange(100_000.0)
before = None
for turn in range(TURNS):
    group = comm.split(0)  # its ports listen while the first group works
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    assert (group.all_reduce(x) == comm.size * x).all()
    for work in works:
        assert (work.wait() == comm.size * x).all()
    group.close()
    del group, works, work
    before = before or held()
print(grown(before), resident() - memory < 96, flush=True)
while True:  # nobody listens now, and the group works
    assert (comm.all_reduce(x) == comm.size * x).all()
    stop = comm.all_reduce(np.array([os.path.exists("enough")]), "max")[0]
    if stop:
        break
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "mixed"])
def test_group_connections_without_the_secret_do_not_disturb(tmp_path, transport):
    hosts = ["a", "b", "c"] if transport == "tcp" else ["a", "a", "b"]
    envs = environments(hosts)
    recorder = Recorder(int(envs[0]["PYCOLLECTIVE_ADDRESS"].rpartition(":")[2]))
    envs[1]["PYCOLLECTIVE_ADDRESS"] = f"127.0.0.1:{recorder.port}"  # through the recorder
    script = write(tmp_path, BODY.replace("TURNS", "6"), PREPARED)
    stop, pids, sent, replayed, ranks = threading.Event(), [], [], [], []
    strangers = [
        threading.Thread(target=bother, args=(pids, recorder.said, stop, seed, sent, replayed))
        for seed in range(2)
    ]

    def oversized():
        return sum(data is OVERSIZED for data in list(sent))

    def begin(env):
        ranks.append(
            subprocess.Popen(
                [sys.executable, script],
                cwd=tmp_path,
                env=surroundings(**env),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        pids.append(ranks[-1].pid)

    try:
        for env in envs[:2]:
            begin(env)
        for thread in strangers:
            thread.start()
        until = time.monotonic() + 60
        # Wait for a replay of rank 1's data. So far only rank 0 listens, and rank 1 for its peers.
        while time.monotonic() < until and not (any(replayed) and oversized() >= 2 * ENOUGH):
            time.sleep(0.01)
        begin(envs[2])
        said = [next(x for x in rank.stdout if not x.startswith("rank ")) for rank in ranks]
        assert said == [" True\n"] * SIZE, said
        assert listening(pids) == set()
        Path(tmp_path / "enough").touch()
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        stop.set()
        for rank in ranks:
            rank.kill()
            rank.communicate()
        for thread in strangers:
            thread.join(20)
        recorder.close()
    assert outputs == ["done\n"] * SIZE, outputs
    assert any(replayed) and oversized() >= 2 * ENOUGH
    # The recorder has a whole handshake of a member, not a refusal.
    greeting = b"".join(recorder.said)
    assert b'"purpose":"join"' in greeting and b'"proof"' in greeting
    assert handshake.key_of(SECRET.encode()) not in greeting
