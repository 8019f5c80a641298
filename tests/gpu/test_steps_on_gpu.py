"""Updates in one launch, loss scaling, copies beside computing, and logical devices on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import test_nn_together as kernels
from test_fit_on_devices import convolutional, fitted
from test_steps_on_devices import LEFT_OUT, OPTIMIZERS, STEPS, STRATEGIES, train

from pycollective import config, distribute
from pycollective.nccl.device import Fetch, Upload
from pycollective.nn.update import adam_update, sgd_update

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [kernels.SHAPES, [(5,)] * 97, [(3_000_001,), (1,)]])
def test_updates(cupy, dtype, shapes):
    close = {"rtol": 1e-5 if dtype == "float32" else 1e-12, "atol": 1e-6}
    params, ms, vs = (
        kernels.drawn(shapes, dtype),
        *([np.zeros(s, dtype) for s in shapes] for _ in "mv"),
    )
    own = kernels.moved(cupy, params, ms, vs)
    for _ in range(3):
        grads = kernels.drawn(shapes, dtype)
        (there,) = kernels.moved(cupy, grads)
        adam_update(params, grads, ms, vs, 0.01, 0.9, 0.999, 1e-7)
        adam_update(own[0], there, own[1], own[2], 0.01, 0.9, 0.999, 1e-7)
        sgd_update(params, grads, 0.1, ms, 0.9, True)
        sgd_update(own[0], there, 0.1, own[1], 0.9, True)
    for found, expected in zip(own, (params, ms, vs), strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(cupy.asnumpy(ours), theirs, **close)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(cupy, name):
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


def test_copies_beside_what_is_computed(cupy):
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
        del copied  # its memory is given to the next one
        assert fetched.value()


def test_two_logical_devices_of_one_gpu(cupy, monkeypatch):
    monkeypatch.setattr(config, "_state", config._State())
    config.set_logical_device_configuration("gpu:0", 2)
    expected = fitted(convolutional(distribute.MirroredStrategy(["cpu:0", "cpu:1"])))
    strategy = distribute.MirroredStrategy(["gpu:0", "gpu:1"])
    model = convolutional(strategy)
    found = fitted(model)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=5e-3, err_msg=key)
    assert {v.values[1]._current().array.device.id for v in model.trainable_weights} == {0}
