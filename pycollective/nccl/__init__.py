"""NVIDIA's NCCL: its library, opened at run time, and communicators.

`Communicator` uses NCCL for arrays on GPUs. `library` opens libnccl, whose functions are those of
`pycollective._core.nccl`. `NcclCommunicator` is one rank of an NCCL communicator with streams, deadlines
and a thread that watches for failures.
"""

from pycollective.nccl import device
from pycollective.nccl.communicator import NcclCommunicator, Operation, Peers
from pycollective.nccl.device_task import DeviceTask
from pycollective.nccl.loading import VARIABLE, library

__all__ = ["VARIABLE", "DeviceTask", "NcclCommunicator", "Operation", "Peers", "device", "library"]
