"""Products of matrices on a GPU, with a stand-in whose matrices are column-major as in cuBLAS."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from pycollective import cublas

TYPES = {2: np.float16, 0: np.float32, 1: np.float64}


class Library:
    """The functions of cuBLAS that are used, on the memory of the stand-in for CuPy."""

    def __init__(self):
        self.products = self.handles = 0
        self.wrong = False

    def cublasCreate_v2(self, handle):
        self.handles += 1
        return 0

    def cublasDestroy_v2(self, handle):
        self.handles -= 1

    cublasSetStream_v2 = cublasSetWorkspace_v2 = lambda self, *_: 0

    def cublasGemmEx(self, handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb,
                     beta, c, type_c, ldc, sums, algorithm):  # fmt: skip
        assert type_a == type_b == type_c and sums == (70 if type_a == 1 else 68)

        def matrix(pointer, rows, columns, leading):
            dtype = np.dtype(TYPES[type_a])
            size = leading * (columns - 1) + rows
            memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer.value)
            flat = np.frombuffer(memory, dtype)
            strides = (dtype.itemsize, leading * dtype.itemsize)
            return np.lib.stride_tricks.as_strided(flat, (rows, columns), strides)

        left = matrix(a, k, m, lda).T if op_a else matrix(a, m, k, lda)
        right = matrix(b, n, k, ldb).T if op_b else matrix(b, k, n, ldb)
        wide = np.float32 if type_a == 2 else TYPES[type_a]
        matrix(c, m, n, ldc)[...] = left.astype(wide) @ right.astype(wide) + self.wrong
        self.products += 1
        return 0


@pytest.fixture
def library(monkeypatch):
    stand_in = Library()
    monkeypatch.setattr(cublas, "_library", lambda: stand_in)
    monkeypatch.setattr(cublas, "_handles", cublas._Handles())
    monkeypatch.setattr(cublas, "_trusted", {})
    return stand_in


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 7, 1), (6, 1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("transposed", ["neither", "left", "right", "both"])
def test_products_equal_those_of_numpy(cupy, library, dtype, shape, transposed):
    rows, inner, columns = shape
    random = np.random.default_rng(0)
    a, b = (random.random(s).astype(dtype) for s in ((rows, inner), (inner, columns)))
    x = (
        cupy.asarray(np.ascontiguousarray(a.T)).T
        if transposed in ("left", "both")
        else cupy.asarray(a)
    )
    y = (
        cupy.asarray(np.ascontiguousarray(b.T)).T
        if transposed in ("right", "both")
        else cupy.asarray(b)
    )
    found = cublas.matmul(x, y)
    close = 1e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(cupy.asnumpy(found), a @ b, rtol=close)
    assert library.products == 2  # one is compared with CuPy's
    cublas.matmul(x, y)
    assert library.products == 3


def test_other_matrices_are_left_to_cupy(cupy, library):
    x = cupy.asarray(np.ones((4, 6), np.float32))
    for a, b in (
        (x[:, ::2], x[:3]),
        (x, cupy.asarray(np.ones((6, 2), np.float64))),
        (cupy.asarray(np.ones((4, 6), np.int32)), cupy.asarray(np.ones((6, 2), np.int32))),
        (x[:0], x.T),
        (np.ones((4, 6), np.float32), x.T),
    ):
        assert cublas.matmul(a, b) is None
    assert library.products == 0


def test_handles_of_streams_are_few_and_destroyed(cupy, library, monkeypatch):
    x = cupy.asarray(np.ones((4, 6), np.float32))
    for number in range(20):
        monkeypatch.setattr(
            cupy.cuda, "get_current_stream", lambda n=number: SimpleNamespace(ptr=n)
        )
        cublas.prepare(x)
        assert cublas.matmul(x, x.T) is not None
    assert library.handles == 8
    cublas._handles.by_stream.clear()
    assert library.handles == 0


def test_wrong_products_are_not_used(cupy, library, caplog):
    library.wrong = True
    x = cupy.asarray(np.ones((4, 6), np.float32))
    assert cublas.matmul(x, x.T) is None and cublas.matmul(x, x.T) is None
    assert library.products == 1 and "differ from CuPy's" in caplog.text


def test_product_whose_comparison_fails_is_compared_again(cupy, library, monkeypatch):
    x = cupy.asarray(np.ones((4, 6), np.float32))

    def fail(*_):
        raise RuntimeError("a stream records")

    with monkeypatch.context() as patch:
        patch.setattr(cublas, "_is_right", fail)
        with pytest.raises(RuntimeError, match="a stream records"):
            cublas.matmul(x, x.T)
    library.wrong = True
    assert cublas.matmul(x, x.T) is None
