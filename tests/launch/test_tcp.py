"""Groups of real processes over TCP: collectives, faults, and refused connections."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from in_ranks import connections
from ports import free_port
from test_rendezvous import refused, wait_until

import pycollective as pc
from pycollective import _core
from pycollective.launch import RendezvousError, handshake, init, interfaces
from pycollective.launch.handshake_server import HandshakeServer

PREAMBLE = """
import numpy as np
import pycollective as pc
comm = pc.init(timeout=20)
assert "TCP" in repr(comm)
"""
SECRET = "0123456789abcdef0123456789abcdef"


def start(tmp_path, ranks, body):
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + body)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pycollective",
            "run",
            "--transport",
            "tcp",
            "-n",
            str(ranks),
            script,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(tmp_path, ranks, body):
    process = start(tmp_path, ranks, body)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_collectives_over_tcp_have_the_bits_of_threads(tmp_path, ranks):
    body = """
from pycollective import algorithms
r, n = comm.rank, comm.size
for name in algorithms.names():
    for size in (0, 1, 17, 4096, 65_537, 1_500_007):
        x = (np.arange(size) % 11 + r).astype("float32")
        want = (np.arange(size) % 11 * n + n * (n - 1) // 2).astype("float32")
        assert np.array_equal(comm.all_reduce(x, algorithm=name), want), (name, size)
        comm.all_reduce(x, out=x, algorithm=name)
        assert np.array_equal(x, want)
for root in range(n):
    got = comm.broadcast(np.full(300_000, float(r)), root)
    assert (got == root).all()
# Parts of messages are no multiple of these items.
odd = np.zeros(50_001, "i4, u1, f8")
odd["f2"] = comm.rank
assert (comm.broadcast(odd, n - 1)["f2"] == n - 1).all()
comm.barrier()
x = np.random.default_rng(comm.rank).standard_normal(70_001).astype("float32")
import hashlib
print(hashlib.sha256(comm.all_reduce(x, reproducible=True).tobytes()).hexdigest())
"""
    status, out, err = run(tmp_path, ranks, body)
    assert (status, err) == (0, "")
    # The bits of a reproducible sum are those of threads.
    group = pc.local_group(ranks)
    results = [None] * ranks

    def work(c):
        x = np.random.default_rng(c.rank).standard_normal(70_001).astype("float32")
        results[c.rank] = hashlib.sha256(c.all_reduce(x, reproducible=True).tobytes()).hexdigest()

    threads = [threading.Thread(target=work, args=(c,)) for c in group]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert out.split() == results


# In this process ------------------------------------------------------------------------------


def environment(rank, size, port, **more):
    return {
        "PYCOLLECTIVE_RANK": str(rank),
        "PYCOLLECTIVE_SIZE": str(size),
        "PYCOLLECTIVE_ADDRESS": f"127.0.0.1:{port}",
        "PYCOLLECTIVE_SECRET": SECRET,
        "PYCOLLECTIVE_TRANSPORT": "tcp",
        **{f"PYCOLLECTIVE_{name}": value for name, value in more.items()},
    }


def join(environments, seconds=15.0):
    """Call init for each environment in a thread of its own; return communicators or errors."""
    results = [None] * len(environments)

    def one(i):
        try:
            results[i] = init(environment=environments[i], timeout=15, join_timeout=seconds)
        except RendezvousError as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(environments))]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def joining(environment, seconds=20.0):
    """Return a function that calls init."""
    return lambda: init(environment=environment, timeout=15, join_timeout=seconds)


def works(comms, on_ranks):
    want = [float(sum(range(1, len(comms) + 1)))] * len(comms)
    return on_ranks(comms, lambda c: float(c.all_reduce([c.rank + 1.0])[0])) == want


def close(comms):
    for c in comms:
        c.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_groups_leave_nothing_behind(on_ranks):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # groups of earlier tests
    before, threads = descriptors(), threading.active_count()
    for i in range(50):
        port = free_port()
        comms = join([environment(r, 2, port) for r in range(2)])
        assert works(comms, on_ranks)
        if i % 2:
            close(comms)
        del comms
    wait_until(lambda: descriptors() <= before and threading.active_count() <= threads)


def test_streams_are_connections_without_delay():
    def delays():
        """Return TCP_NODELAY of this process's connections, by descriptor."""
        found = {}
        for number, sock in connections().items():
            with sock:
                if sock.family != socket.AF_UNIX:
                    found[number] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return found

    def of_a_group(streams):
        before, port = delays(), free_port()
        comms = join([environment(r, 2, port, SOCKET_STREAMS=streams) for r in range(2)])
        flags = [flag for number, flag in delays().items() if number not in before]
        close(comms)
        return flags

    one, most = of_a_group("1"), of_a_group("8")
    assert len(most) == len(one) + 2 * 7  # both ends are in this process
    assert all(one) and all(most)


def test_streams_and_torchruns_variables_make_a_group(on_ranks, caplog):
    caplog.set_level("INFO", "pycollective")
    port = free_port()
    comms = join(
        [environment(r, 3, port, SOCKET_STREAMS="3", SOCKET_IFNAME="=lo") for r in range(3)]
    )
    assert works(comms, on_ranks)
    big = on_ranks(comms, lambda c: c.all_reduce(np.arange(3_000_000.0))[-1])
    assert big == [3 * 2_999_999.0] * 3
    close(comms)
    assert "rank 2 of 3, over TCP, authenticated; described by pycollective run" in caplog.text
    torch = {
        "PYCOLLECTIVE_TRANSPORT": "tcp",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    comms = join([{**torch, "RANK": str(r)} for r in range(2)])
    assert works(comms, on_ranks)
    close(comms)
    assert "without a secret; described by torchrun" in caplog.text


def test_a_failed_group_can_be_made_again(on_ranks):
    port = free_port()
    for _ in range(3):
        comms = join([environment(r, 2, port) for r in range(2)])
        comms[0].abort("grün …")
        assert [str(e) for e in on_ranks(comms, lambda c: c.barrier())] == ["grün …"] * 2
        assert comms[1]._group.failure == "grün …"
        close(comms)
        with pytest.raises(pc.CollectiveError, match="closed"):
            comms[0].barrier()


def test_a_wrong_secret_is_refused(on_ranks, monkeypatch):
    port = free_port()
    good, bad = environment(0, 2, port), environment(1, 2, port, SECRET="f" * 32)
    first, second = refused(on_ranks, monkeypatch, joining(good), joining(bad, 1.0))
    assert "the secrets differ" in str(second)
    assert " s for rank 1 of 2" in str(first)
    assert "failed the handshake" in str(first)
    without = environment(1, 2, port)
    del without["PYCOLLECTIVE_SECRET"]
    _, second = refused(on_ranks, monkeypatch, joining(good), joining(without, 1.0))
    assert "the secrets differ" in str(second)


@pytest.mark.slow
def test_secret_in_a_file_works_like_the_variable(on_ranks, monkeypatch, tmp_path):
    """A secret in a file works like the variable, which takes precedence; its newline is ignored."""
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    port = free_port()
    by_file = environment(1, 2, port, SECRET_FILE=str(file))
    del by_file["PYCOLLECTIVE_SECRET"]
    for comm in join([environment(0, 2, port, SECRET=SECRET), by_file]):
        assert isinstance(comm, pc.Communicator), comm
        comm.close()
    both = environment(0, 2, port, SECRET="f" * 32, SECRET_FILE=str(file))
    _, second = refused(on_ranks, monkeypatch, joining(both), joining(by_file, 1.0))
    assert "the secrets differ" in str(second)


def test_addresses_without_a_secret_must_be_loopback():
    for rank in range(2):
        for address in ("192.0.2.1", "0.0.0.0"):
            # Outside of containers, the check of addresses would refuse them first.
            more = {"ADDRESS": f"{address}:29999", "CHECK_ADDRESSES": "0"}
            env = environment(rank, 2, 29_999, **more)
            del env["PYCOLLECTIVE_SECRET"]
            with pytest.raises(RendezvousError, match="not a loopback address"):
                init(environment=env, join_timeout=1)
    env["PYCOLLECTIVE_INSECURE"] = "1"
    env["PYCOLLECTIVE_ADDRESS"] = "127.0.0.1:1"
    with pytest.raises(RendezvousError, match="did not reach rank 0.*[.] Start the missing ranks"):
        init(environment=env, join_timeout=0.3)


def test_init_bad_tcp_description_raises_rendezvous_error(tmp_path):
    short = tmp_path / "secret"
    short.write_text("short\n")
    short.chmod(0o600)
    for broken, text in (
        ({"RANK": "2"}, "PYCOLLECTIVE_RANK=2 is not among the 2 tasks"),
        ({"RANK": "one"}, "PYCOLLECTIVE_RANK='one'"),
        ({"SIZE": "0"}, "PYCOLLECTIVE_SIZE='0'"),
        ({"ADDRESS": "nowhere"}, "is not host:port"),
        ({"ADDRESS": "h:99999"}, "is not host:port"),
        ({"SECRET": "short"}, "needs at least 16"),
        ({"SOCKET_IFNAME": "=none0"}, "matches none of the interfaces"),
        (
            {"SOCKET_IFNAME": "=lo,none0"},
            "SOCKET_IFNAME: .* names none0, which has no IPv4 address",
        ),
        ({"SOCKET_STREAMS": "9"}, "SOCKET_STREAMS='9' is not a number from 1 to 8"),
        ({"INSECURE": "maybe"}, "INSECURE='maybe'"),
    ):
        with pytest.raises(RendezvousError, match=text):
            init(
                environment={
                    **environment(0, 2, free_port()),
                    **{f"PYCOLLECTIVE_{k}": v for k, v in broken.items()},
                },
                join_timeout=1,
            )
    env = environment(0, 2, free_port(), SECRET_FILE=str(short))
    del env["PYCOLLECTIVE_SECRET"]
    nowhere = environment(0, 2, free_port(), SECRET_FILE=str(tmp_path / "nowhere"))
    del nowhere["PYCOLLECTIVE_SECRET"]
    with pytest.raises(RendezvousError, match=r"SECRET_FILE=.*nowhere' cannot be read: No such"):
        init(environment=nowhere)
    with pytest.raises(RendezvousError, match="SECRET_FILE has 5 bytes"):
        init(environment=env)
    env["PYCOLLECTIVE_SECRET_FILE"] = "/dev/zero"
    with pytest.raises(RendezvousError, match="SECRET_FILE='/dev/zero' has more than 65,536 bytes"):
        init(environment=env)
    with pytest.raises(RendezvousError, match="=tcp needs a launcher .*, or PYCOLLECTIVE_RANK, "):
        init(environment={"PYCOLLECTIVE_TRANSPORT": "tcp"})


@pytest.mark.slow
def test_ranks_and_sizes_that_differ_raise_and_are_named(on_ranks, monkeypatch):
    port = free_port()
    envs = [environment(0, 2, port), environment(1, 3, port)]
    first, second = refused(on_ranks, monkeypatch, *map(joining, envs))
    assert "rank 0 expects 2 ranks, but a rank that joins expects 3" in str(second)
    assert "rank 1 of 2" in str(first) and "a join request was refused: rank 0 expects" in str(
        first
    )
    port = free_port()
    results = join([environment(r, 3, port) for r in (0, 1, 1)], 4.0)
    assert sum("rank 1 is taken" in str(r) for r in results) == 1
    assert sum("waited 4 s for rank 2 of 3" in str(r) for r in results) == 2


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("eth", "eth0 eth1"), ("=eth1", "eth1"), ("^eth", "ib0"), ("^=eth0", "eth1 ib0"),
     ("ib,eth", "eth0 eth1 ib0"), ("^eth,ib", "lo"), ("=lo", "lo"), ("ib,wl", "ib0")],
)  # fmt: skip
def test_interface_patterns_choose_the_expected_names(pattern, name):
    there = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("eth1", "10.0.1.1"), ("ib0", "10.1.0.1")]
    more = [("eth0", "10.0.0.9"), ("eth0", "2001:db8::7"), ("eth2", "2001:db8::8")]
    found = interfaces.choose(pattern, there + more)
    assert [n for n, _ in found] == name.split()
    assert set(found) <= set(there)  # the first address of each, of one family
    with pytest.raises(ValueError, match="matches none"):
        interfaces.choose("=et", there)


def test_interface_exact_name_missing_is_named():
    there = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("eth2", "2001:db8::8")]
    text = r"'=eth0,eth1,eth2' names eth1 and eth2, which has no IPv4 address: .* eth0 \(10.0.0.1\)"
    with pytest.raises(ValueError, match=text):
        interfaces.choose("=eth0,eth1,eth2", there)


def test_interfaces_have_their_ipv6_addresses(tmp_path, monkeypatch):
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
        "fe800000000000000042acfffe110002 02 40 20 80     eth0\n"
    )
    monkeypatch.setattr(interfaces, "Path", lambda name: table)
    monkeypatch.setattr(
        interfaces, "_ipv4_addresses", lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.1")]
    )
    six = interfaces.interface_addresses(socket.AF_INET6)
    assert six[:2] == [("lo", "::1"), ("eth0", "2001:db8::7")]
    assert interfaces.choose("^docker", six) == [("eth0", "2001:db8::7")]
    assert interfaces.choose("eth", interfaces.interface_addresses()) == [("eth0", "10.0.0.1")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; 127.0.0.2 is loopback on Linux")
@pytest.mark.parametrize(
    ("names", "pairs"),
    [(("=a,b", "=a,b"), {(1, 1): 4, (2, 2): 1}), (("=a,b", "=a"), {(1, 1): 5}),
     (("=a,b", ""), {(1, 1): 5}), (("=a", "=a,b"), {(1, 1): 5})],
)  # fmt: skip
def test_streams_go_over_the_interfaces_of_both_ranks(on_ranks, monkeypatch, names, pairs):
    """The first interface carries control, messages and streams 0 and 2; the second carries stream 1."""
    there = [("a", "127.0.0.1"), ("b", "127.0.0.2")]
    monkeypatch.setattr(interfaces, "interface_addresses", lambda family: there)
    before, port = connections(), free_port()
    comms = join(
        [environment(r, 2, port, SOCKET_STREAMS="3", SOCKET_IFNAME=names[r]) for r in (0, 1)]
    )
    found = {}
    for number, sock in connections().items():
        with sock:
            if number not in before and sock.family == socket.AF_INET:
                ends = sock.getsockname()[0], sock.getpeername()[0]
                key = tuple(int(end[-1]) for end in ends)
                found[key] = found.get(key, 0) + 1
    for sock in before.values():
        sock.close()
    assert works(comms, on_ranks)
    assert found == {key: 2 * count for key, count in pairs.items()}  # both ends are here
    close(comms)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_group_over_ipv6_works(on_ranks):
    port = free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    envs = [environment(r, 2, port, ADDRESS=f"[::1]:{port}", SOCKET_IFNAME="=lo") for r in (0, 1)]
    comms = join(envs)
    assert works(comms, on_ranks)
    close(comms)


# Refused data ---------------------------------------------------------------------------------


def frames(rng):
    """Yield data of a process without the secret: noise, broken greetings, wrong lengths."""
    hello = {"pycollective": 2, "nonce": "00" * 16, "purpose": "join", "rank": 1, "size": 2}
    data = json.dumps(hello).encode()
    yield rng.randbytes(rng.randrange(1, 3000))
    yield struct.pack("!I", 0xFFFFFFFF) + rng.randbytes(100)
    yield struct.pack("!I", 1024) + b"[" * 1024
    yield struct.pack("!I", 1000) + b"x"
    yield b"\0\0"
    yield struct.pack("!I", 4) + b"null"
    yield struct.pack("!I", len(data)) + data + struct.pack("!I", 14) + b'{"proof": "0"}'
    yield struct.pack("!I", len(data)) + data + struct.pack("!I", 12) + b'{"proof": 1}'
    yield struct.pack("!I", 15) + b'{"pycollective"' + b"GET / HTTP/1.1\r\n\r\n"


def bother(port, stop, seed, counts):
    """Send about 400 bad greetings; hold a few connections open."""
    rng = random.Random(seed)
    held = []
    for i in range(45):
        for data in frames(rng):
            if stop.is_set():
                break
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=1)
                sock.sendall(data)
                counts.append(1)
            except OSError:
                time.sleep(0.005)
                continue
            held.append(sock)
            if len(held) > 20:
                held.pop(rng.randrange(20)).close()
        time.sleep(0.002 * (i % 3))
    for sock in held:
        sock.close()


def wait_until_listened_to(port):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError), socket.socket() as sock:
            sock.connect(("127.0.0.1", port))
            if sock.getsockname() != sock.getpeername():
                return
        time.sleep(0.01)
    raise AssertionError(f"nobody listens at port {port}")


@pytest.mark.slow
def test_rendezvous_connections_without_the_secret_do_not_disturb(on_ranks):
    port, stop, counts = free_port(), threading.Event(), []
    strangers = [threading.Thread(target=bother, args=(port, stop, s, counts)) for s in range(2)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = []
    zero = threading.Thread(target=lambda: results.extend(join([environment(0, 2, port)])))
    zero.start()
    # Before rank 0 listens, an attempt to connect could connect the port to itself and occupy it.
    wait_until_listened_to(port)
    for t in strangers:
        t.start()
    while len(counts) < 100:  # rank 0 waits for a while under these connections
        time.sleep(0.01)
    results.extend(join([environment(1, 2, port)]))
    zero.join(20)
    comms = sorted(results, key=lambda c: c.rank)
    # The group works during these attempts; no rank listens any more.
    for _ in range(50):
        assert works(comms, on_ranks)
    stop.set()
    for t in strangers:
        t.join(20)
    assert works(comms, on_ranks)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    unit = 1 if sys.platform == "darwin" else 1024
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * unit
    assert grown < 100 << 20
    close(comms)


def test_handshake_replayed_is_refused():
    """A process replays a recorded handshake."""
    entered = []
    server = HandshakeServer(
        socket.create_server(("127.0.0.1", 0)),
        handshake.key_of(SECRET.encode()),
        2,
        lambda channel, hello: entered.append(channel),
    )
    deadline = time.monotonic() + 60
    said = []

    class Tape(socket.socket):
        def sendall(self, data, *flags):
            said.append(bytes(data))
            return super().sendall(data, *flags)

    with Tape() as sock:
        sock.connect(server.address)
        handshake.introduce(sock, handshake.key_of(SECRET.encode()), {"purpose": "join"}, deadline)
        while not entered:
            time.sleep(0.01)
    assert len(said) == 2
    with socket.create_connection(server.address) as sock:
        channel = handshake.Channel(sock)
        sock.sendall(said[0])
        assert "nonce" in channel.receive(deadline)
        sock.sendall(said[1])
        assert channel.receive(deadline) == {"refused": "the secrets differ", "secret": False}
    # A process with another key is refused.
    with socket.create_connection(server.address) as sock, pytest.raises(handshake.Refused):
        handshake.introduce(sock, handshake.key_of(b"other"), {}, deadline)
    assert len(entered) == 1
    entered[0].close()
    server.close()


def test_changed_and_repeated_messages_are_noticed():
    with socket.create_server(("127.0.0.1", 0)) as server:  # a Unix socket needs no codes
        a = socket.create_connection(server.getsockname())
        b = server.accept()[0]
    deadline = time.monotonic() + 60
    ours, theirs = handshake.Channel(a), handshake.Channel(b)
    ours.seal(b"key", True)
    theirs.seal(b"key", False)
    ours.send({"n": 1}, deadline)
    frame = b.recv(1000)
    for wrong in (frame[:-1] + b"\0", frame[:5] + b"m" + frame[6:]):
        a.sendall(wrong)
        with pytest.raises(handshake.HandshakeError, match="changed"):
            theirs.receive(deadline)
    a.sendall(frame + frame)
    assert theirs.receive(deadline) == {"n": 1}
    with pytest.raises(handshake.HandshakeError, match="changed"):
        theirs.receive(deadline)
    b.sendall(frame)  # sent back
    with pytest.raises(handshake.HandshakeError, match="changed"):
        ours.receive(deadline)
    a.close()
    b.close()


def test_lengths_are_bounded_before_anything_is_read():
    for key, allowed in ((b"", 1024), (b"key", 1 << 20)):
        a, b = socket.socketpair()
        channel = handshake.Channel(b)
        channel.seal(key, False)
        a.sendall(struct.pack("!I", allowed + 1))
        with pytest.raises(handshake.HandshakeError, match=f"; {allowed} are allowed"):
            channel.receive(time.monotonic() + 1)
        a.close()
        b.close()


# Malformed frames in the core ------------------------------------------------------------------


def pair_with_this_test():
    """Return rank 0 of 2 whose peer is this test, with both connections."""
    (c0, c1), (m0, m1) = socket.socketpair(), socket.socketpair()
    group = _core.TcpGroup(0, [[], [c0.fileno(), m0.fileno()]])
    c0.close()
    m0.close()
    return group, _core.Communicator(group, 0), c1, m1


def test_host_of_a_lost_rank_is_its_address_where_that_is_not_this_ranks():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs, ours = [], []
        for _ in range(2):
            near = server.getsockname()[:2]
            theirs.append(socket.create_connection(near, source_address=("127.0.0.2", 0)))
            ours.append(server.accept()[0])
    group = _core.TcpGroup(0, [[], [sock.fileno() for sock in ours]])
    for sock in (*ours, *theirs):
        sock.close()
    with pytest.raises(pc.PeerLostError, match=r"^rank 1 \(127\.0\.0\.2\) is lost") as caught:
        _core.Communicator(group, 0).barrier(5.0)
    assert (caught.value.ranks, caught.value.hosts) == ((1,), ("127.0.0.2",))


def header(kind=1, remaining=8, size=8, text=0, magic=0x6C6C6F63, version=3, call=1):
    return struct.pack("=IHHQQQII24x", magic, version, kind, 5, call, remaining, size, text)


def failure(kind, ranks=(), calls=("", ""), message=b"why"):
    """Return the frame of a failure: a FailureRecord."""
    bits = sum(1 << rank for rank in ranks).to_bytes(512, "little")
    texts = b"".join(call.encode().ljust(256, b"\0") for call in calls)
    record = struct.pack("=II", kind, 0) + bits + texts + message
    return header(kind=3, size=0, text=len(record)) + record


TIMEOUT, MISMATCH, PEER_LOST, ABORTED = range(4)


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"\xff" * 200, "sent data that is no pycollective message"),
     (header(version=9), "another version"),
     (header(kind=2), "unknown kind"),
     (header(size=1 << 31, remaining=1 << 40), "a message with an invalid length"),
     (header(text=1 << 30), "a message with an invalid length"),
     (header(size=9), "a message with an invalid length"),
     (header(size=3, remaining=8), "splits an item"),
     (header(size=0, remaining=8), "splits an item")],
)  # fmt: skip
def test_malformed_message_frames_fail_the_group(data, text):
    group, comm, control, messages = pair_with_this_test()
    messages.sendall(data)
    with pytest.raises(pc.PeerLostError, match=text):
        comm.barrier(5.0)
    control.close()
    messages.close()
    assert text in group.failure


def test_a_message_of_another_call_is_a_mismatch_and_its_text_is_cleaned():
    _, comm, control, messages = pair_with_this_test()
    messages.sendall(header(text=16, size=0, remaining=0) + b"all\n\x1b[1m\xff\xc0_thing")
    with pytest.raises(pc.MismatchError, match=r"rank 1 called all\?\?\[1m\?\?_thing\."):
        comm.barrier(5.0)
    # The peer gets the mismatch.
    assert b"rank 1 called all" in control.recv(10_000)
    control.close()
    messages.close()


@pytest.mark.parametrize(
    "data",
    [b"\0" * 64, header(kind=9, size=0), header(kind=2, text=1 << 20, size=0),
     header(kind=1), header(kind=3, size=0), header(kind=3, size=0, text=9) + bytes(9),
     failure(77), failure(PEER_LOST, [2]), failure(PEER_LOST, [0, 4095]),
     failure(PEER_LOST, [1], ["a", "b"]), failure(MISMATCH, [], ["a", ""]),
     failure(ABORTED, message=bytes(4001))],
    ids=lambda data: f"{len(data)} bytes, kind {data[6]}, {data[64:74].hex()}",
)  # fmt: skip
def test_malformed_control_frames_fail_the_group(data):
    _, comm, control, messages = pair_with_this_test()
    control.sendall(data)
    with pytest.raises(pc.PeerLostError, match="sent an invalid control frame"):
        comm.barrier(5.0)
    control.close()
    messages.close()


def test_told_failure_has_ranks_and_call_and_its_texts_are_cleaned():
    _, comm, control, messages = pair_with_this_test()
    control.sendall(failure(PEER_LOST, [0, 1], ["recv \x1b[1m", ""], b"it\nended"))
    with pytest.raises(pc.PeerLostError) as caught:
        comm.barrier(5.0)
    assert caught.value.ranks == (0, 1)
    assert caught.value.call == "recv ?[1m"
    assert str(caught.value) == "it?ended"
    control.close()
    messages.close()


def test_told_mismatch_has_calls_only_if_each_rank_has_one():
    for calls, expected in ((["a", "b"], {0: "a", 1: "b"}), (["a", ""], {}), (["", ""], {})):
        _, comm, control, messages = pair_with_this_test()
        control.sendall(failure(MISMATCH, [0, 1], calls))
        with pytest.raises(pc.MismatchError) as caught:
            comm.barrier(5.0)
        assert (caught.value.ranks, caught.value.calls) == ((0, 1), expected)
        control.close()
        messages.close()


def test_recv_connection_for_messages_ended_names_the_peer_before_the_deadline():
    """The control connection stays open, and does not report that the peer left."""
    pairs = [socket.socketpair() for _ in range(3)]
    control, data, pipe = (ours.fileno() for ours, _ in pairs)
    comm = _core.Communicator(_core.TcpGroup(0, [[], [control, data]], [-1, pipe]), 0)
    for ours, _ in pairs:
        ours.close()
    pairs[2][1].close()
    with pytest.raises(pc.PeerLostError, match="for messages between rank 0 and rank 1 has ended"):
        comm.recv(np.empty(1 << 18), 1, 0, 60.0)
    for _, theirs in pairs[:2]:
        theirs.close()


def test_silent_returns_the_peer_without_heartbeat():
    group, comm, control, messages = pair_with_this_test()
    assert group.silent(0) == []  # no heartbeat was promised yet
    group.send_heartbeat()
    assert control.recv(64)[6] == 5  # in no call
    time.sleep(0.03)
    assert group.silent(0.02) == [1]
    assert group.silent(5) == []
    control.sendall(header(kind=5, size=0, text=3, call=7) + b"ten")
    assert group.silent(0.02) == []
    assert group.calls(1) == 7
    assert "rank 1 had finished ten" in group.describe()
    with pytest.raises(pc.CollectiveTimeoutError):
        comm.barrier(0.1)
    said = control.recv(10_000)
    assert said[6] == 2, said  # the call that the rank is in
    control.sendall(header(kind=4, size=0, call=7))
    time.sleep(0.03)
    assert group.silent(0.02) == []  # the peer has left
    control.close()
    messages.close()


def test_noise_never_crashes_the_core():
    rng = random.Random(1)
    for _ in range(200):
        _, comm, control, messages = pair_with_this_test()
        for sock in (control, messages):
            data = bytearray(
                header(kind=rng.randrange(7), text=rng.randrange(300), size=rng.randrange(64))
            )
            for _ in range(rng.randrange(3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            sock.sendall(data + rng.randbytes(rng.randrange(400)))
            told = bytearray(failure(rng.randrange(5), rng.sample(range(3), 2), "ab"))
            told[rng.randrange(len(told))] = rng.randrange(256)
            sock.sendall(told)
            sock.close()
        with pytest.raises(pc.CollectiveError):
            comm.barrier(2.0)


def test_descriptors_that_are_no_sockets_raise(tmp_path):
    with open(tmp_path / "file", "w") as f, socket.socket() as loose:
        for wrong in (f.fileno(), loose.fileno(), 9999, -1):
            with pytest.raises(ValueError, match="not a connected stream socket"):
                _core.TcpGroup(0, [[], [wrong, wrong]])
    with pytest.raises(ValueError, match="every peer needs a control connection"):
        _core.TcpGroup(0, [[], [1]])
    with pytest.raises(ValueError, match="rank 3 is not in a group of 2 ranks"):
        _core.TcpGroup(3, [[], []])


@pytest.mark.parametrize("rank", [0, 1])
def test_address_with_an_empty_label_raises_a_rendezvous_error(rank):
    environment = {
        "PYCOLLECTIVE_RANK": str(rank), "PYCOLLECTIVE_SIZE": "2",
        "PYCOLLECTIVE_ADDRESS": "trainer..svc:2222", "PYCOLLECTIVE_SECRET": "x" * 20,
    }  # fmt: skip
    with pytest.raises(RendezvousError, match=r"trainer\.\.svc"):
        pc.init(environment=environment, join_timeout=1)
