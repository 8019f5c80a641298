"""MNIST: handwritten digits (LeCun, Cortes and Burges)."""

from __future__ import annotations

import os

from ._files import MNIST, Images, load


def load_data(path: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Return 60,000 training and 10,000 test images of handwritten digits with their labels.

    Parameters
    ----------
    path : path, optional
        A folder with the four idx files (``.gz`` or unpacked) or ``mnist.npz``, or an npz file. The
        default folders are ``$PYCOLLECTIVE_DATA``, its subfolder ``mnist``, and the cache
        ``pycollective/mnist`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. If none has the data, it is
        downloaded into the cache.

    Returns
    -------
    ((x_train, y_train), (x_test, y_test))
        NumPy arrays of uint8: images [n, 28, 28] from 0 to 255, labels [n] from 0 to 9.

    Raises
    ------
    DataError
        If the files are missing or damaged; the message explains what to do.
    """
    return load(MNIST, path)
