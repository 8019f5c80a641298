"""Small Python objects between ranks: as JSON, or pickled where the ranks trust each other."""

from __future__ import annotations

import json
import pickle as pickling
from typing import Any

import numpy as np

from pycollective.arguments import rank_number, switch, whole
from pycollective.comm.arrays import Array
from pycollective.comm.messages import Messages
from pycollective.comm.moves import Moves
from pycollective.errors import MismatchError

MOST_BYTES = 1 << 28
"""The greatest length of an object's text."""

_JSON, _PICKLE = 0, 1


class Objects(Moves, Messages):
    """The calls of a `Communicator` that take Python objects instead of arrays.

    An object travels as JSON: None, bools, numbers, strings, lists, dictionaries with strings as keys.
    A tuple arrives as a list. ``pickle=True`` pickles instead, on every rank that takes part. Whoever
    can write to this group can then run code on the rank that unpickles: give it only among ranks that
    trust each other. Nothing is unpickled without it.
    """

    # What arrives may be of any type, and the program knows of which: so the results are Any.

    def broadcast_object(
        self, obj: object, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Give every rank the root's object.

        Parameters
        ----------
        obj : object
            The root's is sent; the other ranks' is ignored.
        root : int
            The rank whose object it is.
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
            The root's object is none for JSON. The other ranks wait until their deadline.
        ValueError
            The text is longer than 256 MiB.
        MismatchError
            The ranks differ in ``pickle``.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As `broadcast`.
        """
        pickle, root = switch("pickle", pickle), rank_number("root", root, self.size)
        text = _text_of(obj, pickle) if self.rank == root else np.empty(0, np.uint8)
        head = self.broadcast(_head_of(text, pickle), root, timeout=timeout)
        length = self._checked(head, pickle, root)
        given = text if self.rank == root else np.empty(length, np.uint8)
        return _object_of(self.broadcast(given, root, timeout=timeout), pickle)

    def all_gather_object(
        self, obj: object, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """Give every rank the objects of all ranks.

        Parameters
        ----------
        obj : object
            This rank's.
        pickle, timeout
            As of `broadcast_object`.

        Returns
        -------
        list
            The objects, by rank.

        Raises
        ------
        TypeError, ValueError, MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            As `broadcast_object`.
        """
        text, lengths = self._told(obj, pickle, timeout)
        return _objects_of(self.all_gather(text, ragged=True, timeout=timeout), lengths, pickle)

    def gather_object(
        self, obj: object, root: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any] | None:
        """Give the root the objects of all ranks.

        Parameters
        ----------
        obj : object
            This rank's.
        root : int
            The rank that gets them.
        pickle, timeout
            As of `broadcast_object`.

        Returns
        -------
        list or None
            The objects, by rank, on the root; None on the other ranks.

        Raises
        ------
        TypeError, ValueError, MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            As `broadcast_object`.
        """
        root = rank_number("root", root, self.size)
        text, lengths = self._told(obj, pickle, timeout)
        texts = self.gather(text, root, ragged=True, timeout=timeout)
        return None if texts is None else _objects_of(texts, lengths, pickle)

    def send_object(
        self,
        obj: object,
        dest: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Send an object to another rank, which calls `recv_object`.

        Parameters
        ----------
        obj : object
            The object.
        dest, tag, timeout
            As of `send`.
        pickle : bool
            As of `broadcast_object`; the same on both ranks.

        Raises
        ------
        TypeError, ValueError
            As `broadcast_object`, and as `send`.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As `send`.
        """
        text = _text_of(obj, switch("pickle", pickle))
        self.send(_head_of(text, pickle), dest, tag, timeout=timeout)
        self.send(text, dest, tag, timeout=timeout)

    def recv_object(
        self, source: int, tag: int = 0, *, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive an object that another rank sends with `send_object`.

        Parameters
        ----------
        source, tag, timeout
            As of `recv`.
        pickle : bool
            Unpickle what was pickled, if this rank trusts the sender.

        Returns
        -------
        object
            A copy of what was sent.

        Raises
        ------
        MismatchError
            The ranks differ in ``pickle``, or an array was sent; the group has failed.
        ValueError, CollectiveTimeoutError, PeerLostError, AbortedError
            As `recv`.
        """
        pickle, source = switch("pickle", pickle), rank_number("source", source, self.size)
        tag = whole("tag", tag, 0)
        head = self.recv(source=source, tag=tag, shape=2, dtype=np.int64, timeout=timeout)
        length = self._checked(head, pickle, source)
        text = self.recv(source=source, tag=tag, shape=length, dtype=np.uint8, timeout=timeout)
        return _object_of(text, pickle)

    def _told(self, obj: object, pickle: bool, timeout: float | None) -> tuple[Array, list[int]]:
        """Return this rank's text, and the lengths of all ranks' texts."""
        text = _text_of(obj, switch("pickle", pickle))
        heads = self.all_gather(_head_of(text, pickle), timeout=timeout).reshape(-1, 2)
        return text, [self._checked(head, pickle, rank) for rank, head in enumerate(heads)]

    def _checked(self, head: Array, pickle: bool, sender: int) -> int:
        """Return the length that a rank has announced; fail the group unless it is one of a text."""
        length, form = (int(n) for n in head)
        if form == (_PICKLE if pickle else _JSON) and 0 <= length <= MOST_BYTES:
            return length
        forms = {_JSON: "as JSON", _PICKLE: "pickled"}
        error = MismatchError(
            f"rank {sender} sends an object {forms.get(form, 'in an unknown form')} of {length} bytes, "
            f"and rank {self.rank} takes one {forms[int(pickle)]} of at most {MOST_BYTES}: give the "
            "same pickle= on all ranks"
        )
        self.abort(str(error))
        raise error


def _text_of(obj: object, pickle: bool) -> Array:
    text = pickling.dumps(obj) if pickle else json.dumps(obj).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"the object has {len(text)} bytes, and may have {MOST_BYTES}: send large data as arrays"
        )
    return np.frombuffer(text, np.uint8)


def _head_of(text: Array, pickle: bool) -> Array:
    return np.array([len(text), _PICKLE if pickle else _JSON], np.int64)


def _object_of(text: Array, pickle: bool) -> Any:
    return pickling.loads(text.tobytes()) if pickle else json.loads(text.tobytes())


def _objects_of(texts: Array, lengths: list[int], pickle: bool) -> list[Any]:
    ends = np.cumsum(lengths)
    pairs = zip(lengths, ends, strict=True)
    return [_object_of(texts[end - length : end], pickle) for length, end in pairs]
