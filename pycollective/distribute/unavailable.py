"""Classes of ``tf.distribute`` that are not available; their errors say what to use instead."""

from __future__ import annotations

from typing import Any, ClassVar

from pycollective.distribute.strategy import Strategy
from pycollective.errors import NotAvailableError

__all__ = [
    "Client",
    "ClusterCoordinator",
    "ParameterServerStrategy",
    "PerWorkerValue",
    "PreemptionWatcher",
    "RemoteValue",
    "RpcServer",
    "Server",
    "TPUClusterResolver",
    "TPUStrategy",
    "Unavailable",
]

_PROCESSES = (
    "for several replicas in one process use MirroredStrategy; among processes, start them with "
    "`pycollective run` and reduce gradients with the communicator that pycollective.init() returns"
)


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


class ParameterServerStrategy(Unavailable, Strategy):
    """Asynchronous training with variables on parameter servers."""

    instead = _PROCESSES


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


class ClusterCoordinator(Unavailable):
    """Schedules functions on the workers of a `ParameterServerStrategy`."""

    instead = _PROCESSES


class RemoteValue(Unavailable):
    """The result of a function that a `ClusterCoordinator` scheduled."""

    instead = "only a ClusterCoordinator returns one, and it is not available; call the function"


class PerWorkerValue(Unavailable):
    """A value for each worker of a `ClusterCoordinator`."""

    instead = (
        "only a ClusterCoordinator returns one, and it is not available; values of replicas are "
        "PerReplica, see Strategy.experimental_distribute_values_from_function"
    )


class Server(Unavailable):
    """The server of a task in a cluster."""

    instead = (
        "no task needs one; `pycollective run` starts processes, and in each of them "
        "pycollective.init() joins the group"
    )


class RpcServer(Unavailable):
    """A server of functions for other processes."""

    instead = "use xmlrpc of Python's standard library, or grpcio"


class Client(Unavailable):
    """A client of functions in other processes."""

    instead = RpcServer.instead


class PreemptionWatcher(Unavailable):
    """A listener for the notice that this machine will be preempted."""

    instead = "the notice is a SIGTERM: catch it with Python's signal.signal"
