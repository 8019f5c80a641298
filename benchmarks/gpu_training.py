"""Training the tutorial CNN with `Model.fit` on one GPU: samples a second, with cuDNN and without.

The model is that of `pycollective train`: Conv 32 3x3 relu, pool 2x2, Conv 64 3x3 relu, pool 2x2, Dense
64 relu, Dense 10, with Adam, on random images of 28x28x1. The first epoch is not counted; the others'
median is reported.

Run: ``python benchmarks/gpu_training.py [--device gpu:0] [--batch-size 256] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pycollective import distribute, keras
from pycollective.cli.train import build_cnn
from pycollective.nn import cudnn


class Epochs(keras.callbacks.Callback):
    """Notes the seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop it; the numbers of the epoch have been fetched, so that the device is done."""
        self.seconds.append(time.perf_counter() - self.begin)


def samples_per_second(device: str, batch_size: int, steps: int, epochs: int) -> float:
    """Train, and return the median over the epochs but the first."""
    random = np.random.default_rng(0)
    images = random.random((steps * batch_size, 28, 28, 1), np.float32)
    labels = random.integers(0, 10, len(images)).astype(np.int32)
    strategy = distribute.OneDeviceStrategy(device)
    with strategy.scope():
        model = build_cnn()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    watch = Epochs()
    model.fit(images, labels, batch_size, epochs + 1, verbose=0, callbacks=[watch])
    return len(images) / statistics.median(watch.seconds[1:])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="gpu:0")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arguments = options.device, options.batch_size, options.steps, options.epochs
    found: dict[str, Any] = {"samples_per_second": {}, **vars(options), "out": None}
    rates = found["samples_per_second"]
    with mock.patch.object(cudnn, "_library", lambda: None):
        rates["im2col"] = samples_per_second(*arguments)
    if options.device.startswith("gpu") and cudnn._library() is not None:
        rates["cudnn"] = samples_per_second(*arguments)
    for route, rate in rates.items():
        print(f"{route}: {rate:.0f} samples/s")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
