"""The compiled core as an engine: schedules over threads, shared memory and TCP."""

from __future__ import annotations

from typing import Any

from pycollective import _core
from pycollective.comm.call import About, Call, Rows, present
from pycollective.comm.work import DONE, Work


class HostCore(_core.Communicator):
    """One rank of the compiled core. Plain arrays take the fast path, which skips `submit`."""

    def __init__(self, group: _core.Group, rank: int) -> None:
        super().__init__(group, rank)
        self._group = group
        self.choices: Rows = []

    def prefer(self, rows: Rows) -> None:
        """Use rows for ``algorithm="auto"``, the same on all ranks, before the first call."""
        super().prefer(rows)
        self.choices = rows

    def submit(self, call: Call) -> Work[None]:
        """Execute a call."""
        # Any: each kind of call has the arrays that it needs, and the core refuses None.
        source: Any = call.source
        target: Any = call.target
        how, seconds, later, op = call.algorithm, call.timeout, call.async_op, call.op
        match call.collective:
            case "all_reduce":
                task = self.all_reduce(
                    source, target, op, how, call.reproducible, seconds, later, call.shape,
                    call.label,
                )  # fmt: skip
            case "reduce":
                task = self.reduce(source, target, op, call.root, how, seconds, later)
            case "reduce_scatter":
                task = self.reduce_scatter(source, target, op, how, seconds, later)
            case "scan" | "exscan":
                is_exclusive = call.collective == "exscan"
                task = self.scan(source, target, op, is_exclusive, how, seconds, later)
            case "broadcast":
                task = self.broadcast(source, target, call.root, how, seconds, later, call.label)
            case "barrier":
                task = self.barrier(seconds, later)
            case "send":
                task = self.send(source, call.peer, call.tag, seconds, later, call.label)
            case "recv":
                task = self.recv(target, call.peer, call.tag, seconds, later, call.label)
            case _:
                task = self._move(call)
        return DONE if task is None else Work([task])

    def _move(self, c: Call) -> _core.Task | None:
        """Move parts of equal or of different lengths."""
        which, shape = _core.Collective.__members__[c.collective], c.shape or ()
        if c.counts is None:
            return self.move_parts(
                which, c.source, c.target, c.count, shape, c.root, c.algorithm, c.timeout,
                c.async_op, c.label,
            )  # fmt: skip
        if c.out_counts is None:
            return self.move_ragged(
                which, c.source, c.target, c.counts, shape, c.root, c.algorithm, c.timeout,
                c.async_op,
            )  # fmt: skip
        return self.all_to_all_ragged(
            present(c.source), present(c.target), c.counts, c.out_counts, shape, c.timeout,
            c.async_op,
        )  # fmt: skip

    def about(self, call: Call) -> About:
        """Return the entries for the trace of a call."""
        return About(self._group.transport, *self._algorithm_of(call))

    def _algorithm_of(self, call: Call) -> tuple[str, str]:
        """Return the algorithm's name, and the reason for it unless the program named it."""
        array, how = call.array, call.algorithm
        if array is None or call.is_message:
            return "", ""
        if not isinstance(how, str):
            return how.name, "the program's own"
        if call.reproducible:
            return "direct", "for reproducible=True"
        if call.out_counts is not None:
            return "direct", ""
        if how != "auto":
            return how, ""
        nbytes = array.nbytes
        if call.collective == "all_gather" and call.target is not None:
            nbytes = call.target.nbytes  # of all parts
        which = _core.Collective.__members__[call.collective]
        name = self.select(which, nbytes)
        table = "built-in"
        if any(row[0] == which and nbytes <= row[1] for row in self.choices):
            table = "measured"
        elif name == "hierarchical":
            return name, f"chosen for {max(self._group.hosts) + 1} hosts"
        return name, f"chosen by the {table} table for {nbytes} bytes among {self.size} ranks"
