"""The handwritten digits of scikit-learn, for a first run without a network."""

from __future__ import annotations

import numpy as np

from ._files import Images


def load_data() -> tuple[Images, Images]:
    """Return 1,437 training and 360 test images in the format of MNIST.

    The originals have 8x8 pixels from 0 to 16. Each pixel becomes 3x3 pixels from 0 to 255, and a
    margin of two pixels makes 28x28. Every fifth image is a test image.

    Returns
    -------
    ((x_train, y_train), (x_test, y_test))
        NumPy arrays of uint8: images [n, 28, 28], labels [n] from 0 to 9.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the bundled digits come with scikit-learn: pip install 'pycollective[demo]'"
        ) from error
    images, labels = load_digits(return_X_y=True)
    levels = (images.reshape(-1, 8, 8).astype(np.int64) * 255 // 16).astype(np.uint8)
    x = np.pad(levels.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    y = labels.astype(np.uint8)
    test = np.arange(len(y)) % 5 == 0
    return (x[~test], y[~test]), (x[test], y[test])
