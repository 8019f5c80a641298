"""Losses, metrics and optimizers on a device: nothing is fetched in a step of training."""

from __future__ import annotations

import numpy as np
import pytest
from device_arrays import DeviceArray
from test_optimizer_rules import GRADIENTS, OPTIMIZERS, START
from test_zero_rows import PAIRS, exported, fitting, make

from pycollective.keras import losses, metrics, optimizers
from pycollective.tensor import GradientTape, Tensor, Variable


def moved(cupy, *values):
    return [Tensor(cupy.asarray(np.asarray(value))) for value in values]


@pytest.mark.parametrize("cls", exported(losses, losses.Loss), ids=lambda c: c.__name__)
def test_loss_on_device_fetches_nothing(cupy, cls):
    def result(true, predicted):
        with GradientTape() as tape:
            tape.watch(predicted)
            value = make(cls)(true, predicted, sample_weight=0.5)
        return value, tape.gradient(value, predicted)

    pairs = [p for p in PAIRS if p != "values"]
    for pair in fitting(pairs, lambda p: result(*map(Tensor, PAIRS[p]))):
        expected = result(*map(Tensor, PAIRS[pair]))
        given = moved(cupy, *PAIRS[pair])
        before = cupy.fetched, cupy.sent
        found = result(*given)
        assert (cupy.fetched, cupy.sent) == before
        for ours, theirs in zip(found, expected, strict=True):
            assert type(ours.array) is DeviceArray
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cls", exported(metrics, metrics.Metric), ids=lambda c: c.__name__)
def test_metric_update_on_device_fetches_nothing(cupy, cls, weighted):
    weights = [np.array([0.5, 2.0])] if weighted else []

    def values(pair):
        return [*(p for p in PAIRS[pair] if p is not None), *weights]

    for pair in fitting(PAIRS, lambda p: make(cls).update_state(*values(p))):
        here, there = make(cls), make(cls)
        here.update_state(*values(pair))
        if not there.variables:
            there.update_state(*values(pair))
            there.reset_state()
        for variable in there.variables:
            variable.set_array(cupy.asarray(variable.numpy()))
        given = moved(cupy, *values(pair))
        fetched, sent = cupy.fetched, cupy.sent
        there.update_state(*given)
        assert cupy.fetched == fetched
        if isinstance(there, metrics.Mean):
            assert cupy.sent == sent
        for ours, theirs in zip(there.variables, here.variables, strict=True):
            assert type(ours.current().array) is DeviceArray
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
        result = there.result()
        assert cupy.fetched == fetched + len(there.variables)  # fetched by the comparison above
        np.testing.assert_allclose(result.numpy(), here.result().numpy(), rtol=1e-6)


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)), ids=lambda i: OPTIMIZERS[i].name)
def test_optimizer_step_on_device_fetches_nothing(cupy, number):
    description = optimizers.serialize(OPTIMIZERS[number])
    found = []
    for device in (False, True):
        optimizer = optimizers.deserialize(description)
        variables = [Variable(value, name=f"v{i}") for i, value in enumerate(START)]
        optimizer.build(variables)
        if device:
            slots = [v for v in optimizer.variables if v.ndim]
            for variable in (*variables, *slots):
                variable.set_array(cupy.asarray(variable.numpy()))
        fetched, sent = cupy.fetched, cupy.sent
        for gradients in GRADIENTS:
            tensors = moved(cupy, *gradients) if device else map(Tensor, gradients)
            optimizer.apply_gradients(zip(tensors, variables, strict=True))
        if device:
            assert cupy.sent == sent + sum(map(len, GRADIENTS))  # only the gradients
            assert cupy.fetched == fetched
            assert all(type(v.current().array) is DeviceArray for v in (*variables, *slots))
        found.append([v.numpy() for v in variables])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
