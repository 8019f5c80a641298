"""Compare training on one GPU with PyTorch (eager and compiled) and JAX (jit), in one run.

    python benchmarks/gpu_training.py [--device gpu:0] [--batches 256 64 1024 4096] [--seconds 240]
                                      [--peer-python PYTHON] [--out FILE]

The models are the tutorial's CNN and ResNet-20 on generated images (those of compare_training.py), with
Adam and L2 regularization. They run in float32, without TF32, and in mixed float16. A step is forward,
backward and update for one batch on the device. The loss is read at the end of a window of steps, which
waits for the device.

Each contestant is a process that lives for the whole run. For each model, batch and type the contestants
take turns, round after round; the number is the median of the windows. The contestant pycollective also
runs with two logical replicas on the one device (the batch is that of both). With the first batch
size it runs without cuDNN, too. The report names cases for which there was no time, and peers that
are not installed. With ``--device cpu`` everything runs on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from models_keras import MODELS

ROUNDS = 3
L2 = 1e-5
#: A function of model, batch size and half precision (or not) that returns two functions. One makes
#: a step, the other one waits for the device and returns the loss.
Maker = Callable[[str, int, bool], tuple[Callable[[], None], Callable[[], float]]]


def batch_of(model: str, size: int) -> tuple[Any, Any]:
    """Return random images with labels that a model can learn."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, size).astype(np.int32)
    shape = MODELS[model].shape
    images = random.random((10, *shape), np.float32)[labels]
    return images + random.normal(0, 0.3, images.shape).astype(np.float32), labels


# Contestants --------------------------------------------------------------------------------------


def pycollective_maker(device: str, replicas: int = 1, cudnn: bool = True) -> Maker:
    import pycollective as tf
    from pycollective.nn import cudnn as library

    if not cudnn:
        if device.startswith("cpu") or library._library() is None:
            raise ImportError("cuDNN's front end is not used anyway")
        library._library = lambda: None
    if replicas > 1:
        tf.config.set_logical_device_configuration(device, replicas)
        strategy: Any = tf.distribute.MirroredStrategy(
            [f"{device.split(':')[0]}:{i}" for i in range(replicas)]
        )
    else:
        strategy = tf.distribute.OneDeviceStrategy(device)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def make(model_name: str, size: int, half: bool) -> Any:
        tf.keras.mixed_precision.set_global_policy("mixed_float16" if half else "float32")
        with strategy.scope():
            model = MODELS[model_name].build(tf.keras)
            model.build((None, *MODELS[model_name].shape))
            optimizer = tf.keras.optimizers.Adam(1e-3)
            optimizer.build(model.trainable_variables)
            if half:
                optimizer = tf.keras.optimizers.LossScaleOptimizer(optimizer)
        dataset = tf.data.Dataset.from_tensor_slices(batch_of(model_name, size)).batch(size)
        (batch,) = strategy.experimental_distribute_dataset(dataset)

        def replica(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                outputs = tf.cast(model(images, training=True), "float32")
                loss = tf.nn.compute_average_loss(
                    cross_entropy(labels, outputs), global_batch_size=size
                )
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
            optimizer.minimize(loss, model.trainable_variables, tape=tape)
            return loss

        last: list[Any] = []

        def step() -> None:
            last[:] = [strategy.run(replica, args=batch)]

        return step, lambda: float(strategy.reduce("SUM", last[0], axis=None))

    return make


def torch_maker(device: str, compiled: bool = False) -> Maker:
    import models_torch
    import torch

    place = torch.device("cpu" if device.startswith("cpu") else f"cuda:{device.split(':')[1]}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True

    def make(model_name: str, size: int, half: bool) -> Any:
        images, labels = batch_of(model_name, size)
        x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).to(place)
        y = torch.from_numpy(labels.astype(np.int64)).to(place)
        model = models_torch.MODELS[model_name]().to(place)
        called = torch.compile(model, dynamic=False) if compiled else model
        weights = [p for p in model.parameters() if p.dim() > 1]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
        scaler = torch.amp.GradScaler(place.type, enabled=half and place.type == "cuda")
        last: list[Any] = []

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(place.type, torch.float16, enabled=half):
                loss = torch.nn.functional.cross_entropy(called(x), y)
            loss = loss + L2 * sum((w * w).sum() for w in weights)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            last[:] = [loss.detach()]

        return step, lambda: float(last[0].item())

    return make


def jax_maker(device: str) -> Maker:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_default_matmul_precision", "highest")
    kind, _, number = device.partition(":")
    place = jax.devices(kind)[int(number or 0)]

    def conv(
        get: Any, name: str, x: Any, filters: int, size: int, stride: int, padding: str
    ) -> Any:
        kernel = get(name, (size, size, x.shape[-1], filters))
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=numbers
        )

    def pooled(x: Any) -> Any:
        windows = (1, 2, 2, 1)
        low = np.array(-np.inf, x.dtype)
        return jax.lax.reduce_window(x, low, jax.lax.max, windows, windows, "VALID")

    def normal(get: Any, name: str, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        scale, offset = get(name + "/scale", x.shape[-1:]), get(name + "/offset", x.shape[-1:])
        return ((wide - mean) / jnp.sqrt(variance + 1e-3) * scale + offset).astype(x.dtype)

    def tutorial(get: Any, x: Any) -> Any:
        for name, filters in (("a", 32), ("b", 64)):
            x = conv(get, name, x, filters, 3, 1, "VALID") + get(name + "/bias", (filters,))
            x = pooled(jax.nn.relu(x))
        x = x.reshape(len(x), -1)
        x = jax.nn.relu(x @ get("c", (x.shape[1], 64)) + get("c/bias", (64,)))
        return x @ get("d", (64, 10)) + get("d/bias", (10,))

    def resnet20(get: Any, x: Any) -> Any:
        x = jax.nn.relu(normal(get, "n", conv(get, "first", x, 16, 3, 1, "SAME")))
        for stage, filters in enumerate((16, 32, 64)):
            for block in range(3):
                name, stride = f"{stage}/{block}", 2 if stage and not block else 1
                y = conv(get, name + "/a", x, filters, 3, stride, "SAME")
                y = jax.nn.relu(normal(get, name + "/an", y))
                y = conv(get, name + "/b", y, filters, 3, 1, "SAME")
                y = normal(get, name + "/bn", y)
                if stride > 1:
                    x = conv(get, name + "/c", x, filters, 1, stride, "SAME")
                x = jax.nn.relu(x + y)
        return x.mean((1, 2)) @ get("d", (64, 10)) + get("d/bias", (10,))

    nets = {"tutorial": tutorial, "resnet20": resnet20}

    def make(model_name: str, size: int, half: bool) -> Any:
        images, labels = (jax.device_put(a, place) for a in batch_of(model_name, size))
        compute = jnp.float16 if half else jnp.float32
        scale = 1024.0 if half else 1.0
        random = np.random.default_rng(0)
        start: dict[str, Any] = {}

        def fresh(name: str, shape: tuple[int, ...]) -> Any:
            if len(shape) > 1:
                start[name] = random.normal(0, math.sqrt(2 / math.prod(shape[:-1])), shape)
            else:
                start[name] = np.full(shape, float(name.endswith("scale")))
            return jnp.asarray(start[name], jnp.float32)

        nets[model_name](fresh, images[:1])
        params = {k: jax.device_put(np.float32(v), place) for k, v in start.items()}

        def scaled_loss(params: Any, images: Any, labels: Any) -> Any:
            read = lambda name, _shape: params[name].astype(compute)  # noqa: E731
            logits = nets[model_name](read, images.astype(compute)).astype(jnp.float32)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
            penalty = sum((p * p).sum() for p in params.values() if p.ndim > 1)
            return scale * (L2 * penalty - chosen.mean())

        @jax.jit
        def train(state: Any, images: Any, labels: Any) -> Any:
            params, m, v, t = state
            loss, grads = jax.value_and_grad(scaled_loss)(params, images, labels)
            t = t + 1
            alpha = 1e-3 * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            every = jax.tree_util.tree_map
            m = every(lambda m, g: m + (g / scale - m) * 0.1, m, grads)
            v = every(lambda v, g: v + ((g / scale) ** 2 - v) * 0.001, v, grads)
            new = every(lambda p, m, v: p - alpha * m / (jnp.sqrt(v) + 1e-7), params, m, v)
            return (new, m, v, t), loss / scale

        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        last: list[Any] = [(params, zeros, zeros, jax.device_put(np.float32(0), place)), None]

        def step() -> None:
            last[:] = train(last[0], images, labels)

        return step, lambda: float(last[1])

    return make


#: The required package and the function that makes the steps, by name.
CONTESTANTS: dict[str, tuple[str, Callable[[str], Maker]]] = {
    "pycollective": ("pycollective", pycollective_maker),
    "PyTorch eager": ("torch", torch_maker),
    "PyTorch compiled": ("torch", lambda d: torch_maker(d, compiled=True)),
    "JAX jit": ("jax", jax_maker),
    "pycollective, 2 replicas": ("pycollective", lambda d: pycollective_maker(d, replicas=2)),
    "pycollective, no cuDNN": ("pycollective", lambda d: pycollective_maker(d, cudnn=False)),
}
ONCE = "pycollective, no cuDNN"


def serve(name: str, device: str) -> None:
    """Carry out the requests on standard input, and answer each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not look like an answer

    def answer(**found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        make = CONTESTANTS[name][1](device)
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {error}")
        return
    answer(ready=True)
    step: Any = None
    wait: Any = None
    step_seconds = size = 0.0
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "model" in request:
                step = wait = None
                gc.collect()
                size = request["batch"]
                step, wait = make(request["model"], request["batch"], request["half"])
                for steps in (6, 5):  # the first steps compile and record, the others are timed
                    begin = time.perf_counter()
                    for _ in range(steps):
                        step()
                    loss = wait()
                    step_seconds = (time.perf_counter() - begin) / steps
            else:
                steps = max(1, round(request["window"] / step_seconds))
                begin = time.perf_counter()
                for _ in range(steps):
                    step()
                loss = wait()
                taken = time.perf_counter() - begin
                step_seconds = taken / steps
            answer(rate=size / step_seconds, loss=loss)
        except Exception as error:
            answer(failed=f"{type(error).__name__}: {str(error)[:300]}")


# The run ------------------------------------------------------------------------------------------


class Contestant:
    """A process that trains on request."""

    def __init__(self, name: str, device: str, python: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, __file__, "--device", device, "--contestant", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the next answer; a missing answer is a failure."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return {"failed": "it has ended"}
        ready, _, _ = select.select([self._process.stdout], [], [], max(seconds, 0.1))
        line = self._process.stdout.readline() if ready else ""
        if not line:
            why = "it ended" if ready else f"no answer in {seconds:.0f} s"
            self.close()
            return {"failed": why}
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **what: Any) -> None:
        """Send a request; the next `hear` reports it if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def tell(self, seconds: float, **what: Any) -> dict[str, Any]:
        """Send a request, and return the answer."""
        self.ask(**what)
        return self.hear(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def measured(
    contestants: list[Contestant], case: dict[str, Any], window: float, seconds: float
) -> dict[str, Any]:
    """Return for each contestant the rates of its windows, or the reason why there are none."""
    found: dict[str, Any] = {}
    end = time.monotonic() + seconds
    for one in contestants:  # all compile at the same time
        one.ask(**case)
    for one in contestants:
        found[one.name] = one.hear(end - time.monotonic()).get("failed", [])
    for _ in range(ROUNDS):
        for one in contestants:
            if isinstance(found[one.name], str):
                continue
            got = one.tell(end - time.monotonic(), window=window)
            if "failed" not in got and not math.isfinite(got["loss"]):
                got = {"failed": f"its loss is {got['loss']}"}
            if "failed" in got:
                found[one.name] = got["failed"]
            else:
                found[one.name].append(got["rate"])
    return {
        name: rates
        if isinstance(rates, str)
        else {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
        for name, rates in found.items()
    }


def table(results: list[dict[str, Any]], names: list[str]) -> str:
    """Return the medians in samples/s, a row for each case; a dash means no number."""
    width = max(map(len, names), default=0) + 2
    lines = [f"{'':28}" + "".join(f"{name:>{width}}" for name in names)]
    order = sorted(results, key=lambda r: (r["model"], r["half"], r["batch"]))
    for case in order:
        kind = "float16" if case["half"] else "float32"
        cells = []
        for name in names:
            rate = case["samples_per_s"].get(name)
            cells.append(f"{rate['median']:,.0f}" if isinstance(rate, dict) else "-")
        label = f"{case['model']} {kind} batch {case['batch']}"
        lines.append(f"{label:28}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def installed(python: str, module: str) -> bool:
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


def main() -> None:
    """Measure all cases, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="gpu:0", help="gpu:0, or cpu (gpu:0)")
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=["tutorial", "resnet20"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 64, 1024, 4096])
    parser.add_argument("--window", type=float, default=0.3, help="seconds of a window (0.3)")
    parser.add_argument("--seconds", type=float, default=240, help="of the whole run (240)")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="these contestants")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with the peers")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = args.device if ":" in args.device else f"{args.device}:0"
    if args.contestant:
        serve(args.contestant, device)
        return
    end = time.monotonic() + args.seconds
    missing: dict[str, str] = {}
    contestants: list[Contestant] = []
    for name in args.only or CONTESTANTS:
        module = CONTESTANTS[name][0]
        python = sys.executable if module == "pycollective" else args.peer_python
        if installed(python, module):
            contestants.append(Contestant(name, device, python))
        else:
            missing[name] = f"{module} is not installed"
    results: list[dict[str, Any]] = []
    left_out: list[str] = []
    try:
        for one in list(contestants):
            got = one.hear(end - time.monotonic())
            if "failed" in got:
                missing[one.name] = got["failed"]
                contestants.remove(one)
                one.close()
        for name, why in missing.items():
            print(f"# {name}: {why}", file=sys.stderr)
        for batch in args.batches:
            for model in args.models:
                for half in (False, True):
                    case = {"model": model, "batch": batch, "half": half}
                    seconds = end - time.monotonic()
                    if seconds <= 0:
                        left_out.append(f"{model}, batch {batch}, {'float16' * half or 'float32'}")
                        continue
                    takers = [c for c in contestants if c.name != ONCE or batch == args.batches[0]]
                    found = measured(takers, case, args.window, seconds)
                    results.append({**case, "samples_per_s": found})
                    for name, rate in found.items():
                        if isinstance(rate, str):
                            print(f"# {name}, {model}, batch {batch}: {rate}", file=sys.stderr)
    finally:
        for one in contestants:
            one.close()
    print(table(results, [one.name for one in contestants]))
    if left_out:
        print(f"# no time for: {'; '.join(left_out)}", file=sys.stderr)
    if args.out:
        report = {
            "benchmark": "gpu_training",
            "device": device,
            "machine": platform.machine(),
            "batch_is": "that of all replicas",
            "missing": missing,
            "left_out": left_out,
            "results": results,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if not any(isinstance(r["samples_per_s"].get("pycollective"), dict) for r in results):
        raise SystemExit("pycollective has no number: see above")


if __name__ == "__main__":
    main()
