"""Handwritten digits that are always available: MNIST, or the small set of scikit-learn."""

from __future__ import annotations

import logging
import os

from pycollective.errors import DataError

from . import digits, mnist
from ._files import Images

_log = logging.getLogger("pycollective")


def load_data(path: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Return MNIST, or the digits of scikit-learn if MNIST cannot be found or downloaded.

    A warning of the logger ``pycollective`` tells why MNIST is not used.

    Parameters
    ----------
    path : str or path, optional
        A path for `mnist.load_data`, or ``"digits"`` for the digits of scikit-learn.

    Returns
    -------
    ((x_train, y_train), (x_test, y_test))
        NumPy arrays of uint8: images [n, 28, 28] from 0 to 255, labels [n] from 0 to 9.

    Raises
    ------
    DataError
        If the files in ``path`` are missing or damaged.
    ImportError
        If the digits of scikit-learn are needed, but scikit-learn is not installed.
    """
    if path == "digits":
        return digits.load_data()
    try:
        return mnist.load_data(path)
    except DataError as error:
        if path is not None:
            raise
        _log.warning("using the digits of scikit-learn: %s", str(error).splitlines()[0])
        return digits.load_data()
