"""Calls of plain arrays reach the core without a statement of Python's, over every transport."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce out": lambda comm, x: comm.all_reduce(x, out=x),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(*([x] if comm.rank == 0 else []), out=x[:4]),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "all_reduce_many": lambda comm, x: comm.all_reduce_many([x, x[:3]]),
    "barrier": lambda comm, x: comm.barrier(),
    "async": lambda comm, x: comm.all_reduce(x, async_op=True),
    "message": lambda comm, x: (
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0) if comm.rank == 1 else None
    ),
}


@pytest.mark.parametrize("transport", ALL_KINDS)
def test_calls_of_plain_arrays_enter_no_python(transport, on_ranks):
    comms = make_group(transport, 3, 30.0)
    entered: list[tuple[str, str]] = []

    def work(comm):
        x = np.ones(12)
        for name, call in CALLS.items():
            call(comm, x)  # dtype and shape are learnt
            comm.barrier()

            def note(frame, event, _, name=name):
                if event == "call" and "pycollective" in frame.f_code.co_filename:
                    entered.append((name, frame.f_code.co_name))

            sys.setprofile(note)
            made = call(comm, x)
            sys.setprofile(None)
            if name == "async":
                made.wait()
        return True

    try:
        assert on_ranks(comms, work) == [True] * 3
    finally:
        for comm in comms:
            comm.close()
    assert entered == []
