"""Control connections in TLS: certificates of the ranks, and messages to the core through TLS."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from ports import free_port
from processes import SECRET, run_on_hosts
from test_rendezvous import refused
from test_strangers import Recorder

import pycollective as pc
from pycollective.launch import RendezvousError, handshake, rendezvous, tls
from pycollective.launch.description import protection
from pycollective.launch.handshake_server import HandshakeServer
from pycollective.launch.links import probe

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]


def _openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Return the variables of a rank, by (signer of its certificate, signer that it trusts)."""
    folder = tmp_path_factory.mktemp("tls")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ours", "theirs"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        _openssl(folder, "req", "-x509", *new, *files, "-subj", f"/CN={name}", "-days", "2")
        files = ("-keyout", f"{name}1.key", "-out", f"{name}1.csr")
        _openssl(folder, "req", *new, *files, "-subj", "/CN=a rank")
        signer = ("-CA", f"{name}.pem", "-CAkey", f"{name}.key", "-CAcreateserial")
        files = ("-in", f"{name}1.csr", "-out", f"{name}1.pem")
        _openssl(folder, "x509", "-req", *files, *signer, "-days", "2")

    def variables(signed="ours", trusts="ours"):
        return {
            "PYCOLLECTIVE_TLS_CERT": str(folder / f"{signed}1.pem"),
            "PYCOLLECTIVE_TLS_KEY": str(folder / f"{signed}1.key"),
            "PYCOLLECTIVE_TLS_CA": str(folder / f"{trusts}.pem"),
        }

    return variables


def members(environments, work, addresses=None, seconds=20.0):
    """Return a function for each rank that joins the group and calls `work`."""
    addresses = addresses or [f"127.0.0.1:{free_port()}"] * len(environments)

    def rank(i):
        more = {"PYCOLLECTIVE_SECRET": SECRET, "PYCOLLECTIVE_TRANSPORT": "tcp"}
        comm = rendezvous(
            i,
            len(environments),
            [addresses[i]],
            "a test",
            join_timeout=seconds,
            timeout=20.0,
            environment={**more, **environments[i]},
        )
        try:
            return work(comm)
        finally:
            comm.close()

    return [lambda i=i: rank(i) for i in range(len(environments))]


def call(rank):
    return rank()


def total(comm):
    part = comm.split(0)
    both = comm.all_reduce(np.arange(100_000.0)), part.all_reduce(np.ones(3))
    part.close()
    return [float(x[-1]) for x in both]


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param("tcp", marks=pytest.mark.slow),
        pytest.param("one", marks=pytest.mark.slow),
        "two",
    ],
)
def test_tls_collectives_equal_those_without_tls(on_ranks, certificates, hosts):
    environments = [certificates() for _ in range(3)]
    for rank, env in enumerate(environments if hosts != "tcp" else ()):
        env["PYCOLLECTIVE_TRANSPORT"] = ""
        env["PYCOLLECTIVE_HOST_ID"] = "a" if hosts == "one" or rank else "b"
    assert on_ranks(members(environments, total), call) == [[299_997.0, 3.0]] * 3


def test_tls_rendezvous_is_encrypted(on_ranks, certificates):
    for environments, is_encrypted in ([certificates()] * 2, True), ([{}] * 2, False):
        port = free_port()
        between = Recorder(port)
        where = [f"127.0.0.1:{port}", f"127.0.0.1:{between.port}"]
        try:
            assert on_ranks(members(environments, total, where), call) == [[199_998.0, 2.0]] * 2
        finally:
            between.close()
        said = b"".join(between.said)
        assert (b"purpose" not in said) == is_encrypted


def test_tls_connections_without_a_certificate_do_not_disturb(on_ranks, certificates):
    port = free_port()
    greeting = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), greeting, server_hostname="rank-0"
        ).do_handshake()
    hello = greeting.read()
    rng = random.Random(3)
    kept = []

    def connect(data, end):
        for _ in range(2000):
            with contextlib.suppress(ConnectionRefusedError):
                sock = socket.create_connection(("127.0.0.1", port))
                break
            time.sleep(0.005)
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
        kept.append(sock)

    def strangers():
        for end in (True, False):
            for data in (
                b"",
                b"\x16",
                hello[:50],
                hello,
                hello + b"\x17\x03\x03\x00\x05hello",
                b"\x16\x03\x01" + rng.randbytes(2000),
                hello[:40] + rng.randbytes(len(hello)),
                rng.randbytes(100),
            ):
                connect(data, end)
        return join()

    first, join = members([certificates()] * 2, total, [f"127.0.0.1:{port}"] * 2)
    try:
        assert on_ranks([first, strangers], call) == [[199_998.0, 2.0]] * 2
    finally:
        for sock in kept:
            sock.close()


def test_tls_failure_reaches_all_ranks_with_its_reason(on_ranks, certificates):
    def fails(comm):
        if comm.rank == 1:
            time.sleep(0.1)
            comm.abort("the reason")
        comm.all_reduce(np.ones(10))

    for error in on_ranks(members([certificates()] * 3, fails), call):
        assert isinstance(error, pc.CollectiveError)
        assert "the reason" in str(error)


def test_tls_silent_returns_the_rank_without_heartbeat(on_ranks, certificates):
    """The TLS threads pass heartbeats on, so the other ranks notice a missing heartbeat."""
    known = [threading.Event() for _ in range(3)]
    known[1].set()

    def beats(comm):
        until = time.monotonic() + 20
        while not all(one.is_set() for one in known) and time.monotonic() < until:
            if comm.rank != 1:
                comm._group.send_heartbeat()
                if comm._group.silent(0.2) == [1]:
                    known[comm.rank].set()
            time.sleep(0.02)
        return known[comm.rank].is_set()

    assert on_ranks(members([certificates()] * 3, beats), call) == [True] * 3


def test_tls_rank_that_left_is_named(on_ranks, certificates):
    def leaves(comm):
        if comm.rank == 1:
            comm.all_reduce(np.ones(1))

    def goes_on(comm):
        if comm.rank != 1:
            comm.all_reduce(np.ones(1))
            comm.all_reduce(np.ones(1))

    first, _, last = on_ranks(
        members([certificates()] * 3, lambda c: (leaves(c), goes_on(c))), call
    )
    for error in (first, last):
        assert isinstance(error, pc.PeerLostError)
        assert "rank 1 has left the group after 1 call" in str(error)


def test_ranks_are_named_with_their_addresses(on_ranks, certificates):
    """The core sees only a local socket in place of the control connection."""

    def rank_0(comm):
        return comm._group.address(0)

    where = [f"127.0.0.2:{free_port()}"] * 2
    assert on_ranks(members([certificates()] * 2, rank_0, where), call)[1] == "127.0.0.2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("", "rank 1 has left the group after 1 call"),
        (
            "os.fork() or child(); os.kill(os.getpid(), 9)",
            "rank 1 .*is lost to rank 0: it ended, or its",
        ),
    ],
)
def test_tls_process_that_ends_is_named(tmp_path, certificates, end, says):
    """The process ends without close(), or is killed while a forked child has its descriptors."""
    body = f"""
def child():
    wait_until = time.monotonic() + 10
    while not os.path.exists("heard") and time.monotonic() < wait_until:
        time.sleep(0.01)
    os._exit(0)
comm.all_reduce(np.ones(1))
if comm.rank == 1:
    {end or "raise SystemExit"}
begin = time.monotonic()
try:
    comm.all_reduce(np.ones(1))
except pc.PeerLostError as error:
    print(time.monotonic() - begin < 15, error)
Path("heard").touch()
"""
    more = {"PYCOLLECTIVE_TRANSPORT": "tcp", **certificates()}
    done = run_on_hosts(tmp_path, ["", ""], body, **more)
    assert re.match(f"True {says}", done.outputs[0]), done


def members_or_refused(environments):
    """Return both ranks' functions; rank 1 gives up after a second."""
    where = [f"127.0.0.1:{free_port()}"] * 2
    first, _ = members(environments, total, where)
    _, second = members(environments, total, where, seconds=1.0)
    return first, second


@pytest.mark.parametrize(
    ("others", "why"),
    [
        pytest.param(
            ("theirs", "theirs"),
            "this rank refuses the other side's certificate .*PYCOLLECTIVE_TLS_CA",
            marks=pytest.mark.slow,
        ),
        (("theirs", "ours"), "the other side refuses this rank's certificate .*unknown ca"),
        (None, "this rank does not use TLS, and the other side does: set PYCOLLECTIVE_TLS"),
    ],
)
def test_tls_untrusted_certificate_is_refused(on_ranks, monkeypatch, certificates, others, why):
    environments = [certificates(), certificates(*others) if others else {}]
    first, second = refused(on_ranks, monkeypatch, *members_or_refused(environments))
    assert isinstance(first, RendezvousError)
    assert re.search("failed the handshake, the last one because .*TLS", str(first)), first
    assert isinstance(second, RendezvousError)
    assert re.search(why, str(second)), second


def test_tls_encrypted_key_is_refused_without_a_question(certificates, tmp_path):
    env = certificates()
    locked = tmp_path / "locked.key"
    out = ("-out", str(locked), "-aes256", "-passout", "pass:hello")
    _openssl(tmp_path, "pkey", "-in", env["PYCOLLECTIVE_TLS_KEY"], *out)
    locked.chmod(0o600)
    with pytest.raises(ValueError, match="locked.key' is encrypted: give a key without"):
        tls.of_environment({**env, "PYCOLLECTIVE_TLS_KEY": str(locked)})


def test_tls_expired_certificate_is_explained():
    error = ssl.SSLCertVerificationError("expired")
    error.reason, error.verify_message = "CERTIFICATE_VERIFY_FAILED", "certificate has expired"
    assert "(certificate has expired): make a new one" in str(tls._explained(error))
    alert = ssl.SSLError("expired")
    alert.reason = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    assert "(sslv3 alert certificate expired): make a new one" in str(tls._explained(alert))


@pytest.mark.slow
def test_tls_peer_without_tls_is_refused(on_ranks, monkeypatch, certificates):
    _, second = refused(on_ranks, monkeypatch, *members_or_refused([{}, certificates()]))
    assert isinstance(second, RendezvousError)
    assert "the other side does not use TLS: set PYCOLLECTIVE_TLS_CERT" in str(second)


@pytest.fixture
def refusing(certificates):
    """Return a handshake server that refuses the certificates of another signer."""
    own = certificates()
    server = HandshakeServer(
        socket.create_server(("127.0.0.1", 0)),
        handshake.key_of(SECRET.encode()),
        1,
        lambda channel, hello: None,
        tls.of_environment(own),
    )
    yield server
    server.close()


def refused_peer(server, certificates):
    """Return a connection with a foreign certificate that has finished its part of the TLS handshake."""
    theirs = certificates("theirs", "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(theirs["PYCOLLECTIVE_TLS_CA"])
    context.load_cert_chain(theirs["PYCOLLECTIVE_TLS_CERT"], theirs["PYCOLLECTIVE_TLS_KEY"])
    sock = socket.create_connection(server.address, timeout=20)
    return context.wrap_socket(sock)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sends", [False, True], ids=["silent", "sends on"])
def test_accept_refused_peer_that_stays_is_disconnected(refusing, certificates, sends):
    """The peer has a second to read the reason; then the thread and the connection end."""
    with refused_peer(refusing, certificates) as sock:

        def is_disconnected():
            if sends:
                with contextlib.suppress(OSError):
                    socket.socket.send(sock, b"x")
            return refusing.rejected

        until(is_disconnected)
        with pytest.raises(ssl.SSLError, match="(?i)unknown.ca"):
            sock.recv(1)


def test_accept_refused_peer_is_read_until_it_closes(refusing, certificates, monkeypatch):
    """Unread data would reset the connection and lose the alert."""
    monkeypatch.setattr(tls, "_CLOSE_SECONDS", 60.0)
    with refused_peer(refusing, certificates) as sock:
        with pytest.raises(ssl.SSLError, match="(?i)unknown.ca"):
            sock.recv(1)
        for _ in range(20):
            socket.socket.send(sock, b"x")
            time.sleep(0.01)
        assert not refusing.rejected
    until(lambda: refusing.rejected)


def test_tls_inconsistent_variables_raise(certificates, tmp_path):
    own = certificates()
    del own["PYCOLLECTIVE_TLS_KEY"]
    with pytest.raises(RendezvousError, match="PYCOLLECTIVE_TLS_KEY is not: TLS needs all three"):
        members([own, {}], total)[0]()
    own = {**certificates(), "PYCOLLECTIVE_TLS_CA": str(tmp_path / "none")}
    with pytest.raises(
        RendezvousError, match="PYCOLLECTIVE_TLS_CA='.*none' cannot be used: .*No su"
    ):
        members([own, {}], total)[0]()
    own = {**certificates(), "PYCOLLECTIVE_TLS_KEY": certificates("theirs")["PYCOLLECTIVE_TLS_KEY"]}
    with pytest.raises(
        RendezvousError, match="PYCOLLECTIVE_TLS_CERT=.* cannot be used: .*(?i:mism)"
    ):
        members([own, {}], total)[0]()


def test_tls_key_that_others_can_read_raises(certificates, tmp_path):
    own, key = certificates(), tmp_path / "node.key"
    shutil.copy(own["PYCOLLECTIVE_TLS_KEY"], key)
    own["PYCOLLECTIVE_TLS_KEY"] = str(key)
    key.chmod(0o640)
    with pytest.raises(RendezvousError, match="PYCOLLECTIVE_TLS_KEY='.*' has mode 0640.*chmod 600"):
        protection(own)
    key.chmod(0o600)
    assert protection(own).endswith("control connections in TLS")


@pytest.mark.slow
def test_links_are_tried_in_tls(on_ranks, certificates):
    """A rank without TLS gets the reason."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def tried(rank):
        own = certificates() if with_tls[rank] else {}
        return probe(rank, 2, addresses, 3.0, {"PYCOLLECTIVE_SECRET": SECRET, **own})

    with_tls = True, True
    assert all(found.all_work(2) for found in on_ranks(range(2), tried))
    with_tls = True, False
    (kind, text) = on_ranks(range(2), tried)[1].links[1, 0]
    assert kind == "turned away"
    assert text.startswith("this rank does not use TLS, and the other side does: set PYCOLLECTIVE")
    assert protection({"PYCOLLECTIVE_SECRET": SECRET, **certificates()}).endswith("in TLS")


@pytest.mark.slow
def test_parameter_servers_send_arrays_through_tls(certificates, tmp_path):
    """The chief is connected to a parameter server and to a worker in TLS."""
    script = tmp_path / "script.py"
    script.write_text("""
import numpy as np
import pycollective as tf
@tf.function
def add(x):
    total.assign_add(x)
strategy = tf.distribute.ParameterServerStrategy()
with strategy.scope():
    total = tf.Variable(np.zeros(300_000, np.float32))
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
for _ in range(5):
    coordinator.schedule(add, args=(np.ones(300_000, np.float32),))
coordinator.join()
chief = strategy.extended.tasks
links = [chief.worker(0), *chief.servers.links]
print([type(link._channel.socket).__name__ for link in links], set(total.numpy().tolist()))
""")
    words = [sys.executable, "-m", "pycollective", "run", "--ps=1", "--workers=1", "--chief"]
    environment = {**os.environ, **certificates(), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [*words, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert "['SSLSocket', 'SSLSocket'] {5.0}" in ended.stdout, ended
