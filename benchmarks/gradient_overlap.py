"""Measure the time won by summing gradients while the tape still computes others.

A chain of dense layers of equal size is trained by SGD under `MirroredStrategy`. Three ways of a step
take turns in one run. The first is `Optimizer.minimize`, which overlaps. The second is `apply_gradients`
with the result of `GradientTape.gradient`, one after the other. The third is `apply_gradients` without a
sum: the cost of computing and updating alone. The report has medians, and the time won, also as a share
of the sum's cost without overlap.

With ``--work cpu``, layers are computed on the cores that also compute the sums. With as many replicas
as cores there is no time to win, and strategies do not overlap; here they are forced to. With ``--work
device``, a layer waits for a simulated device, which takes ``--layer-ms`` forward and twice as long
back. The cores are free meanwhile.

Run: ``python benchmarks/gradient_overlap.py [--megabytes 1 10 100] [--replicas 2] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from pycollective import _core, distribute, keras, tensor
from pycollective.distribute.experimental import CommunicationOptions
from pycollective.tensor import ops

WAYS = ("overlapped", "one after the other", "without sum")


def on_a_device(seconds: float, gradient: Any) -> Any:
    """Return a layer of a simulated device: the host waits, then gets the weights' gradient."""

    @tensor.custom_gradient
    def layer(x: Any, w: Any) -> Any:
        def back(upstream: Any) -> Any:
            time.sleep(2 * seconds)  # two products
            return upstream, gradient

        time.sleep(seconds)
        return x * 1.0, back

    return layer


class Case:
    """A chain of layers, its inputs and the ways to make a step."""

    def __init__(self, megabytes: float, args: argparse.Namespace, work: str) -> None:
        layers, replicas = args.layers, args.replicas
        self.strategy = distribute.MirroredStrategy([f"cpu:{r}" for r in range(replicas)])
        self.strategy.extended.sums_early = True
        width = max(8, round((megabytes * 2**20 / 4 / layers) ** 0.5))
        self.bytes = layers * width * width * 4
        rng = np.random.default_rng(0)
        self.x = tensor.constant(rng.standard_normal((args.batch_size, width)).astype("float32"))
        with self.strategy.scope():
            scale = np.float32(width**-0.5)
            self.weights = [
                tensor.Variable(rng.standard_normal((width, width)).astype("float32") * scale)
                for _ in range(layers)
            ]
            self.optimizer = keras.optimizers.SGD(1e-4)
        # The layers of each replica's device, or None for layers computed here.
        self.devices: list[list[Any]] | None = None
        if work == "device":
            gradients = [
                tensor.constant(rng.standard_normal((width, width)).astype("float32") * 1e-3)
                for _ in range(layers)
            ]
            self.devices = [
                [on_a_device(args.layer_ms * 1e-3, gradient) for gradient in gradients]
                for _ in range(replicas)
            ]

    def step(self, way: str) -> None:
        """Make a step of one replica."""
        with tensor.GradientTape() as tape:
            y: Any = self.x
            if self.devices is None:
                for w in self.weights:
                    y = ops.tanh(ops.matmul(y, w))
            else:
                here = distribute.get_replica_context().local_replica_id
                for layer, w in zip(self.devices[here], self.weights, strict=True):
                    y = layer(y, w)
            loss = ops.reduce_sum(y)
        if way == WAYS[0]:
            self.optimizer.minimize(loss, self.weights, tape=tape)
            return
        pairs = zip(tape.gradient(loss, self.weights), self.weights, strict=True)
        self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=way == WAYS[2])

    def check(self) -> None:
        """Raise unless the two ways with a sum give all replicas the same bits, unlike the third."""
        start = [weight.numpy() for weight in self.weights]
        left = []
        for way in WAYS:
            self.strategy.run(self.step, args=(way,))
            of_replicas = zip(*(weight.values for weight in self.weights), strict=True)
            left.append({b"".join(c.numpy().tobytes() for c in row) for row in of_replicas})
            for weight, array in zip(self.weights, start, strict=True):
                weight.assign(array)
        overlapped, after, alone = left
        if len(overlapped) != 1 or overlapped != after or overlapped == alone:
            raise AssertionError("the replicas' weights are not those of the summed gradients")

    def measure(self, seconds: float) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Return the milliseconds of each way's steps, in turns: elapsed, and of the processors."""
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        busy: dict[str, list[float]] = {way: [] for way in WAYS}
        self.check()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[WAYS[0]]) < 5:
            for way in WAYS:
                begin, busy_begin = time.perf_counter(), time.process_time()
                self.strategy.run(self.step, args=(way,))
                times[way].append((time.perf_counter() - begin) * 1e3)
                busy[way].append((time.process_time() - busy_begin) * 1e3)
        return times, busy


def result(megabytes: float, pack: int, args: argparse.Namespace, work: str) -> dict[str, Any]:
    case = Case(megabytes, args, work)
    case.strategy.extended.gradient_options = CommunicationOptions(bytes_per_pack=pack)
    times, busy = case.measure(args.seconds)
    medians = {way: statistics.median(values) for way, values in times.items()}
    # Differences of neighbours: a slow phase of the machine affects both.
    won = statistics.median([b - a for a, b in zip(times[WAYS[0]], times[WAYS[1]], strict=True)])
    cost = statistics.median([b - c for b, c in zip(times[WAYS[1]], times[WAYS[2]], strict=True)])
    return {
        "work": work,
        "megabytes": case.bytes / 2**20,
        "bytes_per_pack": pack,
        "steps": len(times[WAYS[0]]),
        "milliseconds": medians,
        "processor_milliseconds": {way: statistics.median(v) for way, v in busy.items()},
        "won_milliseconds": won,
        "sum_milliseconds": cost,
        "won_share_of_sum": won / cost if cost > 0 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument(
        "--bytes-per-pack",
        type=int,
        nargs="+",
        default=[distribute.StrategyExtended.gradient_options.bytes_per_pack],
    )
    parser.add_argument("--work", nargs="+", choices=["cpu", "device"], default=["cpu", "device"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="per replica")
    parser.add_argument("--layer-ms", type=float, default=1.0, help="of a device, forward")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    parser.add_argument("--out", type=Path, help="a file for the JSON, which is also printed")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "benchmark": "gradient_overlap",
        "date": time.strftime("%Y-%m-%d"),
        "cores": _core.usable_cores(),
        "machine": platform.machine(),
        "replicas": args.replicas,
        "layers": args.layers,
        "batch_size": args.batch_size,
        "results": [],
    }
    print(
        f"{'work':>6} {'MB':>6} {'pack':>9} {'overlap':>9} {'after':>9} {'no sum':>9} {'won':>15}"
    )
    for work in args.work:
        for megabytes in args.megabytes:
            for pack in args.bytes_per_pack:
                row = result(megabytes, pack, args, work)
                report["results"].append(row)
                times = [row["milliseconds"][way] for way in WAYS]
                share = row["won_share_of_sum"]
                print(
                    f"{work:>6} {row['megabytes']:6.1f} {pack:9d} "
                    + " ".join(f"{t:9.2f}" for t in times)
                    + f" {row['won_milliseconds']:8.2f} ms"
                    + ("" if share is None else f" {share:5.0%}")
                    + "  processors "
                    + " ".join(f"{t:.2f}" for t in row["processor_milliseconds"].values()),
                    flush=True,
                )
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
