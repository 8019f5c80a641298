"""examples/guide.py prints what TensorFlow's guide prints, for any number of replicas."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fast_cases import some_fast

from pycollective import array_backend

GUIDE = Path(__file__).resolve().parents[2] / "examples" / "guide.py"
#: Losses printed in the guide; the other losses follow from them.
PRINTED = [0.9024367, 0.8953863, 0.88840]


def expected_losses(steps):
    """Compute the guide's loop by hand: -log(sigmoid(w + b)) + 1e-4 w², gradient steps of 0.01."""
    low, high = -10.0, 10.0
    for _ in range(100):
        w = (low + high) / 2
        low, high = (w, high) if math.log1p(math.exp(-w)) + 1e-4 * w * w > PRINTED[0] else (low, w)
    b, losses = 0.0, []
    for _ in range(steps):
        p = 1 / (1 + math.exp(-(w + b)))
        losses.append(-math.log(p) + 1e-4 * w * w)
        w, b = w - 0.01 * (p - 1 + 2e-4 * w), b - 0.01 * (p - 1)
    return losses


def expected_fit():
    """Compute the mean losses of epochs of ten steps by hand: (w + b - 1)² + 1e-4 w² from 0.5.

    The model is evaluated before the third epoch.
    """
    w, b, printed = 0.5, 0.0, []
    for epoch in range(4):
        if epoch == 2:
            printed.append((w + b - 1) ** 2 + 1e-4 * w * w)
        losses = []
        for _ in range(10):
            losses.append((w + b - 1) ** 2 + 1e-4 * w * w)
            step = 0.02 * (w + b - 1)
            w, b = w - step - 0.02 * 1e-4 * w, b - step
        printed.append(sum(losses) / 10)
    return printed


@pytest.mark.parametrize("replicas", some_fast([1, 2, 4], [2]))
def test_guide_prints_the_numbers_of_tensorflow(replicas, tmp_path):
    done = subprocess.run(
        [sys.executable, str(GUIDE), "--replicas", str(replicas)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    without = (
        "" if array_backend.gpu_count()[0] else "Enabled NCCL communication but no GPUs detected"
    )
    assert done.stderr.strip().removesuffix("/specified.") == without
    first, *parts = done.stdout.split("\n# ")
    assert first == ""
    printed = {}
    for part in parts:
        title, _, text = part.partition("\n")
        printed[title] = text.strip().splitlines()

    def numbers(title):
        lines = printed[title]
        tensors = [re.fullmatch(r"tf\.Tensor\((.+), shape=\(\), dtype=float32\)", x) for x in lines]
        return [float(match[1]) for match in tensors]

    # The oldest guide's numbers, for any number of replicas.
    (line,) = printed["Estimator (the oldest guide)"]
    found = dict(re.findall(r"'([\w/]+)': [^,}]*?([\d.]+(?:e-\d+)?)\)?[,}]", line))
    assert {name: float(value) for name, value in found.items()} == {
        "average_loss": 1.4210855e-14,
        "label/mean": 1.0,
        "loss": 1.4210855e-14,
        "prediction/mean": 0.99999994,
        "global_step": 10,
    }

    # 1000 examples, 5 for each replica in a step; then 10 steps more.
    losses = numbers("A custom training loop") + numbers("The same for a number of steps")
    steps = 1000 // (5 * replicas)
    assert len(losses) == steps + 10
    np.testing.assert_allclose(losses[:3], PRINTED, rtol=0, atol=1e-4)
    expected = expected_losses(2 * steps + 10)
    np.testing.assert_allclose(losses, expected[: steps + 10], rtol=0, atol=1e-5)
    epoch = numbers("A loop within a function (custom training tutorial)")
    np.testing.assert_allclose(epoch, [np.mean(expected[steps + 10 :])], rtol=0, atol=1e-5)

    lines = printed["Keras Model.fit"]
    found = [float(x[1]) for line in lines if (x := re.fullmatch(r"10/10 .* loss: (\S+)", line))]
    np.testing.assert_allclose(found, expected_fit(), atol=6e-5)
    assert float(lines[5]) == pytest.approx(expected_fit()[2], abs=1e-6)
    assert [lines[i] for i in (0, 2, 6, 8)] == ["Epoch 1/2", "Epoch 2/2"] * 2

    assert printed["The default strategy"][0] == "tf.Tensor(1.0, shape=(), dtype=float32)"
    per_replica = {1: [10], 2: [5, 5], 4: [3, 3, 3, 1]}[replicas]
    assert printed["The rows of each replica (guide and input tutorial)"] == [
        "rows of a batch of 10: " + " ".join(map(str, per_replica)),
        "rows from a function: " + " ".join(["5"] * replicas),
        "replicas: " + " ".join(map(str, range(replicas))),
    ]
    assert numbers("Two ways to scale a loss (custom training tutorial)") == [1.0, 1.0, 4.0, 1.0]
    gpus = array_backend.gpu_count()[0]
    assert printed["MirroredStrategy"][0] == f"by default {max(1, gpus)} replicas"
    assert printed["MirroredStrategy"][-1] == f"with hierarchical copy {replicas} replicas"
    servers = [f"/job:ps/replica:0/task:{number}/device:CPU:0" for number in range(2)]
    assert printed["ParameterServerStrategy"] == [str(servers), "8.0"]
    assert printed["CentralStorageStrategy"] == [f"by default {max(1, gpus)} replicas"]
    assert printed["OneDeviceStrategy"] == ["42"]
    rate = {1: 0.1, 2: 0.15, 4: 0.175}[replicas]
    assert printed["Batches and learning rates grow with the replicas"] == [
        f"{5 * replicas} examples a step, learning rate {rate}"
    ]
    assert printed["MultiWorkerMirroredStrategy"] == [
        "CommunicationImplementation.NCCL",
        f"by default {max(1, gpus)} replicas",
        f"with NCCL {max(1, gpus)} replicas",
    ]
    assert printed["TF_CONFIG"][-1] == "this is worker 1 at host2:port"
    assert printed["The gradients of several replicas are those of one"][0].startswith(
        f"gradients of {replicas} replicas against one"
    )
