"""The compiled kernels of convolution compared with the definition, for every register width."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycollective import _core
from pycollective import _nn as kernels
from pycollective.distribute.blas_threads import shared_among
from pycollective.nn import conv as conv_module
from pycollective.nn.conv import conv2d, conv2d_relu_max_pool
from pycollective.nn.window import make_window
from pycollective.tensor import GradientTape, Tensor, as_tensor

TOLERANCE = 3e-6


@pytest.fixture(params=[64, 32, 16])
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let the kernels use registers with this number of bytes."""
    before = kernels.limit_vector_bytes(request.param)
    if kernels.vector_bytes() != request.param:
        kernels.limit_vector_bytes(before)
        pytest.skip("this processor has no such registers")
    yield request.param
    kernels.limit_vector_bytes(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let each kernel use this number of threads."""
    before = kernels.threads()
    kernels.set_threads(request.param)
    yield request.param
    kernels.set_threads(before)


def normal(*shapes: Any) -> list[Any]:
    rng = np.random.default_rng(11)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def wide(*arrays: Any) -> list[Any]:
    return [None if a is None else a.astype(np.float64) for a in arrays]


def assert_close(actual: Any, expected: Any, terms: int) -> None:
    """Compare with float64 results; the tolerance grows with the root of the number of terms."""
    assert actual.shape == expected.shape
    scale = np.abs(expected).max(initial=0) + np.sqrt(terms)
    assert np.abs(actual - expected).max(initial=0) <= TOLERANCE * scale


# Winograd ----------------------------------------------------------------------------------------

# images, filters, padding
WINOGRAD = [
    ((2, 7, 9, 8), 8, "VALID"),
    ((1, 4, 4, 16), 16, "SAME"),
    ((3, 5, 5, 9), 17, "SAME"),
    ((2, 32, 30, 16), 16, "SAME"),
    ((1, 3, 3, 8), 40, "VALID"),  # one output
    ((0, 6, 6, 8), 8, "VALID"),
    ((2, 13, 13, 32), 64, "VALID"),
    ((2, 1, 1, 8), 8, "SAME"),
    ((2, 2, 3, 33), 10, "SAME"),
    ((3, 12, 11, 64), 70, "VALID"),
    ((5, 8, 8, 20), 130, "SAME"),
]


def winograd_case(case: Any) -> tuple[Any, ...]:
    shape, filters, padding = case
    x, w, b = normal(shape, (3, 3, shape[3], filters), (filters,))
    window = make_window(shape[1:], (3, 3), (1, 1), (1, 1), padding == "SAME")
    return x, w, b, window


@pytest.mark.parametrize("case", WINOGRAD, ids=str)
def test_winograd_equals_the_definition(case: Any, width: int, threads: int) -> None:
    x, w, b, window = winograd_case(case)
    terms = 9 * case[0][3]
    for bias, relu in ((b, True), (None, False)):
        y = np.full((len(x), window.out_h, window.out_w, case[1]), np.nan, np.float32)
        kernels.winograd_forward(x, w, bias, y, None, window, None, relu)
        expected = conv_module._generic_forward(*wide(x, w, bias), window, relu)
        assert_close(y, expected, terms)
        (g,) = normal(y.shape)
        kept = y if relu else None
        results = [np.full(a.shape, np.nan, np.float32) for a in (x, w, b)]
        kernels.winograd_gradient(x, w, g, kept, *results, window)
        need = (True, True, True)
        theirs = conv_module._generic_backward(*wide(g, x, w, kept), window, need)
        sizes = (9 * case[1], y[..., 0].size, y[..., 0].size)
        for a, e, size in zip(results, theirs, sizes, strict=True):
            assert_close(a, e, size)
        for alone in range(3):
            only = [np.empty_like(r) if k == alone else None for k, r in enumerate(results)]
            kernels.winograd_gradient(x, w, g, kept, *only, window)
            np.testing.assert_array_equal(only[alone], results[alone])


# With pooling ------------------------------------------------------------------------------------


def unpooled(values: Any, codes: Any, pool: Any) -> Any:
    """Return each pooled value at the place that its code names, zeros elsewhere."""
    z = np.zeros((len(values), pool.height, pool.width, pool.channels), values.dtype)
    at = np.indices(values.shape)
    live = codes != 255
    down, across = np.divmod(codes.astype(int), pool.kernel_w)
    place = (at[0], at[1] * pool.stride_h + down, at[2] * pool.stride_w + across, at[3])
    z[tuple(p[live] for p in place)] = values[live]
    return z


@pytest.mark.parametrize(
    "case", [c for c in WINOGRAD if min(c[0][1:3]) > 3 or "S" in c[2]], ids=str
)
def test_winograd_with_pooling_equals_the_definition(case: Any, width: int, threads: int) -> None:
    x, w, b, window = winograd_case(case)
    if min(window.out_h, window.out_w) < 2:
        pytest.skip("nothing to pool")
    plan = conv_module._pooled(window, case[1], (2, 2))
    shape = (len(x), plan.out_h, plan.out_w, case[1])
    for bias in (b, None):
        y = np.full(shape, np.nan, np.float32)
        codes = np.full(shape, 7, np.uint8)
        kernels.winograd_forward(x, w, bias, y, codes, plan.window, plan.pool, True)
        z = conv_module._generic_forward(*wide(x, w, bias), plan.window, True)
        parts = z.reshape(len(x), plan.out_h, 2, plan.out_w, 2, case[1])
        assert_close(y, parts.max(axis=(2, 4), initial=0), 9 * case[0][3])
        np.testing.assert_array_equal(codes == 255, y == 0)
        # The codes name the place of a maximum: they put it back where it was.
        back = unpooled(y, codes, plan.pool)
        assert_close(np.where(back > 0, back, z), z, 9 * case[0][3])


# images, filters, padding
DIRECT = [
    ((2, 8, 9, 1), 32, "VALID"),
    ((3, 7, 6, 1), 5, "SAME"),
    ((2, 9, 12, 3), 33, "SAME"),
    ((1, 4, 5, 3), 16, "VALID"),
    ((0, 6, 6, 1), 8, "VALID"),
]


@pytest.mark.parametrize("case", DIRECT, ids=str)
def test_direct_with_pooling_equals_the_definition(case: Any, width: int, threads: int) -> None:
    x, w, b, window = winograd_case(case)
    plan = conv_module._pooled(window, case[1], (2, 2))
    for bias in (b, None):
        y = np.full((len(x), plan.out_h, plan.out_w, case[1]), np.nan, np.float32)
        codes = np.full(y.shape, 7, np.uint8)
        kernels.direct_forward(x, w, bias, y, codes, plan.window, plan.pool, True)
        z = conv_module._generic_forward(*wide(x, w, bias), plan.window, True)
        parts = z.reshape(len(x), plan.out_h, 2, plan.out_w, 2, case[1])
        assert_close(y, parts.max(axis=(2, 4), initial=0), 9 * case[0][3])
        np.testing.assert_array_equal(codes == 255, y == 0)
        back = unpooled(y, codes, plan.pool)
        assert_close(np.where(back > 0, back, z), z, 9 * case[0][3])


@pytest.mark.parametrize("shape", [(2, 13, 9, 8), (1, 6, 16, 16), (2, 4, 5, 8)], ids=str)
def test_pooling_drops_what_no_window_covers(shape: Any, width: int) -> None:
    """Pooling also drops the last row and column of a convolution with odd sizes."""
    x, w, b, window = winograd_case((shape, 24, "VALID"))
    results = []
    for cut in (window, conv_module._pooled(window, 24, (2, 2)).window):
        pool = make_window((cut.out_h, cut.out_w, 24), (2, 2), (2, 2), (1, 1), False)
        y = np.full((len(x), cut.out_h // 2, cut.out_w // 2, 24), np.nan, np.float32)
        codes = np.full(y.shape, 7, np.uint8)
        kernels.winograd_forward(x, w, b, y, codes, cut, pool, True)
        results.append((y, codes))
    (whole, taps), (cropped, others) = results
    assert_close(whole, cropped.astype(np.float64), 9 * shape[3])
    far = np.abs(whole) > 1e-3  # near 0, relu may clip a maximum in one result only
    np.testing.assert_array_equal((taps == 255)[far], (others == 255)[far])
    assert set(np.unique(taps)) == {0, 1, 2, 3, 255}


def test_the_first_of_equal_maxima_wins_and_relu_cuts(width: int) -> None:
    x = np.zeros((1, 6, 6, 8), np.float32)
    w = np.zeros((3, 3, 8, 16), np.float32)
    b = np.linspace(-1, 2, 16).astype(np.float32)
    plan = conv_module._pooled(make_window((6, 6, 8), (3, 3), (1, 1), (1, 1), False), 16, (2, 2))
    y, codes = np.empty((1, 2, 2, 16), np.float32), np.empty((1, 2, 2, 16), np.uint8)
    kernels.winograd_forward(x, w, b, y, codes, plan.window, plan.pool, True)
    np.testing.assert_array_equal(codes, np.broadcast_to(np.where(b > 0, 0, 255), codes.shape))
    np.testing.assert_array_equal(y, np.broadcast_to(np.maximum(b, 0), y.shape))
    y[...] = 0
    x[0, 3, 3, 0] = np.nan
    w[1, 1] = 1
    kernels.winograd_forward(x, w, b, y, codes, plan.window, plan.pool, True)
    assert np.isnan(y[0, 1, 1]).all()
    z = np.empty((1, 4, 4, 16), np.float32)
    kernels.winograd_forward(x, w, b, z, None, plan.window, None, True)
    assert np.isnan(z[0, 2, 2]).all()


# images, filters, strides, padding, dilations, pooling
SPARSE = [
    ((2, 13, 13, 32), (3, 3, 32, 64), (1, 1), "VALID", (1, 1), (2, 2)),
    ((3, 9, 8, 9), (3, 3, 9, 5), (1, 1), "SAME", (1, 1), (2, 2)),
    ((2, 12, 12, 16), (5, 5, 16, 33), (1, 1), "VALID", (1, 1), (2, 2)),
    ((2, 9, 11, 8), (3, 2, 8, 16), (2, 1), "SAME", (1, 1), (2, 2)),
    ((2, 14, 13, 24), (3, 3, 24, 40), (1, 1), "VALID", (2, 1), (3, 2)),
    ((3, 6, 6, 8), (1, 1, 8, 4), (1, 1), "VALID", (1, 1), (2, 2)),
    ((2, 5, 5, 8), (4, 4, 8, 8), (1, 1), "SAME", (1, 1), (5, 5)),
    ((0, 6, 6, 16), (3, 3, 16, 16), (1, 1), "VALID", (1, 1), (2, 2)),
    ((9, 4, 4, 16), (3, 3, 16, 70), (1, 1), "VALID", (1, 1), (2, 2)),
    ((3, 12, 11, 1), (3, 3, 1, 32), (1, 1), "VALID", (1, 1), (2, 2)),
    ((2, 7, 8, 1), (3, 3, 1, 19), (1, 1), "SAME", (1, 1), (2, 2)),
    ((2, 8, 8, 1), (3, 3, 1, 3), (1, 1), "VALID", (1, 1), (3, 3)),
    ((2, 9, 10, 3), (3, 3, 3, 20), (1, 1), "VALID", (1, 1), (2, 2)),
    ((3, 8, 7, 5), (3, 3, 5, 1), (1, 1), "SAME", (1, 1), (2, 2)),
]


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_sparse_gradient_equals_the_definition(case: Any, width: int, threads: int) -> None:
    shape, filters, strides, padding, dilations, size = case
    x, w = normal(shape, filters)
    window = make_window(shape[1:], filters[:2], strides, dilations, padding == "SAME")
    plan = conv_module._pooled(window, filters[3], size)
    pooled = (len(x), plan.out_h, plan.out_w, filters[3])
    (g,) = normal(pooled)
    rng = np.random.default_rng(12)
    codes = rng.integers(-1, size[0] * size[1], pooled).astype(np.uint8)
    g[rng.random(pooled) < 0.1] = 0
    results = [np.full(s, np.nan, np.float32) for s in (shape, filters, filters[3:])]
    kernels.sparse_gradient(x, w, g, codes, *results, plan.window, plan.pool)
    dz = unpooled(g, codes, plan.pool)
    need = (True, True, True)
    theirs = conv_module._generic_backward(*wide(dz, x, w, None), plan.window, need)
    for a, e in zip(results, theirs, strict=True):
        assert_close(a, e, 9 * filters[3])
    for alone in range(3):
        only = [np.empty_like(r) if k == alone else None for k, r in enumerate(results)]
        kernels.sparse_gradient(x, w, g, codes, *only, plan.window, plan.pool)
        np.testing.assert_array_equal(only[alone], results[alone])


# Blocks ------------------------------------------------------------------------------------------


# Fewer images than threads, so that parts have rows of one or two images.
FEW_IMAGES = [
    ((1, 40, 41, 8), (5, 5, 8, 16), (1, 1), "SAME", (1, 1), (2, 2)),
    ((2, 61, 24, 9), (3, 2, 9, 20), (2, 1), "VALID", (1, 2), (3, 2)),
    ((2, 26, 26, 40), (1, 1, 40, 33), (1, 1), "VALID", (1, 1), (2, 2)),
]


@pytest.mark.parametrize("case", SPARSE + FEW_IMAGES, ids=str)
def test_blocked_kernels_equal_the_definition(case: Any, width: int, threads: int) -> None:
    shape, filters, strides, padding, dilations, size = case
    x, w, b = normal(shape, filters, filters[3:])
    window = make_window(shape[1:], filters[:2], strides, dilations, padding == "SAME")
    plan = conv_module._pooled(window, filters[3], size)
    terms = w[..., 0].size
    need = (True, True, True)
    for bias, relu in ((b, True), (None, False)):
        y = np.full((len(x), window.out_h, window.out_w, filters[3]), np.nan, np.float32)
        kernels.blocked_forward(x, w, bias, y, None, window, None, relu)
        expected = conv_module._generic_forward(*wide(x, w, bias), window, relu)
        assert_close(y, expected, terms)
        (g,) = normal(y.shape)
        kept = y if relu else None
        results = [np.full(a.shape, np.nan, np.float32) for a in (x, w, b)]
        kernels.blocked_gradient(x, w, g, kept, None, *results, window, None)
        theirs = conv_module._generic_backward(*wide(g, x, w, kept), window, need)
        for a, e in zip(results, theirs, strict=True):
            assert_close(a, e, max(y[..., 0].size, 9 * filters[3]))
    pooled = (len(x), plan.out_h, plan.out_w, filters[3])
    y, codes = np.full(pooled, np.nan, np.float32), np.empty(pooled, np.uint8)
    kernels.blocked_forward(x, w, b, y, codes, plan.window, plan.pool, True)
    z = conv_module._generic_forward(*wide(x, w, b), plan.window, True)
    parts = z.reshape(len(x), plan.out_h, size[0], plan.out_w, size[1], filters[3])
    assert_close(y, parts.max(axis=(2, 4), initial=0), terms)
    (g,) = normal(pooled)
    results = [np.full(a.shape, np.nan, np.float32) for a in (x, w, b)]
    kernels.blocked_gradient(x, w, g, None, codes, *results, plan.window, plan.pool)
    dz = unpooled(g, codes, plan.pool)
    theirs = conv_module._generic_backward(*wide(dz, x, w, None), plan.window, need)
    for a, e in zip(results, theirs, strict=True):
        assert_close(a, e, max(z[..., 0].size, 9 * filters[3]))


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("kernel", ["direct", "winograd", "blocked"])
def test_forward_of_few_images_has_the_same_bits_with_any_number_of_threads(
    kernel: str, images: int
) -> None:
    channels = 3 if kernel == "direct" else 24
    x, w, b = normal((images, 61, 60, channels), (3, 3, channels, 32), (32,))
    window = make_window((61, 60, channels), (3, 3), (1, 1), (1, 1), True)
    plan = conv_module._pooled(window, 32, (2, 2))
    run = getattr(kernels, f"{kernel}_forward")
    before, found = kernels.threads(), []
    try:
        for count in (1, 2, 5):
            kernels.set_threads(count)
            y = np.full((images, plan.out_h, plan.out_w, 32), np.nan, np.float32)
            codes = np.zeros(y.shape, np.uint8)
            run(x, w, b, y, codes, plan.window, plan.pool, True)
            found.append((y, codes))
    finally:
        kernels.set_threads(before)
    for y, codes in found:
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(y, found[0][0])
        np.testing.assert_array_equal(codes, found[0][1])


def test_winograd_gradient_of_one_image_has_the_same_bits_with_any_number_of_threads() -> None:
    x, w, b, window = winograd_case(((1, 33, 30, 40), 72, "SAME"))
    (g,) = normal((1, window.out_h, window.out_w, 72))
    before, found = kernels.threads(), []
    try:
        for count in (1, 2, 5):
            kernels.set_threads(count)
            results = [np.full(a.shape, np.nan, np.float32) for a in (x, w, b)]
            kernels.winograd_gradient(x, w, g, None, *results, window)
            found.append(results)
    finally:
        kernels.set_threads(before)
    for results in found:
        for result, expected in zip(results, found[0], strict=True):
            np.testing.assert_array_equal(result, expected)


# Routes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 8, 32])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_public_functions_equal_the_definition_at_every_width(
    channels: int, dtype: str, width: int, threads: int
) -> None:
    arrays = [a.astype(dtype) for a in normal((5, 11, 12, channels), (3, 3, channels, 20), (20,))]
    tensors = [as_tensor(a) for a in arrays]
    with GradientTape(persistent=True) as tape:
        for tensor in tensors:
            tape.watch(tensor)
        fused = conv2d_relu_max_pool(*tensors, padding="SAME")
        plain = conv2d(*tensors[:2], bias=tensors[2], activation="relu")
    window = make_window((11, 12, channels), (3, 3), (1, 1), (1, 1), False)
    expected = conv_module._generic_forward(*wide(*arrays), window, True)
    assert_close(plain.array, expected, 9 * channels)
    (g,) = (a.astype(dtype) for a in normal(plain.shape))
    ours = tape.gradient(plain, tensors, Tensor(g))
    theirs = conv_module._generic_backward(
        *wide(g, *arrays[:2], plain.array), window, (True, True, True)
    )
    for a, e in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        assert_close(a.array, e, 9 * 20 * 5)
    padded = make_window((11, 12, channels), (3, 3), (1, 1), (1, 1), True)
    whole = conv_module._generic_forward(*wide(*arrays), padded, True)
    parts = whole[:, :10].reshape(5, 5, 2, 6, 2, 20)
    assert_close(fused.array, parts.max(axis=(2, 4)), 9 * channels)
    (g,) = (a.astype(dtype) for a in normal(fused.shape))
    gradients = tape.gradient(fused, tensors, Tensor(g))
    # The gradient of the bias is the sum of the gradients that passed relu.
    let_through = np.where(fused.array > 0, g, 0).astype(np.float64).sum(axis=(0, 1, 2))
    assert_close(gradients[2].array, let_through, 180)


def test_calls_from_many_threads_give_the_same_bits() -> None:
    before = kernels.threads()
    kernels.set_threads(3)
    try:
        x, w, b, window = winograd_case(((6, 12, 12, 16), 32, "SAME"))

        def work() -> list[Any]:
            y = conv_module._compiled_forward(x, w, b, window, True)
            need = (True, True, True)
            return [y, *conv_module._compiled_backward(y, x, w, y, window, need)]

        alone = work()
        failures: list[BaseException] = []

        def repeat() -> None:
            try:
                for _ in range(20):
                    for a, e in zip(work(), alone, strict=True):
                        np.testing.assert_array_equal(a, e)
            except BaseException as error:
                failures.append(error)

        several = [threading.Thread(target=repeat) for _ in range(4)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join(60)
        assert not failures
    finally:
        kernels.set_threads(before)


@pytest.mark.parametrize(("asked", "most"), [("1", 1), ("nonsense", _core.usable_cores())])
def test_threads_are_at_most_those_of_the_environment(
    asked: str, most: int, tmp_path: Path
) -> None:
    code = "from pycollective import _nn; print(_nn.threads())"
    env = {**os.environ, "OMP_NUM_THREADS": asked, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    # The program runs in another folder, because the sources may have no compiled core.
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert 1 <= int(done.stdout) <= most


def test_interpreter_end_with_threads_in_kernels_is_clean(tmp_path: Path) -> None:
    code = """
import threading, time
import numpy as np
from pycollective import _nn
_nn.set_threads(2)
def again():
    x = np.ones(1 << 21, np.float32)
    while True:
        _nn.activation("relu", x, x)
for _ in range(3):
    threading.Thread(target=again, daemon=True).start()
time.sleep(0.05)
print("ends", flush=True)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_replicas_share_the_threads() -> None:
    before = kernels.threads()
    kernels.set_threads(5)
    try:
        with shared_among(2):
            assert kernels.threads() == 2
            with shared_among(1):  # the outer limit counts
                assert kernels.threads() == 2
        assert kernels.threads() == 5
        with shared_among(9):
            assert kernels.threads() == 1
    finally:
        kernels.set_threads(before)


def test_kernels_check_their_arrays() -> None:
    x, w, b, window = winograd_case(WINOGRAD[0])
    y = np.zeros((2, window.out_h, window.out_w, 8), np.float32)
    dilated = make_window((7, 9, 8), (3, 3), (1, 1), (2, 2), False)
    with pytest.raises(ValueError, match="3 x 3 with stride and dilation 1"):
        kernels.winograd_forward(x, w, b, y, None, dilated, None, True)
    with pytest.raises(ValueError, match="y has shape"):
        kernels.winograd_forward(x, w, b, y[:1], None, window, None, True)
    with pytest.raises(ValueError, match="dtype float64"):
        kernels.winograd_gradient(x, w, y.astype(np.float64), None, None, None, None, window)
    pool = make_window((window.out_h, window.out_w, 8), (3, 3), (3, 3), (1, 1), False)
    pooled = np.empty((2, 1, 2, 8), np.float32)
    codes = np.zeros(pooled.shape, np.uint8)
    with pytest.raises(ValueError, match="2 x 2"):
        kernels.winograd_forward(x, w, b, pooled, codes, window, pool, True)
    with pytest.raises(ValueError, match="go together"):
        kernels.winograd_forward(x, w, b, y, codes, window, None, True)
    with pytest.raises(ValueError, match="one or three channels"):
        kernels.direct_forward(x, w, b, pooled, codes, window, pool, True)
    with pytest.raises(ValueError, match="outside the pooling window"):
        kernels.sparse_gradient(x, w, pooled, codes + 9, None, None, None, window, pool)
    with pytest.raises(ValueError, match="must cover the rows"):
        cut = make_window((window.out_h, window.out_w, 8), (2, 2), (2, 2), (1, 1), False)
        few = np.zeros((2, 2, 3, 8), np.float32)
        kernels.blocked_forward(x, w, b, few, few.astype(np.uint8), window, cut, True)
    huge = make_window((1 << 17, 1 << 17, 8), (3, 3), (1, 1), (1, 1), False)
    assert kernels.sparse_fits(window, 8) and not kernels.sparse_fits(huge, 8)
