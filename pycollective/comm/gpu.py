"""The choice of the engine for GPU arrays: NCCL, the device executor, or copies in host memory.

At the first call on a GPU array, the ranks exchange their GPUs and their versions of NCCL through the
engine for host arrays. All ranks then use the same engines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import array_backend, nccl
from pycollective.comm import on_device
from pycollective.comm.arrays import Array
from pycollective.comm.by_nccl import Nccl, exchange
from pycollective.comm.call import Call, Engine, GpuEngine, GpuEngines
from pycollective.comm.member import Member
from pycollective.comm.on_device import DeviceExecutor
from pycollective.comm.staged import Staged
from pycollective.errors import (
    NcclError,
    NcclNotFoundError,
)
from pycollective.nccl import device
from pycollective.nccl.loading import may_share_gpus, require_cuda

_log = logging.getLogger("pycollective")


@dataclass
class Engines(GpuEngines):
    """The engines for a rank's calls on GPU arrays, the same on all ranks.

    Attributes
    ----------
    nccl : Nccl or None
        NCCL, if all ranks can use it.
    own : DeviceExecutor or Staged
        The engine for calls that NCCL does not support.
    warning : str
        The warning to log when a call first goes through host memory instead of NCCL.
    """

    nccl: Nccl | None
    own: DeviceExecutor | Staged
    warning: str = ""

    @property
    def to_close(self) -> Sequence[GpuEngine]:
        return [one for one in (self.own, self.nccl) if isinstance(one, DeviceExecutor | Nccl)]

    @property
    def by_streams(self) -> bool:
        return self.nccl is not None or isinstance(self.own, DeviceExecutor)

    def choose(self, call: Call) -> Engine:
        """Choose NCCL, which has its own algorithms, unless the call's algorithm excludes it."""
        if self.nccl is None:
            return self.own
        how = call.algorithm
        if how == "auto" or call.is_message or how == _BY_NCCL.get(call.collective):
            return self.nccl
        if self.warning:
            _log.warning(
                "algorithm %r of GPU arrays copies them through host memory, which is slow: %s",
                how if isinstance(how, str) else how.name,
                self.warning,
            )
            self.warning = ""
        return self.own

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], seconds: float) -> Array | None:
        return None if self.nccl is None else self.nccl.empty(shape, dtype, seconds)


#: The default algorithms of calls that have no "auto": with them a call goes to NCCL, too.
_BY_NCCL = {"gather": "direct", "scatter": "direct", "all_to_all": "direct"}


def engines_for(member: Member, array: Array, make_group: Callable[[], Member]) -> Engines:
    """Choose the engines for this rank's calls on GPU arrays.

    All ranks choose in their first such call. NCCL comes first. If it cannot be used, and for
    algorithms by name, the device executor serves ranks that are threads of one process. Otherwise
    arrays are copied through host memory. ``make_group`` makes a second group of the same ranks.

    Raises
    ------
    MismatchError
        Another rank has given a host array to its call.
    NcclError
        The ranks have different versions of NCCL, or NCCL or CUDA fails on a rank.
    """
    here = array_backend.device_of(array)[1]
    texts = _exchanged(member, lambda: _description(here), "make the first call on a GPU")
    why = _why_not(*zip(*(text.split("\n", 3) for text in texts), strict=True))
    is_possible = on_device.is_possible(member)
    own = DeviceExecutor(member) if is_possible else Staged(member._core)
    if why:
        if member.rank == 0 and is_possible:
            _log.info("pycollective's device executor handles GPU arrays, not NCCL: %s", why)
        elif member.rank == 0:
            _log.warning(
                "GPU arrays are copied through host memory, which is slow. NCCL cannot be used: %s; %s",
                why,
                on_device.why_not(member),
            )
        return Engines(None, own)
    library = nccl.library()
    ids = _exchanged(
        member,
        lambda: "" if member.rank else library.unique_id().hex(),
        "make the identifier of NCCL's communicator",
    )
    by_nccl = Nccl(member, library, bytes.fromhex(ids[0]), here, make_group)
    return Engines(by_nccl, own, "" if is_possible or member.rank else on_device.why_not(member))


def _description(here: int) -> str:
    """Return a text about this rank's NCCL and GPU, for `_why_not`."""
    problem, version, gpu, process = "", 0, "", 0
    try:
        library = nccl.library()
        require_cuda(library, device.driver_version())
        version, gpu = library.version, device.identity(here)
        process = os.getpid() if may_share_gpus(library) else 0
    except NcclNotFoundError as error:
        problem = str(error)
    return f"{version}\n{gpu}\n{process}\n{problem}"


def _why_not(
    versions: Sequence[str], gpus: Sequence[str], processes: Sequence[str], problems: Sequence[str]
) -> str:
    """Return the reason why the ranks cannot use NCCL together, or "".

    ``processes`` has the number of each rank's process if NCCL lets processes share a GPU, else 0.
    Threads cannot share a GPU: calls of two ranks would wait for each other in one stream.
    """
    for rank, problem in enumerate(problems):
        if problem:
            return f"rank {rank}: {problem}"
    if len(set(versions)) > 1:
        raise NcclError(
            "the ranks have different versions of NCCL; install the same version on all: "
            + ", ".join(f"rank {r} has {v}" for r, v in enumerate(versions))
        )
    for rank, gpu in enumerate(gpus):
        for other in range(rank):
            both = {processes[other], processes[rank]}
            if gpus[other] != gpu or (len(both) == 2 and "0" not in both):
                continue
            return f"ranks {other} and {rank} share a GPU ({gpu}), which NCCL does not support"
    return ""


def _exchanged(member: Member, describe: Callable[[], str], what: str) -> list[str]:
    """Return the texts of all ranks; if ``describe`` fails on one rank, raise its error on all."""
    failure = None
    try:
        text = f"={describe()}"
    except Exception as error:
        failure, text = error, f"!{type(error).__name__}: {error}"
    texts = exchange(member, text, what)
    for rank, other in enumerate(texts):
        if other.startswith("!"):
            raise NcclError(f"rank {rank} cannot {what}: {other[1:]}") from failure
    return [other[1:] for other in texts]
