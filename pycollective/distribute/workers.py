"""`Workers`: the processes that train together, each with replicas of its own.

They talk through a communicator with a rank for each process. A process that trains alone has none, and
everything here is trivial for it. Every worker must make the same calls in the same order.
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

__all__ = ["Workers"]

SILENCE = "PYCOLLECTIVE_HEARTBEAT"
SECONDS_OF_SILENCE = 8.0
"""A worker that has not been heard of for so long is lost."""
PULSE_SECONDS = 1.0
_FAILED, _SOMEBODY_WAITS = 1, 2

#: The name tells the workers in another call what the call in `begin_together` is: texts show it.
_BEGINNING = np.dtype([("save/restore", f"V{hashlib.sha256().digest_size}")])


class Workers:
    """The processes that train together; without a communicator, a process that trains alone.

    A worker that dies is lost to the others at once; one that is stopped, or whose network is cut,
    says nothing. So in a thread of its own each worker tells the others every second that it goes on,
    and what it is in; who is not heard of for eight is named, and lost to all.

    Parameters
    ----------
    communicator : Communicator, optional
        This process's rank among them.
    names : sequence of str
        The workers' names in messages, by rank.
    places : sequence of str
        Their addresses by rank, as far as the description of the cluster says them; else empty.
    watched : bool
        Whether silent workers are to be found; not where somebody else watches over them.

    Attributes
    ----------
    count, index : int
        How many processes there are, and which one this is.
    communicator : Communicator or None
        This process's rank among them, if they are several.
    somebody_waits : callable or None
        Says whether a lost worker wants to come back: asked when a checkpoint is saved, which is where
        all can begin again with it.
    has_saved : bool
        Whether a checkpoint was written together since the workers met.
    """

    def __init__(
        self,
        communicator: Communicator | None = None,
        names: Sequence[str] = (),
        places: Sequence[str] = (),
        watched: bool = True,
    ) -> None:
        self.communicator = communicator
        self.count = 1 if communicator is None else communicator.size
        self.index = 0 if communicator is None else communicator.rank
        self.somebody_waits: Callable[[], bool] | None = None
        self.has_saved = False
        self._pulse: _Pulse | None = None
        if communicator is None:
            return
        self.call(names, places)
        self._over = threading.Event()
        self._over_when_dropped = weakref.finalize(self, self._over.set)
        silence = _seconds_of_silence()
        if watched and math.isfinite(silence):
            self._pulse = _Pulse(communicator, silence, self._over)

    def call(self, names: Sequence[str], places: Sequence[str]) -> None:
        """Let errors say so of the workers, of which there are several; see the class."""
        assert self.communicator is not None
        group = self.communicator._group
        titles = []
        for rank, name in enumerate(names):
            place = places[rank] if len(places) == len(names) else group.address(rank)
            titles.append(f"rank {rank} ({name} at {place or platform.node()})")
        group.call_ranks(titles)

    def wait_at_most(self, seconds: float) -> None:
        """Set how long a call waits for the other workers."""
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
        if self.communicator is None:
            return number
        return int(self.communicator.all_reduce(np.asarray(number, np.int64), op))

    def reduce(self, op: ReduceOp, array: Array) -> Array:
        """Return the sum or the mean of the workers' arrays; halves are rounded once, at the end."""
        if self.communicator is None:
            return array
        work = work_dtype(array.dtype, op)
        mean = op is ReduceOp.MEAN and array.dtype.kind not in "iub"
        host = array_backend.to_numpy(array).astype(work, copy=False)
        total = self.communicator.all_reduce(host, "mean" if mean else "sum")
        return array_backend.asarray(finished(total, array.dtype, op, self.count), like=array)

    def reduce_slices(self, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
        """Return the workers' rows one after the other, for a mean divided by their number."""
        if self.communicator is None:
            return slices
        rows, _ = self.gather(slices.values.array, 0)
        indices, _ = self.gather(slices.indices.array, 0)
        if op is ReduceOp.MEAN:  # of ints a fraction, as every mean of ints
            mean = rows / self.count
            rows = mean if rows.dtype.kind in "iub" else mean.astype(rows.dtype, copy=False)
        return IndexedSlices(Tensor(rows), Tensor(indices), slices.dense_shape)

    def gather(self, array: Array, axis: int) -> tuple[Array, int]:
        """Return the workers' arrays joined along an axis, and where this one's begins."""
        if self.communicator is None:
            return array, 0
        rows = np.moveaxis(array_backend.to_numpy(array), axis, 0)
        lengths = self.communicator.all_gather(np.asarray([len(rows)], np.int64))
        whole = self.communicator.all_gather(np.ascontiguousarray(rows), ragged=True)
        joined = np.ascontiguousarray(np.moveaxis(whole, 0, axis))
        return array_backend.asarray(joined, like=array), int(lengths[: self.index].sum())

    def from_first(self, array: Array) -> Array:
        """Return worker 0's array; all have one of its shape and dtype."""
        if self.communicator is None:
            return array
        host = np.ascontiguousarray(array_backend.to_numpy(array)).reshape(array.shape)
        return array_backend.asarray(self.communicator.broadcast(host), like=array)

    def slices_from_first(self, slices: IndexedSlices) -> IndexedSlices:
        """Return worker 0's slices."""
        own = [slices.values.array, slices.indices.array]
        rows = int(self.from_first(np.asarray(len(own[1]), np.int64)))
        if self.index:
            own = [np.zeros((rows, *a.shape[1:]), a.dtype) for a in own]
        values, indices = [Tensor(self.from_first(a)) for a in own]
        return IndexedSlices(values, indices, slices.dense_shape)

    # Agreement ----------------------------------------------------------------------------------

    def every(self, value: str, said: str) -> str:
        """Return ``""`` if all workers have the same value, or else what each of them says."""
        digest = hashlib.sha256(value.encode()).digest()
        digests, _ = self.gather(np.frombuffer(digest, np.uint8)[None], 0)
        return "" if (digests == digests[0]).all() else self._said(said)

    def _said(self, own: str) -> str:
        """Return what each worker says."""
        text = np.frombuffer(f"worker {self.index}: {own}; ".encode(), np.uint8)
        return self.gather(text, 0)[0].tobytes().decode().removesuffix("; ")

    def begin_together(self, what: str, same: str) -> None:
        """Return when all workers begin the same thing, such as saving; raise on every one otherwise.

        A call that only some workers make could be taken for another one that the others make, and
        both would go on with wrong numbers: so it begins with one that has no like.

        Parameters
        ----------
        what : str
            The call, for messages, such as ``"Checkpoint.save('saved/ckpt')"``.
        same : str
            What has to be the same on all workers.
        """
        if self.communicator is None:
            return
        own = hashlib.sha256(same.encode()).digest()
        try:
            words = self.communicator.all_gather(np.frombuffer(own, _BEGINNING))
        except (CollectiveTimeoutError, MismatchError, PeerLostError) as error:
            raise with_text(error, f"{what} needs every worker: {error}") from None
        if (words != words[0]).any():
            raise MismatchError(
                f"the workers do different things: {self._said(what)}. All of them save, or restore, "
                "the same objects at the same time"
            )

    def write_once(self, path: str, write: Callable[[], None], begins_anew: bool = False) -> None:
        """Write files: the first worker, and every one that means another path, calls ``write``.

        Returns when all is written, or raises on every worker; with ``begins_anew`` also an
        `AbortedError` after all is written, if a lost worker is back.
        """
        name = hashlib.sha256(os.path.abspath(path).encode()).digest()[:8]
        names, _ = self.gather(np.frombuffer(name, np.int64), 0)
        error: Exception | None = None
        if self.index == 0 or names[self.index] != names[0]:
            try:
                write()
            except Exception as failure:
                error = failure
        waited_for = begins_anew and self.somebody_waits is not None and self.somebody_waits()
        mine = _FAILED if error is not None else _SOMEBODY_WAITS if waited_for else 0
        states, _ = self.gather(np.asarray([mine]), 0)
        if error is not None:
            raise error
        if (states == _FAILED).any():
            others = ", ".join(str(w) for w in np.flatnonzero(states == _FAILED))
            raise CheckpointError(
                f"{path!r} was not written: worker {others} could not; its error says why"
            )
        self.has_saved = self.has_saved or begins_anew
        if (states == _SOMEBODY_WAITS).any():
            raise AbortedError(
                f"a lost worker is back, so training begins again from {path!r} with it"
            )

    # Ends ---------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every worker has come here."""
        if self.communicator is not None:
            self.communicator.barrier()

    def abort(self, reason: str) -> None:
        """Let every worker's present or next call fail, for a reason that names this one."""
        if self.communicator is not None:
            self.communicator.abort(f"worker {self.index}: {reason}")

    def close(self) -> None:
        """Leave the other workers in good order."""
        if self.communicator is None:
            return
        self._over.set()
        if self._pulse is not None:
            self._pulse.end()
        self.communicator.close()


class _Pulse:
    """A thread that tells the other workers every second that this one goes on, and hears them.

    Who stops, or is cut off, was last heard of at most one second before, is missed after the
    silence, and found by the next look: within 8.5 seconds, if nothing else is set. Nobody waits for
    anybody here, so who is missed is the one that is silent, and not one that waits for it.
    """

    def __init__(self, communicator: Communicator, silence: float, over: threading.Event) -> None:
        group = communicator._group
        assert isinstance(group, _core.Group)  # MPI watches its ranks itself
        self._group = group
        self._rank = communicator.rank
        self._silence = silence
        self._over = over
        self._thread = threading.Thread(target=self._beat, name="pycollective-pulse", daemon=True)
        _running.add(self)
        self._thread.start()

    def _beat(self) -> None:
        pause = min(PULSE_SECONDS, self._silence / 4)
        due = time.monotonic()
        while self._group.failure is None:
            if time.monotonic() >= due:
                self._group.beat()
                due = time.monotonic() + pause
            if self._group.silent(self._silence):
                # Who was cut off at the same moment has beaten at most one pause later.
                self._lose(self._group.silent(self._silence - 2 * pause))
            if self._over.wait(pause / 4):
                return

    def _lose(self, silent: Sequence[int]) -> None:
        """Tell everyone who has not been heard of, and what all were doing."""
        group = self._group
        who = ", ".join(group.title(r) for r in silent)
        are, they = ("is", "it is") if len(silent) == 1 else ("are", "they are")
        group.abort(
            f"{who} {are} lost to {group.title(self._rank)}: not heard of for {self._silence:g} s, so "
            f"{they} stopped or cut off ({SILENCE} sets these seconds); {group.describe()}",
            peer_lost=True,
            ranks=silent,
        )

    def end(self) -> None:
        """Let the thread end, and wait for it."""
        self._over.set()
        self._thread.join(2 * PULSE_SECONDS)


_running: weakref.WeakSet[_Pulse] = weakref.WeakSet()


@atexit.register
def _end_pulses() -> None:
    """No thread may come back from a call when the interpreter is gone: that aborts the process."""
    for pulse in list(_running):
        pulse.end()


def _seconds_of_silence() -> float:
    text = os.environ.get(SILENCE, "")
    try:
        seconds = float(text) if text else SECONDS_OF_SILENCE
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{SILENCE}={text!r} is not a positive number of seconds; 'inf': never")
    return seconds
