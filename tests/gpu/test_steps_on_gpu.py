"""Training steps on a GPU: updates in one launch, loss scaling, copies, logical devices."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import test_captured_on_devices as captured
import test_nn_normalization_on_gpu as normalization
import test_nn_pooling_on_gpu as pooling
import test_nn_together as kernels
from test_fit_on_devices import convolutional, fitted
from test_steps_on_devices import LEFT_OUT, OPTIMIZERS, STEPS, STRATEGIES, train

import pycollective as tf
from pycollective import config, distribute
from pycollective.comm import on_device
from pycollective.nccl.device import Fetch, Upload
from pycollective.nn.update import adam_update, sgd_update

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [kernels.SHAPES, [(5,)] * 97, [(3_000_001,), (1,)]])
def test_updates_of_optimizers_equal_those_of_the_host(cupy, dtype, shapes):
    close = {"rtol": 1e-5 if dtype == "float32" else 1e-12, "atol": 1e-6}
    params, ms, vs = (
        kernels.drawn(shapes, dtype),
        *([np.zeros(s, dtype) for s in shapes] for _ in "mv"),
    )
    on_gpu = kernels.moved(cupy, params, ms, vs)
    for _ in range(3):
        grads = kernels.drawn(shapes, dtype)
        (there,) = kernels.moved(cupy, grads)
        adam_update(params, grads, ms, vs, 0.01, 0.9, 0.999, 1e-7)
        adam_update(on_gpu[0], there, on_gpu[1], on_gpu[2], 0.01, 0.9, 0.999, 1e-7)
        sgd_update(params, grads, 0.1, ms, 0.9, True)
        sgd_update(on_gpu[0], there, 0.1, on_gpu[1], 0.9, True)
    for found, expected in zip(on_gpu, (params, ms, vs), strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(cupy.asnumpy(ours), theirs, **close)


@pytest.mark.parametrize("dtype", normalization.TOLERANCE)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (64, 32, 32, 16), (0, 3)], ids=str)
def test_batch_normalization_equals_that_of_the_host(cupy, dtype, activation, shape):
    wide = "float32" if dtype == "float16" else dtype
    values = [*kernels.drawn([shape], dtype), *kernels.drawn([shape[-1:]] * 2, wide)]
    (upstream,) = kernels.drawn([shape], dtype)
    expected = normalization.results(values, upstream, activation)
    moved, (there,) = kernels.moved(cupy, values, [upstream])
    found = normalization.results(moved, there, activation)
    for ours, theirs in zip(found, expected, strict=True):
        size = np.abs(theirs.numpy()).max(initial=1)
        np.testing.assert_allclose(
            ours.numpy() / size, theirs.numpy() / size, atol=normalization.TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("case", [*pooling.CASES, ((64, 26, 26, 32), 2, None, "VALID")], ids=str)
def test_max_pooling_equals_that_of_the_host(cupy, case, dtype):
    shape, *how = case
    x = (pooling.RNG.integers(-3, 3, shape) / 2).astype(dtype)
    x.reshape(-1)[::11] = np.nan

    def upstream(shape):
        return (np.arange(np.prod(shape)) % 7).reshape(shape).astype(dtype)

    expected = pooling.results(x, upstream, *how)
    found = pooling.results(cupy.asarray(x), lambda s: cupy.asarray(upstream(s)), *how)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_a_gpu_equal_those_of_the_host(cupy, name):
    counts = SimpleNamespace(fetched=0, calls=0)
    far = name == "scaled too far"
    options = OPTIMIZERS[name], counts, "float32" if far else "float64"
    with np.errstate(over="ignore", invalid="ignore"):
        host, *_ = train(STRATEGIES["default"](), *options)
        model, optimizer, _, _, _ = train(STRATEGIES["one device"](), *options)
    close = {"rtol": 1e-2, "atol": 1e-2} if far else {"rtol": 1e-6, "atol": 1e-8}
    for ours, theirs in zip(model.get_weights(), host.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, **close)
    if far:
        assert int(optimizer.iterations) == STEPS - LEFT_OUT


def test_copies_while_the_device_computes_are_right(cupy):
    upload = Upload()
    total = cupy.zeros((2000, 2000), np.float32)
    factor = cupy.full((2000, 2000), 1e-4, np.float32)
    for step in range(20):
        for _ in range(5):
            total = factor @ total + 1
        array = np.full(1_000_000, step, np.float32)
        copied = upload(array)
        array[...] = -1
        fetched = Fetch((copied == step).all())
        del copied  # the next copy gets its memory
        assert fetched.value()


def test_logical_devices_of_one_gpu_train_as_cpus(cupy, monkeypatch):
    monkeypatch.setattr(config, "_state", config._State())
    config.set_logical_device_configuration("gpu:0", 2)
    expected = fitted(convolutional(distribute.MirroredStrategy(["cpu:0", "cpu:1"])))
    strategy = distribute.MirroredStrategy(["gpu:0", "gpu:1"])
    model = convolutional(strategy)
    found = fitted(model)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=5e-3, err_msg=key)
    assert {v.values[1].current().array.device.id for v in model.trainable_weights} == {0}


#: A kernel that keeps its stream busy.
SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
"""


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_no_step_waits_for_the_device(cupy, monkeypatch, policy, replicas):
    """The host completes a step while the device is still busy with another kernel."""
    monkeypatch.setattr(config, "_state", config._State())
    if replicas > 1:
        if on_device.runtime() is None:
            pytest.skip("the core has no CUDA part: gradients are copied through host memory")
        config.set_logical_device_configuration("gpu:0", replicas)
    strategy = distribute.MirroredStrategy([f"gpu:{r}" for r in range(replicas)])
    layers = tf.keras.layers
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                layers.Conv2D(8, 3, activation="relu", dtype=policy),
                layers.MaxPooling2D(dtype=policy),
                layers.BatchNormalization(dtype=policy),
                layers.Flatten(dtype=policy),
                layers.Dense(3, dtype=policy),
            ]
        )
        model.build((None, 12, 12, 1))
        optimizer = tf.keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        if policy == "mixed_float16":
            optimizer = tf.keras.optimizers.LossScaleOptimizer(optimizer)
    images = np.random.default_rng(0).random((16, 12, 12, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((images, np.arange(16) % 3)).batch(16)
    (batch,) = strategy.experimental_distribute_dataset(data)

    def replica(images, labels):
        with tf.GradientTape() as tape:
            outputs = tf.cast(model(images, training=True), "float32")
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        return loss

    for _ in range(5):  # compile kernels, make plans and fill the memory pool
        strategy.run(replica, args=batch)
    cupy.cuda.Device().synchronize()
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(4_000_000_000),))
    spun = cupy.cuda.Event()
    spun.record()
    loss = strategy.run(replica, args=batch)
    assert not spun.done
    assert np.isfinite(float(strategy.reduce("SUM", loss, axis=None)))
    assert spun.done


def test_memory_is_reused_between_steps(cupy):
    model = convolutional(STRATEGIES["one device"]())
    pool = cupy.get_default_memory_pool()
    fitted(model)
    gc.collect()
    before = pool.total_bytes()
    fitted(model, epochs=20)
    assert pool.total_bytes() <= 1.5 * before + (1 << 20)


@pytest.mark.parametrize("build", [captured.sequential, captured.functional])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_replayed_steps_equal_those_of_the_host(cupy, caplog, build, policy):
    """The work of a model becomes CUDA graphs, and no graph is refused."""
    caplog.set_level("INFO", "pycollective")
    training = captured.on_device(build, policy)
    close = 1e-4 if policy == "float32" else 2e-2
    captured.same(training.all_steps(), captured.on_host(build, policy), close)
    assert "CUDA graph" not in caplog.text


def test_replicas_of_one_gpu_have_their_own_graphs(cupy, monkeypatch):
    monkeypatch.setattr(config, "_state", config._State())
    config.set_logical_device_configuration("gpu:0", 2)
    both = [
        captured.Training(captured.functional, distribute.MirroredStrategy(devices), "float32")
        for devices in (["gpu:0", "gpu:1"], ["cpu:0", "cpu:1"])
    ]
    found, expected = (training.all_steps() for training in both)
    captured.same(found, expected, 1e-4)
