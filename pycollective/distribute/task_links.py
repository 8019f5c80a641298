"""Messages between the tasks of a parameter-server cluster, over authenticated connections.

A message is a JSON object in the channel of `pycollective.launch.handshake`, followed by the bytes of
its arrays.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective import dtypes
from pycollective.distribute.workers import heartbeat_timeout
from pycollective.errors import CollectiveError, UnavailableError
from pycollective.launch import secret
from pycollective.launch.description import Description
from pycollective.launch.handshake import Channel, HandshakeError, Refused
from pycollective.launch.handshake_server import HANDSHAKE_SECONDS, Enter, HandshakeServer
from pycollective.launch.leader import LOG_EVERY
from pycollective.launch.sockets import Sockets, inherited

_log = logging.getLogger("pycollective")

PURPOSE = "parameter servers"
SECONDS = 600.0
"""Seconds that a message may take."""
JOIN_SECONDS = 180.0
"""Seconds that a task waits for another one to listen, about as long as TensorFlow."""
_SPIN_SECONDS = 3e-4
"""Seconds for which a thread polls for a message before it sleeps: waking it takes about as long."""
_TIMEVAL = struct.Struct("ll")
_JOINED_BYTES = 1 << 16
"""The bytes of arrays that are copied, so that a message needs one system call."""
_MOST_KEPT = 1 << 20
"""The most bytes that are read from a connection that has failed; a request to end is short."""
_MOST_BYTES = 1 << 34
_MOST_ARRAYS = 100_000


class LinkLostError(CollectiveError):
    """The connection to another task has ended."""


class ServerLostError(UnavailableError):
    """A parameter server is lost."""


class Link:
    """A connection to another task, for requests and replies.

    Ctrl-C loses nothing: the next call of `send` or `receive` continues in the middle of the message.

    Hold `lock` from a request to its reply, as `call` does: threads then take turns. ``answers`` returns
    False if the task of the other side is stopped or cut off. It is called after some silence.
    """

    def __init__(
        self, channel: Channel, task: str, answers: Callable[[], bool] | None = None
    ) -> None:
        self.task = task
        self._channel = channel
        self._answers = answers
        #: The seconds of silence after which `answers` is called.
        self._silence = math.inf if answers is None else heartbeat_timeout()
        self.lock = threading.Lock()
        #: True if the connection has ended because the other side is stopped or cut off.
        self.silent = False
        #: The number of calls that an interrupt, such as Ctrl-C, has ended before their replies. Each
        #: message has it, so that the replies to these calls are dropped.
        self.interrupts = 0
        self._encoded = functools.partial(channel.encoded, repeated=True)
        self._decoded = functools.partial(channel.decoded, repeated=True)
        #: The parts of messages that are not sent yet, and the numbers of bytes that were sent of them.
        self._unsent: list[Any] = []
        self._counts: list[int] = []
        #: Bytes that were received beyond those of the last message, and those that just arrived.
        self._data = b""
        self._chunks: list[bytes] = []
        #: The message that arrives, without its arrays; then its arrays, and the numbers of bytes that
        #: the socket has put into each.
        self._message: list[dict[str, Any]] = []
        self._arrays: list[tuple[Any, list[int]]] | None = None
        #: True if the last message arrived while the thread spun.
        self._spins = True
        sock = channel.socket
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        #: False in TLS, which needs Python's own timeouts: one more system call for each message.
        self._plain = type(sock) is socket.socket
        self._set_timeout()
        if sock.family == socket.AF_UNIX:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # a host that has vanished is detected in 25 seconds
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    def has_told_to_end(self) -> bool:
        """Close the connection, and return True if the other side has sent the request "end"."""
        self._keep_received()
        self.close()
        try:
            return self.receive()[0].get("request") == "end"
        except LinkLostError:
            return False

    def _set_timeout(self) -> None:
        """Let a call of the socket fail after `SECONDS`."""
        sock = self._channel.socket
        sock.settimeout(None if self._plain else SECONDS)
        if self._plain:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(SECONDS), 0))

    def call(
        self, message: dict[str, Any], arrays: Sequence[Any] = (), spins: bool = False
    ) -> tuple[dict[str, Any], list[Any]]:
        """Send a request, and return the reply with its arrays; ``spins`` as in `receive`."""
        with self.lock:
            try:
                self.send(message, arrays)
                return self.reply(spins)
            except KeyboardInterrupt:
                self.interrupts += 1
                raise

    def reply(self, spins: bool = False) -> tuple[dict[str, Any], list[Any]]:
        """Return the reply to the last request; drop those to calls that were interrupted."""
        while True:
            message, arrays = self.receive(spins)
            if message.get("interrupts", 0) == self.interrupts:
                return message, arrays
            if "next" in message or "request" in message:  # the other side waits for something else
                self.close()
                raise self._lost(HandshakeError("a call that needs two replies was interrupted"))

    def request(self, spins: bool = False) -> tuple[dict[str, Any], list[Any]]:
        """Return the next request of the other side, for a reply by `send`."""
        message, arrays = self.receive(spins)
        self.interrupts = message.get("interrupts", 0)
        return message, arrays

    def send(self, message: dict[str, Any], arrays: Sequence[Any] = ()) -> None:
        """Send a message with arrays; raise LinkLostError if the connection has ended."""
        specs, parts = _parts_of(arrays) if arrays else ([], [])
        message = {**message, "arrays": specs}
        if self.interrupts:
            message["interrupts"] = self.interrupts
        try:
            # Nothing interrupts C code that calls C code. So a message is either queued or not encoded.
            self._unsent.extend(itertools.chain(map(self._encoded, (message,)), parts))
            self._send_queue()
        except OSError as error:
            self._keep_received()
            self.close()
            raise self._lost(error) from None
        except KeyboardInterrupt:
            self._unsent = [b"".join(self._unsent)]  # the caller may change its arrays
            raise

    def _keep_received(self) -> None:
        """Read the bytes that the other side sent before its end, for one more call of `receive`."""
        with contextlib.suppress(OSError):
            self._channel.socket.setblocking(False)
            for _ in range(_MOST_KEPT // _JOINED_BYTES):
                self._data += self._channel.socket.recv(_JOINED_BYTES)

    def _send_queue(self) -> None:
        """Send the queued parts, also those of a message that an interrupt has stopped."""
        sock, counts = self._channel.socket, self._counts
        total = sum(map(len, self._unsent))
        if total <= _JOINED_BYTES and len(self._unsent) > 1:
            self._unsent = [b"".join(self._unsent)]
        while (sent := sum(counts)) < total:
            for part in self._unsent:
                if sent < len(part):
                    counts.extend(map(sock.send, (part[sent:] if sent else part,)))
                    break
                sent -= len(part)
        self._unsent, self._counts = [], []

    def receive(self, spins: bool = False) -> tuple[dict[str, Any], list[Any]]:
        """Return the next message with its arrays; raise LinkLostError as `send`.

        With ``spins`` the thread first polls for a message without sleeping, if the last one came soon.
        """
        try:
            if not self._data:
                self._wait(spins)
            while len(self._data) < 4:
                self._fill()
            end = 4 + self._channel.length_of(self._data[:4])
            while len(self._data) < end:
                self._fill()
            if not self._message:
                self._message.extend(map(self._decoded, (self._data[4:end],)))
            message = self._message[0]
            arrays: list[Any] = []
            if message.get("arrays") != []:
                if self._arrays is None:
                    self._arrays = [(array, []) for array in _empty(message.get("arrays"))]
                end = self._fill_arrays(self._arrays, end)
                arrays = [array for array, _ in self._arrays]
            # An interrupt before this line changes nothing, and the next call continues from there.
            self._data, self._message, self._arrays = self._data[end:], [], None
            return message, arrays
        except (OSError, HandshakeError) as error:
            self.close()  # the receiver could not tell the rest of this message from the next message
            raise self._lost(error) from None

    def _fill_arrays(self, arrays: list[tuple[Any, list[int]]], begin: int) -> int:
        """Fill arrays with data from `_data`, then from the socket; return the end in `_data`."""
        for array, counts in arrays:
            if not array.nbytes:
                continue
            view = memoryview(array.reshape(-1).view(np.uint8))
            here = min(len(self._data) - begin, len(view))
            view[:here] = self._data[begin : begin + here]
            begin += here
            while (at := here + sum(counts)) < len(view):
                counts.extend(map(self._channel.socket.recv_into, (view[at:],)))
                if not counts[-1]:
                    raise ConnectionResetError("the other side has closed the connection")
        return begin

    def _wait(self, spins: bool) -> None:
        """Wait for the first bytes of a message, which may take any time."""
        begun = time.monotonic()
        if spins and self._spins:
            until = begun + _SPIN_SECONDS
            while not (self._has_data() or time.monotonic() > until):
                os.sched_yield()
        while not self._data:
            if self._answers is not None and not self.has_reply(self._silence):
                self._check_answers()
                continue
            try:
                self._fill()
            except (TimeoutError, BlockingIOError):  # contextlib.suppress would take longer
                continue
        self._spins = time.monotonic() - begun < _SPIN_SECONDS

    def has_reply(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for data of the other side; return True if there are any."""
        if self._data or (not self._plain and self._channel.socket.pending()):  # type: ignore[attr-defined]
            return True
        return bool(self._poll.poll(None if math.isinf(seconds) else 1000 * seconds))

    def check(self) -> None:
        """Raise LinkLostError if the task of the other side is stopped or cut off."""
        try:
            self._check_answers()
        except OSError as error:
            self.close()
            raise self._lost(error) from None

    def _check_answers(self) -> None:
        if self._answers is not None and not self._answers():
            self.silent = True
            raise ConnectionAbortedError(
                "it is stopped or cut off, because it answers no new connection"
            )

    def _has_data(self) -> bool:
        """Return True if data has arrived; without TLS, also receive it."""
        if not self._plain:
            return bool(self._poll.poll(0))
        try:
            self._fill(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _fill(self, flags: int = 0) -> None:
        """Wait for data, and add it to the bytes that were received."""
        if not self._chunks:
            self._chunks.extend(map(self._channel.socket.recv, (_JOINED_BYTES,), (flags,)))
        if not self._chunks[0]:
            raise ConnectionResetError("the other side has closed the connection")
        self._data, self._chunks = self._data + self._chunks[0], []

    def _lost(self, error: Exception) -> LinkLostError:
        return LinkLostError(f"the connection to {self.task} has ended: {error}")

    @property
    def descriptor(self) -> int:
        """The file descriptor of the socket, or -1 if it is closed."""
        return self._channel.socket.fileno()

    def ended(self) -> bool:
        """Return True if one of the sides has closed the connection; do not wait for a call."""
        if self.descriptor < 0:
            return True
        if not self.lock.acquire(blocking=False):
            return False  # a call that runs notices the end, and may poll
        try:
            if not self._poll.poll(0):
                return False
            try:
                return self._channel.ended()
            finally:
                with contextlib.suppress(OSError):
                    self._set_timeout()
        finally:
            self.lock.release()

    def shut_down(self) -> None:
        """End the connection, which another thread uses; its call raises LinkLostError."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


def _parts_of(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the specs of arrays for a message, and their bytes."""
    contiguous = [np.asarray(array, order="C") for array in arrays]
    size = sum([array.nbytes for array in contiguous])
    if size > _MOST_BYTES:
        raise ValueError(f"a message has {size:,} bytes of arrays, and at most {_MOST_BYTES:,} fit")
    specs = [spec_of(array) for array in contiguous]
    if size <= _JOINED_BYTES:
        return specs, [array.tobytes() for array in contiguous]
    parts = [array.reshape(-1).view(np.uint8).data for array in contiguous if array.nbytes]
    return specs, parts


def _empty(specs: Any) -> list[Any]:
    """Return new arrays for the specs in a message, whose sum of bytes is bounded."""
    if not isinstance(specs, list) or len(specs) > _MOST_ARRAYS:
        raise HandshakeError("a message without a list of arrays")
    total, kinds = 0, []
    for spec in specs:
        shape, dtype = shape_and_dtype(spec)
        if not dtype.itemsize:
            raise HandshakeError("an array of elements without bytes")
        total += math.prod(max(1, n) for n in shape) * dtype.itemsize
        if total > _MOST_BYTES:
            raise HandshakeError(f"arrays of more than {_MOST_BYTES} bytes")
        kinds.append((shape, dtype))
    try:
        return [np.empty(shape, dtype) for shape, dtype in kinds]
    except (ValueError, MemoryError) as error:
        raise HandshakeError(f"arrays of {total} bytes: {error}") from None


def spec_of(array: Any) -> list[Any]:
    """Return the dtype and the shape of an array for a message."""
    return [_name_of(array.dtype), *array.shape]


def shape_and_dtype(spec: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and the dtype in a message."""
    if not isinstance(spec, list) or not spec or not isinstance(spec[0], str) or len(spec) > 65:
        raise HandshakeError("an array without dtype and shape")
    if any(type(n) is not int or not 0 <= n <= _MOST_BYTES for n in spec[1:]):
        raise HandshakeError("an array of a wrong shape")
    return tuple(spec[1:]), _dtype_of(spec[0])


@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    if dtype.kind == "V" and dtype == dtypes.bfloat16:
        return "bfloat16"
    if dtype.kind not in "biufcSU":
        raise TypeError(
            f"an array of dtype {dtype} cannot be sent between tasks: only numbers and texts can"
        )
    return str(dtype.str)


@functools.lru_cache(maxsize=64)
def _dtype_of(name: str) -> Any:
    if name == "bfloat16" and dtypes.bfloat16 is not None:
        return dtypes.bfloat16
    try:
        dtype = np.dtype(name) if len(name) <= 16 and name[1:2] in tuple("biufcSU") else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biufcSU":
        raise HandshakeError(f"an array of dtype {name[:40]!r}")
    return dtype


# Connections ----------------------------------------------------------------------------------------


#: The name of a task's Unix socket, in front of its address. Other hosts have other names. A program
#: of any user can take a name.
_UNIX_NAME = "\0pycollective parameter servers "
_UNIX_SECONDS = 3.0
#: The number of tasks that may connect at the same moment.
_AT_ONCE = 64


def _has_unix_socket(about: Description) -> bool:
    """Return True if a task has a Unix socket too: on Linux, without TLS, and if TCP is not forced."""
    return bool(about.host_id) and about.tls is None


def listen(address: str, enter: Enter) -> tuple[Sockets, HandshakeServer]:
    """Listen at an address, or at the socket from the launcher, for the other tasks' connections.

    Tasks of this host can connect to a Unix socket too, which needs less time for a message.
    """
    about = Description.of_environment(None, 0, 1, [address])
    sockets = Sockets(about)
    if _has_unix_socket(about):
        local = socket.socket(socket.AF_UNIX)
        try:
            local.bind(_UNIX_NAME + address)
            local.listen(1024)
        except OSError as error:
            _log.warning("no Unix socket for %s (%s): tasks of this host use TCP", address, error)
            local.close()
        else:
            sockets.serve(local, enter, connections=_AT_ONCE)
    try:
        sock = inherited(about) or sockets.listen_at_own_address()
    except BaseException:
        sockets.close()
        raise
    return sockets, sockets.serve(sock, enter, connections=_AT_ONCE)


def link_to(
    task: str,
    address: str,
    own_task: str,
    seconds: float | None = None,
    *,
    run: str = "",
    own_address: str = "",
) -> Link:
    """Return a connection of ``own_task`` to another task of the cluster; wait until that one listens.

    ``run`` is the run of the chief's program, if this task is the chief. ``own_address`` is the address
    at which a worker listens.
    """
    sockets = Sockets(Description.of_environment(None, 0, 1, [address]))
    seconds = JOIN_SECONDS if seconds is None else seconds
    deadline, pause = time.monotonic() + seconds, 0.001
    log_at = time.monotonic() + LOG_EVERY
    hello = {"purpose": PURPOSE, "task": own_task, "run": run, "address": own_address}

    def connected(hello: dict[str, Any], until: float) -> Channel:
        family, found = sockets.resolve()
        if _has_unix_socket(sockets.about):
            local = socket.socket(socket.AF_UNIX)
            local.settimeout(_UNIX_SECONDS)
            try:
                local.connect(_UNIX_NAME + address)
                # Another user's program could change arrays on their way to the task.
                if not secret.is_same_user(local):
                    raise HandshakeError("a program of another user has the task's name")
                return sockets.introduced(
                    local, hello, min(until, time.monotonic() + _UNIX_SECONDS)
                )
            except (OSError, HandshakeError):  # on another host, or no task of this cluster
                local.close()
        return sockets.reach(family, found, hello, until)

    def answers() -> bool:
        try:
            connected({**hello, "probe": True}, time.monotonic() + HANDSHAKE_SECONDS).close()
            return True
        except (OSError, HandshakeError):
            return False

    while True:
        try:
            until = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
            return Link(connected(hello, until), task, answers)
        except (OSError, HandshakeError) as error:
            now = time.monotonic()
            if now >= deadline or isinstance(error, Refused):
                raise UnavailableError(
                    f"{own_task} did not reach {task} at {address} within {seconds:g} s: {error}. Start "
                    "the same program as that task, with its own task in TF_CONFIG"
                ) from None
            if now >= log_at:
                _log.warning("%s still tries to reach %s at %s: %s", own_task, task, address, error)
                log_at = now + LOG_EVERY
            time.sleep(min(pause, deadline - now))
            pause = min(1.3 * pause, 1.0)
