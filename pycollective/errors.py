"""The errors of the package: those of TensorFlow's ``tf.errors``, and our own, which belong to them.

Each name of ``tf.errors`` is also the error of Python's own that a program without TensorFlow would
raise there, so that both kinds of program catch it: `InvalidArgumentError` is a ValueError,
`OutOfRangeError` a StopIteration, `NotFoundError` a LookupError, and so on. What goes wrong between
ranks is a `CollectiveError`; it is also the error of ``tf.errors`` that TensorFlow raises for it.
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
        The message, or as TensorFlow's constructors take it: node, operation, message.

    Attributes
    ----------
    message : str
        What went wrong.
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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        given = args if len(args) == 3 else (None, None, *args[:1])
        self.node_def, self.op = given[:2]
        self.message = str(given[2]) if len(given) == 3 else ""

    def __str__(self) -> str:
        return self.message


class CancelledError(OpError, _FutureCancelledError, code=1):
    """The call was cancelled."""


class UnknownError(OpError, RuntimeError, code=2):
    """Something failed, and nothing says what it was."""


class InvalidArgumentError(OpError, ValueError, code=3):
    """An argument has a value that it cannot have."""


class DeadlineExceededError(OpError, TimeoutError, code=4):
    """The deadline came first."""


class NotFoundError(OpError, LookupError, code=5):
    """What was asked for is not there."""


class AlreadyExistsError(OpError, RuntimeError, code=6):
    """What was to be made is there already."""


class PermissionDeniedError(OpError, RuntimeError, code=7):
    """The caller may not do this."""


class ResourceExhaustedError(OpError, MemoryError, code=8):
    """There is not enough memory, or of something else."""


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
    """The caller has not shown who it is."""


class NotAvailableError(UnimplementedError):
    """A class of TensorFlow whose name is here, but whose machinery is not; says what to use."""


class CollectiveError(RuntimeError):
    """A collective call failed; its communicator is dead, and a new one can be made.

    The message is for people. Programs read the attributes, which pickling and copying keep. Ranks
    have their numbers in the group whose call failed, in ascending order.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that the error is about; empty where they are unknown or outside the group. Of groups
        of processes, the ranks below 4096.
    hosts : tuple of str
        For each of ``ranks`` the address at which this process reaches it, or the name of this host;
        empty where the hosts are unknown.
    call : str or None
        The call or the message that was under way in the rank that noticed the failure.
    """

    def __init__(
        self,
        *args: Any,
        ranks: Sequence[int] = (),
        hosts: Sequence[str] = (),
        call: str | None = None,
    ) -> None:
        super().__init__(*args)
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.call = call


class _OpAndCollective:
    """The constructor of errors that have both bases."""

    def __init__(self: Any, *args: Any, **about: Any) -> None:
        OpError.__init__(self, *args)  # which does not get past OSError in the order of the bases
        CollectiveError.__init__(self, *args, **about)


_Error = TypeVar("_Error", bound=CollectiveError)


def with_text(error: _Error, text: str) -> _Error:
    """Return an error of the same class and with the same attributes, but with another message."""
    again = copy.copy(error)
    again.args = (text,)
    if hasattr(again, "message"):  # of an OpError
        again.message = text
    return again


class CollectiveTimeoutError(_OpAndCollective, DeadlineExceededError, CollectiveError):
    """A rank waited until its deadline; the message says for whom and what each was doing.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that have not come to the call, or that came and are silent; where neither is known,
        the ranks that the waiting rank waited for.
    hosts, call
        As of `CollectiveError`.
    """


class MismatchError(CollectiveError):
    """Ranks made calls that do not belong together; the message names both calls.

    Attributes
    ----------
    calls : dict
        What each of ``ranks`` called, by rank; empty where the calls are unknown.
    ranks, hosts
        As of `CollectiveError`.
    """

    def __init__(self, *args: Any, calls: Mapping[int, str] | None = None, **about: Any) -> None:
        super().__init__(*args, **{"ranks": sorted(calls or ()), **about})
        self.calls = dict(calls or {})


class PeerLostError(_OpAndCollective, UnavailableError, CollectiveError):
    """A rank ended, failed or cannot be reached any more.

    Attributes
    ----------
    ranks : tuple of int
        The lost ranks.
    hosts, call
        As of `CollectiveError`.
    """


class AbortedError(_OpAndCollective, OpError, CollectiveError):
    """The group was aborted by another rank or by its owner.

    Attributes
    ----------
    ranks : tuple of int
        The rank that aborted the group, or that left a call because of an error of its own.
    hosts, call
        As of `CollectiveError`.
    """

    error_code = 10


class NcclError(CollectiveError):
    """A call of NCCL failed.

    Attributes
    ----------
    code : int
        NCCL's result (``ncclResult_t``); 0 where NCCL was not called.
    """

    code: int = 0


class NcclNotFoundError(NcclError):
    """There is no NCCL that can be used; the message says where it was looked for, and why not.

    Attributes
    ----------
    is_too_old : bool
        Whether the library was found, and is of a version that cannot be used.
    """

    is_too_old: bool = False


class DataError(ValueError):
    """A data file is missing, truncated or not what it should be."""


class RendezvousError(CollectiveError):
    """The group cannot be made as the environment describes it.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that did not come, or that ended.
    """


class RankError(CollectiveError):
    """A rank of `pycollective.spawn` failed.

    `spawn` raises it for a rank that was killed or ended early. It is the ``__cause__`` of an error
    that a rank itself raised.

    Attributes
    ----------
    rank : int
        The rank that failed.
    exitcode : int or None
        The status with which the rank's process ended, -n after signal n; None after an error.
    traceback : str
        The rank's own traceback; empty where there is none.
    """

    def __init__(
        self, message: str = "", *, rank: int = -1, exitcode: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f'{text}\n"""\n{self.traceback.rstrip()}\n"""' if self.traceback else text


class CheckpointError(ValueError):
    """A checkpoint is missing, truncated, corrupt or does not fit."""
