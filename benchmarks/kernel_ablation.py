"""Measure the gain that each special kernel of convolutions gives to a training step.

    python benchmarks/kernel_ablation.py [--model tutorial resnet20] [--rounds 20] [--data DIR]
                                         [--json FILE]

The steps are those of compare_training.py, with one replica. Each contestant lacks one kind of
kernel: the package then uses the next best one, as for shapes that the kernel does not support. The
contestants make a few steps each, in turns, in one process. A gain is the median step without the
kernel, divided by the median step with all of them. Before the timing, the gradients of one batch
are compared. Each contestant must have the same ones, without a call of the kernel that it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from compare_training import images_of, tutorial_steps
from models_keras import MODELS

import pycollective as tf
from pycollective import _nn
from pycollective.nn import conv

ALL = "all kernels"
STEPS = 5
"""Steps of a contestant in its turn, after one that is not timed."""
BAR = 1.05
"""A kernel stays if a step of one of the models takes this many times longer without it."""


def never(*_: Any) -> bool:
    return False


def without_blocked(*arguments: Any, chosen: Any = conv._pooled_kernel.__wrapped__) -> Any:
    kernel = chosen(*arguments)
    return None if kernel is _nn.blocked_forward else kernel


LACKING: dict[str, dict[str, Any]] = {
    ALL: {},
    "without Winograd": {"_winograd": never},
    "without direct": {"_direct": never},
    "without sparse gradients": {"_sparse": never},
    "without blocked (BLAS)": {"FLOAT32": None, "_pooled_kernel": without_blocked},
}


KERNELS = {
    "without Winograd": ("winograd_forward", "winograd_gradient"),
    "without direct": ("direct_forward",),
    "without sparse gradients": ("sparse_gradient",),
    "without blocked (BLAS)": ("blocked_forward", "blocked_gradient"),
}


@contextlib.contextmanager
def lacking(name: str) -> Iterator[None]:
    """Make the package select kernels without one kind."""
    remembered = conv._pooled_kernel
    remembered.cache_clear()
    try:
        with contextlib.ExitStack() as stack:
            for attribute, stand_in in LACKING[name].items():
                stack.enter_context(mock.patch.object(conv, attribute, stand_in))
            yield
    finally:
        remembered.cache_clear()


def gradients(model: Any, images: Any, labels: Any) -> list[Any]:
    """Return the gradients of a model's mean loss over one batch."""
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    return [np.asarray(g) for g in tape.gradient(loss, model.trainable_variables)]


def check(name: str, folder: str | None) -> None:
    """End the benchmark unless all contestants compute the same gradients of a model."""
    images, labels = (part[: MODELS[name].batch] for part in images_of(name, folder))
    model = MODELS[name].build(tf.keras)
    expected = gradients(model, images, labels)
    for lack, kernels in KERNELS.items():
        with lacking(lack), contextlib.ExitStack() as stack:
            for kernel in kernels:
                stack.enter_context(
                    mock.patch.object(_nn, kernel, side_effect=AssertionError(lack))
                )
            found = gradients(model, images, labels)
        for a, b in zip(found, expected, strict=True):
            # Roundings that change a relu's sign add up in deep models: 2e-3 in ResNet-20.
            if np.linalg.norm(a - b) > 1e-2 * np.linalg.norm(b) + 1e-6:
                raise SystemExit(f"{name}, {lack}: the gradients differ")


def turn(step: Callable[[], Any]) -> list[float]:
    """Return the seconds of each timed step of a turn."""
    step()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def ablation(model: str, rounds: int, folder: str | None) -> dict[str, Any]:
    """Return the median milliseconds of a step of each contestant, and the gains."""
    check(model, folder)
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    losses = tutorial_steps(tf, strategy, model, images_of(model, folder), compiled=False)

    def step() -> float:
        return float(next(losses))

    for _ in range(MODELS[model].warmup):
        step()
    seconds: dict[str, list[float]] = {name: [] for name in LACKING}
    for round_ in range(rounds):
        for name in LACKING:
            with lacking(name):
                seconds[name] += turn(step)
        print(f"\r{model}: round {round_ + 1} of {rounds}", end="", flush=True)
    losses.close()
    ms = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
    gains = {name: ms[name] / ms[ALL] for name in LACKING if name != ALL}
    return {"model": model, "rounds": rounds, "step_ms": ms, "gains": gains}


def show(found: dict[str, Any]) -> None:
    """Print an ablation as a table."""
    print(
        f"\r{found['model']}, batch {MODELS[found['model']].batch}, one replica, {found['rounds']} "
        f"rounds of {STEPS} steps"
    )
    for name, ms in found["step_ms"].items():
        gain = found["gains"].get(name)
        print(f"  {name:26} {ms:9.2f} ms" + ("" if gain is None else f" {gain:7.3f}"))


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=list(MODELS), nargs="+", default=["tutorial", "resnet20"],
                   help="(tutorial resnet20)")  # fmt: skip
    p.add_argument("--rounds", type=int, default=20, help="turns of each contestant (20)")
    p.add_argument("--data", help="folder of the MNIST idx.gz files (generated digits)")
    p.add_argument("--json", type=Path, help="write the results there too")
    args = p.parse_args()
    found = [ablation(model, args.rounds, args.data) for model in args.model]
    for one in found:
        show(one)
    gains = {name: max(one["gains"][name] for one in found) for name in LACKING if name != ALL}
    for name, gain in gains.items():
        print(f"{name}: {gain:.3f}, {'it stays' if gain >= BAR else 'it may go'}")
    if args.json:
        report = {"benchmark": "kernel_ablation", "bar": BAR, "models": found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
