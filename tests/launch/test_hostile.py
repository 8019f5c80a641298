"""Messages from a process without a proof of membership: no listener ends, and no rank fails."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from ports import free_port
from processes import SECRET

from pycollective import tuning
from pycollective.launch import RendezvousError, handshake, rendezvous
from pycollective.launch.handshake_server import HandshakeServer
from pycollective.launch.store import Client

KEY = handshake.key_of(SECRET.encode())
ENVIRONMENT = {"PYCOLLECTIVE_SECRET": SECRET, "PYCOLLECTIVE_TRANSPORT": "tcp"}
HELLO = {"pycollective": 2, "nonce": "00" * 16, "purpose": "join", "rank": 1, "size": 2}
DEEP = b'{"nonce":' + b"[" * 490 + b"]" * 490 + b"}"
VALUES = [
    b'"\\ud800"',
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 900,
    b'"' + b"x" * 900 + b'"',
    b"[]",
    b"{}",
    b'{"\\udfff": 1}',
    b"[" * 400 + b"]" * 400,
    b'{"a":' * 150 + b"1" + b"}" * 150,
]
"""JSON of every wrong kind, each short enough for an unauthenticated message."""


def frame(data):
    return struct.pack("!I", len(data)) + data


def hostile(names):
    """Return messages in which one field has each of the wrong values, or is missing."""
    yield from (b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{", DEEP, *VALUES)
    for name in names:
        yield json.dumps({k: v for k, v in HELLO.items() if k != name}).encode()
        for value in VALUES:
            rest = {k: v for k, v in HELLO.items() if k != name and k != "nonce"}
            yield json.dumps(rest).encode()[:-1] + b', "%s": %s}' % (name.encode(), value)


@pytest.fixture
def uncaught(monkeypatch):
    """Exceptions that have ended threads."""
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


@pytest.fixture
def server():
    entered = []
    listening = HandshakeServer(
        socket.create_server(("127.0.0.1", 0)), KEY, 2, lambda channel, _: entered.append(channel)
    )
    listening.entered = entered
    yield listening
    listening.close()
    for channel in entered:
        channel.close()


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.005)


def test_handshake_server_hostile_greetings_and_proofs_refuses_all(server, uncaught):
    greetings = list(hostile(["pycollective", "nonce", "purpose", "rank", "size"]))
    proofs = list(hostile(["proof"]))
    for sent, greeted in [*((g, False) for g in greetings), *((p, True) for p in proofs)]:
        with socket.create_connection(server.address, timeout=20) as sock:
            if greeted:
                sock.sendall(frame(json.dumps(HELLO).encode()))
            sock.sendall(frame(sent))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):  # until the listener has closed the connection
                pass
    until(lambda: server.rejected == len(greetings) + len(proofs))
    assert (uncaught, server.entered) == ([], [])
    with socket.create_connection(server.address, timeout=20) as sock:
        handshake.introduce(sock, KEY, {"purpose": "join"}, time.monotonic() + 20)
        until(lambda: server.entered)


ANSWERS = [
    *hostile(["nonce", "proof", "refused"]),
    b'{"refused": "go away"}',
    b'{"refused": {"a": [1]}}',
    b'{"proof": "00"}',
]


def squatter(sock, stop):
    """Refuse every connection, without a proof."""
    sock.settimeout(0.05)
    kept = []
    while not stop.is_set():
        try:
            connection, _ = sock.accept()
        except TimeoutError:
            continue
        kept.append(connection)
        with contextlib.suppress(OSError):
            connection.sendall(frame(b'{"refused": "go away"}'))
            connection.shutdown(socket.SHUT_WR)
    for connection in kept:
        connection.close()
    sock.close()


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_introduce_hostile_answer_raises_handshake_error(answer):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(2 * frame(answer))
        with pytest.raises((handshake.HandshakeError, OSError)):
            handshake.introduce(ours, KEY, {"purpose": "join"}, time.monotonic() + 0.2)


def test_join_refused_by_a_squatter_joins_once_rank_0_listens(on_ranks, caplog):
    """An unauthenticated refusal delays a rank and does not end it."""
    port, stop = free_port(), threading.Event()
    server = socket.create_server(("127.0.0.1", port))
    squats = threading.Thread(target=squatter, args=(server, stop))
    squats.start()

    def joins():
        return rendezvous(1, 2, [f"127.0.0.1:{port}"], "a test", environment=ENVIRONMENT)

    def listens():
        until(lambda: "go away" in caplog.text)  # the refusal is logged at once
        stop.set()
        squats.join(20)
        return rendezvous(0, 2, [f"127.0.0.1:{port}"], "a test", environment=ENVIRONMENT)

    comms = on_ranks([listens, joins], lambda rank: rank())
    assert [comm.rank for comm in comms] == [0, 1]
    for comm in comms:
        comm.close()


@pytest.mark.slow
def test_join_refused_until_the_deadline_names_the_address_and_the_reason():
    port, stop = free_port(), threading.Event()
    server = socket.create_server(("127.0.0.1", port))
    squats = threading.Thread(target=squatter, args=(server, stop))
    squats.start()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as first:
        assert first.recv(1)  # the thread has begun
    try:
        with pytest.raises(RendezvousError, match=f"refused at 127.0.0.1:{port}: go away"):
            rendezvous(1, 2, [f"127.0.0.1:{port}"], "a", environment=ENVIRONMENT, join_timeout=2.0)
    finally:
        stop.set()
        squats.join(20)


def test_rank_0_join_request_with_a_bad_port_names_the_field(on_ranks):
    """The last port is 65535. A rank with a larger port gets an error, and the group keeps waiting."""
    rank_0_port = free_port()

    def joins(port):
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", rank_0_port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        with sock:
            channel = handshake.introduce(
                sock, KEY, {k: HELLO[k] for k in ("purpose", "rank", "size")}, deadline
            )
            store = Client(channel)
            request = {"host": "127.0.0.1", "port": port, "claim": "", "milliseconds": 20_000}
            store.set("join/1", request)
            with pytest.raises(RendezvousError) as caught:
                while True:
                    store.wait(1.0)
            return str(caught.value)

    def joins_as(rank):
        return rendezvous(rank, 2, [f"127.0.0.1:{rank_0_port}"], "a", environment=ENVIRONMENT)

    def rank_1():
        said = [joins(port) for port in (0, 65536, "1", None, True, 1.0)]
        assert said == ["port is not a number from 1 to 65535"] * 6
        return joins_as(1)

    comms = on_ranks([lambda: joins_as(0), rank_1], lambda rank: rank())
    assert [comm.rank for comm in comms] == [0, 1]
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '[["all_reduce", -1, "ring"]]', "nonsense"])
def test_given_table_of_algorithms_malformed_raises_value_error(text):
    with pytest.raises(ValueError, match=f"^{tuning.CHOICES}="):
        tuning.given({tuning.CHOICES: text}, "shm", 2)


def test_prepare_table_of_deep_json_begins_a_new_one(tmp_path):
    file = tmp_path / "table.json"
    file.write_text("[" * 100_000)
    tuning.prepare(file, "1.0")
    assert json.loads(file.read_text())["tables"] == {}


def test_unfinished_handshakes_leave_descriptors_for_the_process(monkeypatch):
    """A host without the key opens connections and says nothing."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 4096))
    server = socket.create_server(("127.0.0.1", 0))
    listening = HandshakeServer(server, KEY, 1000, lambda channel, hello: None)
    silent = [socket.create_connection(listening.address) for _ in range(15)]
    try:
        for connection in silent[:5]:  # those that the later ones have replaced
            connection.settimeout(5)
            assert connection.recv(1) == b""
        assert len(listening._handshakes) <= 10
    finally:
        for connection in silent:
            connection.close()
        listening.close()
