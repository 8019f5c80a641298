"""Hints for collectives."""

from __future__ import annotations

import enum
import sys

from pycollective.arguments import seconds, whole


class CommunicationImplementation(enum.Enum):
    """The library that moves data between devices.

    AUTO leaves the choice to pycollective. RING is a ring of the replicas. NCCL is NVIDIA's library. MPI
    is the MPI library whose ``mpirun`` started the workers; TensorFlow has no such member.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    MPI = "MPI"


class CommunicationOptions:
    """Hints for collectives.

    Parameters
    ----------
    bytes_per_pack : int
        The size above which a bucket of one call's arrays takes no further array; 0: one bucket.
    timeout_seconds : float, optional
        The deadline of each collective.
    implementation : CommunicationImplementation or str
        The library that moves the data.

    Raises
    ------
    TypeError
        ``bytes_per_pack`` or ``timeout_seconds`` is not a number.
    ValueError
        A value is out of range or unknown.
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        if whole("bytes_per_pack", bytes_per_pack, -sys.maxsize, sys.maxsize) < 0:
            raise ValueError(f"Argument `bytes_per_pack` must be >=0, Received {bytes_per_pack}.")
        if timeout_seconds is not None:
            seconds("timeout_seconds", timeout_seconds)
        if isinstance(implementation, str):
            implementation = CommunicationImplementation(implementation.upper())
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                "Argument `implementation` must be instance of "
                "`tf.distribute.experimental.CommunicationImplementation`."
            )
        self.bytes_per_pack = bytes_per_pack
        self.timeout_seconds = timeout_seconds
        self.implementation = implementation

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return a copy in which the values of ``options`` replace these, unless 0, None or AUTO."""
        if options is None:
            return self
        unset = CommunicationImplementation.AUTO
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if options.timeout_seconds is None else options.timeout_seconds,
            self.implementation if options.implementation is unset else options.implementation,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CommunicationOptions):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # the attributes can be changed

    def __repr__(self) -> str:
        return (
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack}, "
            f"timeout_seconds={self.timeout_seconds}, implementation={self.implementation.value!r})"
        )
