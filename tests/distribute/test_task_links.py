"""Messages between the tasks of a cluster with parameter servers: values, errors, connections."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import hangs
import numpy as np
import pytest
from ports import free_ports

from pycollective.distribute import task_links
from pycollective.distribute.server_connections import Servers
from pycollective.distribute.task_links import (
    Link,
    LinkLostError,
    link_to,
    listen,
)
from pycollective.distribute.task_values import decode, encode, error_message, error_of
from pycollective.errors import (
    NotFoundError,
    UnavailableError,
)
from pycollective.launch import handshake
from pycollective.launch.handshake import Channel, HandshakeError


def test_decode_malformed_tokens_raises():
    def no_name(token):
        raise ValueError("no such value")

    for tokens in (None, [], [["list", 2]], [["list", 1 << 60]], [["tensor"]], [["dict"]], [[]], [7],
                   [["dict", 1]], [["dict", 1], ["plain", "a"]], [["OrderedDict", 2]],
                   [["pickle"]], [["list", 1]] * 100, [["list", -1]], [["list", 1.0], ["plain", 1]],
                   [["float", "0x1p99999"]], [["plain", {"a": 1}]], [["plain", 1.5]],
                   [["plain", 1], ["plain", 2]]):  # fmt: skip
        with pytest.raises(HandshakeError):
            decode(tokens, [], no_name)


def test_decode_an_array_of_numbers_as_a_scalar_raises():
    with pytest.raises(HandshakeError):
        decode([["scalar"]], [np.ones(2)], lambda token: None)


@pytest.mark.parametrize(
    "specs",
    [
        "bad", [7], [["<f4", -1]], [["<f4", 1 << 60]], [["<f4", 0, 1 << 34, 1 << 34]],
        [["<U0", 1 << 34]], [["<f4", *[1 << 33] * 40]], [["<f8", 1 << 30]] * 3,
    ],
)  # fmt: skip
def test_a_wrong_header_of_arrays_ends_the_link_and_not_the_thread(specs):
    """The connection of the peer ends, and the server's thread gets a `LinkLostError`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with theirs:
        link, peer = Link(Channel(ours), "the chief"), Channel(theirs)
        theirs.sendall(peer.encoded({"request": "x", "arrays": specs}))
        with pytest.raises(LinkLostError, match="the connection to the chief has ended"):
            link.receive()
        theirs.settimeout(10)
        assert theirs.recv(1) == b""


def family_of_link_to(address):
    """Return the family of the socket by which a task is connected to a task that echoes."""

    def enter(channel, hello):
        link = Link(channel, hello["task"])
        link.send(*link.receive())
        link.close()

    sockets, _ = listen(address, enter)
    try:
        link = link_to("/job:ps/task:0", address, "chief", 10.0)
        sent = [np.arange(5.0), np.ones((200, 300), np.float32)]
        message, arrays = link.call({"request": "echo"}, sent)
        assert message["request"] == "echo"
        for one, other in zip(sent, arrays, strict=True):
            np.testing.assert_array_equal(one, other)
        family = link._channel.socket.family
        link.close()
        return family
    finally:
        sockets.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets exist on Linux only")
def test_tasks_of_one_host_talk_through_a_unix_socket_or_tcp(monkeypatch):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    assert family_of_link_to(address) == socket.AF_UNIX
    with socket.socket(socket.AF_UNIX) as other:  # a socket of no task has the name
        other.bind(task_links._UNIX_NAME + address)
        other.listen()
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        assert family_of_link_to(address) == socket.AF_INET
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    assert family_of_link_to(address) == socket.AF_INET


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets exist on Linux only")
def test_a_silent_program_with_the_name_of_a_task_delays_the_link_only(monkeypatch, caplog):
    monkeypatch.setattr(task_links, "_UNIX_SECONDS", 0.1)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(task_links._UNIX_NAME + address)
        other.listen()
        assert family_of_link_to(address) == socket.AF_INET
    assert "Address already in use): tasks of this host use TCP" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs a second user, on Linux"
)
def test_a_program_of_another_user_with_the_name_of_a_task_gets_no_byte():
    """The program could hand the handshake on to the task, and change arrays afterwards."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    code = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as s:
    s.bind("\\0" + sys.argv[1]); s.listen()
    print("listens", flush=True)
    connection, _ = s.accept()
    print(len(connection.recv(100)), flush=True)
"""
    name = task_links._UNIX_NAME[1:] + address
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code, name], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "listens\n"
            assert family_of_link_to(address) == socket.AF_INET
            assert other.stdout.readline() == "0\n"
        finally:
            other.kill()


def test_messages_through_a_unix_socket_of_one_user_have_no_hmac(monkeypatch):
    for owner, codes in ((os.getuid(), 0), (os.getuid() + 1, 32)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda owner=owner: owner)
            one, other = socket.socketpair()
            with one, other:
                sender, receiver = Channel(one), Channel(other)
                sender.seal(b"k" * 32, connected=True)
                receiver.seal(b"k" * 32, connected=False)
                data = sender.encoded({})
                assert len(data) == 4 + len("{}") + codes
                assert receiver.decoded(data[4:]) == {}


def test_equal_values_of_different_types_are_encoded_differently():
    with socket.socket() as sock:
        channel = Channel(sock)
        values = [1, True, 1.0, None, "1", [1], [True], {"a": 1}, {"a": True}]
        for _ in range(2):
            texts = [channel.encoded({"value": value}, repeated=True)[4:] for value in values]
            assert texts == [
                json.dumps({"value": v}, separators=(",", ":")).encode() for v in values
            ]
        shared = [1]
        message = {"value": shared}
        channel.encoded(message, repeated=True)
        shared.append(2)
        assert channel.encoded(message, repeated=True)[4:] == b'{"value":[1,2]}'


def test_equal_messages_are_parsed_once_and_each_hmac_is_checked():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        sender, receiver = Channel(one), Channel(other)
        sender.seal(b"k" * 32, connected=True)
        receiver.seal(b"k" * 32, connected=False)
        request = {"request": "call", "arrays": [], "steps": secrets.randbits(60)}
        first, second, third = [sender.encoded(request)[4:] for _ in range(3)]
        found = receiver.decoded(first, repeated=True)
        found["steps"] = 0  # a change of the message does not reach the next one
        parses = handshake._parsed_before.cache_info().misses
        assert receiver.decoded(second, repeated=True) == request
        assert handshake._parsed_before.cache_info().misses == parses
        for wrong in (second, third[:-1] + bytes([third[-1] ^ 1])):  # replayed, and changed
            with pytest.raises(HandshakeError, match="changed on its way"):
                receiver.decoded(wrong, repeated=True)
        assert receiver.decoded(third, repeated=True) == request


Pair = collections.namedtuple("Pair", "first second")


class Diverged(ArithmeticError):
    def __init__(self, step, loss):
        super().__init__(step, loss)
        self.step = step

    def __str__(self):
        return f"the loss is {self.args[1]} in step {self.step}"


class MissingFile(FileNotFoundError):
    def __init__(self, path):
        raise AssertionError("the program's constructor was called")


def test_ordered_dicts_are_decoded_in_their_order():
    value = collections.OrderedDict(second=1, first=collections.OrderedDict())
    tokens, arrays = encode(value, lambda value: None)
    again = decode(json.loads(json.dumps(tokens)), arrays, None)
    assert again == value and type(again) is type(again["first"]) is collections.OrderedDict


def test_named_tuples_of_a_module_are_decoded_and_others_raise():
    value = [Pair(1, Pair([2.5], (None,)))]
    tokens, arrays = encode(value, lambda value: None)
    again = decode(json.loads(json.dumps(tokens)), arrays, None)
    assert again == value and type(again[0]) is type(again[0].second) is Pair
    local = collections.namedtuple("Local", "first")
    with pytest.raises(TypeError, match="a Local cannot be sent"):
        encode(local(1), lambda value: None)
    for name in (["pycollective.errors", "Unknown"], ["no.module", "Pair"], ["builtins", "tuple"],
                 [__name__, "Pair.first"], [__name__, "Diverged"], [__name__, "os"]):  # fmt: skip
        with pytest.raises(NotFoundError, match="is not known to this task"):
            decode([["namedtuple", *name, 1], ["plain", 1]], [], None)
    with pytest.raises(NotFoundError, match="with 1 fields"):
        decode([["namedtuple", __name__, "Pair", 1], ["plain", 1]], [], None)
    for token in (["namedtuple", 2], ["namedtuple", 7, "Pair", 2], ["namedtuple", "Pair", 2]):
        with pytest.raises(NotFoundError):
            decode([token, ["plain", 1], ["plain", 1]], [], None)


def test_a_class_in_a_message_imports_nothing(monkeypatch):
    module = types.ModuleType("lazy")
    module.__getattr__ = lambda name: pytest.fail("the module's __getattr__ was called")
    monkeypatch.setitem(sys.modules, "lazy", module)
    for name in (["lazy", "Pair"], ["xml.dom.minidom", "Document"]):
        sys.modules.pop("xml.dom.minidom", None)
        with pytest.raises(NotFoundError):
            decode([["namedtuple", *name, 1], ["plain", 1]], [], None)
        error = error_of({"error": "Pair", "text": "no", "class": name, "args": []}, "a worker")
        assert type(error) is RuntimeError and "xml.dom.minidom" not in sys.modules


def sent(error):
    """Return an error as the other side of a connection gets it."""
    return error_of(json.loads(json.dumps(error_message(error))), "a worker")


def test_error_of_a_class_of_the_program_keeps_class_arguments_and_plain_attributes():
    error = sent(Diverged(3, float("inf")))
    assert type(error) is Diverged and error.args == (3, float("inf")) and error.step == 3
    assert str(error) == "the loss is inf in step 3"
    error = sent(json.JSONDecodeError("wrong", "{", 1))
    assert type(error) is json.JSONDecodeError and (error.pos, error.lineno) == (1, 1)
    assert str(error) == "wrong: line 1 column 2 (char 1) (on a worker)"
    error = FileNotFoundError.__new__(MissingFile)
    error.args = (errno.ENOENT, "no file")
    error = sent(error)
    assert type(error) is MissingFile and (error.errno, error.strerror) == (2, "no file")


@pytest.mark.parametrize("value", [object(), "\udcff", "x" * 60_000, 1 << 70, (1,), np.zeros(2)])
def test_error_with_an_argument_or_attribute_that_is_not_plain_is_a_runtime_error(value):
    error = sent(Diverged(3, value))
    assert type(error) is RuntimeError and str(error).startswith("Diverged: the loss is ")
    assert len(json.dumps(error_message(Diverged(3, value)))) < 200_000
    error = Diverged(3, 1.5)
    error.more = value
    assert str(sent(error)) == "Diverged: the loss is 1.5 in step 3 (on a worker)"


def test_error_of_python_keeps_its_class_and_arguments():
    error = sent(FileNotFoundError(errno.ENOENT, "no file", "data.bin"))
    assert type(error) is FileNotFoundError
    assert (error.errno, error.strerror, error.filename) == (errno.ENOENT, "no file", "data.bin")
    error = sent(KeyError("layer"))
    assert type(error) is KeyError and error.args == ("layer",)
    with pytest.raises(UnicodeDecodeError) as found:
        b"\xff".decode()
    error = sent(found.value)  # its arguments are not plain
    assert type(error) is UnicodeError and str(error).endswith("invalid start byte (on a worker)")


def test_link_that_fails_in_send_still_has_what_the_other_side_sent_before_its_end():
    for request in ("end", "ready"):
        one, other = socket.socketpair()
        link, chief = Link(Channel(one), "the chief"), Link(Channel(other), "a worker")
        chief.send({"request": request})
        chief.close()
        with pytest.raises(LinkLostError):
            link.send({"tokens": []})
        assert link.has_told_to_end() is (request == "end")
        assert not link.has_told_to_end()
    one, other = socket.socketpair()  # the other side is there, and has sent nothing
    with other:
        assert not Link(Channel(one), "the chief").has_told_to_end()


def test_error_of_an_unknown_class_or_with_malformed_arguments_is_a_runtime_error():
    class Local(Exception):
        pass

    assert str(sent(Local("text"))) == "Local: text (on a worker)"
    assert type(sent(ValueError("text"))) is ValueError
    assert type(sent(UnavailableError("text"))) is UnavailableError
    for name in (["builtins", "SystemExit"], [__name__, "Pair"], ["builtins", "print"],
                 ["pycollective.distribute.task_links", "LinkLostError"], [__name__], 7):  # fmt: skip
        error = error_of({"error": "Wrong", "text": "text", "class": name, "args": []}, "a worker")
        assert type(error) is RuntimeError and str(error) == "Wrong: text (on a worker)"
    name = [__name__, "Diverged"]
    for args, attributes in (
        ([[]], {}),
        ([], {"__x": 1}),
        ([], {"a b": 1}),
        ([], None),
        (None, {}),
    ):
        message = {"class": name, "args": args, "attributes": attributes}
        error = error_of({"error": "Diverged", "text": "text", **message}, "a worker")
        assert type(error) is RuntimeError


def test_encode_objects_or_too_many_values_raises():
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode([object()], lambda value: None)
    with pytest.raises(ValueError, match="join them to fewer arrays"):
        encode(list(range(10_000)), lambda value: None)


def test_interrupted_call_reply_is_dropped(ctrl_c):
    one, other = socket.socketpair()
    link, peer, interrupted = (
        Link(Channel(one), "the server"),
        Link(Channel(other), "the chief"),
        threading.Event(),
    )

    def serve():
        first, _ = peer.request()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert interrupted.wait(hangs.SECONDS)
        peer.send({"found": first["number"]})
        second, _ = peer.request()
        peer.send({"found": second["number"]})

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        link.call({"request": "x", "number": 1})
    interrupted.set()
    assert link.call({"request": "x", "number": 2})[0]["found"] == 2
    thread.join()
    link.close()
    peer.close()


@pytest.mark.parametrize("has_codes", [False, True])
def test_interrupts_in_the_middle_of_messages_lose_nothing(has_codes):
    channels = [Channel(end) for end in socket.socketpair()]
    for connected, channel in zip((True, False), channels, strict=True):
        channel.seal(b"k" * 32, connected=connected)
        channel._has_codes = has_codes
    link, peer = Link(channels[0], "the server"), Link(channels[1], "the chief")
    done = threading.Event()

    def echo():
        with contextlib.suppress(LinkLostError):
            while True:
                message, arrays = peer.request()
                peer.send({"number": message["number"]}, arrays)

    def interrupt():
        while not done.wait(secrets.randbelow(10_000) / 1e6):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def raise_in_call(signum, frame):
        while frame is not None:
            if frame.f_code is Link.call.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    threads = [threading.Thread(target=target) for target in (echo, interrupt)]
    before = signal.signal(signal.SIGINT, raise_in_call)
    interrupted = 0
    try:
        for thread in threads:
            thread.start()
        for number in range(200):
            arrays = [np.full(n, number, "int16") for n in (3, 0, number % 3 * 100_000, 5)]
            try:
                reply, found = link.call({"request": "x", "number": number}, arrays)
            except KeyboardInterrupt:
                interrupted += 1
                continue
            assert reply["number"] == number
            for a, b in zip(found, arrays, strict=True):
                np.testing.assert_array_equal(a, b)
    finally:
        done.set()
        threads[1].join()
        signal.signal(signal.SIGINT, before)
        link.close()
        threads[0].join()
        peer.close()
    assert interrupted


def test_silent_task_that_answers_no_connection_is_lost(monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_HEARTBEAT", "0.01")
    answers = [True, True, False]
    one, other = socket.socketpair()
    with other:
        link = Link(Channel(one), "the server", lambda: answers.pop(0))
        with pytest.raises(LinkLostError, match="it is stopped or cut off"):
            link.receive()
    assert not answers


def test_ended_during_a_call_is_false_until_the_peer_closes():
    ends = socket.socketpair()
    link, other = (Link(Channel(end), "a task", lambda: True) for end in ends)
    thread = threading.Thread(target=link.call, args=({"request": "wait"},))
    thread.start()
    try:
        other.request()  # the thread has sent, and waits
        for _ in range(100):
            time.sleep(1e-3)
            assert not link.ended()
    finally:
        other.send({})
        thread.join(hangs.SECONDS)
        assert not link.ended()
        other.close()
        assert link.ended()
        link.close()


def test_several_threads_ask_for_lost_servers_at_the_same_time():
    ends = [socket.socketpair() for _ in range(2)]
    links = [Link(Channel(end), "a server") for end, _ in ends]
    servers, errors = Servers(lambda number, seconds: links[number], 2, uncached=True), []

    def ask_for_lost():
        try:
            assert [servers.lost() for _ in range(3000)] == 3000 * [[]]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask_for_lost) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(hangs.SECONDS)
    ends[1][1].close()
    assert not errors and servers.lost() == [1]
    for end in (*ends[0], *ends[1]):
        end.close()


def test_whole_numbers_of_any_size_are_sent():
    for number in (0, -1, 1 << 63, -(1 << 200)):
        tokens, arrays = encode([number], lambda value: None)
        assert decode(json.loads(json.dumps(tokens)), arrays, None) == [number]
