"""Records of kernel calls: replays give the same bits; incomplete records are refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pycollective import _nn as kernels

RANDOM = np.random.default_rng(5)


def floats(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def dense(x, w, b):
    y = np.empty((len(x), w.shape[1]), np.float32)
    kernels.dense_forward(x, w, b, y, True)
    return y


def three_layers(x, w, b):
    return dense(dense(dense(x, w, b), w, b), w, b)


def arguments():
    return [floats(5, 8), floats(8, 8), floats(8)]


def recorded(function, arrays):
    record = kernels.Record()
    assert record.begin(arrays)
    try:
        result = function(*arrays)
    finally:
        record.stop()
    return record, record.end([result])


def test_replay_with_other_arrays_gives_the_bits_of_a_call():
    record, complete = recorded(three_layers, arguments())
    assert complete
    assert record.refusal == ""
    memory = np.empty(record.plan(), np.uint8)
    for _ in range(3):
        others, result = arguments(), np.empty((5, 8), np.float32)
        assert kernels.Replay(record, memory).run(others, [result])
        assert result.tobytes() == three_layers(*others).tobytes()


def test_internal_buffers_that_do_not_exist_together_share_memory():
    def chain(x, w, b):
        for _ in range(10):
            x = dense(x, w, b)
        return x

    record, complete = recorded(chain, [floats(64, 16), floats(16, 16), floats(16)])
    assert complete
    assert record.plan() == 2 * 64 * 16 * 4


def test_second_part_reads_buffers_of_the_first():
    x, w, b = arguments()
    record = kernels.Record()
    assert record.begin([x, w, b])
    y = dense(x, w, b)
    z = dense(y, w, b)
    assert record.end([z])

    def gradient(y, w, g, z):
        dx = np.empty_like(y)
        kernels.dense_gradient(y, w, g, z, dx, None, None)
        return dx

    g = floats(5, 8)
    assert record.begin([g])
    dx = gradient(y, w, g, z)
    assert record.end([dx])
    replay = kernels.Replay(record, np.empty(record.plan(), np.uint8))
    x, w, b = arguments()
    g = floats(5, 8)
    out, found = np.empty_like(z), np.empty_like(dx)
    assert replay.run([x, w, b], [out])
    assert replay.run([g], [found])
    y = dense(x, w, b)
    assert found.tobytes() == gradient(y, w, g, dense(y, w, b)).tobytes()
    with pytest.raises(ValueError, match="at its end"):
        replay.run([g], [found])


def test_numpy_between_kernels_is_refused():
    record, complete = recorded(lambda x, w, b: dense(dense(x, w, b) + 1, w, b), arguments())
    assert not complete
    assert record.refusal == "a kernel reads an array that no recorded kernel wrote"
    with pytest.raises(ValueError, match="no replay: a kernel reads an array"):
        kernels.Replay(record, np.empty(record.plan(), np.uint8))


def test_numpy_in_memory_of_a_freed_result_is_refused():
    def reuse(x, w, b):
        first = dense(x, w, b)
        place, size = first.ctypes.data, first.nbytes
        del first
        held = []
        for _ in range(1000):
            other = np.zeros((5, 8), np.float32)
            held.append(other)
            if other.ctypes.data == place:
                return dense(other, w, b)
        pytest.skip(f"NumPy did not use the {size} bytes again")

    assert not recorded(reuse, arguments())[1]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w, b: dense(x, w, b) + 1, "an output is not the whole result"),
        (lambda x, w, b: dense(x, w, b)[1:], "an output is not the whole result"),
        (lambda x, w, b: x, "an output is not the whole result"),
        (lambda x, w, b: [kernels.dense_forward(x, w, b, x, False), x][1], "writes to an input"),
        (lambda x, w, b: [kernels.bias_relu(y := dense(x, w, b), b, True), y][1], "cannot be rec"),
        (lambda x, w, b: [kernels.copy(y := dense(x, w, b), y), y][1], "cannot be recorded"),
    ],
)
def test_incomplete_record_is_refused(function, reason):
    record, complete = recorded(function, arguments())
    assert not complete
    assert reason in record.refusal


def test_replay_of_other_types_and_sizes_does_nothing():
    record, _ = recorded(three_layers, arguments())
    memory = np.empty(record.plan(), np.uint8)
    x, w, b = arguments()
    result = np.zeros((5, 8), np.float32)
    read_only = np.zeros((5, 8), np.float32)
    read_only.flags.writeable = False
    for inputs, outputs in [
        ([x[:4], w, b], [result]),
        ([x.astype(np.float64), w, b], [result]),
        ([x, np.asfortranarray(w), b], [result]),
        ([x, w, None], [result]),
        ([x, w], [result]),
        ([x, w, b], [read_only]),
        ([x, w, b], []),
    ]:
        assert not kernels.Replay(record, memory).run(inputs, outputs)
    assert not result.any()
    with pytest.raises(ValueError, match="the memory must have"):
        kernels.Replay(record, memory[:-1])


def test_record_has_the_calls_of_its_thread_alone():
    x, w, b = arguments()
    record, other = kernels.Record(), kernels.Record()
    assert record.begin([x, w, b])
    try:
        assert not other.begin([x, w, b])
        thread = threading.Thread(target=kernels.bias_relu, args=(floats(4, 8), b, True))
        thread.start()
        thread.join()
        y = dense(x, w, b)
    finally:
        record.stop()
    assert record.end([y])


def test_error_in_a_replay_is_that_of_the_kernel():
    window = kernels.Window(4, 4, 1, 2, 2, 2, 2, 1, 1, False)

    def gradient(g, codes):
        dx = np.empty((1, 4, 4, 1), np.float32)
        kernels.max_pool_gradient(g, codes, dx, None, window)
        return dx

    g, codes = floats(1, 2, 2, 1), np.zeros((1, 2, 2, 1), np.uint8)
    record, complete = recorded(gradient, [g, codes])
    assert complete
    replay = kernels.Replay(record, np.empty(record.plan(), np.uint8))
    with pytest.raises(ValueError, match="codes name a tap outside"):
        replay.run([g, codes + 9], [np.empty((1, 4, 4, 1), np.float32)])
