"""The package's errors: those of TensorFlow's ``tf.errors``, and its own.

Each error of ``tf.errors`` is also a standard exception of Python that a program without TensorFlow
would expect. For example, `InvalidArgumentError` is a ValueError, and `OutOfRangeError` a
StopIteration. A failure between ranks is a `CollectiveError`, and also the error of ``tf.errors``
that TensorFlow raises in this case.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError as _FutureCancelledError
from typing import Any, ClassVar, TypeVar

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DataError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "MismatchError",
    "NcclError",
    "NcclNotFoundError",
    "NotAvailableError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "PeerLostError",
    "PermissionDeniedError",
    "RankError",
    "RendezvousError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]


class OpError(Exception):
    """Base class of the errors of ``tf.errors``.

    Parameters
    ----------
    *args
        The message, or the arguments of TensorFlow's constructors: node, operation, message.

    Attributes
    ----------
    message : str
        The message.
    node_def, op
        None, unless they were given.
    error_code : int
        TensorFlow's number of the error.
    """

    error_code: ClassVar[int] = 2

    def __init_subclass__(cls, code: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if code is not None:
            cls.error_code = code

    def __init__(
        self, *args: Any, node_def: Any = None, op: Any = None, message: str | None = None
    ) -> None:
        if message is not None:  # by TensorFlow's names
            args = (*args, *(node_def, op)[len(args) :], message)
        super().__init__(*args)
        given = args[:3] if len(args) >= 3 else (None, None, *args[:1])
        self.node_def, self.op = given[:2]
        self.message = str(given[2]) if len(given) == 3 else ""

    def __str__(self) -> str:
        return self.message


class CancelledError(OpError, _FutureCancelledError, code=1):
    """The call was cancelled."""


class UnknownError(OpError, RuntimeError, code=2):
    """An operation failed for an unknown reason."""


class InvalidArgumentError(OpError, ValueError, code=3):
    """An argument has an invalid value."""


class InvalidIndexError(InvalidArgumentError, IndexError, code=3):
    """An index is out of range."""


class DeadlineExceededError(OpError, TimeoutError, code=4):
    """The deadline passed before the operation was complete."""


class NotFoundError(OpError, LookupError, code=5):
    """A requested object does not exist."""


class AlreadyExistsError(OpError, RuntimeError, code=6):
    """An object that was to be made exists already."""


class PermissionDeniedError(OpError, RuntimeError, code=7):
    """The caller does not have the permission."""


class ResourceExhaustedError(OpError, MemoryError, code=8):
    """Memory or another resource is exhausted."""


class FailedPreconditionError(OpError, RuntimeError, code=9):
    """The call is not possible in the present state."""


class OutOfRangeError(OpError, StopIteration, code=11):
    """An iterator has come to its end."""


class UnimplementedError(OpError, NotImplementedError, code=12):
    """The call is not supported."""


class InternalError(OpError, RuntimeError, code=13):
    """An internal invariant was violated; this is a bug in pycollective."""


class UnavailableError(OpError, RuntimeError, code=14):
    """A task cannot be reached."""


class DataLossError(OpError, RuntimeError, code=15):
    """Data are lost or corrupt."""


class UnauthenticatedError(OpError, RuntimeError, code=16):
    """The caller is not authenticated."""


class NotAvailableError(UnimplementedError):
    """A class of TensorFlow that is not implemented here; the message names a replacement."""


class CollectiveError(RuntimeError):
    """A collective call failed; its communicator cannot be used again, but a new one can be made.

    The message is for people. Programs read the attributes, which pickling and copying keep. Ranks
    have their numbers in the group whose call failed, in ascending order.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that caused the failure; empty if they are unknown or outside the group. In groups
        of processes only the ranks below 4096.
    hosts : tuple of str
        The address at which this process reaches each of ``ranks``, or the name of this host; empty if
        the hosts are unknown.
    call : str or None
        The call or message that was under way in the rank that noticed the failure; in this rank, if
        the launcher noticed it.
    """

    def __init__(
        self,
        *args: object,
        ranks: Sequence[int] = (),
        hosts: Sequence[str] = (),
        call: str | None = None,
    ) -> None:
        super().__init__(*args)
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.call = call


class _OpAndCollective:
    """The constructor of errors that are both an `OpError` and a `CollectiveError`."""

    def __init__(
        self: Any,
        *args: Any,
        node_def: Any = None,
        op: Any = None,
        message: str | None = None,
        **about: Any,
    ) -> None:
        # Called here, because OSError's constructor ends the chain.
        OpError.__init__(self, *args, node_def=node_def, op=op, message=message)
        CollectiveError.__init__(self, *self.args, **about)


_Error = TypeVar("_Error", bound=CollectiveError)


def with_text(error: _Error, text: str) -> _Error:
    """Return a copy of an error, with the same attributes but another message."""
    again = copy.copy(error)
    again.args = (text,)
    if hasattr(again, "message"):  # an OpError
        again.message = text
    return again


class CollectiveTimeoutError(_OpAndCollective, DeadlineExceededError, CollectiveError):
    """A rank waited until its deadline; the message names the ranks and their last calls.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that have not joined the call, or that joined it and are silent. If neither is known,
        the ranks for which the waiting rank waited.
    hosts, call
        As in `CollectiveError`.
    """


class MismatchError(CollectiveError):
    """Ranks made different calls; the message names both.

    Attributes
    ----------
    calls : dict
        The call of each of ``ranks``; empty if the calls are unknown.
    ranks, hosts
        As in `CollectiveError`.
    """

    def __init__(
        self,
        *args: object,
        calls: Mapping[int, str] | None = None,
        ranks: Sequence[int] | None = None,
        hosts: Sequence[str] = (),
        call: str | None = None,
    ) -> None:
        ranks = sorted(calls or ()) if ranks is None else ranks
        super().__init__(*args, ranks=ranks, hosts=hosts, call=call)
        self.calls = dict(calls or {})


class PeerLostError(_OpAndCollective, UnavailableError, CollectiveError):
    """A rank ended, failed or became unreachable.

    Attributes
    ----------
    ranks : tuple of int
        The lost ranks.
    hosts, call
        As in `CollectiveError`.
    """


class AbortedError(_OpAndCollective, OpError, CollectiveError):
    """The group was aborted by another rank or by its owner.

    Attributes
    ----------
    ranks : tuple of int
        The rank that aborted the group, or that left a call because of its own error.
    hosts, call
        As in `CollectiveError`.
    """

    error_code = 10


class NcclError(CollectiveError):
    """A call of NCCL failed.

    Attributes
    ----------
    code : int
        NCCL's result (``ncclResult_t``); 0 if NCCL was not called.
    """

    code: int = 0


class NcclNotFoundError(NcclError):
    """No usable NCCL was found; the message lists the places searched and the reasons.

    Attributes
    ----------
    is_too_old : bool
        True if a library was found whose version is not supported.
    """

    is_too_old: bool = False


class DataError(ValueError):
    """A data file is missing, truncated or not valid."""


class RendezvousError(CollectiveError):
    """The group that the environment describes cannot be formed.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that did not join, or that ended.
    """


class RankError(CollectiveError):
    """A rank of `pycollective.spawn` failed.

    `spawn` raises this error for a rank that was killed or ended early. If a rank raised an error of
    its own, `spawn` raises that error, with this one as its ``__cause__``.

    Attributes
    ----------
    rank : int
        The rank that failed.
    exitcode : int or None
        The exit status of the rank's process, -n after signal n; None if the rank raised an error.
    traceback : str
        The rank's own traceback; empty if there is none.
    """

    def __init__(
        self, message: str = "", *, rank: int = -1, exitcode: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message, ranks=() if rank < 0 else (rank,))
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f'{text}\n"""\n{self.traceback.rstrip()}\n"""' if self.traceback else text


class CheckpointError(ValueError):
    """A checkpoint is missing, truncated, corrupt or does not match the object."""
