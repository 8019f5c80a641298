"""Split a training step into its compiled kernels and the Python code around them.

    python benchmarks/training_profile.py [--model MODEL] [--replicas 1 2] [--steps 200]
                                          [--eagerly] [--data DIR] [--json FILE]

The steps are those of compare_training.py: next batch, tape, layers, strategy, Adam, loss. The
calling thread, which runs replica 0, is timed in parts. These are all functions of
``pycollective._nn``, NumPy's matmul, replays of recorded kernels, the replicas' all-reduce, and
waits for other replicas. Times are medians over the steps. With one replica the rest is the time of
Python code. With several, the time to take the GIL again counts for the kernel that released it.
Python calls are those of the calling thread, including functions in C, as cProfile counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from compare_training import images_of, tutorial_steps
from models_keras import MODELS

import pycollective as tf
from pycollective import _nn
from pycollective.comm import Communicator
from pycollective.distribute.replica_threads import ReplicaRun
from pycollective.nn import conv

COUNTED_STEPS = 10
NOT_TIMED = ("alike", "sparse_fits", "threads", "set_threads", "vector_bytes")
METHODS = {(Communicator, "all_reduce"): "all_reduce",
            (_nn.Replay, "run"): "replay",
            (ReplicaRun, "_wait"): "waiting for replicas",
            (ReplicaRun, "wait_for_ends"): "waiting for replicas"}  # fmt: skip


def kind(name: str) -> str:
    """Return the kind of work of a timed function."""
    if name == "replay":
        return "replayed kernels"
    if name in METHODS.values():
        return "other replicas"
    if name.startswith("winograd"):
        return "Winograd's kernels"
    if name.startswith(("direct", "sparse", "blocked", "dense", "im2col", "col2im", "matmul")):
        return "other convolutions and products"
    return "updates" if name.endswith("_update") else "passes over memory"


@contextlib.contextmanager
def timed(seconds: Counter[str], calls: Counter[str]) -> Iterator[None]:
    """Add up the seconds of this thread's kernel calls by name."""
    thread = threading.get_ident()

    def wrap(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **kwargs)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - begin
                calls[name] += 1

        return call

    kernels = {(_nn, name): name for name, function in inspect.getmembers(_nn)
              if inspect.isbuiltin(function) and name not in NOT_TIMED}  # fmt: skip
    with contextlib.ExitStack() as stack:
        for (owner, attribute), name in {**kernels, (np, "matmul"): "matmul", **METHODS}.items():
            wrapped = wrap(getattr(owner, attribute), name)
            stack.enter_context(mock.patch.object(owner, attribute, wrapped))
        # The cache holds functions: clear it before, to find the timed ones, and after.
        stack.callback(conv._pooled_kernel.cache_clear)
        conv._pooled_kernel.cache_clear()
        yield


def python_calls(step: Callable[[], Any]) -> float:
    """Return the number of calls that this thread makes in a step."""
    count = 0

    def count_call(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        for _ in range(COUNTED_STEPS):
            step()
    finally:
        sys.setprofile(None)
    return count / COUNTED_STEPS


def profile(model: str, replicas: int, steps: int, folder: str | None) -> dict[str, Any]:
    """Return the parts of a model's step, in milliseconds."""
    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    losses = tutorial_steps(tf, strategy, model, images_of(model, folder), compiled=False)

    def step() -> float:
        return float(next(losses))

    for _ in range(MODELS[model].warmup):
        step()
    calls_of_a_step = python_calls(step)
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    whole, processor, parts = [], [], []
    with timed(seconds, calls):
        for _ in range(steps):
            seconds.clear()
            used, begin = time.process_time(), time.perf_counter()
            step()
            whole.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
            parts.append(dict(seconds))
    losses.close()
    found = {
        name: {
            "kind": kind(name),
            "calls": count / steps,
            "ms": 1e3 * statistics.median(part.get(name, 0.0) for part in parts),
        }
        for name, count in calls.items()
    }
    step_ms = 1e3 * statistics.median(whole)
    kinds: Counter[str] = Counter()
    for entry in found.values():
        kinds[entry["kind"]] += entry["ms"]
    return {
        "model": model,
        "replicas": replicas,
        "steps": steps,
        "step_ms": step_ms,
        "samples_per_s": 1e3 * MODELS[model].batch * replicas / step_ms,
        "processor_ms": 1e3 * statistics.median(processor),
        "python_calls": calls_of_a_step,
        "functions": dict(sorted(found.items(), key=lambda item: -item[1]["ms"])),
        "kinds_ms": dict(kinds.most_common()),
        "sum_ms": kinds.total(),
        "rest_ms": step_ms - kinds.total(),
    }


def show(found: dict[str, Any]) -> None:
    """Print a profile as a table."""
    whole = found["step_ms"]

    def line(name: str, calls: str, ms: float) -> None:
        print(f"  {name:32} {calls:>6} {ms:9.3f} {ms / whole:7.1%}")

    print(
        f"{found['model']}, {found['replicas']} replica(s) of {MODELS[found['model']].batch}: a step "
        f"takes {whole:.2f} ms ({found['samples_per_s']:,.0f} samples/s), "
        f"{found['processor_ms']:.2f} ms of all threads' processor time, "
        f"{found['python_calls']:,.0f} Python calls"
    )
    print(f"  {'':32} {'calls':>6} {'ms':>9} {'share':>7}")
    for name, entry in found["functions"].items():
        line(name, f"{entry['calls']:.1f}", entry["ms"])
    print()
    for name, ms in found["kinds_ms"].items():
        line(name, "", ms)
    line("sum of these", "", found["sum_ms"])
    line("rest: Python", "", found["rest_ms"])


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=list(MODELS), default="tutorial", help="(tutorial)")
    p.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="(1 2)")
    p.add_argument("--steps", type=int, default=200, help="that are timed (200)")
    p.add_argument("--data", help="folder of the MNIST idx.gz files (generated digits)")
    p.add_argument("--json", type=Path, help="write the results there too")
    p.add_argument("--eagerly", action="store_true", help="replay nothing, and so time each kernel")
    args = p.parse_args()
    tf.config.run_functions_eagerly(args.eagerly)
    profiles = []
    for replicas in args.replicas:
        profiles.append(profile(args.model, replicas, args.steps, args.data))
        show(profiles[-1])
    if args.json:
        report = {
            "benchmark": "training_profile",
            "batch_per_replica": MODELS[args.model].batch,
            "profiles": profiles,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
