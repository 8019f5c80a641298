"""Small Python objects between ranks, as JSON or pickled."""

from __future__ import annotations

import json
import pickle as pickling
from typing import Any

import numpy as np

from pycollective.arguments import rank_number, switch, whole
from pycollective.comm.arrays import Array
from pycollective.comm.call import Call
from pycollective.comm.messages import Messages
from pycollective.comm.moves import Moves
from pycollective.errors import MismatchError

MOST_BYTES = 1 << 28
"""The most bytes of an encoded object."""

_JSON, _PICKLE = 0, 1
#: Takes the place of the dtype of headers, so that no call for arrays can be mistaken for one of these.
_LABEL = "object"


class Objects(Moves, Messages):
    """The calls of a `Communicator` that take Python objects instead of arrays.

    An object is sent as JSON: None, bools, numbers, strings, lists, dictionaries with strings as keys. A
    tuple arrives as a list. With ``pickle=True`` on every rank that takes part, it is pickled instead. A
    rank that unpickles runs code that any process with write access to the group can choose. Use
    ``pickle=True`` only among ranks that trust each other.
    """

    # Results can have any type, which only the program knows: they are annotated with Any.

    def broadcast_object(
        self, obj: object, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Give every rank the root's object.

        Parameters
        ----------
        obj : object
            On the root, the object to send. Ignored on other ranks.
        root : int
            The rank whose object is sent.
        pickle : bool
            Pickle instead of JSON, if all ranks trust each other; the same on every rank.
        timeout : float, optional
            Seconds to wait for the other ranks, in each part of the call.

        Returns
        -------
        object
            A copy, also on the root.

        Raises
        ------
        TypeError
            The object cannot be written as JSON. Other ranks wait until their deadline.
        ValueError
            The encoded object is longer than 256 MiB, or the object is nested too deeply for JSON.
        MismatchError
            The ranks differ in ``pickle``.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As in `all_reduce`.
        """
        pickle, root = switch("pickle", pickle), rank_number("root", root, self.size)
        data = _encoded(obj, pickle) if self.rank == root else np.empty(0, np.uint8)
        header = _header_of(data, pickle)
        seconds = self._seconds(timeout)
        self._run(
            Call("broadcast", header, header, seconds, root=root, count=header.size, label=_LABEL)
        )
        length = self._checked(header, pickle, root)
        given = data if self.rank == root else np.empty(length, np.uint8)
        return _decoded(self.broadcast(given, root, timeout=timeout), pickle)

    def all_gather_object(
        self, obj: object, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """Give every rank the objects of all ranks, in rank order.

        Parameters and errors are those of `broadcast_object`.
        """
        data, lengths = self._announced(obj, pickle, timeout)
        return _all_decoded(self.all_gather(data, ragged=True, timeout=timeout), lengths, pickle)

    def gather_object(
        self, obj: object, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any] | None:
        """Give the root the objects of all ranks, in rank order; other ranks get None.

        Parameters and errors are those of `broadcast_object`.
        """
        root = rank_number("root", root, self.size)
        data, lengths = self._announced(obj, pickle, timeout)
        joined = self.gather(data, root, ragged=True, timeout=timeout)
        return None if joined is None else _all_decoded(joined, lengths, pickle)

    def send_object(
        self, obj: object, dest: int, tag: int = 0, *, pickle: bool = False,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Send an object to another rank, which calls `recv_object`.

        ``dest`` and ``tag`` are those of `send`; ``pickle``, ``timeout`` and the errors are those of
        `broadcast_object`.
        """
        dest, tag = rank_number("dest", dest, self.size), whole("tag", tag, 0)
        data = _encoded(obj, switch("pickle", pickle))
        header, seconds = _header_of(data, pickle), self._seconds(timeout)
        self._run(Call("send", header, None, seconds, peer=dest, tag=tag, label=_LABEL))
        self.send(data, dest, tag, timeout=timeout)

    def recv_object(
        self, source: int, tag: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Return the object that another rank sends with `send_object`.

        ``source`` and ``tag`` are those of `recv`; ``pickle``, ``timeout`` and the errors are those of
        `broadcast_object`. A `MismatchError` is also raised if an array was sent; the group has then
        failed.
        """
        pickle, source = switch("pickle", pickle), rank_number("source", source, self.size)
        tag = whole("tag", tag, 0)
        header, seconds = np.empty(2, np.int64), self._seconds(timeout)
        self._run(Call("recv", None, header, seconds, peer=source, tag=tag, label=_LABEL))
        length = self._checked(header, pickle, source)
        data = self.recv(source=source, tag=tag, shape=length, dtype=np.uint8, timeout=timeout)
        return _decoded(data, pickle)

    def _announced(
        self, obj: object, pickle: bool, timeout: float | None
    ) -> tuple[Array, list[int]]:
        """Return this rank's encoded object, and the lengths of all ranks' encoded objects."""
        data = _encoded(obj, switch("pickle", pickle))
        row, seconds = _header_of(data, pickle).reshape(1, 2), self._seconds(timeout)
        headers = self._gathered(row, seconds, _LABEL)
        return data, [self._checked(header, pickle, rank) for rank, header in enumerate(headers)]

    def _checked(self, header: Array, pickle: bool, sender: int) -> int:
        """Return the length in a header; fail the group if the header is not valid here."""
        length, form = (int(n) for n in header)
        if form == (_PICKLE if pickle else _JSON) and 0 <= length <= MOST_BYTES:
            return length
        forms = {_JSON: "as JSON", _PICKLE: "pickled"}
        error = MismatchError(
            f"rank {sender} sends an object {forms.get(form, 'in an unknown form')} of {length} bytes, "
            f"but rank {self.rank} expects one {forms[int(pickle)]} of at most {MOST_BYTES}. Give the "
            "same pickle= on all ranks",
            ranks=(sender, self.rank),
            calls={
                sender: f"an object {forms.get(form, 'in an unknown form')}",
                self.rank: f"an object {forms[int(pickle)]}",
            },
        )
        self.abort(str(error))
        raise error


def _encoded(obj: object, pickle: bool) -> Array:
    data = pickling.dumps(obj) if pickle else _json_of(obj)
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"the object has {len(data)} bytes, more than {MOST_BYTES}: send large data as arrays"
        )
    return np.frombuffer(data, np.uint8)


def _json_of(obj: object) -> bytes:
    """Return an object as JSON, which has no keys but strings."""
    try:
        _check_keys(obj)
        return json.dumps(obj).encode()
    except TypeError as error:
        raise TypeError(
            f"{error}: send arrays with the calls for arrays, convert NumPy's numbers with item(), "
            "or give pickle=True on all ranks"
        ) from None
    except RecursionError:
        raise ValueError(
            "the object is nested too deeply for JSON, or contains itself: give pickle=True on all "
            "ranks"
        ) from None


def _check_keys(obj: object) -> None:
    """Raise TypeError for a key that JSON would turn into a string, perhaps that of another key."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(f"the keys of a dict must be strings in JSON, not {key!r}")
            _check_keys(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            _check_keys(value)


def _header_of(data: Array, pickle: bool) -> Array:
    return np.array([len(data), _PICKLE if pickle else _JSON], np.int64)


def _decoded(data: Array, pickle: bool) -> Any:
    return pickling.loads(data.tobytes()) if pickle else json.loads(data.tobytes())


def _all_decoded(joined: Array, lengths: list[int], pickle: bool) -> list[Any]:
    return [_decoded(part, pickle) for part in np.split(joined, np.cumsum(lengths[:-1]))]
