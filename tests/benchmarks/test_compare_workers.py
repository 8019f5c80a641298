"""benchmarks/compare_workers.py: the parts of a step, and the predictions."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

import pycollective as tf

HERE = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    spec = importlib.util.spec_from_file_location("compare_workers", HERE / "compare_workers.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_workers", module)
    spec.loader.exec_module(module)
    return module


def test_account_separates_the_time_of_input_from_that_of_computing(compare, monkeypatch):
    monkeypatch.setattr(compare, "WINDOWS", 2)
    monkeypatch.setattr(compare, "STEPS", 2)

    def rows():
        while True:
            yield 1.0

    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    account = compare.Account(strategy)
    data = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), "float32"))
    steps = iter(strategy.experimental_distribute_dataset(data.batch(1)))
    account.begin()
    for _ in range(4):
        next(steps)
        time.sleep(0.01)
    found = account.of_a_step()
    assert found["reduces"] == {}
    assert found["ms"]["communication"] == 0
    assert found["ms"]["input"] > 0
    assert found["ms"]["compute"] >= 10


def test_predicted_time_follows_bandwidth_and_counts(compare, monkeypatch, capsys):
    slow, fast = (compare.predicted({"1000000": 1, "4": 2}, 4, bits) for bits in (10e9, 100e9))
    # 2 · 3/4 of 1 MB over 1.25 GB/s are 1.2 ms.
    assert 1.2 < slow < 3
    assert fast < slow
    assert compare.predicted({"4": 2}, 4, 10e9) == 2 * compare.predicted({"4": 1}, 4, 10e9)
    monkeypatch.setattr(compare, "PREDICTED", (4,))
    alone = {"ms": {"compute": 4.0, "communication": 0.0, "input": 1.0}, "reduces": {}}
    two = {**alone, "reduces": {"1000000": 1.0, "4": 2.0}}
    assert compare.prediction({1: alone, 2: two}) == {"4": {"10G_ms": slow, "100G_ms": fast}}
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["4", f"{slow:.2f}", f"{256e3 / (5 + slow):,.0f}", f"{fast:.2f}",
                    f"{256e3 / (5 + fast):,.0f}"]  # fmt: skip
    assert compare.prediction({2: two}) == {}
