"""Convolution compared with its definition: values, gradients, bad input, threads."""

from __future__ import annotations

import threading
from typing import Any

import nn_reference as reference
import numpy as np
import pytest

from pycollective.nn import blocks as blocks_module
from pycollective.nn import conv as conv_module
from pycollective.nn.conv import conv2d, conv2d_relu_max_pool
from pycollective.nn.pooling import max_pool2d
from pycollective.nn.window import make_window
from pycollective.tensor import GradientTape, Tensor, as_tensor

# images, filters, strides, padding, dilations
CASES = [
    ((2, 7, 9, 3), (3, 3, 3, 5), (1, 1), "VALID", (1, 1)),
    ((2, 12, 11, 1), (3, 3, 1, 32), (1, 1), "VALID", (1, 1)),  # direct, two vectors
    ((1, 9, 8, 1), (5, 5, 1, 17), (2, 1), "SAME", (1, 1)),  # direct, padded, odd filters
    ((2, 8, 7, 3), (3, 3, 3, 8), (1, 2), "SAME", (2, 1)),  # direct, dilated
    ((3, 6, 5, 16), (3, 3, 16, 24), (1, 1), "SAME", (1, 1)),
    ((2, 9, 11, 8), (3, 2, 8, 16), (2, 2), "SAME", (1, 1)),
    ((2, 9, 11, 8), (3, 2, 8, 16), (1, 1), "SAME", (2, 3)),
    ((2, 9, 10, 5), (2, 4, 5, 7), (3, 2), "VALID", (2, 1)),
    ((3, 5, 4, 8), (1, 1, 8, 16), (1, 1), "VALID", (1, 1)),  # pointwise
    ((3, 5, 4, 8), (1, 1, 8, 16), (2, 3), "SAME", (1, 1)),
    ((2, 3, 3, 4), (3, 3, 4, 6), (1, 1), "VALID", (1, 1)),  # one output pixel
    ((2, 4, 3, 2), (4, 5, 2, 9), (3, 3), "SAME", (1, 2)),  # kernel wider than the image
    ((2, 2, 2, 12), (3, 3, 12, 1), (1, 1), "SAME", (3, 3)),  # most taps in the padding
    ((0, 6, 6, 3), (3, 3, 3, 4), (1, 1), "VALID", (1, 1)),
    ((0, 6, 6, 1), (3, 3, 1, 16), (1, 1), "VALID", (1, 1)),
]
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def arrays(case: Any, dtype: str) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(3)
    x, w, b = (rng.normal(size=s).astype(dtype) for s in (case[0], case[1], case[1][3:]))
    return x, w, b


def assert_close(actual: Any, expected: Any, dtype: str) -> None:
    scale = 1 + np.abs(expected).max(initial=0)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max(initial=0) <= TOLERANCE[dtype] * scale


@pytest.fixture(params=["usual blocks", "one row a block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one row a block":
        monkeypatch.setattr(blocks_module, "_BLOCK_BYTES", 1)


def options(case: Any) -> dict[str, Any]:
    """Return the arguments of `conv2d` in a case."""
    return dict(zip(("strides", "padding", "dilations"), case[2:], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv2d_values_equal_the_definition(case: Any, dtype: str, blocks: None) -> None:
    x, w, b = arrays(case, dtype)
    expected = reference.conv2d(x, w, b, *case[2:])
    y = conv2d(x, w, bias=b, **options(case))
    assert y.dtype == dtype
    assert_close(y.array, expected, dtype)
    assert_close(conv2d(x, w, **options(case)).array, expected - b, dtype)
    cut = conv2d(x, w, bias=b, **options(case), activation="relu").array
    assert_close(cut, np.maximum(expected, 0), dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_conv2d_gradients_equal_finite_differences(
    case: Any, activation: Any, blocks: None
) -> None:
    """Differences have no error but rounding.

    The loss is linear in each number unless an input of relu changes its sign.
    """
    inputs = arrays(case, "float64")
    rng = np.random.default_rng(4)
    tensors = [as_tensor(a) for a in inputs]
    with GradientTape(persistent=True) as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = conv2d(*tensors[:2], bias=tensors[2], **options(case), activation=activation)
    weights = rng.normal(size=y.shape)
    gradients = tape.gradient(y, tensors, Tensor(weights))
    step = 1e-6
    for which, gradient in enumerate(gradients):
        assert gradient.shape == inputs[which].shape
        for _ in range(6 if gradient.array.size else 0):
            at = tuple(rng.integers(0, n) for n in gradient.shape)
            losses = []
            for sign in (1, -1):
                moved = [a.copy() for a in inputs]
                moved[which][at] += sign * step
                result = reference.conv2d(*moved, *case[2:])
                losses.append((weights * (result if activation is None else result.clip(0))).sum())
            expected = (losses[0] - losses[1]) / (2 * step)
            assert abs(gradient.array[at] - expected) < 1e-6 * (1 + abs(expected))
    # A gradient alone is the same, although its computation uses other kernels.
    for tensor, gradient in zip(tensors, gradients, strict=True):
        alone = tape.gradient(y, tensor, Tensor(weights))
        np.testing.assert_allclose(alone.array, gradient.array, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_array_module_route_equals_the_compiled_one(case: Any, dtype: str) -> None:
    x, w, b = arrays(case, dtype)
    window = make_window(x.shape[1:], w.shape[:2], case[2], case[4], case[3] == "SAME")
    for relu in (False, True):
        y = conv_module._compiled_forward(x, w, b, window, relu)
        other = conv_module._generic_forward(x, w, b, window, relu)
        assert_close(y, other, dtype)
        g = np.random.default_rng(5).normal(size=y.shape).astype(dtype)
        kept = y if relu else None
        need = (True, True, True)
        ours = conv_module._compiled_backward(g, x, w, kept, window, need)
        theirs = conv_module._generic_backward(g, x, w, kept, window, need)
        for a, e in zip(ours, theirs, strict=True):
            assert a.dtype == dtype
            assert_close(a, e, dtype)


def test_other_dtypes_take_the_array_module_route() -> None:
    x, w, b = arrays(CASES[0], "float16")
    y = conv2d(x, w, bias=b, activation="relu")
    assert y.dtype == np.float16
    expected = np.maximum(reference.conv2d(x, w, b, (1, 1), "VALID", (1, 1)), 0)
    np.testing.assert_allclose(y.array.astype(float), expected, rtol=2e-2, atol=2e-2)


def test_noncontiguous_misaligned_and_readonly_input_gives_the_same_values() -> None:
    x, w, b = arrays(CASES[4], "float64")
    expected = conv2d(x, w, bias=b, padding="SAME").array
    strided = np.asfortranarray(x)
    raw = np.empty(x.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(x.shape)
    raw[...] = x
    assert not strided.flags.c_contiguous and not raw.flags.aligned
    x.setflags(write=False)
    for variant in (strided, raw, x, x[:, ::-1][:, ::-1]):
        y = conv2d(variant, np.asfortranarray(w), bias=b, padding="SAME")
        np.testing.assert_array_equal(y.array, expected)
        with GradientTape() as tape:
            tensor = as_tensor(variant)
            tape.watch(tensor)
            y = conv2d(tensor, w, bias=b, padding="SAME")
        g = np.broadcast_to(np.float64(1.0), y.shape)
        gradient = tape.gradient(y, tensor, g)
        assert gradient.shape == x.shape


def test_nan_stays_nan_through_relu() -> None:
    x = np.full((1, 3, 3, 1), np.nan, np.float32)
    w = np.ones((1, 1, 1, 8), np.float32)
    for filters in (w, np.ones((2, 2, 1, 8), np.float32)):
        assert np.isnan(conv2d(x, filters, activation="relu").array).all()


@pytest.mark.parametrize(
    ("x", "w", "options", "words"),
    [
        ((2, 3, 3, 1), (5, 5, 1, 4), {}, ["(2, 3, 3, 1)", "(5, 5, 1, 4)", "larger"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"dilations": 3}, ["larger"]),
        ((2, 3, 3, 2), (2, 2, 1, 4), {}, ["(2, 3, 3, 2)", "(2, 2, 1, 4)"]),
        ((3, 3, 2), (2, 2, 2, 4), {}, ["(3, 3, 2)"]),
        ((2, 3, 3, 1), (2, 2, 1, 0), {}, ["empty"]),
        ((2, 0, 3, 1), (2, 2, 1, 4), {"padding": "SAME"}, ["at least 1"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"strides": 0}, ["strides", "0"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"strides": (1, 2, 3)}, ["strides", "(1, 2, 3)"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"strides": 1.5}, ["strides", "1.5"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"dilations": 1 << 62, "padding": "SAME"}, ["2**31"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"padding": "FULL"}, ["FULL"]),
        ((2, 3, 3, 1), (2, 2, 1, 4), {"activation": "tanh"}, ["tanh"]),
        ((2, 1, 3, 3), (2, 2, 1, 4), {"data_format": "NCHW"}, ["NCHW", "transpose"]),
    ],
)
def test_bad_input_is_named(x: Any, w: Any, options: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        conv2d(np.zeros(x), np.zeros(w), **options)
    for word in words:
        assert word in str(error.value)


def test_bad_bias_or_dtypes_raise() -> None:
    x, w = np.zeros((1, 3, 3, 1)), np.zeros((2, 2, 1, 4))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        conv2d(x, w, bias=np.zeros(3))
    with pytest.raises(TypeError, match=r"float64.*float32"):
        conv2d(x, w.astype(np.float32))


def test_strides_in_the_forms_of_tensorflow_are_accepted() -> None:
    x, w, b = arrays(CASES[0], "float64")
    expected = conv2d(x, w, bias=b, strides=(2, 1)).array
    np.testing.assert_array_equal(conv2d(x, w, bias=b, strides=[1, 2, 1, 1]).array, expected)
    assert conv2d(x, w, np.int64(2), "valid", bias=b).shape == (2, 3, 4, 5)


# Pooling in the same pass ------------------------------------------------------------------------

FUSED = [
    ((3, 12, 11, 1), (3, 3, 1, 32), "VALID", (2, 2)),
    ((2, 9, 9, 1), (3, 3, 1, 11), "SAME", (2, 3)),
    ((2, 13, 13, 8), (3, 3, 8, 32), "VALID", (2, 2)),
    ((2, 7, 7, 8), (3, 3, 8, 40), "SAME", (3, 2)),
    ((3, 6, 6, 8), (1, 1, 8, 4), "VALID", (2, 2)),
    ((0, 6, 6, 1), (3, 3, 1, 8), "VALID", (2, 2)),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_fused_pooling_is_the_composition(case: Any, dtype: str, blocks: None) -> None:
    x, w, b = arrays(case, dtype)
    padding, size = case[2:]
    tensors = [as_tensor(a) for a in (x, w, b)]
    with GradientTape(persistent=True) as tape:
        for tensor in tensors:
            tape.watch(tensor)
        fused = conv2d_relu_max_pool(*tensors, padding=padding, pool_size=size)
        parts = max_pool2d(
            conv2d(*tensors[:2], bias=tensors[2], padding=padding, activation="relu"), size
        )
    assert_close(fused.array, parts.array, dtype)
    weights = Tensor(np.random.default_rng(6).normal(size=fused.shape).astype(dtype))
    expected = tape.gradient(parts, tensors, weights)
    for a, e in zip(tape.gradient(fused, tensors, weights), expected, strict=True):
        assert_close(a.array, e.array, dtype)
    for which in (1, 2):  # without the images' gradient
        alone = tape.gradient(fused, tensors[which], weights)
        assert_close(alone.array, expected[which].array, dtype)


def test_fused_pooling_without_bias_or_of_float16_is_the_composition() -> None:
    x, w, _ = arrays(FUSED[2], "float64")
    expected = max_pool2d(conv2d(x, w, activation="relu")).array
    np.testing.assert_allclose(conv2d_relu_max_pool(x, w).array, expected, atol=1e-12)
    half = conv2d_relu_max_pool(x.astype(np.float16), w.astype(np.float16))
    np.testing.assert_allclose(half.array, expected, rtol=0.1, atol=0.1)


def test_fused_pooling_window_larger_than_the_result_raises() -> None:
    with pytest.raises(ValueError, match="larger"):
        conv2d_relu_max_pool(np.zeros((1, 4, 4, 1)), np.zeros((3, 3, 1, 8)), pool_size=3)


# Threads and memory ------------------------------------------------------------------------------


def step(x: Any, w: Any, b: Any) -> list[Any]:
    tensors = [as_tensor(a) for a in (x, w, b)]
    with GradientTape() as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = conv2d_relu_max_pool(*tensors)
        z = max_pool2d(conv2d(y, np.ones((2, 2, 32, 16), x.dtype), activation="relu"), 3, 2)
    return [z.array, *(g.array for g in tape.gradient(z, tensors))]


def test_two_threads_give_the_same_bits_as_one() -> None:
    inputs = [arrays(((8, 20, 20, c), (3, 3, c, 32)), "float32") for c in (1, 8)]
    alone = [step(*i) for i in inputs]
    failures: list[Any] = []

    def work(index: int) -> None:
        try:
            for _ in range(10):
                for a, e in zip(step(*inputs[index]), alone[index], strict=True):
                    np.testing.assert_array_equal(a, e)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_results_are_never_overwritten() -> None:
    """Memory is reused, but not while there is a reference to it."""
    x, w, b = arrays(((8, 20, 20, 8), (3, 3, 8, 32)), "float32")
    kept, copies = [], []
    for i in range(5):
        results = step(x + np.float32(i), w, b)
        y = conv2d(x + np.float32(i), w, bias=b).numpy()[1:, ::2]  # only a view is kept
        kept.append([*results, y])
        copies.append([np.array(a) for a in kept[-1]])
    for arrays_kept, arrays_copied in zip(kept, copies, strict=True):
        for a, e in zip(arrays_kept, arrays_copied, strict=True):
            np.testing.assert_array_equal(a, e)


def test_a_persistent_tape_gives_the_same_gradients_again() -> None:
    x, w, b = (as_tensor(a) for a in arrays(((8, 20, 20, 8), (3, 3, 8, 32)), "float32"))
    with GradientTape(persistent=True) as tape:
        tape.watch(w)
        y = conv2d_relu_max_pool(x, w, b)
    first = tape.gradient(y, w).array.copy()
    conv2d(x, w, bias=b)
    np.testing.assert_array_equal(tape.gradient(y, w).array, first)
