"""What befalls a rank of a real process: all hear of it, nobody hangs, and a new group works."""

from __future__ import annotations

import sys

import pytest
from emulated import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TRANSPORTS = {"tcp": ("abc", "TCP"), "mixed": ("aab", "shared memory and TCP")}

# Where ranks give up at different times, the second meeting must not be taken for the first.
AGAIN = """
comm.close()
env = {**os.environ, "PYCOLLECTIVE_ADDRESS": os.environ["SECOND_ADDRESS"]}
again = pc.init(timeout=20, environment=env)
assert again.all_reduce(np.ones(70_000))[-1] == again.size
print("again")
again.close()
"""

SOCKETS = """
def connections():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
            sock.getpeername()
            found.append((int(name), sock))
        except OSError:
            pass
    return found
"""


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return TRANSPORTS[request.param]


@pytest.mark.parametrize("how", ["shut down", pytest.param("closed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [4, 2_000_000])
def test_connections_that_end_under_a_rank(tmp_path, transport, how, count):
    hosts, name = transport
    body = f"""
assert repr(comm).endswith(" {name}>"), comm
x = np.ones({count})
comm.all_reduce(x, "max", out=x)
def cut():
    for number, sock in connections():
        sock.shutdown(socket.SHUT_RDWR) if "{how}" == "shut down" else os.close(number)
        sock.close()
if comm.rank == 1:
    threading.Timer(0.2, cut).start()
began = time.monotonic()
try:
    while True:
        comm.all_reduce(x, "max", out=x)
except pc.PeerLostError as error:
    print(time.monotonic() - began < 5, error)
"""
    # A descriptor that is closed under the core must not become another connection of the process.
    body += AGAIN if how == "shut down" else ""
    codes, outputs = run(tmp_path, hosts, SOCKETS + body)
    assert codes == [0] * 3, outputs
    for output in outputs:
        assert output.startswith("True ")
        assert "is lost to rank" in output
        assert "rank 1" in output
        assert output.endswith("again\n") or how == "closed"


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 3, 6, 8])
def test_no_descriptors_left(tmp_path, left):
    """Rank 1 has none left at some point of the meeting."""
    preamble = f"""
import os, resource, sys
import numpy as np
import pycollective as pc
import pycollective.rendezvous.tcp  # a module is a file too
from pycollective.rendezvous import RendezvousError
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if os.environ["PYCOLLECTIVE_RANK"] == "1":
    opened = [int(n) for n in os.listdir("/proc/self/fd")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + {left}, hard))
try:
    comm = pc.init(timeout=5, join_timeout=2)
    comm.barrier()
    print("made")
except (RendezvousError, pc.PeerLostError) as error:
    print(type(error).__name__, error)
    comm = pc.local_group(1)[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""
    codes, outputs = run(tmp_path, "aab", AGAIN, preamble=preamble)
    assert codes == [0] * 3, outputs
    assert outputs[1].startswith("RendezvousError"), outputs
    assert "Too many open files" in outputs[1] or left, outputs
    for rank in (0, 2):
        assert outputs[rank].startswith(("RendezvousError", "PeerLostError"))
    assert all(output.endswith("again\n") for output in outputs)


def test_no_memory_left_for_what_arrives(tmp_path):
    body = """
x = np.ones(3_000_000)
comm.barrier()
if comm.rank == 1:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used, hard))
    hoard = []
    try:
        while True:
            hoard.append(bytearray(100_000))
    except MemoryError:
        pass
try:
    comm.all_reduce(x, out=x, algorithm="ring")
except MemoryError:
    print("MemoryError")
except pc.AbortedError as error:
    print("AbortedError", error)
if comm.rank == 1:
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
"""
    more = {"PYCOLLECTIVE_SOCKET_STREAMS": "8", "PYCOLLECTIVE_TRANSPORT": "tcp"}
    codes, outputs = run(tmp_path, "abc", body + AGAIN, **more)
    assert codes == [0] * 3, outputs
    assert outputs[1] == "MemoryError\nagain\n"
    for rank in (0, 2):
        assert outputs[rank].startswith("AbortedError a rank left all_reduce because of an error")
        assert outputs[rank].endswith("again\n")


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGSTOP"])
def test_the_survivors_make_a_new_group(tmp_path, transport, sign):
    hosts, _ = transport
    body = f"""
pid = pid_of(2)
comm.timeout = 1.0
x = np.ones(3_000_000)
comm.all_reduce(x, "max", out=x)
if comm.rank == 2:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.{sign})).start()
try:
    while True:
        comm.all_reduce(x, "max", out=x)
except (pc.PeerLostError, pc.CollectiveTimeoutError) as error:
    print(type(error).__name__, error)
if comm.rank == 2:
    sys.exit(0)
comm.close()
env = {{
    **os.environ, "PYCOLLECTIVE_SIZE": "2", "PYCOLLECTIVE_ADDRESS": os.environ["SECOND_ADDRESS"]
}}
again = pc.init(timeout=20, environment=env)
assert again.all_reduce(np.ones(70_000))[-1] == 2
print("again")
if comm.rank == 0:
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError:
        pass
"""
    codes, outputs = run(tmp_path, hosts, body)
    assert codes == [0, 0, -9 if sign == "SIGKILL" else 0], outputs
    what = "PeerLostError" if sign == "SIGKILL" else "CollectiveTimeoutError"
    for output in outputs[:2]:
        assert output.startswith(what)
        assert "rank 2" in output
        assert output.endswith("again\n")
