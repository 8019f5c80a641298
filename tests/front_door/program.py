"""A typed program of a user, on which test_typing.py runs the type checkers.

A line with ``type: ignore`` has an error that each checker must find.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import pycollective as pc
import pycollective as tf

Floats = NDArray[np.float32]


def collectives(comm: pc.Communicator, x: Floats) -> Floats:
    assert_type(comm.rank, int)
    assert_type(comm.all_reduce(x), Floats)
    assert_type(comm.all_reduce(x, "max", algorithm="ring", timeout=1.0), Floats)
    assert_type(comm.all_reduce(x, np.maximum), Floats)
    assert_type(comm.all_reduce(x, tf.distribute.ReduceOp.SUM, reproducible=True), Floats)
    assert_type(comm.all_reduce([1.0, 2.0]), NDArray[Any])
    buffer = bytearray(8)
    assert_type(comm.all_reduce(buffer, out=buffer), bytearray)
    assert_type(comm.all_reduce(x, out=x), Floats)
    assert_type(comm.all_reduce(x, async_op=True), pc.Work[Floats])
    assert_type(comm.all_reduce(x, out=x, async_op=True).wait(), Floats)
    comm.all_reduce(x, "maximum")  # type: ignore[call-overload]
    comm.all_reduce(x, algoritm="ring")  # type: ignore[call-overload]

    assert_type(comm.reduce(x, "sum", 0), Floats | None)
    assert_type(comm.reduce_scatter(x), Floats)
    assert_type(comm.all_reduce_many([x, x]), list[Floats])
    assert_type(comm.all_reduce_many([x], async_op=True), pc.Work[list[Floats]])
    assert_type(comm.broadcast(x, root=1), Floats)
    assert_type(comm.broadcast(None, out=x), Floats)
    comm.broadcast(None)  # type: ignore[call-overload]
    assert_type(comm.all_gather(x, ragged=True), Floats)
    assert_type(comm.gather(x, async_op=True), pc.Work[Floats | None])
    assert_type(comm.scatter(x, ragged=True, counts=[1, 2]), Floats)
    assert_type(comm.all_to_all(x, [1, 1], out_counts=[1, 1]), Floats)

    comm.send(x, 1)
    assert_type(comm.send(x, 1, async_op=True), pc.Work[None])
    assert_type(comm.recv(x, 1, tag=3), Floats)
    assert_type(comm.recv(x, source=1, async_op=True), pc.Work[Floats])
    assert_type(comm.recv(source=1, shape=(2, 3), dtype=np.int64), NDArray[np.int64])
    assert_type(comm.recv(source=1, shape=3, dtype="f4"), NDArray[Any])
    comm.recv(x)  # type: ignore[call-overload]

    comm.barrier()
    assert_type(comm.barrier(async_op=True), pc.Work[None])
    assert_type(comm.empty((2, 3), np.float32), Floats)
    assert_type(comm.empty(3), NDArray[Any])
    request = pc.Persistent(comm.all_reduce, x, out=x)
    assert_type(request, pc.Persistent[Floats])
    assert_type(request.start().wait(), Floats)
    assert_type(pc.Persistent(comm.barrier)(), None)
    pc.Persistent(comm.all_reduce, x, algoritm="ring")  # type: ignore[arg-type]
    assert_type(comm.split(0), pc.Communicator | None)
    assert_type(comm.split(0, async_op=True).result(), pc.Communicator | None)
    comm.Allreduce(x)  # type: ignore[attr-defined]
    return comm.all_reduce(x)


def count(comm: pc.Communicator, steps: int, name: str = "") -> dict[str, int]:
    return {name: steps * comm.size}


def entering_a_group() -> None:
    assert_type(pc.spawn(count, 4, 3), list[dict[str, int]])
    assert_type(pc.spawn(count, 4, 3, "x", threads=True), list[dict[str, int]])
    pc.spawn(count, 4, "x")  # type: ignore[arg-type]
    with pc.init(timeout=5) as comm:
        assert_type(comm, pc.Communicator)
    assert_type(pc.local_group(2), list[pc.Communicator])
    try:
        comm.barrier()
    except pc.RankError as error:
        assert_type(error.exitcode, int | None)
    print(pc.Comunicator)  # type: ignore[attr-defined]


def training() -> None:
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    assert_type(tf.distribute.get_strategy(), tf.distribute.Strategy)
    assert_type(tf.distribute.get_replica_context(), tf.distribute.ReplicaContext | None)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.SGD(0.1)
    assert_type(model, tf.keras.Sequential)
    assert_type(optimizer, tf.keras.optimizers.SGD)
    dataset = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2), np.float32)).batch(2)
    assert_type(dataset, tf.data.Dataset)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.constant([1.0]))
    assert_type(loss, tf.Tensor)
    tape.gradient(loss, model.trainable_variables)
    assert_type(tf.Variable(1.0), tf.Variable)
    tf.cast(loss, tf.float32)
    print(tf.distribute.MiroredStrategy)  # type: ignore[attr-defined]
