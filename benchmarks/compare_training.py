"""Compare the time and memory of training steps with TensorFlow, PyTorch and Keras on JAX.

    python benchmarks/compare_training.py [--model MODEL] [--only CONTESTANT ...] [--rounds 3]
                                          [--json FILE] [--peers PYTHON ...] [--data DIR] [--check]

Every contestant trains the same model with Adam on the same images in float32. The models are in
models_keras.py and models_torch.py.

    The tutorial's CNN (`tutorial`): 121,930 parameters, MNIST, 64 examples a replica.
    ResNet-20 (`resnet20`): 1 x 1 convolutions where shapes change, 32 x 32, 64 examples.
    ResNet-50 (`resnet50`): 224 x 224, 16 examples.
    MobileNetV2 (`mobilenet_v2`): 224 x 224, 16 examples.
    VGG-16 (`vgg16`): a head of 512 units, 32 x 32, 16 examples.
    U-Net (`unet`): 32 to 512 filters, 128 x 128, 16 examples.
    Three dense layers (`mlp`): 32 examples. It shows the costs of Python.

The loop is the one that users of each library write: next batch from a shuffled dataset, step, loss
read every step. A peer's `x2` is a batch as large as that of two replicas.

`--check` instead gives all contestants equal kernels and one batch, and compares two losses: before and
after a step. Run it first.

Each contestant runs in its own process. The contestants take turns, round after round, because shared
machines change their speed; the number is the median over all windows of all rounds. The memory is the
process's peak, including libraries and data. A JSON file keeps the rounds of each contestant, so that
the same command resumes where it ended. Peers that no interpreter of --peers has are left out.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
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

from models_keras import MODELS, Model, give_equal_kernels

WINDOWS = 5
WINDOW_SECONDS = 1.5
FIT_STEPS = 80  # of an epoch of ``fit``
# A contestant with a larger loss at its end stops the comparison. Other models train too few steps.
MOST_LOSS = {"tutorial": 1.0, "resnet20": 1.0, "mlp": 1.0}
CHECKED = 4  # examples of a batch in a check
TOLERANCE = (1e-4, 2e-2)  # of the losses before and after a step


def images_of(model: str, folder: str | None) -> tuple[Any, Any]:
    """Return MNIST's training images as float32 NHWC, or generated images if there is no MNIST."""
    import numpy as np

    if folder and model == "tutorial":
        with gzip.open(Path(folder) / "train-images-idx3-ubyte.gz") as f:
            x = np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
        with gzip.open(Path(folder) / "train-labels-idx1-ubyte.gz") as f:
            y = np.frombuffer(f.read(), np.uint8, offset=8)
        return x.astype(np.float32) / np.float32(255), y.astype(np.int32)
    kind = MODELS[model]
    random = np.random.default_rng(0)
    y = random.integers(0, kind.classes, kind.images).astype(np.int32)
    x = random.standard_normal((kind.images, *kind.shape), dtype=np.float32)
    if kind.per_pixel:
        return x, (x.mean(-1) > 0).astype(np.int32)
    x *= np.float32(0.3)
    x += random.random((kind.classes, *kind.shape), dtype=np.float32)[y]
    return x, y


def timed(step: Callable[[], float], model: str, examples: int) -> dict[str, Any]:
    """Run steps in windows; return samples per second of each window, and the last losses' mean."""
    for _ in range(MODELS[model].warmup):
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


def tutorial_steps(
    tf: Any, strategy: Any, model_name: str, data: tuple[Any, Any], compiled: bool
) -> Iterator[Any]:
    """Yield the losses of the tutorial's custom loop; TensorFlow and pycollective run the same lines."""
    kind = MODELS[model_name]
    batch = kind.batch * strategy.num_replicas_in_sync
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).repeat()
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(2)
    pixels = math.prod(data[1].shape[1:])
    with strategy.scope():
        cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        model = kind.build(tf.keras)
        model.build((None, *kind.shape))
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.nn.compute_average_loss(
                cross_entropy(labels, predictions), global_batch_size=batch
            )
            loss = loss / pixels
            if kind.l2:
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
    """Run ``Model.fit``. A window is an epoch; the first epoch fills the shuffle, and does not count."""
    batch = MODELS[model_name].batch * strategy.num_replicas_in_sync
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).repeat()
    dataset = dataset.batch(batch, drop_remainder=True).prefetch(2)
    with strategy.scope():
        model = MODELS[model_name].build(tf.keras)
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
    batch = MODELS[model_name].batch * replicas
    return timed(lambda: float(next(steps)), model_name, batch)


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
    batch = MODELS[model_name].batch * count
    return timed(lambda: float(next(steps)), model_name, batch)


def run_tensorflow_fit(replicas: int, model_name: str, folder: str | None) -> dict[str, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    )
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])
    return fitted(tf, strategy, model_name, images_of(model_name, folder))


def batches(x: Any, y: Any, size: int) -> Iterator[tuple[Any, Any]]:
    """Yield shuffled batches without an end."""
    import numpy as np

    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(y))
        for i in range(0, len(y) - size + 1, size):
            yield x[order[i : i + size]], y[order[i : i + size]]


def run_jax(replicas: int, model_name: str, folder: str | None) -> dict[str, Any]:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    kind = MODELS[model_name]
    model = kind.build(keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    source = batches(*images_of(model_name, folder), kind.batch * replicas)
    return timed(
        lambda: float(model.train_on_batch(*next(source))), model_name, kind.batch * replicas
    )


def run_torch(replicas: int, model_name: str, folder: str | None, how: str = "") -> dict[str, Any]:
    import models_torch
    import torch

    kind = MODELS[model_name]
    layout = torch.channels_last if how == "channels_last" else torch.contiguous_format
    model = models_torch.MODELS[model_name]()
    if len(kind.shape) == 3:
        model = model.to(memory_format=layout)
    weights = [p for p in model.parameters() if p.dim() > 1] if kind.l2 else []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7, fused=True)
    forward = torch.compile(model) if how == "compiled" else model
    x, y = images_of(model_name, folder)
    images = torch.from_numpy(x)
    if len(kind.shape) == 3:
        images = images.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    del x
    source = batches(images, torch.from_numpy(y.astype("int64")), kind.batch * replicas)

    def step() -> float:
        bx, by = next(source)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(forward(bx), by)
        if weights:
            loss = loss + kind.l2 * sum((w * w).sum() for w in weights)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return timed(step, model_name, kind.batch * replicas)


Run = Callable[[int, str, str | None], dict[str, Any]]
CONTESTANTS: dict[str, tuple[Run, int, str]] = {
    "pycollective x1": (run_pycollective, 1, "own"),
    "pycollective x2": (run_pycollective, 2, "own"),
    "pycollective fit x2": (run_pycollective_fit, 2, "own"),
    "TensorFlow, no strategy": (run_tensorflow, 0, "tensorflow"),
    "TensorFlow Mirrored x1": (run_tensorflow, 1, "tensorflow"),
    "TensorFlow Mirrored x2": (run_tensorflow, 2, "tensorflow"),
    "TensorFlow fit x2": (run_tensorflow_fit, 2, "tensorflow"),
}
for _x in (1, 2):
    CONTESTANTS[f"Keras on JAX x{_x}"] = (run_jax, _x, "jax")
    for _how in ("", "channels_last", "compiled"):
        _name = " ".join(["PyTorch", *_how.split(), f"x{_x}"])
        CONTESTANTS[_name] = (functools.partial(run_torch, how=_how), _x, "torch")


# The check of the losses ------------------------------------------------------------------------


def checked_keras(kind: Model, keras: Any, x: Any, y: Any) -> tuple[int, list[float]]:
    model = kind.build(keras)
    model.build((None, *kind.shape))
    give_equal_kernels(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(1e-3), loss=loss)
    return model.count_params(), [float(model.train_on_batch(x, y)) for _ in range(2)]


def checked(who: str, model_name: str) -> tuple[int, list[float]]:
    """Return a contestant's number of parameters, and its losses before and after a step."""
    kind = MODELS[model_name]
    x, y = (part[:CHECKED] for part in images_of(model_name, None))
    if who == "own":
        import pycollective

        return checked_keras(kind, pycollective.keras, x, y)
    if who == "jax":
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        return checked_keras(kind, keras, x, y)
    import models_torch
    import torch

    model = models_torch.MODELS[model_name](exact=True)
    models_torch.give_equal_kernels(model)
    images = torch.from_numpy(x.transpose(0, 3, 1, 2).copy() if x.ndim == 4 else x)
    labels = torch.from_numpy(y.astype("int64"))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        squares = sum((p * p).sum() for p in model.parameters() if p.dim() > 1)
        loss = torch.nn.functional.cross_entropy(model(images), labels) + kind.l2 * squares
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()))
    # Keras counts the moving means and variances, too.
    moving = sum(b.numel() for b in model.buffers() if b.dim())
    return sum(p.numel() for p in model.parameters()) + moving, losses


def check(model: str, pythons: dict[str, str]) -> None:
    """Raise ``SystemExit`` unless the contestants' parameters and losses of a model agree."""
    found = {}
    for who, python in pythons.items():
        if who != "tensorflow":
            command = [python, __file__, "--checked", who, "--model", model]
            found[who] = answer(command)
            print(f"{model:14} {who:6} {found[who]['parameters']:>12,} {found[who]['losses']}")
    own = found.pop("own")
    for who, other in found.items():
        same = own["parameters"] == other["parameters"]
        for a, b, tolerance in zip(own["losses"], other["losses"], TOLERANCE, strict=True):
            same = same and abs(a - b) <= tolerance * abs(b)
        if not same:
            raise SystemExit(f"{model}: {who} has {other}, pycollective {own}")


def installed(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


def answer(command: list[str]) -> dict[str, Any]:
    """Return the results that a contestant's process prints in its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def report_of(
    model: str, data: str | None, runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    rates = {
        name: [x for run in found for x in run["samples_per_s"]] for name, found in runs.items()
    }
    return {
        "benchmark": "compare_training",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": model,
        "data": "MNIST" if data and model == "tutorial" else "generated",
        "batch_per_replica": MODELS[model].batch,
        "peak_mib": {
            name: round(max(run["peak_mib"] for run in found)) for name, found in runs.items()
        },
        "samples_per_s": {
            name: {"median": statistics.median(r), "min": min(r), "max": max(r)}
            for name, r in rates.items()
        },
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    """Print a report as a table."""
    rates = report["samples_per_s"]
    peers = [v["median"] for k, v in rates.items() if not k.startswith("pycollective")]
    best = max(peers, default=float("nan"))
    batch = report["batch_per_replica"]
    print(f"\n{report['model']}, batches of {batch} a replica")
    print(
        f"{'':26} {'samples/s':>10} {'range':>17} {'ms / batch':>11} {'of best peer':>13} {'loss':>7} "
        f"{'MiB':>6}"
    )
    for name, rate in rates.items():
        spread = f"{rate['min']:,.1f} to {rate['max']:,.1f}"
        print(
            f"{name:26} {rate['median']:>10,.1f} {spread:>17} {1e3 * batch / rate['median']:>11,.1f} "
            f"{rate['median'] / best:>12.2f}x {report['runs'][name][-1]['loss']:>7.3f} "
            f"{report['peak_mib'][name]:>6,}"
        )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=list(MODELS), default="tutorial", help="(tutorial)")
    p.add_argument("--only", nargs="+", choices=list(CONTESTANTS), metavar="CONTESTANT",
                   help="of: " + ", ".join(CONTESTANTS))  # fmt: skip
    p.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    p.add_argument("--json", type=Path, help="results, also to resume from")
    p.add_argument("--peers", nargs="*", default=[sys.executable], metavar="PYTHON",
                   help="the first one that has a peer runs it (this interpreter)")  # fmt: skip
    p.add_argument("--data", help="folder of the MNIST idx.gz files (generated digits)")
    p.add_argument("--check", action="store_true", help="compare losses, and time nothing")
    p.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    p.add_argument("--checked", choices=["own", "jax", "torch"], help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.checked:
        parameters, losses = checked(args.checked, args.model)
        print(json.dumps({"parameters": parameters, "losses": losses}))
        return
    if args.contestant:
        run, number, _ = CONTESTANTS[args.contestant]
        result = run(number, args.model, args.data)
        result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return

    pythons = {"own": sys.executable}
    for peer in ("torch", "jax", "tensorflow"):
        python = next((python for python in args.peers if installed(python, peer)), None)
        if python:
            pythons[peer] = python
        else:
            print(f"# {peer}: not installed", file=sys.stderr)
    if args.check:
        check(args.model, pythons)
        return
    interpreters = {
        name: pythons[needs]
        for name, (_, _, needs) in CONTESTANTS.items()
        if needs in pythons and name in (args.only or CONTESTANTS)
    }
    runs: dict[str, list[dict[str, Any]]] = {}
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text())
        if kept["model"] != args.model:
            raise SystemExit(f"{args.json} has results of the model {kept['model']}")
        runs = kept["runs"]
    for turn in range(args.rounds):
        for name, interpreter in interpreters.items():
            if len(runs.get(name, [])) > turn:
                continue
            print(f"# round {turn + 1}/{args.rounds}: {name}", file=sys.stderr, flush=True)
            command = [interpreter, __file__, "--contestant", name, "--model", args.model]
            result = answer(command + (["--data", args.data] if args.data else []))
            if not result["loss"] < MOST_LOSS.get(args.model, math.inf):
                raise SystemExit(f"{name} does not learn: its loss is {result['loss']}")
            runs.setdefault(name, []).append(result)
            if args.json:
                text = json.dumps(report_of(args.model, args.data, runs), indent=1)
                args.json.write_text(text + "\n")
    show(report_of(args.model, args.data, runs))


if __name__ == "__main__":
    main()
