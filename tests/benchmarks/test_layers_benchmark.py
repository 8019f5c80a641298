"""benchmarks/layers.py: the registry's names, checks of results, the table, and resuming."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"

#: Names that the comparison cannot measure yet. Add a case in layer_cases.py rather than a name here.
WITHOUT_CASE: set[str] = set()


@pytest.fixture
def layers(monkeypatch):
    # Our process of the comparison imports these modules by the same names.
    monkeypatch.syspath_prepend(str(HERE))
    for name in ("compare", "layer_cases", "layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import layers

    yield layers
    for name in ("compare", "layer_cases", "layers"):
        sys.modules.pop(name, None)


def test_every_registered_name_has_a_case(layers):
    assert layers.without_case() == WITHOUT_CASE


def test_every_case_is_of_a_registered_name(layers):
    found = layers.registry()
    unknown = {
        f"{kind}.{name}"
        for kind, cases in layers.CASES.items()
        for name in {*cases} - {*found[kind]}
    }
    assert unknown == set()


def test_rows_have_distinct_titles(layers):
    titles = [title for title, _, _ in layers.rows([1, 16, 64], None)]
    assert len(titles) == len({*titles}) > 400


def test_rows_a_new_layer_gets_a_generic_row(layers, monkeypatch):
    class Double:
        def __init__(self, factor=2.0):
            pass

    class Scale(Double):
        def __init__(self, factor):
            pass

    found = {"layers": {"Double": Double, "Scale": Scale}}
    monkeypatch.setattr(layers, "registry", lambda: found)
    titles = [title for title, _, _ in layers.rows([1, 16], None)]
    assert titles == ["layers.Double() of 1 56 56 64", "layers.Double() of 16 56 56 64"]
    assert layers.without_case() == {"layers.Scale"}


def test_measure_a_generic_row_that_cannot_run_is_no_failure(layers):
    class Broken:
        who = layers.OURS

        def ask(self, request):
            return {"us": {}, "wrong": "", "failed": "ValueError: 3 dimensions"}

    options = argparse.Namespace(rounds=1, seconds=0.0)
    for name, failed in (("Dense", True), ("Unknown", False)):
        case = layers.Case("N 4")
        result = layers.measure(("layers", name, 0, 1), case, [Broken()], options, "")
        assert bool(result["failed"]) == failed and bool(result["notes"]) != failed
    text = layers.report_of({"layers.Unknown() of 1 4": result}, set())
    assert "| – |  | no peer |  | no case yet: pycollective: ValueError: 3 dimensions |" in text


def test_main_unknown_name_is_refused(layers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["layers.py", "--only", "Conv2D", "Conv9D"])
    with pytest.raises(SystemExit, match="2"):
        layers.main()
    assert "--only Conv9D: the registry has no such name or kind" in capsys.readouterr().err


def test_arrays_have_the_shapes_and_values_that_a_case_describes(layers):
    text = "N 3; N 4 <7; N 5 p; N 5 s; N 5 h"
    plain, integers, between, sums, one_hot = layers.arrays_of(layers.Case(text), 6)
    assert plain.shape == (6, 3) and plain.dtype == np.float32
    assert integers.shape == (6, 4) and integers.dtype == np.int32 and integers.max() < 7
    assert between.min() >= 0.05 and between.max() <= 0.95
    np.testing.assert_allclose(sums.sum(-1), 1, rtol=1e-6)
    assert set(one_hot.ravel()) == {0, 1} and (one_hot.sum(-1) == 1).all()


def test_difference_wrong_values_and_shapes_are_found(layers):
    right = np.array([1.0, 100.0], np.float32)
    assert layers.difference("y", right, right + 0.05) == ""
    assert "differs by 1" in layers.difference("y", right, right + 1)
    assert "has shape (1,), not (2,)" in layers.difference("y", right, right[:1])
    assert "differs" in layers.difference("y", right, right * np.nan)


def test_report_has_the_worst_ratio_first_and_rows_without_peer_last(layers):
    def row(**us):
        return {"us": us, "failed": [], "notes": []}

    done = {
        "layers.A() of 1": row(pycollective=10),
        "layers.B() of 1": row(pycollective=10, JAX=20, PyTorch=40),
        "layers.C() of 1": row(pycollective=40, JAX=20),
    }
    text = layers.report_of(done, {"layers.D"})
    lines = [line.split("|")[2:7] for line in text.splitlines()[2:5]]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["`C() of 1`", "40", "20", "JAX", "**2.00**"],
        ["`B() of 1`", "10", "20", "JAX", "**0.50**"],
        ["`A() of 1`", "10", "", "no peer", ""],
    ]
    assert "2 rows with a peer: geometric mean 1.00, 1 rows above 1.1." in text
    assert "No case yet: layers.D." in text


def test_peers_results_are_compared_with_ours(layers, monkeypatch, tmp_path):
    row, case = ("losses", "MeanSquaredError", 0, 3), layers.Case("N 4; N 4")
    file = str(tmp_path / "results.npz")
    assert layers.prepare(layers.OURS, row, case, file)[1] == ""
    x, y = layers.arrays_of(case, 3)

    def peer(factor):
        def steps(row, case, data):
            gradient = factor * 2 * (y - x) / y.size * data["cotangents"][0]
            return {"": lambda: ([((y - x) ** 2).mean()], [gradient])}

        return steps

    monkeypatch.setattr(layers, "jax_steps", peer(1))
    assert layers.prepare("jax", row, case, file)[1] == ""
    monkeypatch.setattr(layers, "jax_steps", peer(2))
    assert layers.prepare("jax", row, case, file)[1].startswith("gradients[0] differs by")


@pytest.mark.parametrize("name", ["Dense", "tanh", "Huber", "Accuracy", "SGD", "reduce_sum"])
def test_our_steps_have_results_for_each_kind(layers, tmp_path, name):
    _, row, case = next(layers.rows([1], [name]))
    steps, _ = layers.prepare(layers.OURS, row, case, str(tmp_path / "results.npz"))
    assert layers.fastest(steps[""], 0.0) > 0


def test_main_wrong_result_ends_with_an_error_and_runs_again(layers, tmp_path, monkeypatch, capsys):
    asked, wrong = [], ["outputs[0] differs (jax )"]

    class Fake:
        def __init__(self, who, python):
            self.who = who

        def ask(self, request):
            asked.append((self.who, request["row"][0]))
            bad = wrong if (self.who, request["row"][0]) == ("jax", "losses") else []
            return {"us": {"": 8.0 if self.who == "jax" else 2.0}, "wrong": "".join(bad)}

        def close(self):
            pass

    monkeypatch.setattr(layers, "Contestant", Fake)
    monkeypatch.setattr(layers, "has", lambda python, module: module == "jax")
    words = "--only Hinge --batches 4 --rounds 1 --json".split()
    monkeypatch.setattr(sys, "argv", ["layers.py", *words, str(tmp_path / "layers.json")])
    with pytest.raises(SystemExit, match=r"FAILED\nlosses.Hinge.* of 4 1000 h; 4 1000: outputs"):
        layers.main()
    assert asked == [(who, k) for k in ("losses", "metrics") for who in ("pycollective", "jax")]
    wrong.clear()
    asked.clear()
    layers.main()
    assert asked == [("pycollective", "losses"), ("jax", "losses")]  # the other row is in the file
    row = "| metrics | `Hinge() of 4 1000 h; 4 1000` | 2 | 8 | JAX | **0.25** |"
    assert row in capsys.readouterr().out
