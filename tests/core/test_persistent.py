"""Persistent calls: started many times, checked once."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as pc
from pycollective import local_group


def test_start_uses_the_current_values(on_ranks):
    def work(comm):
        x, total = np.zeros(5), np.empty(5)
        request = pc.Persistent(comm.all_reduce, x, "sum", out=total)
        found = []
        for step in range(3):
            x[:] = step + comm.rank
            assert request.start() is request
            assert request.wait() is total and request.done()
            found.append(total[0])
        x[:] = 10
        assert request() is total
        return [*found, total[4]]

    assert on_ranks(local_group(3), work) == [[3, 6, 9, 30]] * 3


def test_messages_and_calls_without_a_result_can_be_persistent(on_ranks):
    def work(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x, out = np.zeros(2), np.empty(2)
        requests = [
            pc.Persistent(comm.recv, out, source=left, tag=7),
            pc.Persistent(comm.send, x, right, tag=7),
            pc.Persistent(comm.barrier),
        ]
        for step in range(3):
            x[:] = 10 * step + comm.rank
            for request in requests:
                request.start()
            results = [request.wait() for request in requests]
            assert results[0] is out and results[1:] == [None, None]
            assert out.tolist() == [10 * step + left] * 2
        return True

    assert on_ranks(local_group(2), work) == [True, True]


def test_every_start_reduces_the_arrays_of_an_iterator():
    (comm,) = local_group(1)
    request = pc.Persistent(comm.all_reduce_many, (np.arange(n) for n in (2, 3)))
    named = pc.Persistent(comm.all_reduce_many, arrays=(np.arange(n) for n in (2, 3)))
    for _ in range(2):
        assert [a.tolist() for a in request()] == [[0, 1], [0, 1, 2]]
        assert [a.tolist() for a in named()] == [[0, 1], [0, 1, 2]]


def test_start_twice_or_wait_first_raises():
    first, second = local_group(2, timeout=20)
    request = pc.Persistent(first.barrier)
    assert request.done()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        request.wait()
    request.start()
    for again in (request.start, request):
        with pytest.raises(RuntimeError, match="was started already"):
            again()
    assert not request.done()
    with pytest.raises(TimeoutError, match=r"wait\(\) for it again"):
        request.wait(0.01)
    second.barrier()
    request.wait()
    assert request.done()


def test_wait_after_an_error_ends_the_request(on_ranks):
    def work(comm):
        request = pc.Persistent(comm.all_reduce, np.zeros(2 + comm.rank))
        with pytest.raises(pc.MismatchError):
            request.start().wait()
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            request.wait()
        return request.done()

    assert on_ranks(local_group(2, timeout=20), work) == [True, True]


def test_persistent_invalid_arguments_raise_before_the_first_start():
    (comm,) = local_group(1)
    x = np.zeros(2)
    for text, call, args, options in (
        ("has async_op", comm.describe, (), {}),
        ("has async_op", max, (1,), {}),
        ("has async_op", comm.all_reduce, (x,), {"async_op": True}),
        ("'algoritm'", comm.all_reduce, (x,), {"algoritm": "ring"}),
        ("missing a required argument: 'x'", comm.all_reduce, (), {}),
    ):
        with pytest.raises(TypeError, match=text):
            pc.Persistent(call, *args, **options)
