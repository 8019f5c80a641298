"""Measure the overhead of `MirroredStrategy` with one replica: a training step of the tutorial CNN.

Both contestants train the same network on the same batches. A step is the next batch, forward,
gradients, Adam and reading the loss. Steps take turns in one run. The report has medians, and the median
of the ratios of neighbouring steps, which a slow phase of the machine does not change. The same is
reported for the processor time of the calling thread, on which other programs have little influence.

Run: ``python benchmarks/strategy_overhead.py [--batch-size 64] [--steps 400] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pycollective import _core, data, distribute, keras, nn, tensor
from pycollective.cli.train import build_cnn


def make_step(strategy: distribute.Strategy, batch_size: int) -> Callable[[], float]:
    """Return a function that trains on the next batch and returns the loss."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    images = rng.random((64 * batch_size, 28, 28, 1), np.float32)
    labels = rng.integers(0, 10, len(images)).astype(np.int32)
    batches = data.Dataset.from_tensor_slices((images, labels)).batch(batch_size).repeat()
    with strategy.scope():
        model = build_cnn()
        model.build((batch_size, 28, 28, 1))
        optimizer = keras.optimizers.Adam(1e-3)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=keras.losses.Reduction.NONE
        )
    elements = iter(strategy.experimental_distribute_dataset(batches))

    def replica(x: Any, y: Any) -> Any:
        with tensor.GradientTape() as tape:
            loss = nn.compute_average_loss(
                cross_entropy(y, model(x, training=True)), global_batch_size=batch_size
            )
            loss += nn.scale_regularization_loss(tensor.ops.add_n(model.losses))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    if strategy is distribute.get_strategy():
        return lambda: float(replica(*next(elements)))

    def step() -> float:
        losses = strategy.run(replica, args=next(elements))
        return float(strategy.reduce("SUM", losses, axis=None))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, help="a file for the JSON, which is also printed")
    args = parser.parse_args()
    steps = {
        "without": make_step(distribute.get_strategy(), args.batch_size),
        "with": make_step(distribute.MirroredStrategy(["cpu:0"]), args.batch_size),
    }
    for name in steps:
        for _ in range(5):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.steps):
        losses = {}
        for name in steps if turn % 2 else reversed(steps):
            begin, busy_begin = time.perf_counter(), time.thread_time()
            losses[name] = steps[name]()
            times[name].append((time.perf_counter() - begin) * 1e3)
            busy[name].append((time.thread_time() - busy_begin) * 1e3)
        assert losses["with"] == losses["without"], losses

    def ratio(of: dict[str, list[float]]) -> float:
        return statistics.median([b / a for a, b in zip(of["without"], of["with"], strict=True)])

    report = {
        "benchmark": "strategy_overhead",
        "date": time.strftime("%Y-%m-%d"),
        "cores": _core.usable_cores(),
        "machine": platform.machine(),
        "batch_size": args.batch_size,
        "steps": args.steps,
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "ratio": ratio(times),
        "busy_milliseconds": {name: statistics.median(values) for name, values in busy.items()},
        "busy_ratio": ratio(busy),
    }
    print(json.dumps(report, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
