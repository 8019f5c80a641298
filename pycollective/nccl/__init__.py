"""NVIDIA's NCCL: the library, opened while the program runs, and communicators on it.

`Communicator` uses it by itself for arrays that lie on GPUs. What is here is below that: `library`
opens libnccl, whose calls stand in `pycollective._core.nccl` as they are; `NcclCommunicator` is one
rank of a communicator with streams, deadlines and a thread that watches it.
"""

from pycollective.nccl import device
from pycollective.nccl.communicator import NcclCommunicator, Operation, Peers
from pycollective.nccl.device_task import DeviceTask
from pycollective.nccl.loading import VARIABLE, library

__all__ = ["VARIABLE", "DeviceTask", "NcclCommunicator", "Operation", "Peers", "device", "library"]
