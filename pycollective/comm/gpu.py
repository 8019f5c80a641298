"""Calls on arrays that lie on GPUs: by NCCL, by the project's own executor, or over the host.

At the first such call the ranks tell each other, through the engine for host arrays, which GPUs they
are on and whether they have NCCL; all of them then have the same engines.
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
from pycollective.comm.call import Call, Engine, GpuEngine
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
class Engines:
    """The engines that a rank makes its calls on GPU arrays with: the same ones on all ranks.

    Attributes
    ----------
    nccl : Nccl or None
        NCCL, if the ranks can use it together.
    own : DeviceExecutor or Staged
        The engine for calls that NCCL does not make.
    warning : str
        Said once, when a call goes over the host that NCCL does not make.
    """

    nccl: Nccl | None
    own: DeviceExecutor | Staged
    warning: str = ""

    @property
    def to_close(self) -> Sequence[GpuEngine]:
        """The engines that have to be closed, in this order."""
        return [one for one in (self.own, self.nccl) if isinstance(one, DeviceExecutor | Nccl)]

    @property
    def by_streams(self) -> bool:
        """True if calls are made in streams, so that no host waits for them."""
        return self.nccl is not None or isinstance(self.own, DeviceExecutor)

    def choose(self, call: Call) -> Engine:
        """Choose NCCL, which has algorithms of its own, unless a call names another algorithm."""
        if self.nccl is None:
            return self.own
        how = call.algorithm
        if how == "auto" or call.is_message or how == _DEFAULTS.get(call.collective):
            return self.nccl
        if self.warning:
            _log.warning(
                "algorithm %r of GPU arrays goes over the host's memory, which is slow: %s",
                how if isinstance(how, str) else how.name,
                self.warning,
            )
            self.warning = ""
        return self.own

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], seconds: float) -> Array | None:
        """Make an array in memory that NCCL has registered; None where there is none."""
        return None if self.nccl is None else self.nccl.empty(shape, dtype, seconds)


#: The algorithms that a call has if none is named, where that is not "auto".
_DEFAULTS = {
    "reduce": "tree", "gather": "direct", "scatter": "direct", "all_gather": "direct",
    "all_to_all": "direct",
}  # fmt: skip


def engines_for(member: Member, array: Array, make_group: Callable[[], Member]) -> Engines:
    """Return the engines for this rank's calls on GPU arrays; every rank comes here at its first one.

    That is NCCL, and where it cannot be used, or an algorithm is asked for by name, the device executor
    for ranks that are threads of one process; else the host. ``make_group`` makes a second group of the
    same ranks.

    Raises
    ------
    MismatchError
        Another rank has called something with a host array.
    NcclError
        The ranks have several versions of NCCL, or NCCL or CUDA refuses to work on one of them.
    """
    here = array_backend.device_of(array)[1]
    told = _told_by_all(member, lambda: _says(here), "make the first call on a GPU")
    why = _why_not(*zip(*(text.split("\n", 3) for text in told), strict=True))
    is_possible = on_device.is_possible(member)
    own = DeviceExecutor(member) if is_possible else Staged(member._core)
    if why:
        if member.rank == 0 and is_possible:
            _log.info("GPU arrays are reduced by pycollective's own device executor: %s", why)
        elif member.rank == 0:
            _log.warning(
                "GPU arrays go over the host's memory, which is slow, because NCCL cannot be used: "
                "%s; %s",
                why,
                on_device.why_not(member),
            )
        return Engines(None, own)
    library = nccl.library()
    ids = _told_by_all(
        member,
        lambda: "" if member.rank else library.unique_id().hex(),
        "make the identifier of NCCL's communicator",
    )
    by_nccl = Nccl(member, library, bytes.fromhex(ids[0]), here, make_group)
    return Engines(by_nccl, own, "" if is_possible or member.rank else on_device.why_not(member))


def _says(here: int) -> str:
    """Return what a rank tells of its NCCL and its GPU."""
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
    """Return why the ranks cannot use NCCL together, or nothing.

    Processes may share a GPU where NCCL is set so; each tells its number, or 0. Threads may not: the
    calls of two ranks would wait for each other in one stream.
    """
    for rank, problem in enumerate(problems):
        if problem:
            return f"rank {rank}: {problem}"
    if len(set(versions)) > 1:
        raise NcclError(
            "the ranks have several versions of NCCL, which do not talk to each other: "
            + ", ".join(f"rank {r} has {v}" for r, v in enumerate(versions))
        )
    for rank, gpu in enumerate(gpus):
        for other in range(rank):
            both = {processes[other], processes[rank]}
            if gpus[other] != gpu or (len(both) == 2 and "0" not in both):
                continue
            return f"ranks {other} and {rank} are on one GPU ({gpu}), which NCCL refuses"
    return ""


def _told_by_all(member: Member, say: Callable[[], str], what: str) -> list[str]:
    """Return what every rank has to say; where one fails at it, all raise why, and none waits for it."""
    failure = None
    try:
        text = f"={say()}"
    except Exception as error:
        failure, text = error, f"!{type(error).__name__}: {error}"
    told = exchange(member, text, what)
    for rank, said in enumerate(told):
        if said.startswith("!"):
            raise NcclError(f"rank {rank} cannot {what}: {said[1:]}") from failure
    return [said[1:] for said in told]
