"""``pycollective doctor``: what this process would join, what is wrong with it, how fast links are."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import time
from typing import Any

import numpy as np

from pycollective import _core, array_backend, nccl
from pycollective.cli import options
from pycollective.cluster.membership import (
    Membership,
    membership_of,
    problems,
    resolver_of_environment,
)
from pycollective.communicator import Communicator, on_device
from pycollective.distribute.blas_threads import available_cores
from pycollective.distribute.multi_worker import join_workers
from pycollective.errors import NcclNotFoundError, RendezvousError
from pycollective.nccl.loading import require_cuda
from pycollective.nn import cudnn
from pycollective.rendezvous import LISTENER

__all__ = ["add_parser"]

_DESCRIPTION = """\
Say what MultiWorkerMirroredStrategy() would use here: where the description of the cluster comes from,
which worker this is, what is wrong with the addresses. With several workers, run the command on each of
them, as the training program would be: they meet, and every link between two of them is measured. Where
they do not meet, every address is tried out, and it is said whether nobody listens there or a firewall
swallows packets.
"""

_EPILOG = """\
examples:
  pycollective doctor
  pycollective run -n 2 -m pycollective doctor
  TF_CONFIG='{"cluster": {"worker": ["a:9000", "b:9000"]}, "task": {"type": "worker", "index": 0}}' \\
      pycollective doctor --timeout 60
"""

_PINGS = 200
_BULK = 4 << 20
_PROBE_SECONDS = 3.0


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = commands.add_parser(
        "doctor",
        help="say which cluster this process belongs to, and test its links",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--timeout",
        type=options.seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the other workers (default: %(default)g)",
    )
    p.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if something is wrong."""
    gpus, why = array_backend.gpu_count()
    cuda = "with CUDA" if _core.cuda.runtime_version() else "without CUDA"
    print(f"host: {platform.node()}, {available_cores()} cores, {gpus} GPUs; core {cuda}")
    for line in _gpus(gpus) if gpus else [f"no GPU: {why or 'CUDA sees none'}"]:
        print(line)
    try:
        resolver = resolver_of_environment()
        member = None if resolver is None else membership_of(resolver)
    except ValueError as error:
        print(f"cluster: WRONG: {error}")
        return 1
    if resolver is None:
        print("cluster: none: no variable names one; this process trains alone")
        return 0
    if member is None or member.size == 1:
        task = f"{resolver.task_type} {resolver.task_id}"
        print(f"cluster: {type(resolver).__name__}: {task} trains alone")
        return 0
    print(f"cluster: {member.source}: {member.size} workers, this is {member.names[member.rank]}")
    for rank, name in enumerate(member.names[: len(member.addresses)]):
        print(f"  {name}: {member.addresses[rank]}{', this process' * (rank == member.rank)}")
    found = problems(member, listens=LISTENER in os.environ)
    for problem in found:
        print(f"  WRONG: {problem}")
    print(
        f"waiting up to {args.timeout:g} s for the others, which must run this command too",
        flush=True,
    )
    try:
        communicator = join_workers(member, args.timeout)
    except RendezvousError as error:
        print(f"WRONG: {error}")
        for line in _tried_out(member):
            print(f"  {line}")
        return 1
    try:
        print(f"met: {communicator}, hosts by worker: {communicator.hosts}")
        for line in _links(communicator, member):
            print(line)
    finally:
        communicator.close()
    return bool(found)


def _gpus(count: int) -> list[str]:
    """Return what trains on GPUs here, and by what."""
    version = nccl.device.driver_version()
    lines = [f"  GPU {i}: {nccl.device.description(i)}" for i in range(count)]
    lines.append(
        f"on GPUs: CuPy {nccl.device.library_version()}, a driver for CUDA {version // 1000}."
        f"{version % 1000 // 10} and older"
    )
    found = cudnn.library_version()
    lines.append(
        f"convolution on GPUs: cuDNN {found}"
        if found
        else "convolution on GPUs: by patches and cuBLAS; faster with cuDNN: "
        "pip install nvidia-cudnn-frontend, and nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
    )
    lines.append(f"between GPUs: {_nccl()}")
    return lines


def _nccl() -> str:
    try:
        found = nccl.library()
        require_cuda(found, nccl.device.driver_version())
    except NcclNotFoundError as error:
        way = "over the host" if on_device.runtime() is None else "threads by the core's kernels"
        return f"no NCCL, so {way}: {error}"
    return f"NCCL {found.version_text}, {found.path}"


def _tried_out(member: Membership) -> list[str]:
    """Return what becomes of a connection to each other worker's address."""
    lines = []
    for rank, (name, address) in enumerate(zip(member.names, member.addresses, strict=False)):
        if rank == member.rank:
            continue
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
            outcome = "somebody listens there"
        except ConnectionRefusedError:
            outcome = "the host answers, and nobody listens: not started yet, or gone"
        except TimeoutError:
            outcome = "no answer: a firewall, or another host's address"
        except OSError as error:
            outcome = str(error.strerror or error)
        lines.append(f"{name} at {address}: {outcome}")
    return lines


def _links(communicator: Communicator, member: Membership) -> list[str]:
    """Measure every link, one after the other; return a line for each of this worker's, or all."""
    lines = []
    for a in range(communicator.size):
        for b in range(a + 1, communicator.size):
            communicator.barrier()
            numbers = np.zeros(2)
            if communicator.rank in (a, b):
                numbers[:] = _measured(communicator, a + b - communicator.rank)
            latency, speed = communicator.broadcast(numbers, root=a)
            if communicator.rank in (0, a, b):
                lines.append(_line(member.names[a], member.names[b], latency, speed))
    return lines


def _line(a: str, b: str, latency: float, speed: float) -> str:
    return f"  {a} - {b}: {latency * 1e6:.1f} µs one way, {speed / 1e6:.0f} MB/s"


def _measured(communicator: Communicator, peer: int) -> tuple[float, float]:
    """Return the time of a small message to a peer, which does the same, and the bytes per second."""
    small, large = np.zeros(1), np.zeros(_BULK, np.uint8)
    times = {}
    for message, rounds in ((small, _PINGS), (large, 5)):
        taken = []
        for _ in range(rounds):
            begin = time.perf_counter()
            if communicator.rank < peer:
                communicator.send(message, peer)
                communicator.recv(message, peer)
            else:
                communicator.recv(message, peer)
                communicator.send(message, peer)
            taken.append(time.perf_counter() - begin)
        times[message.nbytes] = float(np.median(taken)) / 2
    return times[small.nbytes], _BULK / times[_BULK]
