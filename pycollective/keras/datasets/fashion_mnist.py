"""Fashion-MNIST: articles of clothing (Zalando Research)."""

from __future__ import annotations

import os

from ._files import Collection, Images, load

__all__ = ["load_data"]

_TRAIN_LABELS = "b0197879cbda89f3dc7b894f9fd52b858e68ea4182b6947c9d8c2b67e5f18dcc"

# The address is that of Keras, which publishes no checksums for these files, and the authors
# publish MD5 only. These SHA-256 are what two public programs that share no code expect.
FASHION_MNIST = Collection(
    name="fashion_mnist",
    title="Fashion-MNIST",
    url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    files={
        "train-images-idx3-ubyte.gz": (
            "08dc20ab1689590a0bcd66e874647b6ee8464e2d501b5a3f1f78831db19a3fdc"
        ),
        "train-labels-idx1-ubyte.gz": _TRAIN_LABELS,
        "t10k-images-idx3-ubyte.gz": (
            "78dcbbfb5a27efaf1b6c1d616caca68560be8766c5bffcb2791df9273a534229"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "42bd18137a62d5998cdeae52bf3a0676ac6b706f5cf8439b47bb5b151ae3dccf"
        ),
    },
    label_sums=frozenset({_TRAIN_LABELS}),
)


def load_data(path: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Return 60,000 training and 10,000 test images of clothing, and what they show.

    Arguments, results and errors are those of `mnist.load_data`, with ``fashion_mnist`` in place of
    ``mnist`` in the names of folders and files.
    """
    return load(FASHION_MNIST, path)
