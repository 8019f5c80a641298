"""`Call`, engines and `Work`; test_compiled_path.py has the calls that make no `Call`."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as pc
from pycollective.comm.call import About, Call, present
from pycollective.comm.tracing import Traced, Tracer
from pycollective.comm.work import DONE, Work


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call("all_reduce", np.ones(3), np.ones(3), 1.0, op="sum"), "all_reduce(float64[3], sum)"),
        (Call("reduce", np.ones(3), None, 1.0, op="max", root=1),
         "reduce(float64[3], max, root=1)"),
        (Call("gather", np.ones(3), None, 1.0, root=2, shape=(-1,), counts=[1, 2, 3]),
         "gather(float64[-1], counts=[1, 2, 3], root=2)"),
        (Call("send", np.ones(3, np.int8), None, 1.0, peer=4), "send(int8[3], dest=4)"),
        (Call("barrier", None, None, 1.0), "barrier()"),
    ],
)  # fmt: skip
def test_call_text_has_the_values_on_which_ranks_agree(call, words):
    assert str(call) == words


class Doubling:
    """An engine that doubles its inputs, and records its calls."""

    def __init__(self):
        self.calls = []

    def about(self, call):
        return About("doubling")

    def submit(self, call):
        self.calls.append(call)
        if call.op != "sum":
            raise TypeError("sums alone")
        present(call.target)[...] = 2 * present(call.source)
        return DONE


def test_traced_records_the_calls_of_any_engine(caplog):
    caplog.set_level(5, "pycollective")
    (comm,) = pc.local_group(1)
    engine, target = Doubling(), np.empty(3)
    traced = Traced(engine, Tracer(comm))
    traced.submit(Call("all_reduce", np.ones(3), target, 1.0, op="sum")).result()
    with pytest.raises(TypeError, match="sums alone"):
        traced.submit(Call("all_reduce", np.ones(3), target, 1.0, op="max"))
    assert target.tolist() == [2.0] * 3
    assert [call.timed for call in engine.calls] == [True, True]
    said = [r.getMessage() for r in caplog.records if "all_reduce" in r.getMessage()]
    assert "rank 0 of 1: all_reduce (float64[3], sum): " in said[0]
    assert said[1].endswith("TypeError: sums alone")
    comm.close()


class Held:
    """A task that a test ends."""

    times = (0.0, 0.0)

    def __init__(self):
        self.done, self.error = False, None

    def wait(self, timeout):
        return self.done

    def check(self):
        if self.error is not None:
            raise self.error


def test_work_then_runs_once_after_the_first_finish():
    task, ends = Held(), []
    work = Work([task], lambda: ends.append("first")).then(lambda: ends.append("second") or 7)
    with pytest.raises(RuntimeError, match="still runs"):
        work.result()
    task.done = True
    assert (work.result(), work.result(), ends) == (7, 7, ["first", "second"])


def test_work_joined_is_done_with_all_works_and_raises_their_errors():
    tasks = [Held(), Held()]
    joined = Work.joined([Work([task]) for task in tasks], lambda: "both")
    tasks[0].done = True
    assert not joined.done()
    tasks[1].done, tasks[1].error = True, pc.AbortedError("one failed")
    assert joined.done()
    for _ in range(2):
        with pytest.raises(pc.AbortedError, match="one failed"):
            joined.wait()
    tasks[1].error = None
    assert joined.wait() == "both"
