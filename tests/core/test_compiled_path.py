"""The compiled path: calls of plain arrays enter no Python; large results lie in the arena."""

from __future__ import annotations

import functools
import os
import sys

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

from pycollective import _core

CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce out": lambda comm, x: comm.all_reduce(x, out=x),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
    "broadcast out": lambda comm, x: comm.broadcast(x if comm.rank == 0 else None, out=x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(*([x] if comm.rank == 0 else []), out=x[:4]),
    "scatter x": lambda comm, x: comm.scatter(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "all_to_all, lengths": lambda comm, x: comm.all_to_all(x, [4] * 3, out_counts=(4, 4, 4)),
    "all_to_all, different lengths": lambda comm, x: comm.all_to_all(
        x[:6],
        np.roll([1, 2, 3], comm.rank).tolist(),
        out_counts=np.roll([1, 3, 2], comm.rank).tolist(),
    ),
    "all_reduce_many": lambda comm, x: comm.all_reduce_many([x, x[:3]]),
    "barrier": lambda comm, x: comm.barrier(),
    "message": lambda comm, x: (
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0) if comm.rank == 1 else None
    ),
}
ASYNC_CALLS = {
    "all_reduce": lambda comm, x: [comm.all_reduce(x, async_op=True)],
    "two all_reduce": lambda comm, x: [comm.all_reduce(x, async_op=True) for _ in range(2)],
    "all_reduce out": lambda comm, x: [comm.all_reduce(x, out=x, async_op=True)],
    "gather": lambda comm, x: [comm.gather(x, async_op=True)],
    "barrier": lambda comm, x: [comm.barrier(async_op=True)],
    "blocking after it": lambda comm, x: [comm.all_reduce(x, async_op=True), comm.scatter(x)][:1],
    "messages": lambda comm, x: [
        comm.send(x, (comm.rank + 1) % comm.size, async_op=True),
        comm.recv(np.empty_like(x), (comm.rank - 1) % comm.size, async_op=True),
    ],
}


#: The folder of a clone may be called pycollective too.
PACKAGE = os.path.join(os.path.dirname(_core.__file__), "")


def calls_into_python(call):
    """Return the result of a call, and the functions of the package that it enters."""
    entered: list[str] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        return call(), entered
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("transport", ALL_KINDS)
def test_calls_of_plain_arrays_enter_no_python(transport, on_ranks):
    comms = make_group(transport, 3, 30.0)

    def work(comm):
        x, entered = np.ones(12), {}
        for name, call in CALLS.items():
            call(comm, x)  # caches dtype and shape
            comm.barrier()
            _, entered[name] = calls_into_python(functools.partial(call, comm, x))
        return entered

    try:
        assert on_ranks(comms, work) == [{name: [] for name in CALLS}] * 3
    finally:
        for comm in comms:
            comm.close()


@pytest.mark.parametrize("length", [12, 30_000, 300_000])
@pytest.mark.parametrize("transport", ALL_KINDS)
def test_asynchronous_calls_of_plain_arrays_enter_no_python(transport, length, on_ranks):
    comms = make_group(transport, 3, 30.0)

    def work(comm):
        x, entered = np.ones(length), {}
        for name, call in ASYNC_CALLS.items():
            for each in call(comm, x):  # caches dtype and shape
                each.wait()
            works, entered[name] = calls_into_python(functools.partial(call, comm, x))
            for each in works:
                each.wait()
        return entered

    try:
        assert on_ranks(comms, work) == [{name: [] for name in ASYNC_CALLS}] * 3
    finally:
        for comm in comms:
            comm.close()


def test_calls_of_more_shapes_than_are_kept_prepared_are_right(on_ranks):
    comms = make_group("shm", 2, 30.0)

    def work(comm):
        for _ in range(2):
            for length in range(1, 40):
                x = np.arange(length) + comm.rank
                np.testing.assert_array_equal(comm.all_reduce(x), 2 * np.arange(length) + 1)
                np.testing.assert_array_equal(comm.all_reduce(x, "max"), np.arange(length) + 1)
                (total,) = comm.all_reduce_many([x])
                np.testing.assert_array_equal(total, 2 * np.arange(length) + 1)
                if comm.rank == 0:
                    comm.send(x, 1)
                else:
                    np.testing.assert_array_equal(comm.recv(np.empty_like(x), 0), x - 1)
        return True

    try:
        assert on_ranks(comms, work) == [True] * 2
    finally:
        for comm in comms:
            comm.close()


RESULTS = {
    "plain": lambda comm, x: comm.all_reduce(x),
    "strided": lambda comm, x: comm.all_reduce(np.repeat(x, 2)[::2]),
    "read-only buffer": lambda comm, x: comm.all_gather(memoryview(x.tobytes())),
    "list": lambda comm, x: comm.broadcast(x.tolist()),
    "byte order": lambda comm, x: comm.all_to_all(x.astype(">f8")),
    "unaligned": lambda comm, x: comm.scatter(
        np.frombuffer(b"." + np.tile(x, comm.size).tobytes(), np.float64, offset=1)
    ),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(np.tile(x, (comm.size, 2)).T.T[:, ::2]),
    "scan": lambda comm, x: comm.scan(x),
    "ragged": lambda comm, x: comm.all_gather(x, ragged=True),
    "recv": lambda comm, x: (
        comm.send(x, 1 - comm.rank, async_op=True),
        comm.recv(source=1 - comm.rank, shape=x.shape, dtype=x.dtype),
    )[1],
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_64_kib_lie_in_the_arena(name, on_ranks):
    comms = make_group("shm", 2, 30.0)

    def work(comm):
        x = np.ones(8192)
        return _core.is_shared(RESULTS[name](comm, x)), _core.is_shared(x)

    try:
        assert on_ranks(comms, work) == [(True, False)] * 2
    finally:
        for comm in comms:
            comm.close()


def test_result_of_an_asynchronous_call_lies_in_the_arena(on_ranks):
    comms = make_group("shm", 2, 30.0)

    def work(comm):
        works = [comm.all_reduce(np.ones(n), async_op=True) for n in (8191, 8192, 8193, 1 << 18)]
        return [_core.is_shared(each.wait()) for each in works]

    try:
        assert on_ranks(comms, work) == [[False, True, True, True]] * 2
    finally:
        for comm in comms:
            comm.close()
