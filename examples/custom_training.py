"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", with pycollective as tf.

    python examples/custom_training.py [--replicas 2] [--epochs 5] [--data DIR]

The loop is the tutorial's. A strategy's scope encloses model, optimizer and metrics; the dataset is
distributed, and the loss is scaled by the global batch. The steps use strategy.run and strategy.reduce,
and a checkpoint is restored without a strategy. The data are MNIST, or else the digits of scikit-learn.
The learning rate falls along a cosine. After five epochs, 99 % of MNIST's test images are right.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import pycollective as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--examples", type=int, help="number of training examples (all)")
parser.add_argument("--seed", type=int, default=1, help="of the weights and the order")
parser.add_argument(
    "--data", help="folder of MNIST's files, or 'digits'; else MNIST or scikit-learn's digits"
)
args = parser.parse_args()
tf.keras.utils.set_random_seed(args.seed)

# Data -----------------------------------------------------------------------------------------
handwritten = tf.keras.datasets.handwritten
(train_images, train_labels), (test_images, test_labels) = handwritten.load_data(args.data)
train_images, train_labels = train_images[: args.examples], train_labels[: args.examples]
# Add a channel axis, scale to [0, 1].
train_images = train_images[..., None].astype("float32") / 255
test_images = test_images[..., None].astype("float32") / 255

strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(args.replicas)])
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BUFFER_SIZE = len(train_images)
BATCH_SIZE_PER_REPLICA = 64
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

train_dataset = (
    tf.data.Dataset.from_tensor_slices((train_images, train_labels))
    .shuffle(BUFFER_SIZE)
    .batch(GLOBAL_BATCH_SIZE)
)
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(
    GLOBAL_BATCH_SIZE
)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


# Model ----------------------------------------------------------------------------------------
def create_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


def create_optimizer():
    steps = args.epochs * -(-len(train_images) // GLOBAL_BATCH_SIZE)
    return tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.CosineDecay(2e-3, steps))


with strategy.scope():
    # Reduction NONE: the loss is scaled by hand, by the global batch.
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    model = create_model()
    optimizer = create_optimizer()
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


# Steps ----------------------------------------------------------------------------------------
def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    t_loss = loss_object(labels, predictions)
    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


# Training -------------------------------------------------------------------------------------
with tempfile.TemporaryDirectory() as checkpoint_dir:
    checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")

    for epoch in range(args.epochs):
        total_loss = 0.0
        num_batches = 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches

        for x in test_dist_dataset:
            distributed_test_step(x)
        checkpoint.save(checkpoint_prefix)

        print(
            f"Epoch {epoch + 1}, Loss: {train_loss:.4f}, "
            f"Accuracy: {train_accuracy.result() * 100:.2f}, Test Loss: {test_loss.result():.4f}, "
            f"Test Accuracy: {test_accuracy.result() * 100:.2f}"
        )
        final_accuracy = float(test_accuracy.result())
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()

    # The checkpoint, without a strategy -------------------------------------------------------
    eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model = create_model()
    new_optimizer = create_optimizer()
    checkpoint = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
    checkpoint.restore(tf.train.latest_checkpoint(checkpoint_dir))

    @tf.function
    def eval_step(images, labels):
        predictions = new_model(images, training=False)
        eval_accuracy(labels, predictions)

    for images, labels in test_dataset:
        eval_step(images, labels)
    print(
        f"Accuracy after restoring the saved model without strategy: "
        f"{eval_accuracy.result() * 100:.2f}"
    )
    if float(eval_accuracy.result()) != final_accuracy:
        raise SystemExit("the restored model has another test accuracy than the trained one")
