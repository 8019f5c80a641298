"""The elements that TensorFlow's strategies read from many datasets, in `input_cases.json`.

With TensorFlow installed, this command writes the file again (TensorFlow 2.21 wrote the present one):

    python tests/distribute/input_cases.py

Every case is a dataset, a policy and a number of replicas.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")

SOURCES = {
    "range": lambda tf, n: tf.data.Dataset.range(n),
    "slices": lambda tf, n: tf.data.Dataset.from_tensor_slices(
        np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    ),
    "generator": lambda tf, n: tf.data.Dataset.from_generator(
        lambda: iter(range(n)), output_signature=tf.TensorSpec((), tf.int64)
    ),
    "zip": lambda tf, n: tf.data.Dataset.zip(
        (tf.data.Dataset.range(n), tf.data.Dataset.range(n).map(lambda x: x * 2))
    ),
    "dict": lambda tf, n: tf.data.Dataset.from_tensor_slices(
        {"a": np.arange(n), "b": np.arange(3 * n).reshape(n, 3)}
    ),
}
AFTER = {
    "nothing": lambda ds, batch: ds,
    "map": lambda ds, batch: ds.map(lambda *x: x[0] if len(x) == 1 else x),
    "filter": lambda ds, batch: ds.filter(lambda *x: True),
    "prefetch": lambda ds, batch: ds.prefetch(1),
    "shuffle": lambda ds, batch: ds.shuffle(1),
    "take": lambda ds, batch: ds.take(2),
    "cache": lambda ds, batch: ds.cache(),
    "batch": lambda ds, batch: ds.unbatch().batch(batch + 1),
}


def some_cases(count):
    """Return random cases, the same ones in each call."""
    choose = random.Random(7)
    return [
        {
            "source": choose.choice(list(SOURCES)),
            "rows": choose.randint(0, 11),
            "batch": choose.randint(1, 6),
            "drop_remainder": choose.random() < 0.3,
            "repeat": choose.choice([1, 1, 2]),
            "after": choose.choice(["nothing", *AFTER]),
            "policy": choose.choice(["AUTO", "OFF", "DATA"]),
            "replicas": choose.choice([1, 2, 3, 4]),
            "from_function": choose.random() < 0.3,
        }
        for _ in range(count)
    ]


def elements(tf, strategy, case):
    """Return the elements of a case's distributed dataset as nested lists."""
    batch = case["batch"]
    if case["from_function"]:
        batch = max(1, batch // 2)
    dataset = SOURCES[case["source"]](tf, case["rows"]).repeat(case["repeat"])
    dataset = dataset.batch(batch, drop_remainder=case["drop_remainder"])
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy[case["policy"]]
    options.experimental_distribute.auto_shard_policy = policy
    dataset = AFTER[case["after"]](dataset, batch).with_options(options)
    if case["from_function"]:
        distributed = strategy.distribute_datasets_from_function(lambda context: dataset)
    else:
        distributed = strategy.experimental_distribute_dataset(dataset)
    return [_plain(strategy, element) for element in distributed]


def _plain(strategy, value):
    if isinstance(value, dict):
        return {key: _plain(strategy, value[key]) for key in sorted(value)}
    if isinstance(value, tuple):
        return [_plain(strategy, part) for part in value]
    return [part.numpy().tolist() for part in strategy.experimental_local_results(value)]


def record():
    """Write the file, with the elements that TensorFlow reads."""
    os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    four = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, four)
    strategies = {
        n: tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in range(1, 5)
    }
    cases = some_cases(100)
    for case in cases:
        case["elements"] = elements(tf, strategies[case["replicas"]], case)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    record()
