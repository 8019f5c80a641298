"""TensorFlow's tutorial "Parameter server training", with pycollective as tf.

    python examples/parameter_server.py [--workers 3] [--servers 2] [--epochs 4]

The model learns from the names of three films whether a film is of Marvel. Servers and workers are
threads of this process. The tutorial makes them with tf.distribute.Server, and looks words up by a layer
for strings; here the strategy makes them, and the words have numbers. The model flattens the three
rows of the table, whose mean the tutorial takes.
"""

from __future__ import annotations

import argparse

import numpy as np

import pycollective as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=3)
parser.add_argument("--servers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--seed", type=int, default=1, help="of the examples and the weights")
args = parser.parse_args()
tf.keras.utils.set_random_seed(args.seed)

strategy = tf.distribute.ParameterServerStrategy(
    variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(
        args.servers
    ),
    num_workers=args.workers,
    num_ps=args.servers,
)

feature_vocab = [
    "avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman", "shrek",
]  # fmt: skip
marvel = np.array([name in ("avenger", "ironman", "hulk", "spiderman") for name in feature_vocab])


def feature_and_label_gen(num_examples=200):
    words = np.random.default_rng(args.seed).integers(0, len(feature_vocab), (num_examples, 3))
    return words.astype("int32"), (marvel[words].sum(axis=1) >= 2).astype("float32")[:, None]


# Model ----------------------------------------------------------------------------------------
with strategy.scope():
    emb_layer = tf.keras.layers.Embedding(len(feature_vocab), 16)
    model_input = tf.keras.layers.Input(shape=(3,), dtype="int32", name="model_input")
    emb_output = tf.keras.layers.Flatten()(emb_layer(model_input))
    dense_output = tf.keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
    model = tf.keras.Model(model_input, dense_output)
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.1)
    accuracy = tf.keras.metrics.BinaryAccuracy()

for weight in emb_layer.weights:
    print(f"{weight.name}: shape {tuple(weight.shape)} on {weight.device}")


# Training loop --------------------------------------------------------------------------------
@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = tf.keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


def dataset_fn(_):
    raw_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen())
    return raw_dataset.shuffle(200).batch(32).repeat()


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

steps_per_epoch = 20
for i in range(args.epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()  # wait at epoch boundaries
    print(f"Finished epoch {i}, accuracy is {float(accuracy.result()):.3f}.")

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print(f"Final loss is {loss.fetch():.3f}")

# Keras's fit ----------------------------------------------------------------------------------
with strategy.scope():
    model.compile(
        tf.keras.optimizers.RMSprop(0.01), loss="binary_crossentropy", metrics=["accuracy"]
    )
creator = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
model.fit(creator, epochs=2, steps_per_epoch=steps_per_epoch)

# Evaluation -----------------------------------------------------------------------------------
words, labels = feature_and_label_gen(400)
_, eval_accuracy = model.evaluate(words, labels, verbose=0)
print(f"Evaluation accuracy: {eval_accuracy:.3f}")
if eval_accuracy < 0.95:
    raise SystemExit("the model has not learned")
