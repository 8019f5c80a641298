"""`GradientReducer`: buckets, one level and two, and the Python calls of a training step."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from strategies import mirrored

import pycollective as pc
from pycollective import distribute as d
from pycollective import keras
from pycollective.comm import Communicator
from pycollective.distribute.all_reduce_ops import CollectiveAllReduce
from pycollective.distribute.experimental import CommunicationOptions
from pycollective.distribute.reducer import GradientReducer
from pycollective.keras.layers.holder import Holder
from pycollective.tensor import Tensor, Variable

SHAPES = [(3,), (), (2, 5), (0, 4), (7,)]


class Worker:
    """The replicas of one process, as threads. Replica 0 runs the functions of merge points."""

    def __init__(self, size: int) -> None:
        self.replicas = pc.local_group(size, timeout=20) if size > 1 else [None]
        self._barrier = threading.Barrier(size, timeout=20)
        self._given: list[object] = [None] * size
        self._results: list[object] = []

    def merge(self, replica: int):
        def merge(_what, function, *args, timeout=None):
            self._given[replica] = args
            self._barrier.wait()
            if replica == 0:
                self._results = function(self._given)
            self._barrier.wait()
            return self._results[replica]

        return merge


def reduce_everywhere(workers, size, arrays_of, op, options, way):
    """Return each replica's results; replica ``n`` of all contributes ``arrays_of(n)``."""
    between_workers = pc.local_group(workers, timeout=20) if workers > 1 else [None]

    def replica(worker, number, worker_index):
        reducer = GradientReducer(
            CollectiveAllReduce(),
            worker.replicas[number],
            between_workers[worker_index],
            CommunicationOptions(),
        )
        arrays = arrays_of(worker_index * size + number)
        merge = worker.merge(number)
        if way == "all at once":
            return reducer.all_reduce(arrays, op, options, merge)
        reduction = reducer.begin(arrays, op, options, merge)
        for i in reversed(range(len(arrays))):
            reduction.add(i, arrays[i])
        return reduction.finish()

    with ThreadPoolExecutor(workers * size) as threads:
        futures = []
        for index in range(workers):
            worker = Worker(size)
            futures += [threads.submit(replica, worker, n, index) for n in range(size)]
        return [future.result(30) for future in futures]


@pytest.mark.parametrize("way", ["all at once", "one by one"])
@pytest.mark.parametrize(("workers", "size"), [(1, 3), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("op", [d.ReduceOp.SUM, d.ReduceOp.MEAN])
def test_levels_and_ways_give_every_replica_the_same_result(way, workers, size, dtype, op):
    total = workers * size

    def arrays_of(number):
        rng = np.random.default_rng(number)
        return [rng.integers(-9, 9, shape).astype(dtype) for shape in SHAPES]

    results = reduce_everywhere(workers, size, arrays_of, op, CommunicationOptions(1), way)
    for i, shape in enumerate(SHAPES):
        wanted = np.sum([arrays_of(n)[i].astype(np.float64) for n in range(total)], axis=0)
        if op is d.ReduceOp.MEAN:
            wanted = wanted / total
        for result in results:
            assert result[i].shape == shape
            assert result[i].tobytes() == results[0][i].tobytes()
            np.testing.assert_allclose(result[i], wanted, rtol=1e-3)
            if op is d.ReduceOp.SUM or dtype != "int32":
                assert result[i].dtype == dtype


@pytest.mark.parametrize("way", ["all at once", "one by one"])
def test_float16_on_two_levels_is_rounded_once(way):
    """The sum of 1 and three times 2**-11 is exact in float32, and is rounded at the end."""
    parts = [1.0, 2**-11, 2**-11, 2**-11]

    def arrays_of(number):
        return [np.full(2, parts[number], np.float16)] * 2

    options = CommunicationOptions(1)
    for result in reduce_everywhere(2, 2, arrays_of, d.ReduceOp.SUM, options, way):
        assert result[1].tolist() == [float(np.float16(1 + 3 * 2**-11))] * 2


def test_begin_with_one_bucket_returns_none():
    reducer = GradientReducer(
        CollectiveAllReduce(), pc.local_group(2)[0], None, CommunicationOptions()
    )
    likes = [np.zeros(3), np.zeros(2)]
    options = CommunicationOptions()
    assert reducer.begin(likes, d.ReduceOp.SUM, options, None) is None
    assert reducer.begin([], d.ReduceOp.SUM, CommunicationOptions(1), None) is None
    assert reducer.begin(likes, d.ReduceOp.SUM, CommunicationOptions(1), None) is not None


# Number of calls ----------------------------------------------------------------------------------


def test_apply_gradients_reaches_the_core_in_at_most_40_calls(monkeypatch):
    """Count replica 0's calls of package functions from the optimizer to the communicator."""
    strategy = mirrored(2)
    with strategy.scope():
        variables = [Variable(np.zeros(n, np.float32)) for n in (3, 50_000, 1, 7)]
        optimizer = keras.optimizers.Adam(0.01)
    package = str(Path(pc.__file__).parent)
    all_reduce, calls = Communicator.all_reduce, []

    def record_call(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    def reached(communicator, *args, **kwargs):
        sys.setprofile(None)
        return all_reduce(communicator, *args, **kwargs)

    def step():
        replica = d.get_replica_context().local_replica_id
        gradients = [Tensor(np.full(v.shape, 1.0 + replica, np.float32)) for v in variables]
        if replica == 0 and counted:
            sys.setprofile(record_call)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    counted = False
    strategy.run(step)
    counted = True
    monkeypatch.setattr(Communicator, "all_reduce", reached)
    strategy.run(step)
    assert 5 < len(calls) <= 40, calls
    assert len({file for file, _ in calls}) <= 8, calls


def test_custom_step_makes_at_most_228_calls(monkeypatch):
    """Count replica 0's calls of package functions in the guide's step with replayed layers."""
    # If a layer of an earlier test had added a loss, the step would make more calls.
    monkeypatch.setattr(Holder, "_any_added_loss", False)
    strategy, calls = mirrored(2), []
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(8, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(16, activation="relu"),
                layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam()
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    package = str(Path(pc.__file__).parent)

    def record_call(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else 0)

    def replica(images, labels):
        with pc.GradientTape() as tape:
            predictions = model(images, training=True)
            losses = entropy(labels, predictions)
            loss = pc.nn.compute_average_loss(losses, global_batch_size=8)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    def counted(*batch):
        first = d.get_replica_context().local_replica_id == 0
        if first:
            calls.clear()
            sys.setprofile(record_call)
        try:
            return replica(*batch)
        finally:
            if first:
                sys.setprofile(None)

    random = np.random.default_rng(0)
    images = random.random((80, 14, 14, 1), np.float32)
    data = pc.data.Dataset.from_tensor_slices((images, random.integers(0, 10, 80))).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(counted, args=batch)
    assert 100 < len(calls) <= 228, calls
