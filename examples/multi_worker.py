"""Handwritten digits with several workers: processes on one machine or on many.

    pycollective run -n 2 examples/multi_worker.py          # on this machine
    mpirun -n 2 python examples/multi_worker.py             # Open MPI, MPICH
    srun -n 2 python examples/multi_worker.py               # Slurm
    python examples/multi_worker.py --ray 2                 # Ray

Or by hand on each machine, with its own index (docs/tutorials/two_machines.md):

    export PYCOLLECTIVE_SECRET=...
    export TF_CONFIG='{"cluster": {"worker": ["a:9000", "b:9000"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/multi_worker.py

With each of these commands, two workers print the same numbers.
"""

from __future__ import annotations

import argparse

import numpy as np

import pycollective as tf


def train(args):
    # Waits for all workers; from here on they make the same calls.
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        devices=[f"cpu:{i}" for i in range(args.replicas)]
    )
    batch_size = 64 * strategy.num_replicas_in_sync

    (images, labels), (test_images, test_labels) = tf.keras.datasets.handwritten.load_data(
        args.data
    )
    images, labels = images[: args.examples], labels[: args.examples]
    images, test_images = (a[..., None].astype("float32") / 255 for a in (images, test_images))

    # A seed gives all workers the same order, from which each takes its batches.
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(len(images), seed=1).batch(batch_size)

    tf.random.set_seed(1)
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 3, activation="relu"),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.1),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    chief = strategy.extended.should_checkpoint
    model.fit(dataset, epochs=args.epochs, verbose=2 if chief else 0)
    loss, accuracy = model.evaluate(test_images, test_labels, batch_size=batch_size, verbose=0)
    weights = sum(float(np.abs(w).sum(dtype=np.float64)) for w in model.get_weights())
    worker = strategy.extended.input_pipeline[1]
    return f"worker {worker}: test loss {loss:.6f}, accuracy {accuracy:.4f}, weights {weights:.6f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (3)")
    parser.add_argument("--examples", type=int, help="number of training examples (all)")
    parser.add_argument(
        "--replicas", type=int, default=1, help="replicas of each worker, on its CPU (1)"
    )
    parser.add_argument(
        "--data", help="folder of MNIST's files, or 'digits'; else MNIST or scikit-learn's digits"
    )
    parser.add_argument("--ray", type=int, metavar="N", help="start N workers on Ray")
    arguments = parser.parse_args()
    if arguments.ray:
        print(*tf.ray.run(train, arguments.ray, args=(arguments,)), sep="\n")
    else:
        print(train(arguments))
