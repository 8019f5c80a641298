"""Compare the training throughput of two models with TensorFlow and PyTorch in the same run.

    python benchmarks/compare_training.py [--model tutorial|resnet20] [--data DIR] [--rounds 3]
                                          [--json FILE] [--peer-python PYTHON]

Every contestant trains the same model with Adam and L2 regularization on the same images in float32, 64
examples per replica. The loop is the one that its users write: next batch from a shuffled dataset, step,
loss read every step. One model is the tutorial's CNN (121,930 parameters) on MNIST. The other one is
ResNet-20 (He et al., 2016; 1 x 1 convolutions where shapes change) on generated images of 32 x 32 x 3.

Each contestant runs in its own process. The contestants take turns, round after round, because shared
machines change their speed; the number is the median over all windows of all rounds. The memory is the
process's peak, including libraries and data. Peers that are not installed are left out (extra `peers`,
or another interpreter by --peer-python). A contestant whose loss has not decreased has no number.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64
WARMUP_STEPS = 30
WINDOWS = 5
WINDOW_SECONDS = 1.5
FIT_STEPS = 80  # of an epoch of ``fit``
# The shape of an image, and the number of images.
SIZES = {"tutorial": ((28, 28, 1), 20_000), "resnet20": ((32, 32, 3), 10_000)}


def images_of(model: str, folder: str | None) -> tuple[Any, Any]:
    """Return MNIST's training images as float32 NHWC, or generated images if there is no MNIST."""
    import numpy as np

    if folder and model == "tutorial":
        with gzip.open(Path(folder) / "train-images-idx3-ubyte.gz") as f:
            x = np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
        with gzip.open(Path(folder) / "train-labels-idx1-ubyte.gz") as f:
            y = np.frombuffer(f.read(), np.uint8, offset=8)
        return x.astype(np.float32) / np.float32(255), y.astype(np.int32)
    shape, count = SIZES[model]
    random = np.random.default_rng(0)
    prototypes = random.random((10, *shape), dtype=np.float32)
    y = random.integers(0, 10, count).astype(np.int32)
    noise = random.standard_normal((len(y), *shape), dtype=np.float32)
    return prototypes[y] + np.float32(0.3) * noise, y


def timed(step: Callable[[], float], examples: int) -> dict[str, Any]:
    """Run steps in windows; return samples per second of each window, and the last losses' mean."""
    for _ in range(WARMUP_STEPS):
        step()
    rates, losses = [], []
    for _ in range(WINDOWS):
        begin = time.perf_counter()
        steps = 0
        while time.perf_counter() - begin < WINDOW_SECONDS:
            losses.append(step())
            steps += 1
        rates.append(steps * examples / (time.perf_counter() - begin))
    tail = losses[-50:]
    return {"samples_per_s": rates, "loss": sum(tail) / len(tail)}


# Contestants ----------------------------------------------------------------------------------


def tutorial_model(tf: Any) -> Any:
    layers, l2 = tf.keras.layers, tf.keras.regularizers.L2
    return tf.keras.Sequential(
        [
            layers.Conv2D(32, 3, activation="relu", kernel_regularizer=l2(1e-5)),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu", kernel_regularizer=l2(1e-5)),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", kernel_regularizer=l2(1e-5)),
            layers.Dense(10, kernel_regularizer=l2(1e-5)),
        ]
    )


def resnet20(tf: Any) -> Any:
    layers, l2 = tf.keras.layers, tf.keras.regularizers.L2

    def conv(filters: int, size: int, strides: int) -> Any:
        return layers.Conv2D(
            filters,
            size,
            strides=strides,
            padding="same",
            use_bias=False,
            kernel_regularizer=l2(1e-5),
        )

    inputs = tf.keras.Input((32, 32, 3))
    x = layers.BatchNormalization()(conv(16, 3, 1)(inputs))
    x = layers.Activation("relu")(x)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            strides = 2 if stage and not block else 1
            y = layers.BatchNormalization()(conv(filters, 3, strides)(x))
            y = layers.Activation("relu")(y)
            y = layers.BatchNormalization()(conv(filters, 3, 1)(y))
            if strides > 1:
                x = conv(filters, 1, strides)(x)
            x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, layers.Dense(10, kernel_regularizer=l2(1e-5))(x))


MODELS = {"tutorial": tutorial_model, "resnet20": resnet20}


def tutorial_steps(
    tf: Any, strategy: Any, model_name: str, data: tuple[Any, Any], compiled: bool
) -> Iterator[Any]:
    """Return a step of the tutorial's custom loop; the same lines run on TensorFlow and pycollective."""
    replicas = strategy.num_replicas_in_sync
    batch = BATCH * replicas
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).repeat()
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(2)
    with strategy.scope():
        cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        model = MODELS[model_name](tf)
        model.build((None, *SIZES[model_name][0]))
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.nn.compute_average_loss(
                cross_entropy(labels, predictions), global_batch_size=batch
            )
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    def step(images: Any, labels: Any) -> Any:
        losses = strategy.run(train_step, args=(images, labels))
        return strategy.reduce("SUM", losses, axis=None)

    run = tf.function(step) if compiled else step
    for images, labels in strategy.experimental_distribute_dataset(dataset):
        yield run(images, labels)


def fitted(tf: Any, strategy: Any, model_name: str, data: tuple[Any, Any]) -> dict[str, Any]:
    """Run ``Model.fit`` with an epoch as a window; the first epoch, which fills the shuffle, is none."""
    batch = BATCH * strategy.num_replicas_in_sync
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).repeat()
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(2)
    with strategy.scope():
        model = MODELS[model_name](tf)
        model.compile(
            optimizer=tf.keras.optimizers.Adam(1e-3),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    begins: list[float] = []
    seconds: list[float] = []
    clock = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins.append(time.perf_counter()),
        on_epoch_end=lambda epoch, logs: seconds.append(time.perf_counter() - begins[-1]),
    )
    losses = model.fit(
        dataset, epochs=1 + WINDOWS, steps_per_epoch=FIT_STEPS, verbose=0, callbacks=[clock]
    ).history["loss"]
    return {"samples_per_s": [FIT_STEPS * batch / s for s in seconds[1:]], "loss": losses[-1]}


def run_pycollective(replicas: int, model_name: str, folder: str | None) -> dict[str, Any]:
    import pycollective as tf

    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    steps = tutorial_steps(tf, strategy, model_name, images_of(model_name, folder), compiled=False)
    return timed(lambda: float(next(steps)), BATCH * replicas)


def run_pycollective_fit(replicas: int, model_name: str, folder: str | None) -> dict[str, Any]:
    import pycollective as tf

    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    return fitted(tf, strategy, model_name, images_of(model_name, folder))


def run_tensorflow(replicas: int, model_name: str, folder: str | None) -> dict[str, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    count = max(1, replicas)
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    strategy = (
        tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(count)])
        if replicas
        else tf.distribute.get_strategy()
    )
    steps = tutorial_steps(tf, strategy, model_name, images_of(model_name, folder), compiled=True)
    return timed(lambda: float(next(steps)), BATCH * count)


def run_tensorflow_fit(replicas: int, model_name: str, folder: str | None) -> dict[str, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    )
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])
    return fitted(tf, strategy, model_name, images_of(model_name, folder))


def torch_resnet20() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, filters: int, stride: int) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(before, filters, 3, stride, 1, bias=False), nn.BatchNorm2d(filters),
                nn.ReLU(),
                nn.Conv2d(filters, filters, 3, 1, 1, bias=False), nn.BatchNorm2d(filters),
            )  # fmt: skip
            self.beside = (
                nn.Conv2d(before, filters, 1, stride, bias=False) if stride > 1 else nn.Identity()
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(self.beside(x) + self.inner(x))

    blocks, before = [], 16
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            blocks.append(Block(before, filters, 2 if stage and not block else 1))
            before = filters
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def torch_tutorial() -> Any:
    import torch

    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(1600, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip


def run_torch(batch: int, model_name: str, folder: str | None) -> dict[str, Any]:
    import torch

    x, y = images_of(model_name, folder)
    images = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
    labels = torch.from_numpy(y.astype("int64"))
    model = torch_tutorial() if model_name == "tutorial" else torch_resnet20()
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)

    def batches() -> Iterator[Any]:
        while True:
            order = torch.randperm(len(labels))
            for i in range(0, len(labels) - batch + 1, batch):
                yield images[order[i : i + batch]], labels[order[i : i + batch]]

    source = batches()

    def step() -> float:
        bx, by = next(source)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(bx), by)
        loss = loss + 1e-5 * sum((w * w).sum() for w in weights)
        loss.backward()
        optimizer.step()
        return loss.item()

    return timed(step, batch)


CONTESTANTS: dict[str, tuple[Callable[[int, str, str | None], dict[str, Any]], int, str]] = {
    "pycollective x1": (run_pycollective, 1, "own"),
    "pycollective x2": (run_pycollective, 2, "own"),
    "pycollective fit x2": (run_pycollective_fit, 2, "own"),
    "TensorFlow, no strategy": (run_tensorflow, 0, "tensorflow"),
    "TensorFlow Mirrored x1": (run_tensorflow, 1, "tensorflow"),
    "TensorFlow Mirrored x2": (run_tensorflow, 2, "tensorflow"),
    "TensorFlow fit x2": (run_tensorflow_fit, 2, "tensorflow"),
    "PyTorch, batch 64": (run_torch, 64, "torch"),
    "PyTorch, batch 128": (run_torch, 128, "torch"),
}


def installed(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=list(MODELS), default="tutorial", help="(tutorial)")
    p.add_argument("--data", help="folder of the MNIST idx.gz files (generated digits)")
    p.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    p.add_argument("--json", type=Path, help="write the results there too")
    p.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers")
    p.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.contestant:
        run, number, _ = CONTESTANTS[args.contestant]
        result = run(number, args.model, args.data)
        result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return

    python = {
        name: sys.executable if needs == "own" else args.peer_python
        for name, (_, _, needs) in CONTESTANTS.items()
    }
    there = {}
    for name, (_, _, needs) in CONTESTANTS.items():
        if needs == "own" or installed(args.peer_python, needs):
            there[name] = python[name]
        else:
            print(f"# {name}: not installed", file=sys.stderr)
    rates: dict[str, list[float]] = {name: [] for name in there}
    loss: dict[str, float] = {}
    peak: dict[str, float] = {}
    for turn in range(args.rounds):
        for name, interpreter in there.items():
            print(f"# round {turn + 1}/{args.rounds}: {name}", file=sys.stderr, flush=True)
            command = [interpreter, __file__, "--contestant", name, "--model", args.model]
            command += ["--data", args.data] if args.data else []
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
            result = json.loads(done.stdout.strip().splitlines()[-1])
            if not result["loss"] < 1.0:
                raise SystemExit(f"{name} does not learn: its loss is {result['loss']}")
            rates[name] += result["samples_per_s"]
            loss[name] = result["loss"]
            peak[name] = max(peak.get(name, 0.0), result["peak_mib"])
    median = {name: statistics.median(r) for name, r in rates.items()}
    peers = [v for k, v in median.items() if not k.startswith("pycollective")]
    best = max(peers, default=float("nan"))
    print(f"\n{'':26} {'samples/s':>10} {'range':>17} {'of best peer':>13} {'loss':>7} {'MiB':>6}")
    for name, value in median.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        print(
            f"{name:26} {value:>10,.0f} {spread:>17} {value / best:>12.2f}x {loss[name]:>7.3f} "
            f"{peak[name]:>6,.0f}"
        )
    if args.json:
        report = {
            "benchmark": "compare_training",
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "model": args.model,
            "data": "MNIST" if args.data and args.model == "tutorial" else "generated",
            "batch_per_replica": BATCH,
            "peak_mib": {name: round(value) for name, value in peak.items()},
            "samples_per_s": {
                name: {"median": median[name], "min": min(r), "max": max(r)}
                for name, r in rates.items()
            },
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
