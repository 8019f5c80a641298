"""Fashion-MNIST: articles of clothing (Zalando Research)."""

from __future__ import annotations

import os

from ._files import FASHION_MNIST, Images, load


def load_data(path: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Return 60,000 training and 10,000 test images of clothing with their labels.

    Arguments, results and errors are those of `mnist.load_data`, with ``fashion_mnist`` in place of
    ``mnist`` in the names of folders and files.
    """
    return load(FASHION_MNIST, path)
