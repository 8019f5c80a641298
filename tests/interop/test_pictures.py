"""Resized pictures compared with real Keras."""

import os

import numpy as np
import pytest

from pycollective.keras.utils.resizing import cropped, resized

os.environ.setdefault("KERAS_BACKEND", "jax")
real = pytest.importorskip("keras")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

PICTURE = np.random.default_rng(2).integers(0, 256, (15, 11, 3)).astype(np.uint8)
FLOATS = PICTURE.astype(np.float32)


@pytest.mark.parametrize(
    "interpolation", ["bilinear", "nearest", "bicubic", "lanczos3", "lanczos5"]
)
def test_resized_picture_equals_that_of_keras(interpolation):
    for size in ((6, 31), (31, 5)):
        expected = np.asarray(real.ops.image.resize(FLOATS, size, interpolation=interpolation))
        found = resized(PICTURE, size, interpolation)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-2)


@pytest.mark.parametrize("size", [(20, 5), (3, 17)])
def test_cropped_picture_equals_that_of_keras(size):
    """Compare with the function by which Keras's `image_dataset_from_directory` crops."""
    expected = real.preprocessing.image.smart_resize(FLOATS, size)
    found = resized(cropped(PICTURE, size), size, "bilinear")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-2)
