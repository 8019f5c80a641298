"""Classes of ``tf.distribute`` that are not available; their errors say what to use instead."""

from __future__ import annotations

from typing import Any, ClassVar

from pycollective.distribute.strategy import Strategy
from pycollective.errors import NotAvailableError

_NO_TPU = (
    "it needs TPU hardware, and pycollective runs on CPUs and GPUs. Use MirroredStrategy for the "
    "devices of one machine, OneDeviceStrategy for one of them"
)


class Unavailable:
    """Base class of names whose constructor raises an error.

    Raises
    ------
    NotAvailableError
        Always; a NotImplementedError.
    """

    #: The replacement, for the error.
    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotAvailableError(
            f"{type(self).__name__} is not available in pycollective: {self.instead}"
        )


class TPUStrategy(Unavailable, Strategy):
    """Training on TPUs."""

    instead = _NO_TPU


class TPUClusterResolver(Unavailable):
    """A resolver of TPU clusters."""

    instead = _NO_TPU

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise the error of the constructor."""
        return cls()


class RpcServer(Unavailable):
    """A server of functions for other processes."""

    instead = "use xmlrpc of Python's standard library, or grpcio"


class Client(Unavailable):
    """A client of functions in other processes."""

    instead = RpcServer.instead


class PreemptionWatcher(Unavailable):
    """A listener for the notice that this machine will be preempted."""

    instead = "the notice is a SIGTERM: catch it with Python's signal.signal"
