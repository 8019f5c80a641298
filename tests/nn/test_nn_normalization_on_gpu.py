"""Batch normalization by kernels for GPUs, whose source runs on the host here."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from pycollective.nn import normalization_on_gpu, normalize_batch
from pycollective.tensor import GradientTape, Tensor

RNG = np.random.default_rng(7)
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3}


def results(values, upstream, activation, moments=None):
    values = [None if v is None else Tensor(v) for v in values]
    there = [v for v in values if v is not None]
    with GradientTape() as tape:
        for value in there:
            tape.watch(value)
        y, mean, variance = normalize_batch(*values, 1e-3, activation, moments)
    return [y, mean, variance, *tape.gradient(y, there, Tensor(upstream))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("parameters", ["both", "scale", "offset", "none"])
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (7, 3), (1, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("constant", [False, True])
def test_normalization_on_a_gpu_equals_that_of_the_host(
    cupy, dtype, activation, parameters, shape, constant
):
    wide = "float32" if dtype == "float16" else dtype
    x = (3 + 2 * RNG.standard_normal(shape)).astype(dtype)
    scale = RNG.standard_normal(shape[-1]).astype(wide) if parameters in ("both", "scale") else None
    offset = (
        RNG.standard_normal(shape[-1]).astype(wide) if parameters in ("both", "offset") else None
    )
    upstream = RNG.standard_normal(shape).astype(dtype)
    values = [x, scale, offset]
    moments = RNG.uniform(1, 2, (2, shape[-1])).astype(wide) if constant else None
    expected = results(values, upstream, activation, moments)
    before = cupy.calls, cupy.fetched
    moved = [None if v is None else cupy.asarray(v) for v in values]
    there = None if moments is None else [cupy.asarray(v) for v in moments]
    found = results(moved, cupy.asarray(upstream), activation, there)
    assert cupy.fetched == before[1]
    if dtype != "float16" and x.size:
        assert cupy.calls - before[0] <= 17
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), **close)


def test_gradient_in_fortran_order_is_masked_by_relu(cupy):
    """The mask of relu applies for any layout of the gradient."""
    x, upstream = RNG.standard_normal((6, 4)), RNG.standard_normal((4, 6)).T
    expected = results([x, None, None], upstream, "relu")
    there = cupy.asarray(upstream)
    there._memory = np.asfortranarray(upstream)
    assert not there.flags.c_contiguous
    found = results([cupy.asarray(x), None, None], there, "relu")
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-12)


def test_nan_makes_its_channel_alone_nan(cupy):
    x = RNG.standard_normal((5, 2))
    x[1, 1] = np.nan
    y = normalize_batch(cupy.asarray(x), activation="relu")[0].numpy()
    assert np.isfinite(y[:, 0]).all() and np.isnan(y[:, 1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nvcc_compiles_the_source(tmp_path, dtype):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = tmp_path / "normalization.cu"
    index = "unsigned" if dtype == "float32" else "long long"
    source.write_text(normalization_on_gpu.source(np.dtype(dtype), index))
    command = [nvcc, "-cubin", "-arch=sm_90", "-Werror=all-warnings", "-o", tmp_path / "x", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
