"""Only one module distinguishes arrays of NumPy and CuPy; a small stand-in for CuPy shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from device_arrays import DeviceArray
from gradient_cases import CASES, gradients_of, numbers

import pycollective
import pycollective.nn as nn
import pycollective.tensor as tf
from pycollective import array_backend, nest


def test_only_two_modules_import_cupy():
    root = Path(pycollective.__file__).parent
    importers = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(
            r"^\s*(import|from) cupy\b|modules\S*cupy|['\"]cupy['\"]", path.read_text(), re.M
        )
    ]
    # The first module handles arrays, the second one streams and events.
    assert sorted(importers) == ["array_backend.py", "nccl/device.py"]


def test_cupy_is_not_imported():
    assert "cupy" not in sys.modules
    assert array_backend.array_module(np.zeros(1), 3) is np
    assert not array_backend.is_array([1])
    assert array_backend.is_array(np.zeros(1))


def test_array_module_is_that_of_the_array(cupy):
    device = cupy.asarray([1.0])
    assert array_backend.array_module(np.zeros(1)) is np
    assert array_backend.array_module(1.0, device) is cupy
    assert array_backend.is_array(device)
    assert array_backend.to_numpy(device).tolist() == [1.0]
    assert type(array_backend.asarray(np.zeros(1), like=device)) is DeviceArray
    assert type(array_backend.asarray(device, like=np.zeros(1))) is np.ndarray
    assert array_backend.asarray(device) is not None
    assert type(array_backend.copy(device)) is DeviceArray


def test_scatter_add_repeated_indices_add_up(cupy):
    for make in (np.asarray, cupy.asarray):
        target = make(np.zeros(3))
        array_backend.scatter_add(target, make(np.array([1, 1])), make(np.array([2.0, 3.0])))
        assert array_backend.to_numpy(target).tolist() == [0, 5, 0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3), (5, 0), (0, 3)])
def test_scatter_add_of_rows_adds_in_order(shape, dtype):
    random = np.random.default_rng(0)
    for count in ((), (40,), (4, 5), (0,)) if shape[0] else ((0,),):
        rows = random.integers(-shape[0], shape[0], count) if count else np.array(2 % shape[0])
        values = (100 * random.random((*count, *shape[1:]))).astype(dtype)
        for index in (rows, (rows,), rows.astype(np.int8), np.abs(rows).astype(np.uint8) % 5):
            target = np.ones(shape, dtype)
            expected = target.copy()
            np.add.at(expected, index, values)
            array_backend.scatter_add(target, index, values)
            np.testing.assert_array_equal(target, expected)
    turned = np.zeros((3, 5), dtype).T
    array_backend.scatter_add(turned, np.array([1, 1]), np.ones((2, 3), dtype))
    assert turned.tolist() == [[0] * 3, [2] * 3, [0] * 3, [0] * 3, [0] * 3]


def test_tensors_of_device_arrays_compute_on_the_device(cupy):
    x = tf.Tensor(cupy.asarray(np.array([1.0, 2.0], np.float32)))
    y = 2.0 * x + [1, 1]
    assert type(y.array) is DeviceArray
    assert y.numpy().tolist() == [3, 5]
    assert float(x[1]) == 2.0
    assert repr(x).startswith("<tf.Tensor: shape=(2,), dtype=float32")
    v = tf.Variable(x)
    v.assign_add([1.0, 1.0])
    assert type(v._read().array) is DeviceArray
    assert v.numpy().tolist() == [2, 3]
    assert x.numpy().tolist() == [1, 2]


@pytest.mark.parametrize("name", CASES)
def test_no_operation_leaves_the_device(cupy, name):
    for op, arrays in CASES[name]:
        host_out, host_gradients = gradients_of(op, [np.array(a) for a in arrays])
        device = [cupy.array(a) for a in arrays]
        tensors = [tf.Tensor(a) for a in device]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            outputs = nest.flatten(op(*tensors))
            total = sum_on_device(cupy, outputs)
        gradients = tape.gradient(total, tensors)
        for ours, theirs in zip([*outputs, *gradients], [*host_out, *host_gradients], strict=True):
            assert type(ours.array) is DeviceArray
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12, atol=1e-14)


def sum_on_device(cupy, outputs):
    total = 0.0
    for k, out in enumerate(outputs):
        weights = cupy.asarray(numbers(*out.shape, low=0.5, high=1.5, seed=7 + k))
        total = tf.reduce_sum(out * weights) + total
    return total


def test_loss_on_the_device_equals_that_of_the_host(cupy):
    logits = np.random.default_rng(0).normal(size=(4, 3))
    labels = np.array([0, 2, 1, 1])
    loss = nn.sparse_softmax_cross_entropy_with_logits(cupy.asarray(labels), cupy.asarray(logits))
    host = nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert type(loss.array) is DeviceArray
    np.testing.assert_array_equal(loss.numpy(), host.numpy())


_IMPORTS_NO_CUDA = """
import sys

class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("cupy", "cupy_backends", "cudnn", "cuda", "nvidia"):
            raise AssertionError(f"{name} was looked for")

sys.meta_path.insert(0, Refuse())
import numpy as np
import pycollective as tf

layer = tf.keras.layers.Dense(2)
with tf.GradientTape() as tape:
    y = layer(np.ones((1, 3), np.float32))
tf.keras.optimizers.Adam().apply_gradients(
    zip(tape.gradient(y, layer.trainable_variables), layer.trainable_variables)
)
tf.local_group(1)[0].all_reduce(np.ones(2))
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libnccl" not in maps
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_nothing_of_cuda_is_loaded_without_need(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS_NO_CUDA],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
