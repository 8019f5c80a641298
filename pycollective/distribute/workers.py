"""`Workers`: the processes that train together, each with its own replicas.

The workers use a communicator with a rank for each process. A single process has no communicator, and
the methods then return their arguments. All workers must make the same calls in the same order.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from pycollective import _core, array_backend
from pycollective.arguments import OpName
from pycollective.array_backend import Array
from pycollective.comm import Communicator
from pycollective.distribute.reduce_op import ReduceOp, finished, work_dtype
from pycollective.errors import (
    AbortedError,
    CheckpointError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    with_text,
)
from pycollective.tensor import IndexedSlices, Tensor

HEARTBEAT = "PYCOLLECTIVE_HEARTBEAT"
HEARTBEAT_TIMEOUT = 8.0
"""Seconds without a heartbeat after which a worker is lost."""
HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats."""
_FAILED, _WORKER_WAITS = 1, 2

#: A field's name describes the call of `begin_together` in the errors of other workers.
_BEGINNING = np.dtype([("save/restore", f"V{hashlib.sha256().digest_size}")])


class Workers:
    """The processes that train together, or a single process without a communicator.

    The connections of a dead worker end at once. A stopped worker, or a worker without a network,
    keeps its connections. Each worker therefore sends a heartbeat every second from a thread. A worker
    without a heartbeat for `heartbeat_timeout` seconds is lost, and errors on all workers name it.

    Parameters
    ----------
    communicator : Communicator, optional
        This process's rank among the workers.
    names : sequence of str
        The workers' names in messages, by rank.
    addresses : sequence of str
        The workers' addresses by rank; empty if the description of the cluster has none.
    watched : bool
        False if the launcher finds lost workers, so that there are no heartbeats.

    Attributes
    ----------
    count, index : int
        The number of processes, and the index of this one.
    communicator : Communicator or None
        This process's rank, if there are several processes.
    worker_waits : callable or None
        Returns True if a lost worker asks to join again; called when a checkpoint is saved, from which
        all workers can restart.
    has_saved : bool
        True if this group of workers has written a checkpoint.
    failure : str
        An error of this worker's program since the last call, which other workers may not have had.
    """

    def __init__(
        self,
        communicator: Communicator | None = None,
        names: Sequence[str] = (),
        addresses: Sequence[str] = (),
        watched: bool = True,
    ) -> None:
        self.communicator = communicator
        self.count = 1 if communicator is None else communicator.size
        self.index = 0 if communicator is None else communicator.rank
        self.worker_waits: Callable[[], bool] | None = None
        self.has_saved = False
        self.failure = ""
        self._heartbeat: _Heartbeat | None = None
        if communicator is None:
            return
        self.set_names(names, addresses)
        self._over = threading.Event()
        weakref.finalize(self, self._over.set)
        timeout = heartbeat_timeout()
        if watched and math.isfinite(timeout):
            self._heartbeat = _Heartbeat(communicator, timeout, self._over)

    def set_names(self, names: Sequence[str], addresses: Sequence[str]) -> None:
        """Set the names and addresses that errors give for the workers. Needs a communicator."""
        assert self.communicator is not None
        group = self.communicator._group
        titles = []
        for rank, name in enumerate(names):
            known = len(addresses) == len(names)
            address = addresses[rank] if known else group.address(rank)
            titles.append(f"rank {rank} ({name} at {address or platform.node()})")
        group.set_titles(titles)

    def wait_at_most(self, seconds: float) -> None:
        """Set the deadline of each later call, in seconds."""
        if self.communicator is not None:
            self.communicator.timeout = seconds

    # Numbers and arrays -------------------------------------------------------------------------

    def total(self, number: int) -> int:
        """Return the sum of the workers' numbers."""
        return self._of_all(number, "sum")

    def largest(self, number: int) -> int:
        """Return the largest of the workers' numbers."""
        return self._of_all(number, "max")

    def _of_all(self, number: int, op: OpName) -> int:
        group = self._group()
        if group is None:
            return number
        return int(group.all_reduce(np.asarray(number, np.int64), op))

    def reduce(self, op: ReduceOp, array: Array) -> Array:
        """Return the sum or the mean of the workers' arrays; round halves once, at the end."""
        group = self._group()
        if group is None:
            return array
        work = work_dtype(array.dtype, op)
        mean = op is ReduceOp.MEAN and array.dtype.kind not in "iub"
        host = array_backend.to_numpy(array).astype(work, copy=False)
        total = group.all_reduce(host, "mean" if mean else "sum")
        return array_backend.asarray(finished(total, array.dtype, op, self.count), like=array)

    def reduce_slices(self, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
        """Return the workers' rows in rank order, divided by the number of workers for a mean."""
        if self.communicator is None:
            return slices
        rows, _ = self.gather(slices.values.array, 0)
        indices, _ = self.gather(slices.indices.array, 0)
        if op is ReduceOp.MEAN:  # the mean of integers is a fraction
            mean = rows / self.count
            rows = mean if rows.dtype.kind in "iub" else mean.astype(rows.dtype, copy=False)
        return IndexedSlices(Tensor(rows), Tensor(indices), slices.dense_shape)

    def gather(self, array: Array, axis: int) -> tuple[Array, int]:
        """Return the workers' arrays joined along an axis, and the offset of this worker's array."""
        group = self._group()
        if group is None:
            return array, 0
        rows = np.moveaxis(array_backend.to_numpy(array), axis, 0)
        lengths = group.all_gather(np.asarray([len(rows)], np.int64))
        whole = group.all_gather(np.ascontiguousarray(rows), ragged=True)
        joined = np.ascontiguousarray(np.moveaxis(whole, 0, axis))
        return array_backend.asarray(joined, like=array), int(lengths[: self.index].sum())

    def from_first(self, array: Array) -> Array:
        """Return worker 0's array; all workers must pass an array of the same shape and dtype."""
        group = self._group()
        if group is None:
            return array
        host = np.ascontiguousarray(array_backend.to_numpy(array)).reshape(array.shape)
        return array_backend.asarray(group.broadcast(host), like=array)

    def slices_from_first(self, slices: IndexedSlices) -> IndexedSlices:
        """Return worker 0's slices."""
        arrays = [slices.values.array, slices.indices.array]
        rows = int(self.from_first(np.asarray(len(arrays[1]), np.int64)))
        if self.index:
            arrays = [np.zeros((rows, *a.shape[1:]), a.dtype) for a in arrays]
        values, indices = [Tensor(self.from_first(a)) for a in arrays]
        return IndexedSlices(values, indices, slices.dense_shape)

    # Agreement ----------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Note an error after which this worker may go on, and which the others may not have had.

        Their collectives could match later ones of this worker. So this worker's next call compares.
        """
        if self.communicator is not None and not self.failure:
            self.failure = f"{type(error).__name__}: {error}"

    def compare_failures(self) -> None:
        """Raise a MismatchError on all workers unless each of them calls this function now."""
        failure, self.failure = self.failure, ""
        if self.communicator is None:
            return
        try:
            self.communicator.barrier()
        except MismatchError as error:
            raise with_text(
                error,
                f"worker {self.index} went on after an error that other workers did not have "
                f"({failure}): {error}",
            ) from None

    def _group(self) -> Communicator | None:
        """Return the communicator for a collective, after the comparison that may be due."""
        if self.failure:
            self.compare_failures()
        return self.communicator

    def every(self, value: str, text: str) -> str:
        """Return ``""`` if all workers have the same value, else the workers' texts."""
        digest = hashlib.sha256(value.encode()).digest()
        digests, _ = self.gather(np.frombuffer(digest, np.uint8)[None], 0)
        return "" if (digests == digests[0]).all() else self._texts(text)

    def _texts(self, text: str) -> str:
        """Return the texts of all workers."""
        encoded = np.frombuffer(f"worker {self.index}: {text}; ".encode(), np.uint8)
        return self.gather(encoded, 0)[0].tobytes().decode().removesuffix("; ")

    def begin_together(self, what: str, same: str) -> None:
        """Wait until all workers begin the same call, such as saving; raise an error on all otherwise.

        ``what`` names the call in errors. ``same`` must be equal on all workers. If only some workers
        make a call, its collectives could match other calls of the other workers. This method's
        collective has a dtype that no other call uses, so it matches no other call.
        """
        group = self._group()
        if group is None:
            return
        digest = hashlib.sha256(same.encode()).digest()
        try:
            digests = group.all_gather(np.frombuffer(digest, _BEGINNING))
        except (CollectiveTimeoutError, MismatchError, PeerLostError) as error:
            raise with_text(error, f"{what} needs every worker: {error}") from None
        if (digests != digests[0]).any():
            raise MismatchError(
                f"the workers make different calls: {self._texts(what)}. All workers must save, or "
                "restore, the same objects at the same time"
            )

    def write_once(self, path: str, write: Callable[[], None], may_restart: bool = False) -> None:
        """Write files: worker 0, and each worker with another path, calls ``write``.

        Return when all files are written, or raise an error on every worker. With ``may_restart``,
        raise an `AbortedError` after the files are written if a lost worker asks to join again.
        """
        name = hashlib.sha256(os.path.abspath(path).encode()).digest()[:8]
        names, _ = self.gather(np.frombuffer(name, np.int64), 0)
        error: Exception | None = None
        if self.index == 0 or names[self.index] != names[0]:
            try:
                write()
            except Exception as failure:
                error = failure
        waits = may_restart and self.worker_waits is not None and self.worker_waits()
        state = _FAILED if error is not None else _WORKER_WAITS if waits else 0
        states, _ = self.gather(np.asarray([state]), 0)
        if error is not None:
            raise error
        if (states == _FAILED).any():
            others = ", ".join(str(w) for w in np.flatnonzero(states == _FAILED))
            raise CheckpointError(
                f"{path!r} was not written: worker {others} failed; see its error for the reason"
            )
        self.has_saved = self.has_saved or may_restart
        if (states == _WORKER_WAITS).any():
            raise AbortedError(
                f"a lost worker joins again, so training restarts from {path!r} with it"
            )

    # Ends ---------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every worker calls this method."""
        group = self._group()
        if group is not None:
            group.barrier()

    def abort(self, reason: str) -> None:
        """Abort every worker's current or next call; the error names this worker and the reason."""
        if self.communicator is not None:
            self.communicator.abort(f"worker {self.index}: {reason}")

    def close(self) -> None:
        """Leave the group of workers."""
        if self.communicator is None:
            return
        self._over.set()
        if self._heartbeat is not None:
            self._heartbeat.end()
        self.communicator.close()


class _Heartbeat:
    """A thread that sends heartbeats, and finds workers without one.

    The thread waits for no other worker, so a worker that waits for a lost worker still sends
    heartbeats. Errors therefore name only the lost worker.
    """

    def __init__(self, communicator: Communicator, timeout: float, over: threading.Event) -> None:
        group = communicator._group
        assert isinstance(group, _core.Group)  # MPI finds lost ranks itself
        self._group = group
        self._rank = communicator.rank
        self._timeout = timeout
        self._over = over
        self._thread = threading.Thread(
            target=self._beat, name="pycollective-heartbeat", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def _beat(self) -> None:
        pause = min(HEARTBEAT_INTERVAL, self._timeout / 4)
        due = time.monotonic()
        while self._group.failure is None:
            if time.monotonic() >= due:
                self._group.send_heartbeat()
                due = time.monotonic() + pause
            if self._group.silent(self._timeout):
                # Workers lost at the same time sent their last heartbeats at most one pause apart.
                self._abort_for(self._group.silent(self._timeout - 2 * pause))
            if self._over.wait(pause / 4):
                return

    def _abort_for(self, silent: Sequence[int]) -> None:
        """Abort the group with an error that names the lost workers, and every worker's call."""
        group = self._group
        who = ", ".join(group.title(r) for r in silent)
        are, they = ("is", "it is") if len(silent) == 1 else ("are", "they are")
        group.abort(
            f"{who} {are} lost to {group.title(self._rank)}: no heartbeat for {self._timeout:g} s, so "
            f"{they} stopped or cut off ({HEARTBEAT} sets these seconds); {group.describe()}",
            peer_lost=True,
            ranks=silent,
        )

    def end(self) -> None:
        """End the thread, and wait for it."""
        self._over.set()
        self._thread.join(2 * HEARTBEAT_INTERVAL)


_running: weakref.WeakSet[_Heartbeat] = weakref.WeakSet()


@atexit.register
def _end_heartbeats() -> None:
    """End the threads: a thread that needs the GIL after Python has ended aborts the process."""
    for heartbeat in list(_running):
        heartbeat.end()


def heartbeat_timeout() -> float:
    """Return the seconds without a heartbeat after which a worker is lost; inf for no limit.

    Raise a `ValueError` if the environment variable is not a positive number.
    """
    text = os.environ.get(HEARTBEAT, "")
    try:
        seconds = float(text) if text else HEARTBEAT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"{HEARTBEAT}={text!r} is not a positive number of seconds, nor 'inf' for no limit"
        )
    return seconds
