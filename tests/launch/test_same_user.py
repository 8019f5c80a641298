"""Groups without a secret: only processes of one user join, by a key that only this user can read."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading

import pytest
from ports import free_port
from processes import SECRET, surroundings

from pycollective.errors import RendezvousError
from pycollective.launch import handshake, init, secret
from pycollective.launch.handshake_server import HandshakeServer

KEY_FILE = "pycollective.key"


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder in which this process keeps its user's key."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def no_runtime(tmp_path, monkeypatch):
    """The folder for temporary files, where there is no runtime directory."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(secret, "_runtime_folders", lambda: iter(()))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_key_of_user_is_made_once_and_only_for_this_user(runtime):
    first = secret.of_user()
    assert len(first) == 64
    assert secret.of_user() == first
    assert mode_of(runtime / KEY_FILE) == 0o600
    (runtime / KEY_FILE).unlink()
    assert secret.of_user() != first


def test_key_of_user_made_by_many_at_once_is_one_key(runtime):
    begin, found = threading.Barrier(8, timeout=20), []

    def asks():
        begin.wait()
        found.append(secret.of_user())

    threads = [threading.Thread(target=asks) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_key_of_user_open_runtime_folder_uses_a_folder_of_its_own(runtime, monkeypatch):
    """A folder that others can enter is not used, even if the variable names it."""
    runtime.chmod(0o755)
    monkeypatch.setattr(secret, "_runtime_folders", lambda: iter([runtime]))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(runtime.parent))
    secret.of_user()
    own = runtime.parent / f"pycollective-{os.geteuid()}"
    assert not (runtime / KEY_FILE).exists()
    assert (mode_of(own), mode_of(own / KEY_FILE)) == (0o700, 0o600)


@pytest.mark.parametrize(
    "fault", ["folder mode", "file mode", "folder link", "file link", "length"]
)
def test_key_of_user_unsafe_file_or_folder_raises(no_runtime, fault):
    folder = no_runtime / f"pycollective-{os.geteuid()}"
    elsewhere = no_runtime / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if fault == "folder link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir(mode=0o700)
    file = folder / KEY_FILE
    if fault == "folder mode":
        folder.chmod(0o770)
    elif fault == "file mode":
        secret.of_user()
        file.chmod(0o640)
    elif fault == "file link":
        (elsewhere / "key").write_text("0" * 64)
        (elsewhere / "key").chmod(0o600)
        file.symlink_to(elsewhere / "key")
    elif fault == "length":
        file.write_text("0" * 63)
        file.chmod(0o600)
    with pytest.raises(RendezvousError, match="set PYCOLLECTIVE_SECRET to the same") as raised:
        secret.of_user()
    assert str(folder) in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_key_of_user_of_another_owner_raises(no_runtime, what):
    secret.of_user()
    folder = no_runtime / f"pycollective-{os.geteuid()}"
    os.chown(folder if what == "folder" else folder / KEY_FILE, 12345, 12345)
    with pytest.raises(RendezvousError, match="belongs to user 12345, not to 0"):
        secret.of_user()


_OTHER = """
import sys
from pycollective.launch import RendezvousError, init
try:
    comm = init(join_timeout=float(sys.argv[1]))
except RendezvousError as error:
    print("ERROR", error)
else:
    print(comm.all_reduce([1.0]), comm._group.transport)
    comm.close()
"""


def description(rank, port):
    return {
        "PYCOLLECTIVE_RANK": str(rank),
        "PYCOLLECTIVE_SIZE": "2",
        "PYCOLLECTIVE_ADDRESS": f"127.0.0.1:{port}",
    }


def other(port, seconds, **more):
    """Start rank 1 as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(seconds)],
        cwd="/",  # in the repository, Python would import the package without its compiled core
        env=surroundings(**description(1, port), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process):
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_init_without_a_secret_processes_of_one_user_join(runtime, transport):
    more = {"PYCOLLECTIVE_TRANSPORT": transport}
    port = free_port()
    process = other(port, 20, XDG_RUNTIME_DIR=str(runtime), **more)
    try:
        comm = init(environment={**description(0, port), **more}, join_timeout=20)
        assert comm.all_reduce([2.0]) == [3.0]
        comm.close()
    finally:
        out, err = said(process)
    assert out.startswith("[3.]"), err
    assert (runtime / KEY_FILE).exists()


@pytest.mark.slow
def test_init_without_a_secret_process_with_another_key_is_refused(runtime, tmp_path):
    """A process of another user or in another container has another key."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    entered = []
    server = socket.create_server(("127.0.0.1", 0))
    key = handshake.key_of(secret.of_user())
    rank_0 = HandshakeServer(server, key, 2, lambda channel, hello: entered.append(hello))
    port = rank_0.address[1]
    try:
        out, err = said(other(port, 1.5, XDG_RUNTIME_DIR=str(theirs)))
    finally:
        rank_0.close()
    assert not entered
    assert rank_0.rejected
    assert f"ERROR rank 1 was refused at 127.0.0.1:{port}: the secrets differ" in out, err
    assert "it joins only processes of its own user on this machine" in out
    assert "set the same PYCOLLECTIVE_SECRET on every rank" in out
    assert (theirs / KEY_FILE).exists()


def test_init_insecure_needs_no_key(no_runtime, monkeypatch):
    monkeypatch.setattr(secret, "of_user", lambda: pytest.fail("the key of the user is read"))
    env = {**description(1, free_port()), "PYCOLLECTIVE_INSECURE": "1"}
    with pytest.raises(RendezvousError, match="did not reach rank 0"):
        init(environment=env, join_timeout=0.2)


# Memory ---------------------------------------------------------------------------------------

_CONNECTS = """
import os, socket, sys
os.setgid(12345)
os.setuid(12345)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect("\\0" + sys.argv[1])
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
def test_is_same_user_own_process_is():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert secret.is_same_user(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_is_same_user_process_of_another_user_is_not():
    name = f"pycollective-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen()
        server.settimeout(20)
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _CONNECTS, name], stdin=subprocess.PIPE
        )
        try:
            connection, _ = server.accept()
            with connection:
                assert not secret.is_same_user(connection)
        finally:
            process.communicate(timeout=20)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
@pytest.mark.parametrize("has_secret", [False, True])
def test_sharing_with_another_user_needs_a_secret(on_ranks, monkeypatch, has_secret):
    """Another user's rank gets no memory descriptor: the ranks use TCP."""
    monkeypatch.setattr(secret, "is_same_user", lambda sock: False)
    port = free_port()
    more = {"PYCOLLECTIVE_SECRET": SECRET} if has_secret else {"PYCOLLECTIVE_INSECURE": "1"}

    def rank(r):
        comm = init(environment={**description(r, port), **more}, join_timeout=20)
        found = comm.hosts
        comm.close()
        return list(found)

    assert on_ranks([0, 1], rank) == [[0, 0] if has_secret else [0, 1]] * 2


# The secret's file ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o620, 0o601])
def test_secret_file_open_to_others_raises(tmp_path, mode):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(mode)
    env = {**description(1, free_port()), "PYCOLLECTIVE_SECRET_FILE": str(file)}
    with pytest.raises(RendezvousError, match=f"has mode {mode:04o}.*chmod 600") as raised:
        init(environment=env, join_timeout=0.2)
    assert f"PYCOLLECTIVE_SECRET_FILE={str(file)!r}" in str(raised.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_secret_file_of_this_user_alone_is_used(tmp_path, mode):
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(mode)
    assert secret.of_environment({"PYCOLLECTIVE_SECRET_FILE": str(file)}) == SECRET.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_secret_file_of_another_owner_is_used_with_any_mode(tmp_path):
    """Container systems mount secrets that belong to root, and that all in the container can read."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o644)
    os.chown(file, 12345, 12345)
    assert secret.of_environment({"PYCOLLECTIVE_SECRET_FILE": str(file)}) == SECRET.encode()
