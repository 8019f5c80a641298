"""``pycollective train``: train the tutorial's CNN on handwritten digits, data-parallel."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pycollective import _core, data, distribute, keras, nn, tensor
from pycollective import train as checkpoints
from pycollective.algorithms import Algorithm
from pycollective.benchmark import report
from pycollective.cli import options
from pycollective.distribute.scheduled_ops import ScheduledOps
from pycollective.errors import DataError

_DESCRIPTION = """\
Train the convolutional network of TensorFlow's distributed-training tutorial (121,930 parameters for
28x28 images) on handwritten digits. Each batch is split among the replicas, which are threads; an
all-reduce sums their gradients. Every example has the same weight, also in the smaller last batch, so
that the losses do not depend on the number of replicas.

After each epoch a checkpoint is written. At the end it is read into a new model without any strategy;
the model's test accuracy must be the same.
"""

_EPILOG = """\
data: auto           MNIST from $PYCOLLECTIVE_DATA, the cache or the network; if that fails, the small
                     digits of scikit-learn (extra 'demo')
      mnist, fashion_mnist, digits
      FOLDER         the folder with the MNIST files (idx.gz or mnist.npz)

examples:
  pycollective train -n 4 --epochs 3 --cross-device-ops hierarchical_copy
  pycollective train --epochs 10 --resume                 continue where the last run ended
  pycollective train --data fashion_mnist --batch-size 256 --checkpoint-dir runs/fashion
"""

_OPS: dict[str, Callable[[], distribute.CrossDeviceOps]] = {
    "ring": distribute.RingAllReduce,
    "hierarchical_copy": distribute.HierarchicalCopyAllReduce,
    "reduce_to_one": distribute.ReductionToOneDevice,
}

Arrays = tuple[Any, Any]


@dataclass
class Epoch:
    """Results of one epoch.

    Attributes
    ----------
    number : int
        The epoch, from 1.
    loss, accuracy, test_loss, test_accuracy : float
        Means over the examples; ``loss`` includes regularization, accuracies are from 0 to 1.
    seconds : float
        Time of the training part.
    step_losses : list of float
        The loss of each global batch.
    """

    number: int
    loss: float = 0.0
    accuracy: float = 0.0
    test_loss: float = 0.0
    test_accuracy: float = 0.0
    seconds: float = 0.0
    step_losses: list[float] = field(default_factory=list)


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands,
        "train",
        run,
        help="train a CNN on handwritten digits",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = p.add_argument
    add("-n", "--replicas", type=options.whole(1, max(16, _core.usable_cores())), metavar="N",
        help="replicas of the mirrored strategy, at most 16 or one for each core (2)")  # fmt: skip
    add("--strategy", choices=["mirrored", "one_device", "default"], default="mirrored",
        help="strategy that replicates the model (mirrored)")  # fmt: skip
    add("--cross-device-ops", type=_cross_device_ops, default="ring", metavar="NAME",
        help=f"algorithm that reduces gradients: {', '.join(_OPS)}, or FILE.py:NAME for one of your "
        "own (ring)")  # fmt: skip
    add("--data", default="auto", metavar="DATA", help="see below (auto)")
    add("--epochs", type=options.positive, default=3, metavar="N", help="passes over the data (3)")
    add("--batch-size", type=options.positive, default=128, metavar="N",
        help="examples of a step, of all replicas together (128)")  # fmt: skip
    add("--learning-rate", type=options.real(1e-12, 1e12), default=2e-3, metavar="X",
        help="Adam's initial rate; it falls to 0 along a cosine (0.002)")  # fmt: skip
    add("--seed", type=options.whole(0, 2**32 - 1), default=0, metavar="N",
        help="seed of weights and order (0)")  # fmt: skip
    add("--checkpoint-dir", type=Path, default=Path("training_checkpoints"), metavar="DIR",
        help="folder for checkpoints (training_checkpoints)")  # fmt: skip
    add("--max-to-keep", type=options.positive, metavar="N",
        help="keep the last N checkpoints of the folder, and delete older ones (default: keep all)",
    )  # fmt: skip
    add("--resume", action="store_true",
        help="continue from the folder's last checkpoint; with the other options unchanged, the "
        "result is that of an uninterrupted run")  # fmt: skip
    options.add_json(p, "the epochs")


def _cross_device_ops(text: str) -> distribute.CrossDeviceOps:
    """Return cross-device operations by name, or those that run an algorithm of a user's file."""
    if text in _OPS:
        return _OPS[text]()
    algorithm = options.algorithm(text)
    if isinstance(algorithm, str):
        raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(_OPS)} nor FILE.py:NAME")
    return _OwnAlgorithm(text, algorithm)


class _OwnAlgorithm(ScheduledOps):
    """Cross-device operations that run an algorithm of a user's file."""

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self.called = name
        self.algorithm = self.own = algorithm
        super().__init__()

    def describe(self) -> str:
        return self.called


def load_digits(name: str) -> tuple[str, Arrays, Arrays]:
    """Return the name of the data, and training and test images (float32, 0 to 1, NHWC) with labels."""
    sets = keras.datasets
    if name == "auto":
        pairs = sets.handwritten.load_data()
    elif name in ("mnist", "fashion_mnist", "digits"):
        pairs = getattr(sets, name).load_data()
    elif Path(name).exists():
        pairs = sets.mnist.load_data(name)
    else:
        raise DataError(
            f"--data {name!r} is neither a folder nor one of auto, mnist, fashion_mnist, digits"
        )
    (x, y), (x_test, y_test) = pairs

    def ready(images: Any, labels: Any) -> Arrays:
        return images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int32)

    titles = {
        "auto": "handwritten digits",
        "digits": "scikit-learn's digits",
        "fashion_mnist": "Fashion-MNIST",
    }
    what = titles.get(name, "MNIST")
    return f"{what}, {len(x)} + {len(x_test)} images", ready(x, y), ready(x_test, y_test)


def build_cnn(dtype: str = "float32") -> Any:
    """Return the tutorial's CNN; its weights are made at its first call."""
    layers = keras.layers

    def l2() -> Any:
        return keras.regularizers.L2(1e-5)

    return keras.Sequential(
        [
            layers.Conv2D(32, 3, activation="relu", kernel_regularizer=l2(), dtype=dtype),
            layers.MaxPooling2D(dtype=dtype),
            layers.Conv2D(64, 3, activation="relu", kernel_regularizer=l2(), dtype=dtype),
            layers.MaxPooling2D(dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(64, activation="relu", kernel_regularizer=l2(), dtype=dtype),
            layers.Dense(10, kernel_regularizer=l2(), dtype=dtype),
        ]
    )


def train_cnn(
    strategy: distribute.Strategy,
    training: Arrays,
    test: Arrays,
    *,
    epochs: int,
    batch_size: int,
    seed: int = 0,
    learning_rate: float = 2e-3,
    dtype: str = "float32",
    checkpoint_dir: Path | None = None,
    max_to_keep: int | None = None,
    resume: bool = False,
    keep: dict[str, Any] | None = None,
) -> Iterator[Epoch]:
    """Train the CNN; each step of the iterator trains an epoch and yields its results.

    ``keep`` is a dictionary that gets the model and the optimizer.
    """
    keras.utils.set_random_seed(seed)
    x, y = training
    batches = data.Dataset.from_tensor_slices((x.astype(dtype), y))
    batches = batches.shuffle(len(x), seed=seed).batch(batch_size)
    with strategy.scope():
        model = build_cnn(dtype)
        # The rate falls to 0 over the run, so that the last steps do not undo the progress.
        rate = keras.optimizers.schedules.CosineDecay(learning_rate, epochs * len(batches))
        optimizer = keras.optimizers.Adam(learning_rate=rate)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy", dtype=dtype)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=keras.losses.Reduction.NONE
        )
    if keep is not None:
        keep.update(model=model, optimizer=optimizer)
    checkpoint = checkpoints.Checkpoint(model=model, optimizer=optimizer)
    manager = None
    if checkpoint_dir is not None:
        manager = checkpoints.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep)

    def step(images: Any, labels: Any, examples: int) -> Any:
        with tensor.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = nn.compute_average_loss(
                cross_entropy(labels, predictions), global_batch_size=examples
            )
            loss += nn.scale_regularization_loss(tensor.ops.add_n(model.losses))
        # `apply_gradients` would do the same, but without overlapping all-reduce and gradients.
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        accuracy.update_state(labels, predictions)
        return loss

    distributed = strategy.experimental_distribute_dataset(batches)
    first = 0
    if manager is not None and resume and manager.restore_or_initialize():
        first = int(checkpoint.save_counter.numpy())
        for _ in range(first):
            next(iter(distributed))  # skip: each epoch has its own order
    for number in range(first, epochs):
        epoch = Epoch(number + 1)
        weighted = 0.0
        accuracy.reset_state()
        begin = time.perf_counter()
        for images, labels in _bar(distributed, number, len(batches)):
            # The size of the whole batch gives each example the same weight on every replica.
            examples = sum(len(part) for part in strategy.experimental_local_results(labels))
            losses = strategy.run(step, args=(images, labels, examples))
            loss = float(strategy.reduce("SUM", losses, axis=None))
            epoch.step_losses.append(loss)
            weighted += loss * examples
        epoch.seconds = time.perf_counter() - begin
        epoch.loss = weighted / len(x)
        epoch.accuracy = float(accuracy.result())
        epoch.test_loss, epoch.test_accuracy = evaluate(strategy, model, test, batch_size, dtype)
        if manager is not None:
            manager.save()
        yield epoch


def _bar(batches: Iterable[Any], epoch: int, steps: int) -> Iterable[Any]:
    """Return the batches of an epoch with a progress bar, if there is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    hidden = not sys.stderr.isatty()
    title = f"epoch {epoch + 1}"
    bar: Iterable[Any] = tqdm(batches, title, steps, leave=False, unit="step", disable=hidden)
    return bar


def evaluate(
    strategy: distribute.Strategy, model: Any, test: Arrays, batch_size: int, dtype: str = "float32"
) -> tuple[float, float]:
    """Return a model's mean loss and accuracy on test data."""
    x, y = test
    batches = data.Dataset.from_tensor_slices((x.astype(dtype), y)).batch(batch_size)
    with strategy.scope():
        mean_loss = keras.metrics.Mean(name="test_loss", dtype=dtype)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy", dtype=dtype)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=keras.losses.Reduction.NONE
        )

    def step(images: Any, labels: Any) -> None:
        predictions = model(images, training=False)
        mean_loss.update_state(cross_entropy(labels, predictions))
        accuracy.update_state(labels, predictions)

    for images, labels in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(images, labels))
    return float(mean_loss.result()), float(accuracy.result())


def _strategy(args: argparse.Namespace) -> distribute.Strategy:
    replicas = args.replicas or (2 if args.strategy == "mirrored" else 1)
    if replicas > 1 and args.strategy != "mirrored":
        raise options.WrongOptionError(f"--strategy {args.strategy} has one replica")
    if args.batch_size < replicas:
        raise options.WrongOptionError(
            f"--batch-size {args.batch_size} leaves some of the {replicas} replicas without examples"
        )
    if replicas > 1 and isinstance(args.cross_device_ops, _OwnAlgorithm):
        try:
            args.cross_device_ops.own.verify(replicas)
        except (ValueError, TypeError) as error:
            raise options.WrongOptionError(str(error)) from error
    if args.strategy == "mirrored":
        return distribute.MirroredStrategy(
            [f"cpu:{i}" for i in range(replicas)], args.cross_device_ops
        )
    if args.strategy == "one_device":
        return distribute.OneDeviceStrategy("cpu:0")
    return distribute.get_strategy()


def run(args: argparse.Namespace) -> int:
    """Train, print a line for each epoch, and check the checkpoint."""
    strategy = _strategy(args)
    options.need_folder(args.checkpoint_dir)
    what, training, test = load_digits(args.data)
    print(f"data: {what}")
    replicas = strategy.num_replicas_in_sync
    print(
        f"strategy: {type(strategy).__name__.lstrip('_')}, replicas: {replicas}, "
        f"all-reduce: {args.cross_device_ops.describe() if replicas > 1 else 'none'}, "
        f"batch size: {args.batch_size}"
    )
    epochs = train_cnn(
        strategy,
        training,
        test,
        epochs=args.epochs,
        batch_size=args.batch_size,
        seed=args.seed,
        learning_rate=args.learning_rate,
        checkpoint_dir=args.checkpoint_dir,
        max_to_keep=args.max_to_keep,
        resume=args.resume,
    )
    epoch = None
    found = []
    for epoch in epochs:
        found.append(asdict(epoch))
        print(
            f"epoch {epoch.number}/{args.epochs}: loss {epoch.loss:.4f}, accuracy {epoch.accuracy:.2%}, "
            f"test loss {epoch.test_loss:.4f}, test accuracy {epoch.test_accuracy:.2%}, "
            f"{len(training[0]) / epoch.seconds:,.0f} samples/s",
            flush=True,
        )
    path = checkpoints.latest_checkpoint(str(args.checkpoint_dir))
    same = True
    if epoch is None:
        print(f"{path} has all of the {args.epochs} epochs: give more --epochs to continue")
    else:
        model = build_cnn()
        restored = checkpoints.Checkpoint(model=model)
        restored.restore(path).expect_partial()
        _, accuracy = evaluate(distribute.get_strategy(), model, test, args.batch_size)
        same = accuracy == epoch.test_accuracy
        said = "the same" if same else "NOT the same"
        print(f"restored {path} without a strategy: test accuracy {accuracy:.2%}, {said}")
    if args.json:
        about = {"data": what, "replicas": strategy.num_replicas_in_sync}
        report.write(args.json, "train", about, found)
    return 0 if same else 1
