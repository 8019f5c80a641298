"""Depthwise, grouped and transposed convolution, mean pooling and resizing by their definitions."""

from __future__ import annotations

from typing import Any

import nn_reference as reference
import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective import nn
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops

RANDOM = np.random.default_rng(3)


def numbers(*shape: int) -> Any:
    return RANDOM.standard_normal(shape)


def gradients(function: Any, arrays: Any, g: Any) -> Any:
    tensors = [as_tensor(a) for a in arrays]
    with GradientTape() as tape:
        tape.watch(tensors)
        y = function(*tensors)
    return [t.numpy() for t in tape.gradient(y, tensors, Tensor(g))]


def check_gradients(function: Any, arrays: Any) -> Any:
    """Compare with finite differences along random directions. ``function`` is linear in each array."""
    y = function(*arrays).numpy()
    g = numbers(*y.shape)
    for k, gradient in enumerate(gradients(function, arrays, g)):
        assert gradient.shape == arrays[k].shape
        for _ in range(3):
            direction = numbers(*arrays[k].shape)
            moved = [
                [a + sign * direction if i == k else a for i, a in enumerate(arrays)]
                for sign in (1, -1)
            ]
            ends = [float((function(*m).numpy() * g).sum()) for m in moved]
            along = float((gradient * direction).sum())
            np.testing.assert_allclose(along, (ends[0] - ends[1]) / 2, rtol=1e-9, atol=1e-9)
    return y


WINDOWS = [
    ((2, 6, 7, 3), (3, 2), (1, 1), "VALID", (1, 1)),
    ((2, 6, 7, 3), (3, 3), (2, 2), "SAME", (1, 1)),
    ((2, 7, 8, 2), (2, 3), (1, 3), "SAME", (1, 1)),
    ((1, 9, 9, 2), (3, 2), (1, 1), "SAME", (2, 3)),
    ((1, 9, 9, 2), (2, 2), (4, 4), "VALID", (1, 1)),  # gaps between windows
    ((0, 6, 6, 3), (2, 2), (2, 2), "VALID", (1, 1)),
]


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_depthwise_equals_a_convolution_per_channel(case: Any, multiplier: int) -> None:
    shape, kernel, strides, padding, dilations = case
    x, w = numbers(*shape), numbers(*kernel, shape[3], multiplier)
    b = numbers(x.shape[3] * multiplier)

    def convolve(x: Any, w: Any, b: Any) -> Any:
        return nn.depthwise_conv2d(x, w, strides, padding, dilations=dilations, bias=b)

    y = check_gradients(convolve, [x, w, b]) - b
    for channel in range(shape[3]):
        expected = reference.conv2d(
            x[..., channel : channel + 1],
            w[:, :, channel : channel + 1],
            None,
            strides,
            padding,
            dilations,
        )
        of_channel = y[..., channel * multiplier : (channel + 1) * multiplier]
        np.testing.assert_allclose(of_channel, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("channels", [1, 8, 45, 77])
@pytest.mark.parametrize("weighted", [False, True])
def test_depthwise_of_many_channels_equals_that_of_each_channel(
    channels: int, vector_bytes: int, weighted: bool
) -> None:
    arrays = [numbers(5, 13, 11, channels), numbers(3, 5, channels, 1)][: 1 + weighted]

    def call(x: Any, *w: Any) -> Any:
        if not weighted:
            return nn.avg_pool2d(x, (3, 5), (2, 1), "SAME")
        return nn.depthwise_conv2d(x, *w, (2, 1), "SAME")

    def results(arrays: Any, g: Any) -> Any:
        return [call(*arrays).numpy(), *gradients(call, arrays, g)]

    g = numbers(*call(*arrays).shape)
    alone = []
    for c in range(channels):
        one = [a[..., c : c + 1, :] if a is not arrays[0] else a[..., c : c + 1] for a in arrays]
        alone.append(results(one, g[..., c : c + 1]))
    before = kernels.limit_vector_bytes(vector_bytes)
    try:
        for dtype, error in (("float64", 1e-13), ("float32", 2e-5)):
            found = results([a.astype(dtype) for a in arrays], g.astype(dtype))
            for k, result in enumerate(found):
                expected = np.concatenate([part[k] for part in alone], axis=2 if k == 2 else 3)
                assert result.dtype == dtype
                np.testing.assert_allclose(result, expected, rtol=error, atol=error)
    finally:
        kernels.limit_vector_bytes(before)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_depthwise_and_means_of_special_numbers_reach_their_windows_alone(special: float) -> None:
    x, w = numbers(2, 6, 7, 40).astype(np.float32), numbers(3, 3, 40, 1).astype(np.float32)
    x[1, 0, 0, 33] = special
    w[0, 0] = np.inf  # this tap is in the padding for the first row and column
    touched = np.zeros((2, 6, 7, 40), bool)
    touched[1, :2, :2, 33] = True
    mean = nn.avg_pool2d(x, 3, 1, "SAME").numpy()
    np.testing.assert_array_equal(~np.isfinite(mean), touched)
    y = nn.depthwise_conv2d(x, w, 1, "SAME").numpy()
    np.testing.assert_array_equal(np.isfinite(y[:, 0]), ~touched[:, 0])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_equals_a_convolution_per_group(groups: int) -> None:
    x, w, b = numbers(2, 5, 6, 4), numbers(3, 2, 4 // groups, 8), numbers(8)
    y = check_gradients(lambda x, w, b: nn.grouped_conv2d(x, w, groups, b, 2, "SAME", 1), [x, w, b])
    n, m = 4 // groups, 8 // groups
    for k in range(groups):
        of_group = slice(k * m, (k + 1) * m)
        expected = reference.conv2d(
            x[..., k * n : (k + 1) * n], w[..., of_group], b[of_group], (2, 2), "SAME", (1, 1)
        )
        np.testing.assert_allclose(y[..., of_group], expected, rtol=1e-12, atol=1e-12)
    relu = nn.grouped_conv2d(x, w, groups, b, 2, "SAME", 1, "relu").numpy()
    np.testing.assert_allclose(relu, np.maximum(y, 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_transpose_is_the_gradient_of_a_convolution(case: Any) -> None:
    shape, kernel, strides, padding, dilations = case
    w = numbers(*kernel, shape[3], 4)
    x = numbers(*nn.conv2d(numbers(*shape), w, strides, padding, dilations=dilations).shape)
    y = check_gradients(
        lambda x, w: nn.conv2d_transpose(x, w, shape, strides, padding, dilations=dilations), [x, w]
    )
    expected = gradients(
        lambda z: nn.conv2d(z, w, strides, padding, dilations=dilations), [np.zeros(shape)], x
    )
    np.testing.assert_allclose(y, expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (2, 2), (4, 2), (1, 1), (2, 3)])
def test_transpose_of_float32_is_close_to_float64(size: int, stride: int) -> None:
    arrays = [numbers(3, 5, 6, 16), numbers(size, size, 9, 16)]
    shape = (3, 5 * stride, 6 * stride, 9)

    def results(arrays: Any, g: Any) -> Any:
        def call(x: Any, w: Any) -> Any:
            return nn.conv2d_transpose(x, w, shape, stride)

        return [call(*arrays).numpy(), *gradients(call, arrays, g)]

    g = numbers(*shape)
    narrow = results([a.astype(np.float32) for a in arrays], g.astype(np.float32))
    for found, expected in zip(narrow, results(arrays, g), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_average_pooling_equals_the_definition(case: Any) -> None:
    shape, kernel, strides, padding, _ = case
    x = numbers(*shape)
    y = check_gradients(lambda x: nn.avg_pool2d(x, kernel, strides, padding), [x])
    rows = reference.places(shape[1], kernel[0], strides[0], 1, padding)
    columns = reference.places(shape[2], kernel[1], strides[1], 1, padding)
    assert y.shape == (shape[0], len(rows), len(columns), shape[3])
    for i, inside in enumerate(rows):
        for j, across in enumerate(columns):
            ys = [k for k in inside if 0 <= k < shape[1]]
            xs = [k for k in across if 0 <= k < shape[2]]
            expected = x[:, ys][:, :, xs].mean(axis=(1, 2))
            np.testing.assert_allclose(y[:, i, j], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_are_kept(dtype: str) -> None:
    x, w = numbers(1, 4, 4, 2).astype(dtype), numbers(2, 2, 2, 2).astype(dtype)
    for y in (
        nn.depthwise_conv2d(x, w),
        nn.grouped_conv2d(x, w[:, :, :1], 2),
        nn.conv2d_transpose(x, w, (1, 8, 8, 2), 2),
        nn.avg_pool2d(x),
        nn.upsample_nearest(x, (2, 2)),
        nn.resize_bilinear(x, 3, 5),
        nn.normalize_batch(x)[0],
        nn.layer_normalization(x),
    ):
        assert y.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 9, 2, 70), (3, 1, 1, 17), (0, 4, 4, 2)])
@pytest.mark.parametrize("target", [(1, 1), (4, 13), (18, 6)])
def test_bilinear_resizing_and_its_gradient_equal_the_reference(shape, target, dtype) -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(0, 1, shape).astype(dtype)
    matrices = []
    for source, size in zip(shape[1:3], target, strict=True):
        centers = np.clip((np.arange(size) + 0.5) * source / size - 0.5, 0, source - 1)
        matrices.append(np.maximum(1 - np.abs(centers[:, None] - np.arange(source)), 0))
    g = rng.normal(0, 1, (shape[0], *target, shape[3])).astype(dtype)
    found = []
    before = kernels.threads()
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            with GradientTape() as tape:
                source = as_tensor(x)
                tape.watch(source)
                y = nn.resize_bilinear(source, *target)
            found.append((y.numpy(), tape.gradient(y, source, as_tensor(g)).numpy()))
    finally:
        kernels.set_threads(before)
    close = 20 * float(np.finfo(dtype).eps)
    wide = np.einsum("ih,jw,nhwc->nijc", *matrices, x.astype(float))
    np.testing.assert_allclose(found[0][0], wide, rtol=close, atol=close)
    back = np.einsum("ih,jw,nijc->nhwc", *matrices, g.astype(float))
    np.testing.assert_allclose(found[0][1], back, rtol=close, atol=10 * close)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_depthwise_takes_tensorflows_names_of_arguments(dtype) -> None:
    x, w = numbers(1, 4, 4, 2).astype(dtype), numbers(2, 2, 2, 1).astype(dtype)
    found = nn.depthwise_conv2d(input=x, filter=w, strides=1, padding="SAME")
    np.testing.assert_array_equal(found.numpy(), nn.depthwise_conv2d(x, w, 1, "SAME").numpy())


def test_bilinear_resizing_keeps_nan_and_infinity_to_their_neighbors() -> None:
    x = np.zeros((1, 1, 8, 1), np.float32)
    x[0, 0, 0], x[0, 0, 7] = np.nan, np.inf
    y = nn.resize_bilinear(x, 1, 16).numpy().ravel()
    assert np.isnan(y).tolist() == [True] * 3 + [False] * 13
    assert np.isinf(y).tolist() == [False] * 13 + [True] * 3
    with pytest.raises(ValueError, match="must be images, equal in number and channels"):
        kernels.resample(x, np.ones((1, 1)), np.ones((8, 8)), x[0])


def test_resizing_repeats_and_interpolates() -> None:
    x = np.arange(12.0).reshape(1, 2, 3, 2)
    large = check_gradients(lambda x: nn.upsample_nearest(x, (3, 2)), [x])
    np.testing.assert_array_equal(large, x.repeat(3, axis=1).repeat(2, axis=2))
    same = nn.resize_bilinear(x, 2, 3).numpy()
    np.testing.assert_array_equal(same, x)
    double = check_gradients(lambda x: nn.resize_bilinear(x, 4, 3), [x])
    mixed = [x[0, 0], 0.75 * x[0, 0] + 0.25 * x[0, 1], 0.25 * x[0, 0] + 0.75 * x[0, 1], x[0, 1]]
    np.testing.assert_allclose(double[0], mixed, rtol=1e-14)
    half = nn.resize_bilinear(np.arange(4.0).reshape(1, 1, 4, 1), 1, 2).numpy()
    np.testing.assert_allclose(half.ravel(), [0.5, 2.5], rtol=1e-14)
    assert nn.resize_bilinear(x[:0], 4, 4).shape == (0, 4, 4, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nn.depthwise_conv2d(numbers(2, 3, 3), numbers(2, 2, 3, 1)), r"\(2, 3, 3\)"),
        (lambda: nn.depthwise_conv2d(numbers(2, 3, 3, 2), numbers(2, 2, 2)), "multiplier"),
        (lambda: nn.depthwise_conv2d(numbers(2, 3, 3, 2), numbers(2, 2, 3, 1)), "2 channels"),
        (lambda: nn.depthwise_conv2d(numbers(2, 3, 3, 2), numbers(4, 2, 2, 1)), "depthwise"),
        (
            lambda: nn.depthwise_conv2d(
                numbers(2, 3, 3, 2), numbers(2, 2, 2, 3), bias=numbers(2)
            ),
            r"need \(6,\)",
        ),
        (lambda: nn.grouped_conv2d(numbers(1, 3, 3, 3), numbers(2, 2, 1, 4), 2), "3 channels"),
        (lambda: nn.conv2d_transpose(numbers(1, 3, 3, 2), numbers(2, 2, 3, 2), (1, 9, 9, 3), 2),
         r"\(1, 9, 9, 3\).*\(1, 3, 3, 2\)"),
        (lambda: nn.conv2d_transpose(numbers(1, 3, 3, 2), numbers(2, 2, 3, 2), (1, 6, 6, 5), 2),
         "output_shape"),
        (lambda: nn.conv2d_transpose(numbers(1, 3, 3, 4), numbers(2, 2, 3, 2), (6, 6), 2),
         r"\(1, 3, 3, 4\)"),
        (lambda: nn.conv2d_transpose(numbers(3, 4), numbers(2, 2, 3, 4), (6, 6), 2),
         r"got shapes \(3, 4\)"),
        (lambda: nn.conv2d_transpose(numbers(1, 3, 3, 2), numbers(2, 2, 3, 2), (1, 6, 6), 2),
         r"not \[1, 6, 6\]"),
        (lambda: nn.resize_bilinear(np.ones((1, 2, 2, 1), int), 4, 4), "floating-point"),
        (lambda: nn.depthwise_conv2d(filter=numbers(2, 2, 2, 1)), "missing 1 required"),
        (lambda: nn.avg_pool2d(numbers(1, 3, 3, 2), 4), r"avg_pool2d of images \(1, 3, 3, 2\)"),
        (lambda: nn.avg_pool2d(numbers(3, 3, 2)), r"\(3, 3, 2\)"),
        (lambda: nn.avg_pool2d(np.ones((1, 2, 2, 1), int)), "floating-point"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_batch_normalization_of_several_blocks_of_rows_equals_float64() -> None:
    # More rows than a kernel sums in one block.
    x = RANDOM.standard_normal((40_000, 3)).astype(np.float32) + np.float32(100)
    y, mean, variance = nn.normalize_batch(x, np.full(3, 2.0), np.ones(3), 0.0)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean.numpy(), wide.mean(axis=0), rtol=5e-6)
    np.testing.assert_allclose(variance.numpy(), wide.var(axis=0), rtol=1e-5)
    expected = 2 * (wide - wide.mean(axis=0)) / wide.std(axis=0) + 1
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert float(ops.reduce_mean(y)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: nn.conv2d(
                numbers(1, 3, 3, 2), numbers(2, 2, 2, 2), padding=[[0, 0], [1, 1], [1, 1], [0, 0]]
            ),
            "padding must be",
        ),
        (lambda: nn.grouped_conv2d(numbers(1, 3, 3, 2), numbers(2, 2, 2, 2), 0), "groups must be"),
        (lambda: nn.grouped_conv2d(numbers(1, 3, 3, 2), numbers(2, 2, 2), 2), r"\(2, 2, 2\)"),
    ],
)
def test_convolution_of_wrong_padding_or_groups_raises(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_upsampling_of_images_without_rows_has_no_rows(dtype: str) -> None:
    assert nn.upsample_nearest(np.zeros((2, 0, 4, 2), dtype), (2, 2)).shape == (2, 0, 8, 2)


def test_window_with_too_many_numbers_raises() -> None:
    with pytest.raises(ValueError, match="too many numbers"):
        kernels.Window(2**31, 2**31, 4, 1, 1, 1, 1, 1, 1, False)
