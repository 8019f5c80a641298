"""Ranks that die, stall or leave, and errors of NCCL: no rank hangs, and messages name the rank."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pycollective import local_group, missed
from pycollective.comm import gpu, watch
from pycollective.errors import AbortedError, CollectiveError, NcclError, PeerLostError
from pycollective.nccl import communicator as watching
from pycollective.nccl import device_task


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """Shorten the intervals and waits of the threads that watch NCCL and the other ranks."""
    gc.collect()  # closes communicators of earlier tests
    monkeypatch.setattr(watching, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(watching, "_CAUSE_SECONDS", 0.1)
    monkeypatch.setattr(watch.Watch, "SECONDS", 0.02)
    monkeypatch.setattr(watch.Watch, "GRACE", 0.1)


class Failing:
    """An object of NCCL's binding in which some methods fail."""

    def __init__(self, whole, *failing):
        self._whole, self._failing = whole, failing

    def __getattr__(self, name):
        if name not in self._failing:
            return getattr(self._whole, name)

        def fail(*_):
            raise NcclError(f"{name} fails")

        return fail


def ones(gpus):
    return gpus.asarray(np.ones(4, np.float32))


def begun(c, gpus):
    """Make the first call, which makes NCCL's communicator."""
    c.all_reduce(ones(gpus))
    return c


def aborted(gpus):
    return sorted(line for line in gpus.log() if "CommAbort" in line)


def test_error_of_an_nccl_call_raises_on_all_ranks(gpus, on_gpus):
    failed = threading.Event()

    def work(c):
        begun(c, gpus).barrier()
        if c.rank == 0:
            gpus.cuda.library.fake_fail_next(6)
            try:
                c.all_reduce(ones(gpus))
            except NcclError as error:
                failed.set()
                return error
        failed.wait(20)  # so that rank 0 fails first
        while True:  # the other rank raises it, at the latest in its next call
            c.all_reduce(ones(gpus))
            time.sleep(0.01)

    first, other = on_gpus(local_group(2, timeout=20), work)
    assert first.code == 6 and "ncclAllReduce failed: remote process exited" in str(first)
    assert "rank 0, all_reduce(float32[4], sum)" in str(first)
    assert isinstance(other, AbortedError) and "rank 0, all_reduce(float32[4], sum)" in str(other)
    assert aborted(gpus) == ["rank 0: CommAbort", "rank 1: CommAbort"]


def test_asynchronous_nccl_error_raises_on_all_ranks(gpus, on_gpus):
    def work(c):
        begun(c, gpus).barrier()
        if c.rank == 0:
            gpus.cuda.library.fake_async_error(0, 6)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                c.all_reduce(ones(gpus))
            except CollectiveError as error:
                return error
            time.sleep(0.01)

    first, other = on_gpus(local_group(2, timeout=20), work)
    assert isinstance(first, NcclError) and first.code in (0, 6)
    assert "remote process exited" in str(first)  # by the call, or by the watching thread
    assert isinstance(other, AbortedError)
    assert aborted(gpus) == ["rank 0: CommAbort", "rank 1: CommAbort"]


def test_failed_device_ends_waits_and_close(gpus, on_gpus):
    """After an illegal access, events never happen: CUDA gives an error for each query."""

    def work(c):
        begun(c, gpus)
        later = c.all_reduce(ones(gpus), async_op=True)
        gpus.cuda.failed = True
        begin = time.monotonic()
        try:
            while not later.done():
                time.sleep(0.01)
            error = later.exception()
        except NcclError as found:
            error = found
        c.close()
        return error, time.monotonic() - begin

    ((error, seconds),) = on_gpus(local_group(1, timeout=600), work)
    assert isinstance(error, NcclError) and "cudaErrorIllegalAddress" in str(error)
    assert seconds < 60


@pytest.mark.slow
def test_missing_rank_raises_peer_lost_error(gpus, on_gpus):
    """The error names the rank, and the aborted call has no result."""

    def work(c):
        begun(c, gpus)
        until = time.monotonic() + 20
        while c._gpu.nccl._watch._counts != [1, 1, 1]:  # heartbeats exchange the counts
            assert time.monotonic() < until
            time.sleep(0.01)
        c.barrier()
        if c.rank == 2:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                c._gpu.nccl._nccl.check()
                time.sleep(0.01)
        later = c.all_reduce(ones(gpus), async_op=True, timeout=4)
        until = time.monotonic() + 20
        while not later.done() and time.monotonic() < until:
            time.sleep(0.01)
        return later.exception()

    found = on_gpus(local_group(3, timeout=20), work)
    for error in found[:2]:
        assert isinstance(error, PeerLostError), error
        assert "waited 4 s for all_reduce(float32[4], sum) on GPU" in str(error)
        assert "rank 2 has made 1 of 2 calls on GPUs" in str(error)
        assert error.ranks == (2,)
        assert error.call == "all_reduce(float32[4], sum)"
    assert isinstance(found[2], CollectiveError) and "rank 2 has made 1 of 2" in str(found[2])
    assert len(aborted(gpus)) == 3


def test_rank_without_elements_counts_its_calls(gpus, on_gpus):
    """A rank without elements is not named when another rank is late."""

    def work(c):
        x = ones(gpus)[: 4 * (c.rank != 1)]
        for _ in range(3):
            c.gather(x, 0, ragged=True)
            c.all_reduce(x[:0])
        c.barrier()
        return c._gpu.nccl._nccl.calls

    assert on_gpus(local_group(3, timeout=20), work) == [6] * 3


def test_heartbeats_ignore_timeouts_of_calls(gpus, on_gpus):
    """A rank whose heartbeat is late is not lost, however short the timeouts of calls are."""

    def work(c):
        heartbeats = begun(c, gpus)._gpu.nccl._watch
        heartbeats._own.timeout = 0.05
        c.barrier()
        if c.rank == 1:
            with heartbeats._lock:  # its watching thread waits
                time.sleep(0.3)
        c.barrier()
        failure = heartbeats._failure
        c.barrier()  # a rank that leaves earlier would be a failure to the other
        return failure

    assert on_gpus(local_group(2, timeout=20), work) == [None, None]


@pytest.mark.slow
def test_hanging_devices_raise_timeout_error(gpus, on_gpus):
    def work(c):
        begun(c, gpus).barrier()
        gpus.cuda.library.fake_stall(1)
        c.barrier()
        c.all_reduce(ones(gpus), timeout=2.0)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            c._gpu.nccl._nccl.check()
            time.sleep(0.01)

    for error in on_gpus(local_group(2, timeout=20), work):
        assert isinstance(error, CollectiveError) and "or a device hangs" in str(error)


def test_leaving_rank_raises_peer_lost_error(gpus, on_gpus):
    def work(c):
        begun(c, gpus)
        if c.rank == 0:
            c.close()
            return None
        until = time.monotonic() + 20
        while time.monotonic() < until:
            c.all_reduce(ones(gpus))
            c._gpu.nccl._nccl.check()
            time.sleep(0.05)

    error = on_gpus(local_group(2, timeout=20), work)[1]
    assert isinstance(error, PeerLostError) and "rank 0 has closed its communicator" in str(error)
    assert (error.ranks, error.hosts) == ((0,), (platform.node(),))
    assert aborted(gpus) == ["rank 1: CommAbort"]
    assert "rank 0: CommDestroy" in gpus.log()


def test_abort_ends_calls_on_gpus(gpus, on_gpus):
    def work(c):
        begun(c, gpus).barrier()
        if c.rank == 0:
            c.abort("enough of it")
        until = time.monotonic() + 20
        while time.monotonic() < until:
            c._gpu.nccl._nccl.check()
            time.sleep(0.01)

    for error in on_gpus(local_group(2, timeout=20), work):
        assert isinstance(error, AbortedError) and "enough of it" in str(error)
    assert len(aborted(gpus)) == 2


def test_new_group_after_a_failure_works(gpus, on_gpus):
    on_gpus(local_group(2, timeout=20), lambda c: begun(c, gpus).abort("over"))
    found = on_gpus(
        local_group(2, timeout=20), lambda c: gpus.asnumpy(c.all_reduce(ones(gpus))).tolist()
    )
    assert found == [[2.0] * 4] * 2


def test_nccl_init_error_raises(gpus, on_gpus):
    """The ranks raise NCCL's error, and no rank waits for another."""

    gpus.cuda.library.fake_set_device = lambda number: None  # NCCL sees one GPU, and CuPy two
    for error in on_gpus(local_group(2, timeout=20), lambda c: c.all_reduce(ones(gpus))):
        assert isinstance(error, CollectiveError)
        assert "making the communicator" in str(error) and "invalid usage" in str(error)


def test_nccl_init_error_of_one_rank_fails_all_ranks_at_once(gpus, on_gpus, monkeypatch):
    """The other ranks wait for that rank while they make the communicator, and raise its error."""
    found = gpu.nccl.NcclCommunicator

    def refusing(library, unique_id, size, rank, *rest):
        if rank == 1:
            raise NcclError("NCCL refuses rank 1")
        return found(library, unique_id, size, rank, *rest)

    monkeypatch.setattr(gpu.nccl, "NcclCommunicator", refusing)

    def work(c):
        with pytest.raises(CollectiveError, match="NCCL refuses rank 1"):
            c.all_reduce(ones(gpus))

    assert on_gpus(local_group(2, timeout=50), work) == [None, None]


@pytest.mark.parametrize("failing", ["abort", "async_error"])
def test_nccl_error_while_failing_still_raises_on_all_ranks(gpus, on_gpus, failing, caplog):
    """The other ranks still raise the error."""

    def work(c):
        begun(c, gpus).barrier()
        if c.rank == 0:
            by_nccl = c._gpu.nccl._nccl
            by_nccl._comm = Failing(by_nccl._comm, failing)
            if failing == "abort":
                gpus.cuda.library.fake_async_error(0, 6)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            c._gpu.nccl._nccl.check()
            time.sleep(0.01)

    first, other = on_gpus(local_group(2, timeout=20), work)
    what = "NCCL reports" if failing == "abort" else "can no longer be watched: async_error fails"
    assert isinstance(first, NcclError) and what in str(first), first
    assert isinstance(other, AbortedError) and what in str(other), other
    assert ("failed to abort a communicator: abort fails" in caplog.text) == (failing == "abort")


def test_nccl_error_without_a_watching_thread_raises_on_all_ranks(gpus, on_gpus):
    def work(c):
        begun(c, gpus).barrier()
        if c.rank == 0:
            by_nccl = c._gpu.nccl._nccl
            by_nccl._over.set()  # ends the watching thread
            by_nccl._thread.join(20)
            by_nccl._comm = Failing(by_nccl._comm, "async_error")
            with pytest.raises(NcclError, match=r"rank 0, all_reduce.*async_error fails"):
                c.all_reduce(ones(gpus))
        until = time.monotonic() + 20
        while time.monotonic() < until:
            c._gpu.nccl._nccl.check()
            time.sleep(0.01)

    first, other = on_gpus(local_group(2, timeout=20), work)
    assert isinstance(first, NcclError) and "async_error fails" in str(first)
    assert isinstance(other, AbortedError) and "async_error fails" in str(other)


def test_close_logs_a_failed_abort(gpus, caplog):
    (alone,) = local_group(1)
    by_nccl = begun(alone, gpus)._gpu.nccl._nccl
    by_nccl._comm = Failing(by_nccl._comm, "destroy", "abort")
    alone.close()
    assert "failed to abort a communicator: abort fails" in caplog.text
    by_nccl._comm._whole.abort()


@pytest.mark.parametrize("what", ["unique_id", "identity"])
def test_rank_that_cannot_start_nccl_fails_all_ranks(gpus, on_gpus, monkeypatch, what):
    """The other ranks raise the reason without waiting, and the group still works."""

    def identity(number):
        if number == 0:
            raise RuntimeError("identity fails")
        return str(number)

    found = gpu.nccl.library()
    monkeypatch.setattr(gpu.nccl, "library", lambda: Failing(found, what))
    if what == "identity":
        monkeypatch.setattr(gpu.device, "identity", identity)

    def work(c):
        with pytest.raises(NcclError, match=f"rank 0 cannot make the .*Error: {what} fails"):
            c.all_reduce(ones(gpus), timeout=20)
        return c.all_reduce(np.ones(2)).tolist()

    assert on_gpus(local_group(2, timeout=20), work) == [[2.0] * 2] * 2


def test_dropped_communicator_aborts_nccl(gpus):
    (alone,) = local_group(1)
    begun(alone, gpus)
    del alone
    gc.collect()
    until = time.monotonic() + 20
    while not aborted(gpus) and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert aborted(gpus) == ["rank 0: CommAbort"]


PROCESS = """
import os, signal, sys, time
sys.path[:0] = {paths!r}
import fake_gpus, numpy as np, pytest
gpus = fake_gpus.make_gpus(pytest.MonkeyPatch(), {library!r})
import pycollective as pc
from pycollective import missed
from pycollective.comm import gpu, watch
"""

DIES = """
watch.Watch.GRACE = 0.2
comm = pc.init(timeout=60)
with gpus.cuda.Device(comm.rank):
    if comm.rank == 1:
        comm.barrier()
        # Each process has an NCCL of its own, which waits for the other process for ever.
        gpu.nccl.NcclCommunicator = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    else:
        comm.barrier()
    try:
        comm.all_reduce(gpus.asarray(np.ones(3)))
    except pc.errors.PeerLostError as error:
        print("lost:", error)
"""


def run(code, path, *, ranks=1):
    here = Path(__file__).parent
    code = PROCESS.format(paths=[str(here), str(here.parent)], library=str(path)) + code
    command = [sys.executable, "-c", code]
    if ranks > 1:
        command = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd="/")


@pytest.mark.slow
def test_killed_process_raises_peer_lost_error(fake_path):
    found = run(DIES, fake_path, ranks=2)
    assert "lost:" in found.stdout and "rank 1" in found.stdout, found.stdout + found.stderr


EXITS = """
comm, = pc.local_group(1)
comm.all_reduce(gpus.asarray(np.ones(3)))
x = comm.empty(3, device="gpu")
if {stall}:
    gpus.cuda.library.fake_stall(1)
    comm.all_reduce(x, out=x)
import threading
print("ends with", threading.active_count(), "threads")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stall", [False, True])
def test_process_end_does_not_wait_for_devices(fake_path, stall):
    """The process ends without waiting for a device or a thread."""
    found = run(EXITS.format(stall=stall), fake_path)
    assert found.returncode == 0 and found.stdout == "ends with 2 threads\n", found
    assert found.stderr == ""


@pytest.mark.slow
def test_interrupt_ends_a_wait_in_nccl(fake_path):
    """A rank that waits for others in NCCL can be interrupted."""
    code = """
import signal
from pycollective import nccl
signal.signal(signal.SIGINT, signal.default_int_handler)
class Nobody:
    failure = late = lambda self, _: None
library = nccl.library()
print("waits", flush=True)
try:
    nccl.NcclCommunicator(library, library.unique_id(), 2, 0, 0, Nobody(), 60.0)
except KeyboardInterrupt:
    print("interrupted")
"""
    here = Path(__file__).parent
    code = PROCESS.format(paths=[str(here), str(here.parent)], library=str(fake_path)) + code
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/"
    )
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out == "interrupted\n"


class ShiftedClock:
    """The module `time`, whose monotonic clock can be set forward, as for a stopped process."""

    offset = 0.0

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self):
        return time.monotonic() + self.offset


@pytest.mark.slow
def test_rank_that_was_stopped_in_a_call_blames_no_rank(gpus, on_gpus, monkeypatch):
    clock = ShiftedClock()
    for module in (watching, device_task, missed, watch):
        monkeypatch.setattr(module, "time", clock)

    def work(c):
        begun(c, gpus).barrier()
        gpus.cuda.library.fake_stall(1)
        c.barrier()
        c.all_reduce(ones(gpus), timeout=5.0)
        c.barrier()
        if c.rank == 0:
            clock.offset = 100.0  # both ranks are of this process
        until = time.monotonic() + 1
        while time.monotonic() < until:
            c._gpu.nccl._nccl.check()
            time.sleep(0.01)
        gpus.cuda.library.fake_stall(0)
        c.barrier()

    assert on_gpus(local_group(2, timeout=20), work) == [None, None]
