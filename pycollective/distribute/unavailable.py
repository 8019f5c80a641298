"""Classes of ``tf.distribute`` whose machinery is not here: making one says what to use instead."""

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
    "Unavailable",
]

_PROCESSES = (
    "for several replicas in one process use MirroredStrategy; among processes, start them with "
    "`pycollective run` and reduce gradients with the communicator that pycollective.init() returns"
)


class Unavailable:
    """A class that cannot be made.

    Raises
    ------
    NotAvailableError
        Always; a NotImplementedError.
    """

    #: What to use instead.
    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotAvailableError(
            f"{type(self).__name__} is not available in pycollective: {self.instead}"
        )


class ParameterServerStrategy(Unavailable, Strategy):
    """Asynchronous training with variables on parameter servers."""

    instead = _PROCESSES


class ClusterCoordinator(Unavailable):
    """Schedules functions on the workers of a `ParameterServerStrategy`."""

    instead = _PROCESSES


class RemoteValue(Unavailable):
    """The result of a function that a `ClusterCoordinator` scheduled."""

    instead = "only a ClusterCoordinator makes one, and that is not available; call the function"


class PerWorkerValue(Unavailable):
    """A value for each worker of a `ClusterCoordinator`."""

    instead = (
        "only a ClusterCoordinator makes one, and that is not available; values of replicas are "
        "PerReplica, see Strategy.experimental_distribute_values_from_function"
    )


class Server(Unavailable):
    """The server of a task in a cluster."""

    instead = (
        "no task needs one; `pycollective run` starts processes, and in each of them "
        "pycollective.init() joins the group"
    )


class RpcServer(Unavailable):
    """Offers functions to other processes."""

    instead = "use xmlrpc of Python's standard library, or grpcio"


class Client(Unavailable):
    """Calls functions that other processes offer."""

    instead = RpcServer.instead


class PreemptionWatcher(Unavailable):
    """Watches for the message that this machine is to be taken away."""

    instead = "the message comes as a SIGTERM: catch it with Python's signal.signal"
