"""Distributed datasets and loss scaling."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import mirrored

import pycollective as tf
from pycollective import distribute as d


def parts(strategy, dataset):
    return [
        [p.numpy().tolist() for p in strategy.experimental_local_results(x)]
        for x in strategy.experimental_distribute_dataset(dataset)
    ]


def test_the_guides_example(two):
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    elements = list(two.experimental_distribute_dataset(dataset))
    assert len(elements) == 10
    features, labels = elements[0]
    assert [v.shape for v in features.values] == [(5, 1), (5, 1)]
    assert [v.shape for v in labels.values] == [(5, 1), (5, 1)]


def test_every_row_goes_to_one_replica_in_order(strategy):
    n = strategy.num_replicas_in_sync
    for rows, batch in ((10, 4), (7, 7), (3, 3), (9, 8), (1, 4)):
        got = parts(strategy, tf.data.Dataset.range(rows).batch(batch))
        assert [v for step in got for part in step for v in part] == list(range(rows))
        if n > 1:
            assert all(len(step) == n for step in got)
            assert all(len(part) <= -(-batch // n) for step in got for part in step)


def test_ragged_and_empty_parts():
    assert parts(mirrored(4), tf.data.Dataset.range(6).batch(6)) == [[[0, 1], [2, 3], [4, 5], []]]
    assert parts(mirrored(3), tf.data.Dataset.range(4).batch(3)) == [[[0], [1], [2]], [[3], [], []]]


def test_one_replica_gets_plain_tensors():
    (x,) = mirrored(1).experimental_distribute_dataset(tf.data.Dataset.range(3).batch(3))
    assert isinstance(x, tf.Tensor)


def test_it_can_be_iterated_again_and_has_a_length(two):
    dataset = two.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4))
    assert len(dataset) == len(list(dataset)) == len(list(dataset)) == 3
    assert dataset.cardinality == 3
    iterator = iter(dataset)
    assert [v.shape for v in next(iterator).values] == [(2,), (2,)]
    with pytest.raises(ValueError, match="should be called from outside of replica_fn"):
        two.run(lambda: next(iterator))
    infinite = two.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4).repeat())
    with pytest.raises(TypeError, match="infinite"):
        len(infinite)


def test_from_function(two):
    seen = []

    def make(context):
        seen.append(str(context))
        return tf.data.Dataset.range(10).batch(context.get_per_replica_batch_size(4))

    steps = [
        [v.numpy().tolist() for v in x.values] for x in two.distribute_datasets_from_function(make)
    ]
    assert seen == ["tf.distribute.InputContext(input pipeline id 0, total: 1)"]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
    with pytest.raises(ValueError, match="is not divisible by `num_replicas_in_sync`"):
        d.InputContext(1, 0, 3).get_per_replica_batch_size(4)


def test_datasets_that_cannot_be_split(two):
    with pytest.raises(ValueError, match="Perhaps your input dataset is not batched"):
        two.experimental_distribute_dataset(tf.data.Dataset.range(4))
    generated = tf.data.Dataset.from_generator(lambda: iter([1.0, 2.0]))
    with pytest.raises(ValueError, match="Perhaps your input dataset is not batched"):
        list(two.experimental_distribute_dataset(generated))
    with pytest.raises(TypeError, match="expected a pycollective.data.Dataset, got list"):
        two.experimental_distribute_dataset([1, 2])


def test_an_error_in_the_middle_arrives(two):
    def broken():
        yield np.zeros(4)
        raise OSError("the disk is gone")

    dataset = tf.data.Dataset.from_generator(broken).prefetch(2)
    with pytest.raises(OSError, match="the disk is gone"):
        for x in two.experimental_distribute_dataset(dataset):
            two.run(lambda v: v, args=(x,))


# Loss scaling ---------------------------------------------------------------------------------


def test_average_loss_sums_to_the_global_mean(strategy):
    n = strategy.num_replicas_in_sync
    rows = np.arange(float(4 * n))
    (x,) = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(rows).batch(4 * n)
    )
    losses = strategy.run(tf.nn.compute_average_loss, args=(x,))
    assert float(strategy.reduce("SUM", losses, axis=None)) == pytest.approx(rows.mean())
    regularization = strategy.run(lambda: tf.nn.scale_regularization_loss(tf.constant([1.0, 2.0])))
    assert float(strategy.reduce("SUM", regularization, axis=None)) == pytest.approx(3.0)


def test_average_loss_of_nothing_and_of_more_axes():
    empty = tf.nn.compute_average_loss(np.zeros(0, "float32"))
    assert float(empty) == 0.0
    assert empty.dtype == tf.float32
    assert float(tf.nn.compute_average_loss(np.ones((2, 3)))) == 3.0
    assert float(tf.nn.compute_average_loss([1.0, 2.0], global_batch_size=6)) == 0.5
    weighted = tf.nn.compute_average_loss(np.array([1.0, 2.0]), sample_weight=[[2.0], [0.5]])
    assert float(weighted) == 1.5
    assert weighted.dtype == tf.float64


def test_bad_loss_scaling(two):
    with pytest.raises(ValueError, match="Expected a tensor with at least rank 1"):
        tf.nn.compute_average_loss(1.0)
    with pytest.raises(ValueError, match="global_batch_size must be scalar"):
        tf.nn.compute_average_loss([1.0], global_batch_size=[1])
    with pytest.raises(TypeError, match="global_batch_size must be an integer"):
        tf.nn.compute_average_loss([1.0], global_batch_size=1.0)
    with pytest.raises(ValueError, match="global_batch_size must be non-negative"):
        tf.nn.compute_average_loss([1.0], global_batch_size=-1)
    with pytest.raises(ValueError, match="sample_weight"):
        tf.nn.compute_average_loss([1.0, 2.0], sample_weight=[[[1.0, 2.0, 3.0]]])
    with two.scope():
        with pytest.raises(RuntimeError, match="compute_average_loss` in cross replica context"):
            tf.nn.compute_average_loss([1.0])
        with pytest.raises(RuntimeError, match="scale_regularization_loss` in cross replica"):
            tf.nn.scale_regularization_loss([1.0])
        assert float(tf.nn.compute_average_loss([1.0], global_batch_size=2)) == 0.5
