"""Sums of columns, on the host and by the kernel for GPUs."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from pycollective.nn.sums import column_sums, source

RNG = np.random.default_rng(9)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
@pytest.mark.parametrize("shape", [(1, 3), (64, 5), (65, 1), (4097, 2), (0, 3), (3, 0)], ids=str)
def test_sums_of_columns_equal_the_float64_sums(cupy, dtype, shape):
    rows = (8 * RNG.random(shape)).astype(dtype)
    wide = rows.astype(np.float64).sum(axis=0)
    for array in (rows, cupy.asarray(rows), cupy.asarray(rows.T).T):
        before = cupy.calls
        found = column_sums(array)
        assert found.dtype == (dtype if dtype != "int32" else rows.sum(axis=0).dtype)
        close = 1e-2 if dtype == "float16" else 1e-5
        np.testing.assert_allclose(getattr(found, "_host", found), wide, rtol=close)
        if dtype == "float32" and array is not rows:
            assert cupy.calls - before <= 3 + 1


def test_every_row_counts_once(cupy):
    rows = np.zeros((200, 3))
    for row in (0, 63, 64, 127, 199):
        rows[row] = 10.0**row % 97
        found = column_sums(cupy.asarray(rows))
        np.testing.assert_allclose(found._host, rows.sum(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nvcc_compiles_the_source(tmp_path, dtype):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = tmp_path / "sums.cu"
    path.write_text(source(np.dtype(dtype)))
    command = [nvcc, "-cubin", "-arch=sm_90", "-Werror=all-warnings", "-o", tmp_path / "x", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
