"""Compare parameter servers with TensorFlow's: one program, once with each library.

    python benchmarks/compare_parameter_server.py [--tensorflow PYTHON] [--json FILE]

`embedded` has servers and workers as threads of the program, which only pycollective has. `processes`
has one server, two workers and the chief as processes of this host.

The numbers are medians of all windows of all rounds, on the chief. Each function is first called
for a second. `schedule`, `pull` and `push` are the µs from schedule() to fetch(). In this order,
the functions do nothing, sum a variable of 4 MiB, and add a tensor of 4 MiB to it. The tensor is
made before the calls, as TensorFlow makes the constants of a function. The number `copy` is the
time of a copy of 4 MiB in the chief's memory. The numbers `pull share` and `push share` are the
speeds of 4 MiB, without the time of `schedule`, in percent of that of the copy. The numbers
`embedding` and `cnn` count functions per second, 20 at a time. An embedding function trains a model
with a table of 1,000,000 rows and 64 columns. The function looks up 256 rows of the table, and
sends the gradient of these rows. A CNN function trains the tutorial's network on a batch of 64
images of 28 x 28.

`--accuracy` compares the accuracy after asynchronous training by two workers, which are threads, with
that after synchronous training by two replicas, for three seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WINDOWS, CALLS, AT_ONCE = 7, 30, 20
WARM_UP_SECONDS = 1.0  # workers may still start while the chief makes its first calls
ROWS, WIDTH, BATCH, IMAGES = 1_000_000, 64, 256, 64
UNITS = {
    "schedule": "µs", "pull": "µs", "push": "µs", "copy": "µs", "pull share": "%", "push share": "%",
    "embedding": "1/s", "cnn": "1/s",
}  # fmt: skip


def measure(tf: Any, strategy: Any) -> dict[str, float]:
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        large = tf.Variable(np.zeros(1 << 20, np.float32), name="large")
        table = tf.Variable(np.zeros((ROWS, WIDTH), np.float32), name="table")
        weights = tf.Variable(np.ones(WIDTH, np.float32), name="weights")
        layers = [
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
        model = tf.keras.Sequential([tf.keras.Input((28, 28, 1)), *layers])
    rng = np.random.default_rng(1)
    rows = rng.integers(0, ROWS, 64 * BATCH)
    images = rng.random((16 * IMAGES, 28, 28, 1), np.float32)
    labels = rng.integers(0, 10, 16 * IMAGES)

    def dataset(*arrays: Any, batch: int) -> Any:
        def make() -> Any:
            return tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(batch)

        return iter(coordinator.create_per_worker_dataset(make))

    looked_up, pictures = dataset(rows, batch=BATCH), dataset(images, labels, batch=IMAGES)

    @tf.function
    def nothing() -> Any:
        return tf.constant(1.0)

    @tf.function
    def pull() -> Any:
        return tf.reduce_sum(large)

    amount = tf.ones([1 << 20], tf.float32)

    @tf.function
    def push() -> Any:
        large.assign_add(amount)
        return tf.constant(1.0)

    @tf.function
    def embed(iterator: Any) -> Any:
        (ids,) = next(iterator)
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * weights, axis=1)
            loss = tf.reduce_mean(tf.square(found - 1.0))
        of_table, of_weights = tape.gradient(loss, [table, weights])
        table.scatter_sub(tf.IndexedSlices(0.1 * of_table.values, of_table.indices))
        weights.assign_sub(0.01 * of_weights)
        return loss

    @tf.function
    def train(iterator: Any) -> Any:
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):  # noqa: B905
            variable.assign_sub(0.001 * gradient)
        return loss

    def micros(function: Any) -> float:
        def call() -> None:
            coordinator.schedule(function).fetch()

        return windows(call, CALLS) * 1e6

    def per_second(function: Any, iterator: Any) -> float:
        def call() -> None:
            for _ in range(AT_ONCE):
                coordinator.schedule(function, args=(iterator,))
            coordinator.join()

        return AT_ONCE / windows(call, 2)

    source, target = np.zeros(1 << 20, np.float32), np.zeros(1 << 20, np.float32)

    return {
        "schedule": micros(nothing),
        "pull": micros(pull),
        "push": micros(push),
        "copy": windows(lambda: np.copyto(target, source), CALLS) * 1e6,
        "embedding": per_second(embed, looked_up),
        "cnn": per_second(train, pictures),
    }


def windows(call: Callable[[], None], calls: int) -> float:
    """Return the median seconds of a call."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_SECONDS:
        for _ in range(calls):
            call()
    seconds = []
    for _ in range(WINDOWS):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds)


# Contestants --------------------------------------------------------------------------------------


def program(library: str) -> None:
    """Run one task: of the cluster of TF_CONFIG, or the embedded servers and workers."""
    if library == "TensorFlow":
        import tensorflow as tf
    else:
        import pycollective as tf  # type: ignore[no-redef]
    if "TF_CONFIG" not in os.environ:
        strategy = tf.distribute.ParameterServerStrategy(num_workers=2, num_ps=1)
    else:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        # A worker of TensorFlow serves; one of pycollective runs the chief's program.
        if resolver.task_type == "ps" or (
            resolver.task_type == "worker" and library == "TensorFlow"
        ):
            server = tf.distribute.Server(
                resolver.cluster_spec(),
                job_name=resolver.task_type,
                task_index=resolver.task_id,
                protocol="grpc",
            )
            server.join()
            return
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    print(json.dumps(measure(tf, strategy)), flush=True)
    os._exit(0)  # servers of TensorFlow never end


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run(python: str, library: str, place: str, limit: float) -> dict[str, float]:
    tasks: list[tuple[str, int]] = [("chief", 0)]
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_FAIL_FAST": "use_caller"}
    cluster: dict[str, list[str]] = {}
    if place == "processes":
        tasks += [("ps", 0), ("worker", 0), ("worker", 1)]
        for (task, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
            cluster.setdefault(task, []).append(f"127.0.0.1:{port}")
    started = []
    for task, index in tasks:
        if cluster:
            config = {"cluster": cluster, "task": {"type": task, "index": index}}
            env["TF_CONFIG"] = json.dumps(config)
        command = [python, __file__, "--as", library]
        output = subprocess.PIPE if task == "chief" else subprocess.DEVNULL
        started.append(subprocess.Popen(command, env=env, stdout=output, text=True))
    try:
        text = started[0].communicate(timeout=limit)[0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def accuracies(path: Path | None) -> None:
    """Print the accuracies on the test examples, in percent, of three seeds."""
    import pycollective as tf

    (x, y), (test_x, test_y) = tf.keras.datasets.handwritten.load_data()
    shape = (*x.shape[1:3], 1)
    x, test_x = [
        (a / np.float32(x.max())).reshape(-1, *shape).astype(np.float32) for a in (x, test_x)
    ]
    steps, found = -(-len(x) // 64), {}
    for name in ("synchronous", "asynchronous"):
        for seed in range(3):
            tf.keras.utils.set_random_seed(seed)
            strategy = (
                tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
                if name == "synchronous"
                else tf.distribute.ParameterServerStrategy(num_workers=2, num_ps=1)
            )
            with strategy.scope():
                model = tf.keras.Sequential(
                    [
                        tf.keras.Input(shape),
                        tf.keras.layers.Conv2D(32, 3, activation="relu"),
                        tf.keras.layers.MaxPooling2D(),
                        tf.keras.layers.Flatten(),
                        tf.keras.layers.Dense(64, activation="relu"),
                        tf.keras.layers.Dense(10, activation="softmax"),
                    ]
                )
                model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
            data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(64)
            model.fit(data, epochs=15, steps_per_epoch=steps, verbose=0)
            accuracy = 100 * model.evaluate(test_x, test_y, verbose=0)[1]
            found.setdefault(name, []).append(accuracy)
    for name, values in found.items():
        print(f"{name}: {statistics.mean(values):.2f} % ({', '.join(f'{v:.2f}' for v in values)})")
    if path:
        about = {"when": time.strftime("%Y-%m-%d %H:%M"), "examples": len(x), "accuracy": found}
        path.write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has TensorFlow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=180, metavar="S", help="of a program (180)")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="library", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library:
        program(args.library)
        return
    if args.accuracy:
        accuracies(args.json)
        return
    contestants = [(sys.executable, "pycollective", place) for place in ("embedded", "processes")]
    if args.tensorflow:
        contestants.append((args.tensorflow, "TensorFlow", "processes"))
    results: dict[str, dict[str, list[float]]] = {}
    for turn in range(args.rounds):
        for python, library, place in contestants:
            print(f"# round {turn + 1}/{args.rounds}: {library}, {place}", file=sys.stderr)
            found = run(python, library, place, args.limit)
            for what in ("pull", "push"):
                moving = found[what] - found["schedule"]
                share = 100 * found["copy"] / moving if moving > 0 else float("nan")
                found[f"{what} share"] = share
            for what, value in found.items():
                results.setdefault(f"{library}, {place}", {}).setdefault(what, []).append(value)
    print("| | " + " | ".join(f"{what}, {unit}" for what, unit in UNITS.items()) + " |")
    print("|---" * (len(UNITS) + 1) + "|")
    for name, values in results.items():
        cells = [f"{statistics.median(values[what]):,.0f}" for what in UNITS]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if args.json:
        machine = {"processor": platform.processor(), "cores": os.cpu_count()}
        about = {"when": time.strftime("%Y-%m-%d %H:%M"), **machine, "results": results}
        args.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
