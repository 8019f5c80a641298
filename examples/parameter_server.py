"""TensorFlow's tutorial "Parameter server training", with pycollective as tf.

    python examples/parameter_server.py [--workers 3] [--servers 2] [--epochs 4]
    pycollective run --ps 2 --workers 3 --chief examples/parameter_server.py

The model learns from the names of three films whether "avenger" is among them. With the first command,
the program makes all tasks of its cluster, and servers and workers are threads of this process. All
models, functions and datasets come before the first training, because a worker in another process runs
the program up to there.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import tempfile

import pycollective as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=3)
parser.add_argument("--servers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--seed", type=int, default=1, help="of the examples and the weights")
args = parser.parse_args()
tf.keras.utils.set_random_seed(args.seed)
random.seed(args.seed)


def create_in_process_cluster(num_workers, num_ps):
    """Make all tasks of a cluster, at free ports of this host, and return the resolver."""
    jobs = {"worker": free_addresses(num_workers), "ps": free_addresses(num_ps)}
    cluster_spec = tf.train.ClusterSpec(jobs)
    worker_config = tf.compat.v1.ConfigProto()
    worker_config.inter_op_parallelism_threads = num_workers + 1
    for i in range(num_workers):
        tf.distribute.Server(
            cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc"
        )
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


def free_addresses(count):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    addresses = [f"localhost:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


# A program that was started as one task of a cluster reads the cluster from TF_CONFIG.
cluster_resolver = (
    None if "TF_CONFIG" in os.environ else create_in_process_cluster(args.workers, args.servers)
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver,
    variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=256 << 10, max_shards=args.servers
    ),
)

# Data -----------------------------------------------------------------------------------------
feature_vocab = [
    "avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman",
]  # fmt: skip
label_vocab = ["no", "yes"]

with strategy.scope():
    feature_lookup_layer = tf.keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
    label_lookup_layer = tf.keras.layers.StringLookup(
        vocabulary=label_vocab, num_oov_indices=0, mask_token=None
    )
    raw_feature_input = tf.keras.layers.Input(shape=(3,), dtype=tf.string, name="features")
    feature_preprocess_stage = tf.keras.Model(
        {"features": raw_feature_input}, feature_lookup_layer(raw_feature_input)
    )
    raw_label_input = tf.keras.layers.Input(shape=(1,), dtype=tf.string, name="label")
    label_preprocess_stage = tf.keras.Model(
        {"label": raw_label_input}, label_lookup_layer(raw_label_input)
    )


def feature_and_label_gen(num_examples=200):
    features = [random.sample(feature_vocab, 3) for _ in range(num_examples)]
    labels = [["yes" if "avenger" in words else "no"] for words in features]
    return {"features": features, "label": labels}


def preprocessed(dataset):
    """Replace the strings of a dataset of batches by their indices."""
    return dataset.map(
        lambda x: (
            {"features": feature_preprocess_stage(x["features"])},
            label_preprocess_stage(x["label"]),
        )
    )


raw_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen())
raw_eval_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16))


def dataset_fn(_):
    return preprocessed(raw_dataset.shuffle(200).batch(32)).repeat()


# Model ----------------------------------------------------------------------------------------
with strategy.scope():
    small_model = tf.keras.models.Sequential([tf.keras.Input((10,)), tf.keras.layers.Dense(10)])
    small_model.compile(tf.keras.optimizers.SGD(), loss="mse", steps_per_execution=10)

    model_input = tf.keras.layers.Input(shape=(3,), dtype=tf.int64, name="model_input")
    emb_layer = tf.keras.layers.Embedding(
        input_dim=feature_lookup_layer.vocabulary_size(), output_dim=16384
    )
    emb_output = tf.reduce_mean(emb_layer(model_input), axis=1)
    dense_output = tf.keras.layers.Dense(
        units=1, activation="sigmoid", kernel_regularizer=tf.keras.regularizers.L2(1e-4)
    )(emb_output)
    model = tf.keras.Model({"features": model_input}, dense_output)
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.001)
    accuracy, eval_accuracy = tf.keras.metrics.Accuracy(), tf.keras.metrics.Accuracy()
    model.compile(
        tf.keras.optimizers.RMSprop(0.001), loss="binary_crossentropy", metrics=["accuracy"]
    )

for shard in emb_layer.trainable_variables:
    print(f"{shard.name}: shape {tuple(shard.shape)} on {shard.device}")


# Functions and datasets of the workers ----------------------------------------------------------
@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = tf.keras.losses.BinaryCrossentropy(
                reduction=tf.keras.losses.Reduction.NONE
            )(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
            model_losses = model.losses
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


def eval_dataset_fn():
    return preprocessed(raw_eval_dataset.shuffle(16).repeat().batch(8))


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)

# Keras's fit with a dataset for each worker ----------------------------------------------------
x, y = tf.random.uniform((10, 10)), tf.random.uniform((10, 10))


def random_dataset_fn(_):
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat().batch(64).prefetch(2)


creator = tf.keras.utils.experimental.DatasetCreator(random_dataset_fn)
with tempfile.TemporaryDirectory() as working_dir:
    callbacks = [
        tf.keras.callbacks.ModelCheckpoint(
            filepath=os.path.join(working_dir, "ckpt"), save_weights_only=True
        ),
        tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(working_dir, "backup")),
    ]
    small_model.fit(creator, epochs=5, steps_per_epoch=20, callbacks=callbacks)

# Training loop --------------------------------------------------------------------------------
per_worker_iterator = iter(per_worker_dataset)

steps_per_epoch = 10
for i in range(args.epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()  # wait at epoch boundaries
    print(f"Finished epoch {i}, accuracy is {accuracy.result().numpy():.3f}.")

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print(f"Final loss is {loss.fetch():.3f}")

# Evaluation -----------------------------------------------------------------------------------
for batch_data, labels in preprocessed(raw_eval_dataset.batch(8)):
    pred = model(batch_data, training=False)
    eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))
direct = float(eval_accuracy.result())
print(f"Evaluation accuracy on the coordinator: {direct:.3f}")

eval_accuracy.reset_state()
per_worker_eval_iterator = iter(per_worker_eval_dataset)
for _ in range(2):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()
print(f"Evaluation accuracy on the workers: {float(eval_accuracy.result()):.3f}")

# Keras's fit with a dataset that the coordinator reads -----------------------------------------
model.fit(dataset_fn(None), epochs=2, steps_per_epoch=steps_per_epoch)
_, fit_accuracy = model.evaluate(preprocessed(raw_eval_dataset.batch(8)), verbose=0)
print(f"Evaluation accuracy after fit: {fit_accuracy:.3f}")
if min(direct, fit_accuracy) < 0.9:
    raise SystemExit("the model has not learned")
