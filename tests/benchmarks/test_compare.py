"""benchmarks/compare.py: ratios, goals, checks of results, and continuing after a stop."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"
KI, MI = 1 << 10, 1 << 20


def load(monkeypatch, name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(monkeypatch):
    return load(monkeypatch, "compare")


@pytest.fixture
def ranks(monkeypatch):
    return load(monkeypatch, "compare_ranks")


def results(ranks, launches, sizes=(8, MI, 16 * MI), kinds=None):
    kinds = {name: "mpi" for name in launches} | {"pycollective": "pycollective"} | (kinds or {})
    return {
        "ranks": ranks, "sizes": list(sizes), "kinds": kinds, "launches": launches, "notes": {},
        "failed": [], "turns": 1, "when": "now",
    }  # fmt: skip


def times(*us, memory=None):
    found = {str(s): {"us": t} for s, t in zip((8, MI, 16 * MI), us, strict=True)}
    if memory:
        found[str(16 * MI)]["memory_gb_s"] = memory
    return found


def row(text, what):
    """Return the cells of a call's line in the table of goals."""
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.split("|")[2:6]]


# Tables -----------------------------------------------------------------------------------------


def test_ratios_are_of_medians_and_of_the_best_peer(compare):
    ours = [times(2, 10, 100), times(3, 10, 100), times(90, 10, 100)]  # one bad launch
    peers = {"A": [times(10, 20, 100)], "B": [times(6, 30, 500)]}
    found = results(2, {"pycollective": ours, **peers})
    text = compare.tables({"processes2": {"all_reduce": found}})
    assert (
        "| all_reduce |  | **0.50** (3 / 6) | **0.50** (10 / 20) | **1.00** (100 / 100) |" in text
    )
    assert "| pycollective | 3 (2–90) | 10 (10–10) | 100 (100–100) |" in text
    assert row(text, "2 processes: all_reduce") == [
        "8 B / 64 KiB / 1 MiB / 16 MiB / 64 MiB",
        "≤ 0.25 / 0.45 / 0.5 / 0.45 / 0.3 × best MPI",
        "**0.50** / – / 0.50 / **1.00** / –",
        "**not met**",
    ]
    assert text.count("| – / – / – / – / – | not measured |") == 2  # comm.empty(), shared_arrays()


def test_ratios_have_a_row_for_each_kind_of_memory(compare):
    launches = {
        "pycollective": [times(2, 10, 100)],
        "pycollective, comm.empty()": [times(2, 5, 50)],
        "pycollective, shared_arrays()": [times(2, 5, 40)],
        "A": [times(4, 50, 200)],
    }
    text = compare.tables({"processes2": {"broadcast": results(2, launches)}})
    assert [line for line in text.splitlines() if line.startswith("| broadcast")] == [
        "| broadcast |  | **0.50** (2 / 4) | **0.20** (10 / 50) | **0.50** (100 / 200) |",
        "| broadcast | comm.empty() | **0.50** (2 / 4) | **0.10** (5 / 50) | **0.25** (50 / 200) |",
        "| broadcast | shared_arrays() | **0.50** (2 / 4) | **0.10** (5 / 50) | **0.20** (40 / 200) |",
    ]
    assert row(text, "2 processes: broadcast")[2:] == ["– / – / 0.20 / 0.50", "met"]


def test_ratios_gloo_faster_than_mpi_counts_for_the_ratio_and_not_for_the_goal(compare):
    launches = {
        "pycollective": [times(2, 10, 100)],
        "A": [times(8, 40, 400)],
        "G": [times(1, 5, 50)],
    }
    found = results(2, launches, kinds={"G": "gloo"})
    text = compare.tables({"processes2": {"all_reduce": found}})
    assert "| all_reduce |  | **2.00** (2 / 1) | **2.00** (10 / 5) | **2.00** (100 / 50) |" in text
    assert row(text, "2 processes: all_reduce")[2:] == ["0.25 / – / 0.25 / 0.25 / –", "met"]


def test_tables_call_of_one_size_fills_one_column(compare):
    found = {"0": {"us": 1.0}}
    launches = {"pycollective": [found], "A": [{"0": {"us": 4.0}}]}
    done = {
        "barrier": results(2, launches, [0]),
        "gather": results(2, {"pycollective": [times(1, 2, 3)]}),
    }
    text = compare.tables({"processes2": done})
    assert "| barrier |  | **0.25** (1 / 4) |  |  |" in text
    assert "| gather |  | (1 / –) | (2 / –) | (3 / –) |" in text
    assert row(text, "2 processes: barrier") == ["", "≤ 0.5 × best MPI", "0.25", "met"]


def test_goals_are_compared_with_the_rates_of_the_memory_and_the_loopback(compare):
    # 2 × 2 × 16 MiB at 100 GB/s: 671 µs.
    ours = [times(9, 50, 700, memory=100.0)]
    launches = {"pycollective": ours, "TensorFlow eager": [times(99, 99, 650)]}
    text = compare.tables({"replicas2": {"all_reduce": results(2, launches)}})
    assert row(text, "2 replicas in one process: all_reduce") == [
        "16 MiB / 64 MiB", "≤ 1.15 × the memory's time", "1.04 / –", "met",
    ]  # fmt: skip
    raw = {"one_way_us_blocking": 20.0, "one_way_us_spinning": 4.0}
    raw |= {"both_ways_gb_s_threads": 4.0, "both_ways_gb_s_polling": 5.0}
    launches = {"pycollective": [times(24, 629, 6710)], "raw loopback": [raw]}
    text = compare.tables({"tcp2": {"all_reduce": results(2, launches)}})
    first, second = [x for x in text.splitlines() if x.startswith("| 2 processes, TCP only: all")]
    assert "| ≤ 0.4 / 0.6 / 0.6 / 0.6 × gloo | – / – / – / – | not measured |" in first
    assert "| ≤ 1.25 × the loopback's time | 1.20 / **1.50** / 1.00 / – | **not met** |" in second


# Starting contestants ---------------------------------------------------------------------------


def options(**others):
    given = {
        "launches": 2,
        "seconds": 0.001,
        "launch_limit": 60,
        "only": None,
        "mpi": {},
        "peers": [],
    }
    return argparse.Namespace(**given | others)


def test_sizes_of_calls_with_parts_have_an_item_for_each_rank(compare):
    part = compare.PARTS["processes4"]
    assert compare.sizes_of(part, "all_gather", None)[:2] == [16, KI]
    assert compare.sizes_of(part, "broadcast", None)[:2] == [8, 16]
    assert compare.sizes_of(part, "all_to_all", [8, 64]) == [64]
    assert compare.sizes_of(part, "barrier", [8, 64]) == [0]


def test_contestants_are_chosen_by_name_and_missing_ones_named(compare, monkeypatch):
    monkeypatch.setattr(compare, "has", lambda python, module: python == f"has {module}")
    monkeypatch.setattr(compare, "has_shared_arrays", lambda: False)
    args = options(mpi={"X": "has mpi4py", "Y": "nothing"}, peers=["has torch"])
    part = compare.PARTS["processes2"]
    found, missing = compare.contestants(part, "all_reduce", args)
    assert list(found) == [
        "pycollective", "pycollective, comm.empty()", "bare copies", "X", "torch gloo",
    ]  # fmt: skip
    assert found["torch gloo"] == ("gloo", "has torch")
    assert missing == {
        "pycollective, shared_arrays()": "this pycollective has none", "Y": "not installed",
        "JAX gloo": "not installed", "TensorFlow RING": "not installed",
    }  # fmt: skip
    found, missing = compare.contestants(part, "broadcast", args)
    assert "JAX gloo" not in missing  # JAX is compared in all_reduce alone
    args.only = ["X", "torch"]
    assert compare.contestants(part, "broadcast", args)[0].keys() == {"X", "torch gloo"}


@pytest.mark.parametrize(("cores", "yields"), [(1, True), (2, False)])
def test_commands_mpi_yields_only_with_more_ranks_than_cores(compare, monkeypatch, cores, yields):
    monkeypatch.setattr(compare, "cores", lambda: cores)
    ((_, env),) = compare.commands("mpi", "/envs/x/bin/python", compare.PARTS["processes2"], [])
    assert ("OMPI_MCA_mpi_yield_when_idle" in env) == yields
    assert "OMPI_MCA_btl" not in env
    ((_, env),) = compare.commands("mpi", "/envs/x/bin/python", compare.PARTS["tcp2"], [])
    assert env["OMPI_MCA_btl"] == "tcp,self"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "why"),
    [("import time; time.sleep(60)", "did not end within 1 s"),
     ("raise SystemExit('out of memory')", "gave no result: out of memory"),
     ("raise SystemExit('LEFT OUT there is none')", "there is none")],
)  # fmt: skip
def test_launch_contestant_that_fails_returns_the_reason(
    compare, tmp_path, monkeypatch, script, why
):
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(compare, "RANKS", str(worker))
    part, args = compare.PARTS["replicas2"], options(launch_limit=1)
    assert compare.launch("jax-replicas", sys.executable, part, "all_reduce", [8], args) == why


@pytest.mark.slow
@pytest.mark.parametrize("after", ["", "time.sleep(60)"])
def test_launch_wrong_result_is_raised_also_if_other_ranks_hang(
    compare, tmp_path, monkeypatch, after
):
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import sys, time; print('[1] WRONG a wrong sum', file=sys.stderr, flush=True); {after}"
    )
    monkeypatch.setattr(compare, "RANKS", str(worker))
    part, args = compare.PARTS["replicas2"], options(launch_limit=1)
    with pytest.raises(compare.WrongResult, match="^a wrong sum$"):
        compare.launch("jax-replicas", sys.executable, part, "all_reduce", [8], args)


@pytest.mark.parametrize(
    ("name", "fault", "fails"),
    [("MPI", "wrong", True), ("MPI", "text", False), ("pycollective", "wrong", True),
     ("pycollective", "text", True)],
)  # fmt: skip
def test_main_wrong_result_of_any_or_no_result_of_ours_fails(
    compare, tmp_path, monkeypatch, name, fault, fails
):
    def launch(kind, *_):
        if (kind == "mpi") != (name == "MPI"):
            return {"64": {"us": 1.0}}
        if fault == "wrong":
            raise compare.WrongResult("a wrong sum")
        return "did not end"

    file = tmp_path / "results.json"
    words = ["--parts", "processes2", "--calls", "broadcast", "--sizes", "64", "--json", str(file)]
    words += ["--mpi", "MPI=x", "--peers", "--only", "pycollective", "MPI", "--patience", "0"]
    monkeypatch.setattr(compare, "launch", launch)
    monkeypatch.setattr(compare, "has", lambda python, module: True)
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    if fails:
        with pytest.raises(SystemExit, match=f"2 processes, broadcast: {name}"):
            compare.main()
        monkeypatch.setattr(compare, "launch", lambda *_: {"64": {"us": 1.0}})
    compare.main()  # a call that failed is run again
    found = json.loads(file.read_text())["parts"]["processes2"]["broadcast"]
    assert found["failed"] == []
    assert (name in found["launches"]) == fails


@pytest.mark.parametrize(
    ("patience", "ours", "mpi", "moved", "says"),
    [
        (60, 3.0, 5.0, [], "took 0.10 µs.\n"),  # the second launch changes it, and is repeated
        (
            1e-9,
            3.0,
            9.0,
            ["MPI", "pycollective"],
            "took 0.10 µs, but not while these ran: MPI, pyc",
        ),
        (0, 3.0, 9.0, [], ""),
    ],
)
def test_launch_between_other_handshakes_of_the_cores_is_repeated(
    compare, monkeypatch, patience, ours, mpi, moved, says
):
    times, handshakes = iter([3.0, 9.0, 5.0]), iter([0.1, 0.4, 0.11, 0.1, 0.1, 0.4, 0.1, 0.1])
    if patience == 1e-9:
        handshakes = iter([0.1, 0.4, 0.1, 0.4])
    who = {"pycollective": ("pycollective", ""), "MPI": ("mpi", "")}
    monkeypatch.setattr(compare, "launch", lambda *_: {"64": {"us": next(times)}})
    monkeypatch.setattr(compare, "handshake", lambda: next(handshakes))
    monkeypatch.setattr(compare, "contestants", lambda *_: (who, {}))
    part = compare.PARTS["processes2"]
    args = options(launches=1, patience=patience)
    found = compare.run_call(part, "broadcast", [64], args)
    assert [found["launches"][name][0]["64"]["us"] for name in who] == [ours, mpi]
    assert found["moved"] == moved
    assert says in "\n".join(compare.call_table(part, "broadcast", found))


def test_handshake_of_two_cores_takes_some_time(compare):
    assert compare.handshake() > 0 or compare.cores() == 1


def test_main_file_of_another_format_is_refused(compare, tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    file.write_text('{"benchmark": "compare", "parts": {}}')
    monkeypatch.setattr(sys, "argv", ["compare.py", "--json", str(file)])
    with pytest.raises(SystemExit, match="older compare.py"):
        compare.main()


@pytest.mark.slow
def test_main_measures_and_adds_to_an_earlier_file(compare, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pycollective")
    file = tmp_path / "results.json"
    words = [
        "compare.py",
        "--launches",
        "2",
        "--seconds",
        "0.001",
        "--sizes",
        "8",
        "--patience",
        "0",
    ]
    words += ["--calls", "all_reduce", "broadcast", "--peers", "--mpi", "No MPI=/nowhere/python"]
    words += ["--json", str(file), "--parts", "processes2"]
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(sys, "argv", words)
    compare.main()
    out = capsys.readouterr()
    assert out.err.count(": pycollective\n") == 4
    assert "Without No MPI: not installed." in out.out
    part = json.loads(file.read_text())["parts"]["processes2"]
    for call in ("all_reduce", "broadcast"):
        ours = part[call]["launches"]["pycollective"]
        assert [launched["8"]["us"] > 0 for launched in ours] == [True] * 2
    monkeypatch.setattr(sys, "argv", [*words, "replicas2"])
    compare.main()
    out = capsys.readouterr()
    assert "processes2, broadcast: already in" in out.err
    assert set(json.loads(file.read_text())["parts"]) == {"processes2", "replicas2"}


@pytest.mark.slow
def test_mpi_every_call_in_this_environment_gives_right_values(compare, tmp_path, monkeypatch):
    pytest.importorskip("mpi4py")
    if not Path(sys.executable).with_name("mpiexec").exists():
        pytest.skip("needs an MPI from PyPI beside mpi4py")
    file = tmp_path / "results.json"
    words = ["--parts", "processes2", "--launches", "1", "--seconds", "0.001", "--sizes", "64"]
    words += [
        "--patience",
        "0",
        "--only",
        "MPI",
        "--mpi",
        f"MPI={sys.executable}",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    compare.main()
    part = json.loads(file.read_text())["parts"]["processes2"]
    assert {call: r["notes"] for call, r in part.items()} == {call: {} for call in compare.CALLS}


# Checks and times of one contestant -------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_every_call_is_checked_and_timed(compare, ranks, n):
    pytest.importorskip("pycollective")
    for call in compare.CALLS:
        sizes = compare.sizes_of(compare.PARTS["processes4"], call, [64])
        found = ranks.pycollective_threads(n, call, sizes, 0.0001)
        assert set(found) == {str(size) for size in sizes}
        assert all(row["us"] > 0 and len(row["us_of_repeats"]) == 5 for row in found.values())


class Idle:
    """A rank whose calls do nothing, or call `run`."""

    def __init__(self, ranks, rank, size, call, run=lambda x: None):
        group = ranks.Group()
        self.rank, self.size, self.sums, self.run, self.name = rank, size, group.sums, run, call
        self.array, self.result, self.barrier = group.array, group.result, lambda: None
        self.divisor, self.right = group.divisor, True

    def call(self, call, size, x, out):
        return {self.name: lambda: self.run(x), "all_reduce": lambda: self.run(x)}[call]


def test_check_call_that_does_nothing_is_wrong(compare, ranks, monkeypatch):
    class Wrong(Exception):
        pass

    def wrong(*what):
        raise Wrong(what)

    monkeypatch.setattr(ranks, "wrong", wrong)
    for call in compare.CALLS:
        found = []
        for rank in (0, 1):
            try:
                ranks.check(Idle(ranks, rank, 2, call), call, 64)
            except Wrong as error:
                found.append(error.args[0])
        assert bool(found) == (call != "barrier"), call
        assert all(what[:2] == (call, 64) for what in found)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_time_size_sums_in_place_stay_finite_and_not_zero(ranks, monkeypatch, n):
    seen, before = [], [0]

    def run(x):
        x *= n
        seen.append((x.min(), x.max()))

    def slowest(group, own):
        calls, before[0] = len(seen) - before[0], len(seen)
        return calls * 1e-6  # a microsecond each

    group = Idle(ranks, 0, n, "all_reduce", run)
    monkeypatch.setattr(ranks, "check", lambda *_: (lambda: run(x), x))
    monkeypatch.setattr(ranks, "slowest", slowest)
    x = np.ones(2, np.float32)
    ranks.time_size(group, "all_reduce", 8, 0.0005)
    assert len(seen) > 2000
    assert all(low > 0 and np.isfinite(high) for low, high in seen)


def test_measure_counts_the_slowest_rank_and_the_median_repeat(ranks):
    slow = iter([1.0] * 7 + [5.0, 2.0, 9.0, 4.0, 3.0])
    found = ranks.measure(lambda: None, 0.15, slowest=lambda own: next(slow))
    assert found["us_of_repeats"] == [5e6, 2e6, 9e6, 4e6, 3e6]
    assert found["us"] == 4e6


# Bare copies ------------------------------------------------------------------------------------


def test_bare_copies_are_no_peer_and_explain_a_missed_goal(compare):
    kinds = {"bare copies": "bare"}
    launches = {"pycollective": [times(6, 9, 8)], "M": [times(10, 10, 10)],
                "bare copies": [times(3, 3, 4)]}  # fmt: skip
    done = {"processes2": {"all_reduce": results(2, launches, kinds=kinds)}}
    assert compare.best_peer(done["processes2"]["all_reduce"], 8) == 10
    text = compare.tables(done)
    (line,) = [x for x in text.splitlines() if x.startswith("| 2 processes: all_reduce |")]
    assert line.split("|")[6].strip() == "2.00 / 3.00 / 2.00"  # at 8 B, 1 MiB and 16 MiB
    assert "| of bare copies and a handshake | 2.00 | 3.00 | 2.00 |" in text


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "gather", "scatter", "all_to_all"])
def test_bare_copies_write_every_byte_of_the_result(ranks, call):
    """The copies write all bytes of a result: those of other ranks, and those of this rank."""
    size, count = 3, 12
    for rank in range(size):
        values = ranks.Values(call, 4 * count, rank, size)
        if values.expected() is None:
            continue
        bare = object.__new__(ranks.Bare)
        bare.rank, bare.size = rank, size
        x = np.zeros(values.given, np.float32)
        out = np.full(values.got, -1, np.float32)
        rows = np.ones((size, count), np.float32)
        bare.copies(call, x, out, [ranks.Ring(row) for row in rows])()
        result = bare.result(call, x, out)
        own = values.given // (1 if call in ("gather", "all_gather") else size)
        foreign = np.ones(values.got, bool)
        if call in ("gather", "all_to_all"):
            foreign[rank * own : (rank + 1) * own] = False
        if call == "all_reduce":
            assert np.all(result[rank * own : (rank + 1) * own] == size - 1)
            assert np.all(np.delete(result, range(rank * own, (rank + 1) * own)) == 1)
        elif rank == 0 and call in ("broadcast", "scatter"):
            assert np.all(result == 0)
        elif call == "broadcast":
            assert np.all(out == 1)
        else:
            assert np.all(result[foreign] == 1) and np.all(result[~foreign] == 0)
