"""Kernels for all arrays of a step in one launch: the source runs on the host, and nvcc compiles it."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from pycollective.nn import together
from pycollective.nn.update import adam_update, sgd_update

RNG = np.random.default_rng(4)
SHAPES = [(3000,), (7, 13), (), (0, 3), (1,)]


def drawn(shapes, dtype):
    return [np.asarray(RNG.standard_normal(shape)).astype(dtype) for shape in shapes]


def moved(cupy, *columns):
    return [[cupy.asarray(array) for array in column] for column in columns]


def check(found, expected, dtype):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            ours._host, theirs, rtol=3e-6 if dtype == "float32" else 1e-14, atol=1e-7
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [SHAPES, [(5,)] * 97])
def test_adam_takes_one_launch_for_96_arrays_and_equals_that_of_the_host(cupy, dtype, shapes):
    params, ms, vs = drawn(shapes, dtype), *([np.zeros(s, dtype) for s in shapes] for _ in "mv")
    there = moved(cupy, params, ms, vs)
    for step in range(1, 4):
        grads = drawn(shapes, dtype)
        (on_device,) = moved(cupy, grads)
        numbers = (0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step), 0.9, 0.999, 1e-7)
        adam_update(params, grads, ms, vs, *numbers)
        calls = cupy.calls
        adam_update(there[0], on_device, there[1], there[2], *numbers)
        assert cupy.calls - calls == (1 if len(shapes) < 97 else 2)
        check(on_device, grads, dtype)
    for found, expected in zip(there, (params, ms, vs), strict=True):
        check(found, expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
def test_sgd_takes_one_launch_and_equals_that_of_the_host(cupy, dtype, kind):
    params = drawn(SHAPES, dtype)
    speeds = None if kind == "plain" else [np.zeros(s, dtype) for s in SHAPES]
    (there,) = moved(cupy, params)
    there_speeds = None if speeds is None else moved(cupy, speeds)[0]
    options = (0.0 if speeds is None else 0.9, kind == "nesterov")
    for _ in range(3):
        grads = drawn(SHAPES, dtype)
        (on_device,) = moved(cupy, grads)
        sgd_update(params, grads, 0.1, speeds, *options)
        calls = cupy.calls
        sgd_update(there, on_device, 0.1, there_speeds, *options)
        assert cupy.calls - calls == 1
    check(there, params, dtype)
    if speeds is not None:
        check(there_speeds, speeds, dtype)


def test_update_of_arrays_on_another_device_changes_them_there(cupy):
    with cupy.cuda.Device(1):
        (params, grads) = moved(cupy, [np.ones(3)], [np.arange(3.0)])
    sgd_update(params, grads, 1.0)  # on another device than the thread's current one
    assert params[0]._memory.tolist() == [1.0, 0.0, -1.0]
    assert together.fits(params, grads)
    assert not together.fits(params, [cupy.asarray(np.ones(3))])


def test_gradient_in_fortran_order_is_applied_array_by_array(cupy):
    grad = np.arange(6.0).reshape(2, 3)
    (params, grads) = moved(cupy, [np.zeros((2, 3))], [np.asfortranarray(grad)])
    grads[0]._memory = np.asfortranarray(grad)
    assert not together.fits(params, grads)
    sgd_update(params, grads, 1.0)
    assert (params[0]._host == -grad).all()


def test_update_without_a_kernel_equals_that_of_the_host(cupy):
    params, grads = drawn([(3,), (2,)], "float16"), drawn([(3,), (2,)], "float16")
    there = moved(cupy, params, grads)
    sgd_update(params, grads, 0.5)
    sgd_update(*there, 0.5)
    for ours, theirs in zip(there[0], params, strict=True):
        np.testing.assert_array_equal(ours._host, theirs)
    assert not together.fits([]) and not together.fits([np.ones(2)])
    with pytest.raises(ValueError, match="grad has shape"):
        sgd_update(*moved(cupy, [np.ones(3)], [np.ones(4)]), 0.5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_unscaled_divides_and_finds_nan_and_infinities(cupy, dtype):
    scale = cupy.asarray(np.float32(8))
    grads = drawn([(5,), (2, 2)], dtype)
    (there,) = moved(cupy, grads)
    results, finite = together.unscaled(there, scale)
    assert finite._host.shape == () and finite._host
    for ours, theirs in zip(results, grads, strict=True):
        np.testing.assert_allclose(ours._host, theirs / 8, rtol=1e-3)
    for wrong in (np.nan, np.inf, -np.inf):
        there[1]._memory[1, 1] = wrong
        assert not together.unscaled(there, scale)[1]._host
    assert together.unscaled(there[:1], scale)[1]._host


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("keep", [True, False])
def test_put_back_restores_unless_kept(cupy, dtype, keep):
    (arrays,) = moved(cupy, drawn([(5,), (2, 2)], dtype))
    before = together.copies(arrays)
    for array in arrays:
        array._memory[...] = 7
    together.put_back(arrays, before, cupy.asarray(np.bool_(keep)))
    for array, old in zip(arrays, before, strict=True):
        assert (array._host == (7 if keep else old._host)).all()
        assert not (old._host == 7).any()


def test_next_scale_halves_and_doubles_as_in_keras(cupy):
    scale, count = cupy.asarray(np.float32(8)), cupy.asarray(np.int64(0))
    found = []
    for finite in (True, False, True, True, True, True):
        together.next_scale(scale, count, cupy.asarray(np.bool_(finite)), 2)
        found.append((float(scale._host), int(count._host)))
    assert found == [(8, 1), (4, 0), (4, 1), (8, 0), (8, 1), (16, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("real", together._NAMES.values())
def test_nvcc_compiles_the_source(tmp_path, real):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = tmp_path / "together.cu"
    source.write_text(together.source(real))
    command = [nvcc, "-cubin", "-arch=sm_90", "-Werror=all-warnings", "-o", tmp_path / "x", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
