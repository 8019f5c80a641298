"""Arguments that count as arrays: layouts, other libraries' arrays, given outputs."""

from __future__ import annotations

import array
import ctypes
from collections import deque

import numpy as np
import pytest

from pycollective import dtypes, local_group


class Dlpack:
    """An array of a library that supports only DLPack."""

    def __init__(self, held, device=1):
        self.held, self.device = held, device

    def __dlpack__(self, **how):
        return self.held.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.device, 0


class Interface:
    """An array of a library that supports only the array interface."""

    def __init__(self, held):
        self.held = held
        self.__array_interface__ = held.__array_interface__


@pytest.fixture
def alone():
    return local_group(1)[0]


def layouts():
    base = np.arange(120.0).reshape(4, 5, 6)
    unaligned = np.zeros(8 * 30 + 1, np.uint8)[1:].view(float).reshape(5, 6)
    unaligned[...] = base[0]
    overlapping = np.lib.stride_tricks.as_strided(base, (3, 4), (8, 8))
    return {
        "C": base,
        "Fortran": np.asfortranarray(base),
        "transposed": base.transpose(2, 0, 1),
        "strided": base[::2, 1:, ::-3],
        "backwards": base[::-1],
        "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
        "unaligned": unaligned,
        "overlapping": overlapping,
        "0-d": np.array(2.5),
        "empty": np.zeros((3, 0, 2)),
        "many axes": np.ones((1,) * 12),
    }


@pytest.mark.parametrize("layout", layouts())
def test_input_of_any_layout_is_reduced(layout, on_ranks):
    def work(c):
        x = layouts()[layout]
        n = c.size
        np.testing.assert_array_equal(c.all_reduce(x), n * x)
        np.testing.assert_array_equal(c.broadcast(x, 1), x)
        reduced = c.reduce(x, root=1)
        assert reduced is None or np.array_equal(reduced, n * x)
        rows = x if x.ndim else x.reshape(1)
        np.testing.assert_array_equal(c.all_gather(x), np.concatenate([rows] * n))
        gathered = c.gather(x, 1)
        assert gathered is None or np.array_equal(gathered, np.concatenate([rows] * n))
        whole = np.concatenate([rows] * n)
        whole = np.asfortranarray(whole)
        np.testing.assert_array_equal(c.scatter(whole), rows)
        np.testing.assert_array_equal(c.reduce_scatter(whole), n * rows)
        np.testing.assert_array_equal(c.all_to_all(whole), whole)
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


@pytest.mark.parametrize("layout", ["Fortran", "transposed", "strided", "backwards", "unaligned"])
def test_output_of_any_layout_gets_the_result(layout, on_ranks):
    def work(c):
        out = layouts()[layout]
        x = np.array(out)
        outside = None if out.base is None else np.array(out.base)
        assert c.all_reduce(x, out=out) is out
        np.testing.assert_array_equal(out, 2 * x)
        assert c.all_reduce(out, "max", out=out) is out  # in place
        np.testing.assert_array_equal(out, 2 * x)
        assert c.broadcast(x, out=out, async_op=True).wait() is out
        np.testing.assert_array_equal(out, x)
        if outside is not None:  # the memory between the elements is unchanged
            np.testing.assert_array_equal(out.base, outside)
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


def test_input_overlapping_output_is_copied(alone):
    x = np.arange(10.0)
    np.testing.assert_array_equal(alone.all_reduce(x[:8], out=x[2:]), np.arange(8.0))
    x = np.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(alone.broadcast(x, out=x.T), np.arange(9.0).reshape(3, 3))


def test_input_of_other_libraries_is_reduced(alone):
    for x in (
        array.array("d", [1, 2, 3]),
        memoryview(np.arange(1.0, 4)),
        (ctypes.c_double * 3)(1, 2, 3),
        Dlpack(np.arange(1.0, 4)),
        Interface(np.arange(1.0, 4)),
        np.array([[1.0, 2, 3]]).view(np.matrix)[0],
        [1.0, 2.0, 3.0],
    ):
        got = alone.all_reduce(x)
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got.reshape(-1), [1.0, 2.0, 3.0])
    assert alone.all_reduce(bytearray(b"ab")).tolist() == [97, 98]
    assert alone.all_reduce(2.5).shape == ()


@pytest.mark.parametrize("make", [
    lambda: array.array("d", [0, 0]),
    lambda: (ctypes.c_double * 2)(),
    lambda: memoryview(bytearray(16)).cast("d"),
    lambda: Interface(np.zeros(2)),
    lambda: np.zeros(2).view(np.recarray),
], ids=["array", "ctypes", "memoryview", "interface", "subclass"])  # fmt: skip
def test_output_of_other_libraries_gets_the_result(alone, make):
    out = make()
    assert alone.all_reduce([1.0, 2.0], out=out) is out
    np.testing.assert_array_equal(np.asarray(out), [1.0, 2.0])
    assert alone.all_gather([3.0, 4.0], out=out, async_op=True).wait() is out
    np.testing.assert_array_equal(np.asarray(out), [3.0, 4.0])
    assert alone.all_reduce_many([[5.0, 6.0]], out=[out])[0] is out
    np.testing.assert_array_equal(np.asarray(out), [5.0, 6.0])


def test_bytes_are_an_array_of_uint8_that_cannot_be_written(alone):
    """NumPy would make a string of the bytes, and drop the zeros at its end."""
    given = alone.broadcast(b"ab\0")
    assert (given.dtype, given.tobytes()) == (np.uint8, b"ab\0")
    alone.send(b"ab\0", 0)
    assert alone.recv(bytearray(3), 0) == b"ab\0"
    with pytest.raises(ValueError, match="out is read-only"):
        alone.broadcast(b"ab", out=b"cd")


def test_unsupported_arrays_raise_clear_errors(alone):
    x = np.ones(2)
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    for out in (read_only, memoryview(bytes(16)).cast("d"), np.broadcast_to(np.zeros(1), 2)):
        for call in (alone.all_reduce, alone.broadcast, alone.all_gather):
            with pytest.raises(ValueError, match="out is read-only"):
                call(x, out=out)
    for out in ([0.0, 0.0], 3.0, np.float64(1), "text", range(2), deque([0.0, 0.0])):
        with pytest.raises(TypeError, match="out must be an array, not"):
            alone.all_reduce(x, out=out)
    with pytest.raises(TypeError, match="would lose their masks"):
        alone.all_reduce(np.ma.array([1, 2], mask=[0, 1]))
    with pytest.raises(TypeError, match="Dlpack is on a GPU, and CuPy, .*is not installed"):
        alone.all_reduce(Dlpack(x, device=2))
    with pytest.raises(TypeError, match=r"Dlpack is on a device \(DLPack's type 10\)"):
        alone.all_reduce(Dlpack(x, device=10))
    with pytest.raises(TypeError, match="Python objects"):
        alone.broadcast([1, None])
    with pytest.raises(TypeError, match="no reduction for dtype >f8"):
        alone.all_reduce(x.astype(">f8"))
    np.testing.assert_array_equal(alone.broadcast(x.astype(">f8")), x)


@pytest.mark.skipif(dtypes.bfloat16 is None, reason="needs ml_dtypes")
def test_bfloat16_of_any_layout_is_reduced(on_ranks):
    def work(c):
        x = np.arange(12).reshape(3, 4).astype(dtypes.bfloat16)
        for y in (x, np.asfortranarray(x), x[::2, ::-1], x[:0], x[0, 0]):
            got = c.all_reduce(y)
            assert got.dtype == dtypes.bfloat16
            np.testing.assert_array_equal(got.astype(float), 2 * y.astype(float))
        out = np.zeros((4, 3), dtypes.bfloat16).T
        assert c.all_reduce(x, "max", out=out) is out
        np.testing.assert_array_equal(out, x)
        assert c.all_gather(x).shape == (6, 4)
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]
