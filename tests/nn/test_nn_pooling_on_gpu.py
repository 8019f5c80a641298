"""Max pooling by GPU kernels, whose source runs on the host here, compared with the host's kernels."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from pycollective.nn import max_pool2d, pooling_on_gpu
from pycollective.tensor import GradientTape, Tensor

RNG = np.random.default_rng(6)
#: Images, window, strides, padding.
CASES = [
    ((2, 6, 6, 3), 2, None, "VALID"),
    ((2, 7, 5, 3), 2, None, "VALID"),
    ((1, 7, 5, 2), (3, 2), (3, 2), "SAME"),
    ((2, 6, 7, 1), 3, 1, "VALID"),
    ((2, 6, 7, 2), 3, 2, "SAME"),
    ((1, 5, 9, 2), (2, 4), (3, 5), "VALID"),
    ((0, 6, 6, 3), 2, None, "VALID"),
]


def results(x, upstream, *options):
    x = Tensor(x)
    with GradientTape() as tape:
        tape.watch(x)
        y = max_pool2d(x, *options)
    return y, tape.gradient(y, x, Tensor(upstream(y.shape)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pooling_on_a_gpu_equals_that_of_the_host(cupy, case, dtype):
    shape, size, strides, padding = case
    # Few different values, so that many maxima are equal.
    x = (RNG.integers(-3, 3, shape) / 2).astype(dtype)
    x.reshape(-1)[::11] = np.nan
    x.reshape(-1)[::5] = -np.inf
    weights = {}

    def upstream(shape):
        return weights.setdefault(shape, RNG.standard_normal(shape).astype(dtype))

    expected = results(x, upstream, size, strides, padding)
    calls = cupy.calls
    there = cupy.asarray(x)
    found = results(there, lambda shape: cupy.asarray(upstream(shape)), size, strides, padding)
    disjoint = strides is None or (min(np.atleast_1d(strides)) > 1 and padding != "SAME")
    if (dtype != "float16" or disjoint) and x.size:
        assert cupy.calls - calls <= 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.array.dtype == theirs.array.dtype
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-3)


def test_pooling_without_a_kernel_equals_that_of_the_host(cupy):
    x = RNG.random((1, 17, 17, 1), np.float32)
    found = results(cupy.asarray(x), lambda s: cupy.ones(s, np.float32), 16)
    expected = results(x, lambda s: np.ones(s, np.float32), 16)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    whole = np.arange(24).reshape(1, 4, 6, 1)
    assert max_pool2d(cupy.asarray(whole)).numpy().tolist() == max_pool2d(whole).numpy().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(pooling_on_gpu._KINDS, key=str), ids=str)
def test_nvcc_compiles_the_source(tmp_path, dtype):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = tmp_path / "pooling.cu"
    source.write_text(
        pooling_on_gpu.source(dtype, "unsigned" if dtype.itemsize > 2 else "long long")
    )
    command = [nvcc, "-cubin", "-arch=sm_90", "-Werror=all-warnings", "-o", tmp_path / "x", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
