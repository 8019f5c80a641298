"""The snippets of TensorFlow's guide "Distributed training with TensorFlow", with pycollective as tf.

    python examples/guide.py [--replicas 2]

The output of the guide is printed here too: the losses of its custom loop are the same for any number of
replicas. Snippets that need a TPU or a second machine are left out. Facts from the tutorials beside the
guide are shown at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile

import numpy as np

import pycollective as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--replicas", type=int, default=2)
args = parser.parse_args()
# The guide's estimator makes a temporary directory too, which stays.
model_dir = tempfile.TemporaryDirectory()
# The guide takes all GPUs; these are replicas on the CPU.
devices = [f"cpu:{i}" for i in range(args.replicas)]


def heading(text):
    print(f"\n# {text}")


heading("MirroredStrategy")
mirrored_strategy = tf.distribute.MirroredStrategy()  # every GPU, or one replica on the CPU
print(f"by default {mirrored_strategy.num_replicas_in_sync} replicas")
mirrored_strategy = tf.distribute.MirroredStrategy(
    devices, cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
)
print(f"with hierarchical copy {mirrored_strategy.num_replicas_in_sync} replicas")
mirrored_strategy = tf.distribute.MirroredStrategy(devices=devices)

heading("MultiWorkerMirroredStrategy")
communication_options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
)
print(communication_options.implementation)
# Without a cluster description this is one worker. Without a GPU it has one replica.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
print(f"by default {strategy.num_replicas_in_sync} replicas")
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication_options)
print(f"with NCCL {strategy.num_replicas_in_sync} replicas")

heading("ParameterServerStrategy")
# Without a cluster description, servers and workers are threads of this process.
parameter_server_strategy = tf.distribute.experimental.ParameterServerStrategy(
    variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
)
coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(parameter_server_strategy)
with parameter_server_strategy.scope():
    table = tf.Variable(tf.zeros([4, 2]))
print([part.device for part in table.variables])
print(coordinator.schedule(tf.function(lambda: tf.reduce_sum(table + 1.0))).fetch())

heading("CentralStorageStrategy")
central_storage_strategy = tf.distribute.experimental.CentralStorageStrategy()
print(f"by default {central_storage_strategy.num_replicas_in_sync} replicas")

heading("The default strategy")
default_strategy = tf.distribute.get_strategy()
print(default_strategy.reduce("SUM", 1.0, axis=None))
if tf.config.list_physical_devices("GPU"):
    strategy = tf.distribute.MirroredStrategy()
else:  # the same program without distribution
    strategy = tf.distribute.get_strategy()
with strategy.scope():
    print(tf.Variable(1.0))

heading("OneDeviceStrategy")
one_device = tf.distribute.OneDeviceStrategy(device="/cpu:0")
print(one_device.run(lambda x: x * 2, args=(21,)))

heading("Keras Model.fit")
with mirrored_strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(
                1, input_shape=(1,), kernel_regularizer=tf.keras.regularizers.L2(1e-4)
            )
        ]
    )
model.set_weights([[[0.5]], [0.0]])  # the guide's weights are random
model.compile(loss="mse", optimizer="sgd")
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
model.fit(dataset, epochs=2)
print(model.evaluate(dataset))
inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10)

heading("Batches and learning rates grow with the replicas")
BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15, 20: 0.175}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE.get(global_batch_size, 0.2)
print(f"{global_batch_size} examples a step, learning rate {learning_rate}")

heading("A custom training loop")
with mirrored_strategy.scope():
    regularizer = tf.keras.regularizers.L2(1e-4)
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=regularizer)]
    )
    optimizer = tf.keras.optimizers.SGD()
    # Set the reduction to NONE: the loss is scaled by hand, by the global batch.
    loss_object = tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(1000).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


def weight_of_first_loss(loss):
    """Return the weight w with -log(sigmoid(w)) + 1e-4 w² = loss, by bisection."""
    low, high = -10.0, 10.0
    for _ in range(100):
        w = (low + high) / 2
        low, high = (w, high) if math.log1p(math.exp(-w)) + 1e-4 * w * w > loss else (low, w)
    return low


# The guide's weight was random; its first loss determines it.
model.set_weights([[[weight_of_first_loss(0.9024367)]], [0.0]])


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model.losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_train_step(dist_inputs):
    per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
    return mirrored_strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


for dist_inputs in dist_dataset:
    print(distributed_train_step(dist_inputs))

heading("The same for a number of steps")
iterator = iter(dist_dataset)
for _ in range(10):
    print(distributed_train_step(next(iterator)))

heading("A loop within a function (custom training tutorial)")


@tf.function
def distributed_train_epoch(dataset):
    total_loss, num_batches = 0.0, 0
    for dist_inputs in dataset:
        total_loss += distributed_train_step(dist_inputs)
        num_batches += 1
    return total_loss / float(num_batches)


print(distributed_train_epoch(dist_dataset))

heading("The gradients of several replicas are those of one")
print(tf.distribute.verify_equivalence(model, next(iterator), loss_object))

heading("Estimator (the oldest guide)")
config = tf.estimator.RunConfig(
    train_distribute=mirrored_strategy, eval_distribute=mirrored_strategy, model_dir=model_dir.name
)
regressor = tf.estimator.LinearRegressor(
    feature_columns=[tf.feature_column.numeric_column("feats")], optimizer="SGD", config=config
)


def input_fn():
    dataset = tf.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0]))
    return dataset.repeat(1000).batch(10)


regressor.train(input_fn=input_fn, steps=10)
print(regressor.evaluate(input_fn=input_fn, steps=10))

heading("TF_CONFIG")
os.environ["TF_CONFIG"] = json.dumps(
    {
        "cluster": {
            "worker": ["host1:port", "host2:port", "host3:port"],
            "ps": ["host4:port", "host5:port"],
        },
        "task": {"type": "worker", "index": 1},
    }
)
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
print(resolver.cluster_spec())
print(f"this is {resolver.task_type} {resolver.task_id} at {resolver.master()}")

heading("The rows of each replica (guide and input tutorial)")
hundred = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
for features, _labels in mirrored_strategy.experimental_distribute_dataset(hundred):
    parts = mirrored_strategy.experimental_local_results(features)
    print("rows of a batch of 10:", *(len(part) for part in parts))
    break


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    numbers = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(batch_size)
    return numbers.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


from_function = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
features, _labels = next(iter(from_function))
parts = mirrored_strategy.experimental_local_results(features)
print("rows from a function:", *(len(part) for part in parts))
ids = mirrored_strategy.experimental_distribute_values_from_function(
    lambda context: context.replica_id_in_sync_group
)
print("replicas:", *mirrored_strategy.experimental_local_results(ids))

heading("Two ways to scale a loss (custom training tutorial)")


def both(rows):
    losses = rows[0] * 0.0 + 1.0
    by_rows = tf.nn.compute_average_loss(losses)
    by_batch = tf.nn.compute_average_loss(losses, global_batch_size=global_batch_size)
    return by_rows, by_batch


full = next(iter(dist_dataset))
for scaled in mirrored_strategy.run(both, args=(full,)):
    print(mirrored_strategy.reduce("SUM", scaled, axis=None))
# With labels of more axes, the loss is summed over these axes; averaging is left to the program.
per_example_loss = tf.ones([3, 4])
print(tf.nn.compute_average_loss(per_example_loss))
print(tf.nn.compute_average_loss(tf.reduce_mean(per_example_loss, axis=1)))
