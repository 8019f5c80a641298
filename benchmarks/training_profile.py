"""Where a training step of the tutorial's CNN goes, operation by operation.

The model is Conv 32 3x3 relu, pool 2x2, Conv 64 3x3 relu, pool 2x2, Dense 64 relu, Dense 10 on
images of 28x28x1, trained with Adam. The operations are those of the package on plain arrays,
without tape, layers and strategy: this is what is left when those cost nothing. Each replica is a
thread with its share of the cores and its own copy of the parameters; all_reduce sums the
gradients.

Run: ``python benchmarks/training_profile.py [--replicas 1 2] [--batch-size 64] [--separate]``
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

import pycollective
from pycollective.distribute.blas_threads import shared_among
from pycollective.nn import conv, cross_entropy, pooling, update
from pycollective.nn.window import make_window

SHAPES = {
    "conv1/w": (3, 3, 1, 32),
    "conv1/b": (32,),
    "conv2/w": (3, 3, 32, 64),
    "conv2/b": (64,),
    "dense1/w": (1600, 64),
    "dense1/b": (64,),
    "dense2/w": (64, 10),
    "dense2/b": (10,),
}
EPOCH = 60000


class Timer:
    """Adds up seconds by name; a step's time goes to the operation that ends it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = time.perf_counter()

    def start(self) -> None:
        """Forget the time since the last operation."""
        self.last = time.perf_counter()

    def __call__(self, name: str) -> None:
        """Note that an operation has ended."""
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now


class Timed:
    """Stands in for a module and times the calls of some of its functions."""

    def __init__(self, module: Any, names: dict[str, str], seconds: dict[str, float]) -> None:
        self._module, self._names, self._seconds = module, names, seconds

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in self._names:
            return function

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[self._names[name]] += time.perf_counter() - start

        return timed


@contextlib.contextmanager
def inside_convolutions(seconds: dict[str, float]) -> Iterator[None]:
    """Time the parts of convolutions too."""
    names = {
        "im2col": "im2col",
        "col2im": "col2im",
        "bias_relu": "bias, relu",
        "max_pool": "bias, relu, pool of a block",
        "max_pool_gradient": "unpool of a block",
        "relu_gradient": "relu gradient",
        "direct_forward": "direct forward",
        "direct_gradient": "direct gradient",
        "winograd_forward": "Winograd forward",
        "winograd_gradient": "Winograd gradient",
        "sparse_gradient": "sparse gradient",
    }
    kernels, numpy = conv.kernels, conv.np
    conv.kernels = Timed(kernels, names, seconds)
    conv.np = Timed(numpy, {"matmul": "BLAS", "add": "sum of blocks"}, seconds)
    try:
        yield
    finally:
        conv.kernels, conv.np = kernels, numpy


class Replica:
    """The model on arrays: one flat vector for all parameters, one for their gradients."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
        self.flat = np.zeros(sum(sizes), np.float32)
        self.gradient, self.m, self.v = (np.zeros_like(self.flat) for _ in range(3))
        self.p = self.views(self.flat)
        self.g = self.views(self.gradient)
        rng = np.random.default_rng(0)
        for name, w in self.p.items():
            if name.endswith("/w"):
                limit = np.sqrt(6 / (np.prod(w.shape[:-1]) + np.prod(w.shape[:-2]) * w.shape[-1]))
                w[...] = rng.uniform(-limit, limit, w.shape)
        self.steps = 0

    @staticmethod
    def views(flat: Any) -> dict[str, Any]:
        """Return the parts of a flat vector by name, in their shapes."""
        views, start = {}, 0
        for name, shape in SHAPES.items():
            size = int(np.prod(shape))
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views

    def convolve(self, name: str, x: Any) -> tuple[Any, Any]:
        """Convolve, cut, pool; return the result and what the way back needs."""
        w, b = self.p[name + "/w"], self.p[name + "/b"]
        window = make_window(x.shape[1:], w.shape[:2], (1, 1), (1, 1), False)
        if self.fused:
            plan = conv._pooled(window, w.shape[3], (2, 2))
            y, codes = conv._pooled_forward(x, w, b, plan)
            return y, (codes, x, w, plan)
        z = conv.conv2d_forward(x, w, b, window, True)
        pool = make_window(z.shape[1:], (2, 2), (2, 2), (1, 1), False)
        y, codes = pooling.max_pool_forward(z, pool)
        return y, (codes, x, w, window, z, pool)

    def unconvolve(self, name: str, g: Any, kept: Any, need_x: bool) -> Any:
        """Store the gradients of a convolution's parameters, return its images' if needed."""
        need = (need_x, True, True)
        if self.fused:
            dx, dw, db = conv._pooled_backward(g, *kept, need)
        else:
            codes, x, w, window, z, pool = kept
            dz = pooling.max_pool_backward(g, codes, z.shape, pool)
            dx, dw, db = conv.conv2d_backward(dz, x, w, z, window, need)
        self.g[name + "/w"][...] = dw
        self.g[name + "/b"][...] = db
        return dx

    def step(self, x: Any, labels: Any, timer: Timer, comm: Any) -> float:
        """Train on one batch; return its loss."""
        p, g = self.p, self.g
        y1, kept1 = self.convolve("conv1", x)
        timer("conv1 + relu + pool")
        y2, kept2 = self.convolve("conv2", y1)
        timer("conv2 + relu + pool")
        features = y2.reshape(len(y2), -1)
        hidden = features @ p["dense1/w"]
        hidden += p["dense1/b"]
        np.maximum(hidden, 0, out=hidden)
        logits = hidden @ p["dense2/w"]
        logits += p["dense2/b"]
        timer("dense")
        losses, slope = cross_entropy.forward(logits, labels, True)
        slope *= np.float32(1 / (len(x) * comm.size))
        timer("softmax, cross-entropy")
        np.matmul(hidden.T, slope, out=g["dense2/w"])
        np.sum(slope, axis=0, out=g["dense2/b"])
        dh = slope @ p["dense2/w"].T
        dh *= hidden > 0
        np.matmul(features.T, dh, out=g["dense1/w"])
        np.sum(dh, axis=0, out=g["dense1/b"])
        dy2 = (dh @ p["dense1/w"].T).reshape(y2.shape)
        timer("dense gradient")
        dy1 = self.unconvolve("conv2", dy2, kept2, True)
        timer("conv2 + relu + pool gradient")
        self.unconvolve("conv1", dy1, kept1, False)
        timer("conv1 + relu + pool gradient")
        if comm.size > 1:
            comm.all_reduce(self.gradient, "sum", out=self.gradient)
            timer("all_reduce and waiting")
        self.steps += 1
        alpha = 1e-3 * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        update.adam_update(
            [self.flat], [self.gradient], [self.m], [self.v], alpha, 0.9, 0.999, 1e-7
        )
        timer("Adam")
        return float(losses.mean())


def measure(
    replicas: int, batch: int, steps: int, fused: bool
) -> tuple[float, dict[str, float], float]:
    """Return samples/s (median of 5 runs), seconds by operation of replica 0, its last loss."""
    rng = np.random.default_rng(1)
    images = rng.random((8192, 28, 28, 1), np.float32)
    labels = rng.integers(0, 10, 8192)
    communicators = pycollective.local_group(replicas)
    barrier = threading.Barrier(replicas)
    rates: list[float] = []
    timers = [Timer() for _ in range(replicas)]
    losses = [0.0] * replicas

    def work(rank: int) -> None:
        replica, timer = Replica(fused), timers[rank]
        order = np.random.default_rng(rank).permutation(len(images))
        for run in range(6):
            barrier.wait()
            begin = time.perf_counter()
            timer.start()
            for step in range(steps):
                chosen = order.take(range(step * batch, (step + 1) * batch), mode="wrap")
                x, y = images.take(chosen, axis=0), labels.take(chosen)
                timer("batch")
                losses[rank] = replica.step(x, y, timer, communicators[rank])
            barrier.wait()
            if run == 0:
                timer.seconds.clear()
            elif rank == 0:
                rates.append(steps * batch * replicas / (time.perf_counter() - begin))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(rates), timers[0].seconds, losses[0]


def show(seconds: dict[str, float], samples: int, whole: float) -> None:
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"  {name:32s} {value / samples * 1e6:9.2f} {value / whole:7.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=64, help="per replica")
    parser.add_argument(
        "--share", type=int, help="how many share the cores; 1 replica has them all"
    )
    parser.add_argument("--steps", type=int, default=40, help="per run; 5 runs count")
    parser.add_argument(
        "--separate", action="store_true", help="pooling as an operation of its own"
    )
    args = parser.parse_args()
    for replicas in args.replicas:
        with shared_among(args.share or replicas):
            rate, seconds, loss = measure(replicas, args.batch_size, args.steps, not args.separate)
        whole = sum(seconds.values())
        samples = 5 * args.steps * args.batch_size
        print(
            f"{replicas} replica(s) of {args.batch_size} samples: {rate:.0f} samples/s, "
            f"an epoch of {EPOCH} in {EPOCH / rate:.1f} s, last loss {loss:.3f}"
        )
        print(f"  {'operation':32s} {'us/sample':>9s} {'share':>7s}")
        show(seconds, samples, whole)
    parts: dict[str, float] = defaultdict(float)
    with inside_convolutions(parts), shared_among(args.share or 1):
        _, seconds, _ = measure(1, args.batch_size, args.steps, not args.separate)
    print("inside the convolutions, 1 replica (the warm-up run counts too)")
    show(parts, 6 * args.steps * args.batch_size, sum(seconds.values()) * 6 / 5)


if __name__ == "__main__":
    main()
