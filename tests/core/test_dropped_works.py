"""The log has the error of an asynchronous call whose `Work` the program has dropped."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from rank_groups import KINDS, make_group

import pycollective as pc

every_kind = pytest.mark.parametrize("kind", KINDS)


def all_reduce(comm, **options):
    return comm.all_reduce(np.ones(3), async_op=True, **options)


def recv(comm, **options):
    return comm.recv(np.ones(3), 1, async_op=True, **options)


def general(comm, **options):
    """Return the work of a call that does not take the fast path."""
    return comm.all_reduce([[1.0, 2.0]], async_op=True, **options)


def in_python(comm, **options):
    return comm.all_reduce(np.ones(3), np.hypot, async_op=True, **options)


def until_done(work):
    until = time.monotonic() + 20
    while not work.done():
        assert time.monotonic() < until
        time.sleep(0.01)


def warnings(log):
    """Return the text of each warning about a dropped work, with the rank of its record."""
    gc.collect()
    records = [r for r in log.records if "dropped the Work" in r.getMessage()]
    assert all(record.levelno == logging.WARNING for record in records)
    return [(record.rank, record.getMessage()) for record in records]


CALLS = {
    all_reduce: "all_reduce #1 (float64[3], sum, ",
    general: "all_reduce #1 (float64[1, 2], sum, ",
    recv: "recv (float64[3], tag 0) from rank 1",
    in_python: "an asynchronous call",
}


@every_kind
@pytest.mark.parametrize("call", CALLS)
def test_dropped_work_of_a_failed_call_is_logged_with_the_call(kind, call, caplog):
    comms = make_group(kind, 2)
    comm = comms[0]
    work = call(comm, timeout=0.2)
    until_done(work)
    assert warnings(caplog) == []
    del work
    comm._host.collect()  # as the next call does
    ((rank, text),) = warnings(caplog)
    assert rank == 0
    assert f"the Work of {CALLS[call]}" in text
    assert "CollectiveTimeoutError: rank 0 waited until its deadline" in text


@pytest.mark.parametrize("call", CALLS)
def test_work_dropped_before_its_call_fails_is_logged_by_close(call, caplog):
    comms = make_group("threads", 2)
    call(comms[0])
    comms[1].close()
    comms[0].close()
    ((rank, text),) = warnings(caplog)
    assert (rank, "PeerLostError: rank 1 has left the group" in text) == (0, True), text


def test_several_dropped_works_are_logged_once(caplog):
    comms = make_group("threads", 2)
    comm = comms[0]
    works = [all_reduce(comm, timeout=0.2) for _ in range(3)]
    for work in works:
        until_done(work)
    del works, work
    comm.close()
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ask", ["wait", "exception", "of another", "blocking"])
def test_dropped_work_whose_error_the_program_has_is_not_logged(call, ask, caplog):
    comms = make_group("threads", 2)
    comm = comms[0]
    work = call(comm, timeout=0.2)
    other = call(comm, timeout=0.2)
    until_done(work)
    if ask == "exception":
        assert isinstance(work.exception(), pc.CollectiveTimeoutError)
    else:
        ways = {"wait": work.wait, "of another": other.wait, "blocking": comm.barrier}
        with pytest.raises(pc.CollectiveTimeoutError):
            ways[ask]()
    del work, other
    comm.close()
    assert warnings(caplog) == []


@every_kind
@pytest.mark.parametrize("call", CALLS)
def test_dropped_work_without_an_error_or_of_a_group_that_this_rank_aborts_is_not_logged(
    kind, call, caplog
):
    comms = make_group(kind, 2)

    def work(comm):
        for _ in range(3):
            comm.all_reduce(np.ones(3), async_op=True)
            comm.send(np.ones(3), 1 - comm.rank, async_op=True)
            comm.recv(np.ones(3), 1 - comm.rank, async_op=True)
        comm.barrier()

    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    call(comms[0])
    comms[0].abort("enough")
    comms[0].close()
    assert warnings(caplog) == []


def test_dropped_work_with_an_error_of_its_own_is_logged(caplog):
    comms = make_group("threads", 2)

    def breaks(a, b):
        raise ValueError("odd")

    odd = np.frompyfunc(breaks, 2, 1)
    works = [comm.all_reduce(np.ones(3), odd, async_op=True) for comm in comms]
    for work in works:
        until_done(work)
    del works, work
    for comm in comms:
        comm.close()
    assert any("ValueError: odd" in text for _, text in warnings(caplog))


def test_end_of_the_interpreter_logs_no_work(tmp_path):
    script = """
import time, numpy as np, pycollective as pc
comms = pc.local_group(2)
works = [
    comms[0].all_reduce(np.ones(3), async_op=True, timeout=0.1),
    comms[0].all_reduce(np.ones(3), np.hypot, async_op=True, timeout=0.1),
    comms[0].recv(np.ones(3), 1, async_op=True),
]
while not works[1].done():
    time.sleep(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    assert "dropped" not in done.stderr
