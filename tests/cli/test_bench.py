"""``pycollective bench``: its table, its checks, and the table of algorithms that --tune writes."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from fast_cases import some_fast
from ports import free_ports

from pycollective import _core, local_group, spawn, tuning
from pycollective.benchmark import cases, load
from pycollective.benchmark.cases import COLLECTIVES, PARTS, Arrays, Case, algorithms_of
from pycollective.benchmark.measure import Row, measure
from pycollective.benchmark.tune import choose, past_cache_from
from pycollective.cli import main
from pycollective.comm import Communicator

# Few calls: beside other programs, each call may wait for a time slice of the processor.
QUICK = ["--iterations", "3", "-w", "1"]


RUN = [sys.executable, "-m", "pycollective"]


def bench(*words):
    return main(["bench", *QUICK, *words])


def results(path):
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("place", ["--in-place", "--no-in-place"])
@pytest.mark.parametrize("ranks", some_fast([1, 2, 3], [1, 3]))
def test_bench_of_every_collective_among_threads_is_right(tmp_path, capsys, place, ranks):
    report = tmp_path / "bench.json"
    words = f"-n {ranks} -c all -a all -b 4 -e 128K -f 256 {place} --json {report}".split()
    assert bench(*words) == 0
    out = capsys.readouterr().out
    assert "# errors: 0 OK" in out
    rows = results(report)
    assert list(dict.fromkeys(row["collective"] for row in rows)) == list(COLLECTIVES)
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in lines] == [row["collective"] for row in rows]
    for collective in COLLECTIVES:
        found = [row for row in rows if row["collective"] == collective]
        assert {row["algorithm"] for row in found} == set(algorithms_of(collective))
        for row in found:
            assert row["p50_us"] <= row["p99_us"]
            assert row["min_us"] <= row["p50_us"]
            assert row["bytes"] % (4 * ranks) == 0 or collective not in PARTS
            measured = collective != "barrier" and row["bytes"] >= 64 << 10 and (ranks > 1)
            assert (row["percent_of_limit"] is not None) == measured or ranks == 1
            if row["percent_of_limit"]:
                case = Case(collective, row["bytes"], ranks, in_place=place == "--in-place")
                limit = case.traffic / (row["limit_gb_s"] * 1e3) / row["p50_us"] * 100
                assert row["percent_of_limit"] == pytest.approx(limit)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("float32", o) for o in ("sum", "prod", "min", "max", "mean")]
    + [("uint16", o) for o in ("and", "or", "xor")]
    + [("int8", "sum"), ("float16", "mean"), ("bool", "xor"), ("int64", "and")]
    + [("complex64", "mean"), ("bfloat16", "sum")],
)
def test_bench_of_each_dtype_and_operation_has_no_errors(capsys, dtype, op):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    collectives = ["all_reduce", "reduce", "reduce_scatter"]
    assert bench("-n", "3", "-c", *collectives, "-b", "64", "-e", "8K", "-d", dtype, "-o", op) == 0
    assert "# errors: 0 OK" in capsys.readouterr().out


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_bench_of_every_collective_among_processes_is_right(tmp_path, capfdbinary, transport):
    report = tmp_path / "bench.json"
    words = f"--transport {transport} -n 3 -c all -b 64 -e 64K -f 1024 --json {report}".split()
    assert bench(*words) == 0
    out, err = capfdbinary.readouterr()
    assert (out.count(b"# errors: 0 OK"), err) == (1, b"")
    found = json.loads(report.read_text())
    assert found["transport"] == {"shm": "shared memory", "tcp": "TCP"}[transport]
    assert {row["collective"] for row in found["results"]} == set(COLLECTIVES)
    for row in found["results"]:
        assert row["ranks"] == 3 and row["wrong"] == 0 and row["p50_us"] <= row["p99_us"]
    assert any(row["percent_of_limit"] for row in found["results"])


def test_bench_uses_the_forced_transport_and_refuses_an_unknown_one(
    tmp_path, capfdbinary, monkeypatch
):
    report = tmp_path / "bench.json"
    for forced, named in (("tcp", "TCP"), ("thread", "threads")):
        monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", forced)
        assert bench("-e", "8", "--json", str(report)) == 0
        assert json.loads(report.read_text())["transport"] == named
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "pigeon")
    with pytest.raises(SystemExit):
        bench("-e", "8")
    assert b"PYCOLLECTIVE_TRANSPORT='pigeon'" in capfdbinary.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--transport tcp",
            "the launcher's group uses shared memory: start it with pycollective run",
        ),
        ("-n 3", "--ranks 3: the launcher started 2 ranks"),
        ("--transport thread", "leave out the launcher, or time its group"),
    ],
)
def test_bench_refuses_another_group_than_the_launchers(tmp_path, words, said):
    done = subprocess.run(
        [*RUN, "run", "-n", "2", "-m", "pycollective", "bench", "-e", "8", *words.split()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr, done


def test_bench_without_memory_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "-e", "8", "-w", "1", "-i", str(1 << 53)])
    assert "there is too little memory" in capsys.readouterr().err


def test_ranks_over_tcp_are_on_one_machine(on_ranks, monkeypatch):
    """For the load of other programs, and for the choice of GPUs."""
    for known in (True, False):
        if not known:
            monkeypatch.setattr(cases, "boot_id", lambda: "")
        found = on_ranks(local_group(2), cases.machines)
        assert found[0] == found[1] and len(set(found[0])) == 1
    groups = local_group(2)
    for comm in groups:
        monkeypatch.setattr(type(comm), "hosts", [0, 1])
    monkeypatch.setattr(cases, "boot_id", lambda: "the machine")
    assert on_ranks(groups, cases.machines)[0] == ["the machine"] * 2
    monkeypatch.setattr(cases, "boot_id", lambda: "")
    assert on_ranks(groups, cases.machines)[0] == ["host 0", "host 1"]


def test_bench_registers_memory_for_all_but_ragged_collectives(tmp_path, capfdbinary):
    report = tmp_path / "bench.json"
    words = f"--transport shm --registered -c all -b 64K -e 64K --json {report}".split()
    assert bench(*words) == 0
    assert b"# errors: 0 OK" in capfdbinary.readouterr().out
    ragged = {row["collective"] for row in results(report) if not row["registered"]}
    assert ragged == {collective for collective in COLLECTIVES if collective.endswith("_ragged")}


def test_bench_under_pycollective_run_prints_one_table(tmp_path):
    command = "run -n 2 -m pycollective bench -b 8 -e 8 --seconds 0.01".split()
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("2 ranks (shared memory)") == 1


def test_bench_under_torchruns_variables_prints_one_table(tmp_path):
    words = "-m pycollective bench -b 8 -e 8 --seconds 0.01".split()
    (port,) = free_ports(1)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **where}  # of torchrun
    processes = [
        subprocess.Popen(
            [sys.executable, *words], env={**environment, "RANK": str(rank)}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "2 ranks (shared memory)" in said[0]
    assert said[1] == ""


def test_bench_in_an_incomplete_group_says_how_to_time_threads(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        bench("-e", "8")
    assert "To time threads, give --transport thread" in capsys.readouterr().err
    assert bench("-e", "8", "--transport", "thread") == 0


def test_measure_makes_equal_numbers_of_iterations_on_all_ranks(on_ranks):
    def agreed(comm):
        return measure(comm, Case("all_reduce", 64, 2), seconds=0.002).iterations

    first, second = on_ranks(local_group(2), agreed)
    assert first == second >= 5
    rows = on_ranks(local_group(2), lambda c: measure(c, Case("barrier", 0, 2), iterations=7))
    assert [row.iterations for row in rows] == [7, 7]


def test_measure_of_sums_in_place_stays_finite(on_ranks, monkeypatch):
    """Sums in place grow with every call, and are refilled before they overflow."""
    seen = []
    right = Communicator.all_reduce

    def watched(self, x, op="sum", **others):
        result = right(self, x, op, **others)
        if op == "sum" and np.asarray(x).dtype == "float16" and self.rank == 0:
            seen.append(float(np.abs(result.astype("float64")).max()))
        return result

    monkeypatch.setattr(Communicator, "all_reduce", watched)
    case = Case("all_reduce", 64, 2, dtype="float16")
    assert all(isinstance(r, Row) for r in on_ranks(
        local_group(2), lambda comm: measure(comm, case, iterations=200)))  # fmt: skip
    assert len(seen) > 200
    assert all(0 < value < math.inf for value in seen)


def test_bench_with_wrong_values_fails(capsys, monkeypatch):
    right = Communicator.all_reduce

    def wrong(self, x, op="sum", *, out=None, **others):
        result = right(self, x, op, out=out, **others)
        if self.rank == 1 and op == "sum" and out is not None:
            result[0] += 1
        return result

    monkeypatch.setattr(Communicator, "all_reduce", wrong)
    assert bench("-b", "64", "-e", "64") == 1
    assert "# errors: 1 FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
def test_check_of_each_collective_finds_a_wrong_item(on_ranks, collective):
    def work(comm):
        arrays = Arrays(comm, Case(collective, 4096, 2))
        right = arrays.call

        def broken():
            right()
            arrays._target[-1] += 1

        arrays.call = broken
        return arrays.wrong()

    rooted = collective in ("reduce", "gather", "gather_ragged")
    assert on_ranks(local_group(2), work) == [1, 0 if rooted else 1]


def test_a_rank_that_fails_ends_the_run(monkeypatch):
    right = Communicator.broadcast

    def failing(self, *args, **others):
        if self.rank == 1:
            raise RuntimeError("broken")
        return right(self, *args, **others)

    monkeypatch.setattr(Communicator, "broadcast", failing)
    with pytest.raises(RuntimeError, match="broken"):
        bench("-c", "broadcast", "-e", "8")


def test_bench_wrong_options_are_refused_with_the_reason(capsys):
    for words, text in (
        ("-b 1M -e 1K", "sizes must grow"),
        ("-b 2 -e 1K", "from at least 4 bytes"),
        ("-f 1", "not a whole number from 2"),
        ("-a bus", "no algorithm is called 'bus' here"),
        ("-c broadcast all_reduce -a tree -e 8", "all_reduce: no algorithm is called tree"),
        ("-c reduce -a chain", "no algorithm is called 'chain' here"),
        ("-d float32 -o xor", "xor"),
        ("-d text", "text"),
        ("-e 100000G", "larger than the memory of this machine"),
        ("--tune", "has no file to write"),
    ):
        with pytest.raises(SystemExit) as ended:
            bench(*words.split())
        assert ended.value.code == 2 and text in capsys.readouterr().err


def test_bench_plot_needs_matplotlib_and_writes_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "bench.svg"
    with pytest.raises(SystemExit):
        bench("-e", "64", "--plot", str(picture))
    assert "pip install 'pycollective[plot]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert bench("-e", "4K", "-a", "ring", "direct", "--plot", str(picture)) == 0
    text = picture.read_text()
    assert "<svg" in text
    assert "# drawn to" in capsys.readouterr().out


def test_the_load_of_this_host_is_read():
    time, host, own = load._now()
    again = load._now()
    assert again[0] >= time and again[1] >= host > 0 and again[2] >= own > 0


@pytest.mark.parametrize(("others", "warned"), [(0.0, False), (1.5, True)])
def test_a_busy_machine_gives_a_warning(capsys, monkeypatch, tmp_path, others, warned):
    """The group's own 7 s do not count; both ranks are one process, which is subtracted once."""
    ranks = threading.local()

    def now():
        begin = not hasattr(ranks, "began")
        ranks.began = True
        return np.zeros(3) if begin else np.array([10, 10 * others + 7, 7])

    monkeypatch.setattr(load, "_now", now)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    report = tmp_path / "bench.json"
    assert bench("-e", "8", "--json", str(report)) == 0
    said = "other programs used 1.5 of 4 cores during the measurement" in capsys.readouterr().out
    assert said == warned
    assert json.loads(report.read_text())["cores_of_other_programs"] == pytest.approx(others)


# --tune ---------------------------------------------------------------------------------------


def row(collective, size, algorithm, time):
    return Row(
        collective=collective, bytes=size, count=size, type="-", op="-", algorithm=algorithm,
        in_place=True, ranks=2, iterations=1, p50_us=time, p99_us=time, min_us=time,
        algbw_gb_s=1, busbw_gb_s=1, limit_gb_s=None, percent_of_limit=None, wrong=0,
    )  # fmt: skip


def test_choose_takes_the_fastest_algorithm_for_each_size():
    measured = {
        8: {"ring": 2.0, "tree": 1.0},
        128: {"ring": 1.0, "tree": 1.04},  # not worth a change
        2048: {"ring": 1.0, "tree": 3.0},
        32768: {"ring": 1.0, "tree": 3.0},
    }
    rows = [row("all_reduce", s, name, t) for s, of in measured.items() for name, t in of.items()]
    rows += [row("all_reduce", 8, "tree", 9.0), row("all_reduce", 8, "tree", 1.1)]  # other turns
    rows += [row("broadcast", 8, "chain", 1.0), row("broadcast", 8, "auto", 0.1)]
    kinds = _core.Collective
    assert choose(rows) == [
        (kinds.all_reduce, 512, "tree"),
        (kinds.all_reduce, (1 << 63) - 1, "ring"),
        (kinds.broadcast, (1 << 63) - 1, "chain"),
    ]


def selected(comm, collective, size):
    return comm._core.select(_core.Collective.__members__[collective], size)


@pytest.mark.slow
def test_tune_writes_a_table_that_groups_use(tmp_path, capsys, monkeypatch, caplog):
    file = tmp_path / "deep" / "table.json"
    monkeypatch.setenv(tuning.TUNING, str(file))
    assert bench("--tune", "-b", "64", "-e", "4K", "-f", "64", "-n", "2") == 0
    assert f"# for groups of 2 ranks (threads) on this machine: {file}" in capsys.readouterr().out
    content = json.loads(file.read_text())
    tables = content["tables"]
    assert content["past_cache_from"] > 0
    assert {collective for collective, _, _ in tables["thread"]["2"]} == {
        "all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter",
    }  # fmt: skip
    (comm, _) = local_group(2)
    for collective, most_bytes, name in reversed(tables["thread"]["2"]):
        assert selected(comm, collective, most_bytes) == name
    tuning.save(file, "TCP", 4, [(_core.Collective.broadcast, 99, "chain")], "0")
    assert set(json.loads(file.read_text())["tables"]) == {"thread", "tcp"}
    assert tuning.rows("TCP", 3) == tuning.rows("TCP", 4) != []
    assert tuning.rows("TCP", 5) == []
    assert caplog.text == ""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write a table: broadcast uses chain up to 100 bytes, all_reduce uses ring up to 64."""
    file = tmp_path / "table.json"
    rows = [(_core.Collective.broadcast, 100, "chain"), (_core.Collective.all_reduce, 64, "ring")]
    for transport in ("threads", "shared memory", "TCP"):
        tuning.save(file, transport, 2, rows, "0")
    monkeypatch.setenv(tuning.TUNING, str(file))
    return file


def called(comm):
    """Return the algorithms that an all_reduce of 64 bytes, one of 128 and a broadcast use."""
    found = []
    for call, array in (
        (comm.all_reduce, np.ones(8)), (comm.all_reduce, np.ones(16)), (comm.broadcast, np.ones(4)),
    ):  # fmt: skip
        call(array)
        found.append(comm.describe().split("rank 1")[0])
    return found


@pytest.fixture
def past_cache_reset():
    """Reset the size from which copies bypass the caches, at the end of the test."""
    yield
    _core.set_past_cache_from(0)


@pytest.mark.parametrize("setting", [0, 54_321])
def test_measuring_copies_restores_the_setting(monkeypatch, past_cache_reset, setting):
    monkeypatch.setattr("pycollective.benchmark.tune._COPIED", [1 << 20])
    _core.set_past_cache_from(setting)
    spawn(past_cache_from, 2, threads=True)
    assert _core.past_cache_setting() == setting


def test_copies_bypass_the_caches_from_the_measured_size_on(table, past_cache_reset):
    usual = _core.past_cache_from()
    local_group(2)
    assert _core.past_cache_from() == usual  # the file does not set it
    tuning.save(table, "threads", 2, [], "0", past_cache_from=12_345)
    local_group(2)
    assert _core.past_cache_from() == 12_345
    tuning.save(table, "TCP", 2, [], "0")
    assert json.loads(table.read_text())["past_cache_from"] == 12_345


@pytest.mark.parametrize("wrong", [-1, 1.5, "much"])
def test_wrong_past_cache_from_of_a_table_is_logged_and_not_used(
    table, past_cache_reset, caplog, wrong
):
    content = json.loads(table.read_text())
    table.write_text(json.dumps({**content, "past_cache_from": wrong}))
    usual = _core.past_cache_from()
    local_group(2)
    assert _core.past_cache_from() == usual
    assert "not a number of bytes" in caplog.text


def test_rows_of_the_table_determine_what_auto_chooses(table, on_ranks):
    comms = local_group(2)
    assert selected(comms[0], "all_reduce", 64) == "ring"
    assert selected(comms[0], "all_reduce", 65) == "direct"
    assert selected(comms[0], "broadcast", 101) == "direct"
    assert selected(comms[0], "reduce_scatter", 8) == "direct"
    first, second, third = on_ranks(comms, called)[0]
    assert ", ring)" in first
    assert ", direct)" in second
    assert ", chain" in third
    assert ", direct)" in on_ranks(local_group(3), called)[0][0]


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_ranks_agree_on_the_launchers_or_rank_0s_table(table, tmp_path, transport):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        # If each rank read the file itself, rank 1 would find none.
        "if os.environ['PYCOLLECTIVE_RANK'] == '1': os.environ['PYCOLLECTIVE_TUNING'] = 'none'\n"
        "import numpy as np, pycollective as pc\n"
        "from pycollective._core import Collective\n"
        "comm = pc.init(timeout=20)\n"
        "comm.broadcast(np.ones(4))\n"
        "print(comm._core.select(Collective.broadcast, 100))\n"
        "print(comm._core.select(Collective.broadcast, 101))\n"
    )
    words = [sys.executable, "-m", "pycollective", "run", "-n", "2", "--transport", transport]
    done = subprocess.run(
        [*words, script], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        sorted(done.stdout.split())
        == ["chain"] * 2 + ["direct" if transport == "shm" else "tree"] * 2
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: "no json", "Expecting value"),
        (lambda t: "[" * 100_000, "is not used"),
        (lambda t: "[]", "not a table of format"),
        (lambda t: json.dumps({**t, "format": 2}), "not a table of format"),
        (lambda t: json.dumps({**t, "host": {"machine": "vax"}}), "measured on another machine"),
        (lambda t: json.dumps({**t, "tables": [1]}), "is not used"),
        (lambda t: json.dumps({**t, "tables": {"thread": {"two": []}}}), "two"),
        (lambda t: json.dumps({**t, "tables": {"thread": {"2": [["all_reduce", 8, "bus"]]}}}),
         "no all_reduce algorithm is called 'bus'"),
        (lambda t: json.dumps({**t, "tables": {"thread": {"2": [["shout", 8, "ring"]]}}}),
         "not a row"),
        (lambda t: json.dumps({**t, "tables": {"thread": {"2": [["all_reduce", -1, "ring"]]}}}),
         "not a number of bytes"),
    ],
)  # fmt: skip
def test_a_bad_table_gives_one_warning(table, caplog, change, text):
    table.write_text(change(json.loads(table.read_text())))
    with caplog.at_level(logging.WARNING, "pycollective"):
        for _ in range(3):
            (comm, _) = local_group(2)
            assert selected(comm, "all_reduce", 8) == "direct"
    assert len(caplog.records) == 1
    assert text in caplog.text


@pytest.mark.parametrize(
    "tables", ["no object", [1], {"tcp": [1]}, {"tcp": None}, {"tcp": {"2": 5}}], ids=repr
)
def test_save_over_a_table_with_wrong_types_writes_the_new_rows(tmp_path, tables):
    file = tmp_path / "tuning.json"
    content = {"format": tuning.FORMAT, "host": tuning.host(), "tables": tables}
    for text in (json.dumps(content), "[" * 100_000, "[]", "{"):
        file.write_text(text)
        tuning.save(file, "TCP", 4, [(_core.Collective.broadcast, 99, "chain")], "0")
        found = json.loads(file.read_text())
        assert found["tables"]["tcp"]["4"] == [["broadcast", 99, "chain"]]


def test_save_keeps_the_valid_rows_of_a_table(tmp_path):
    file = tmp_path / "tuning.json"
    tables = {
        "tcp": {"2": [["broadcast", 99, "chain"]], "3": [["shout", 8, "ring"]], "two": []},
        "thread": {"2": [["all_reduce", -1, "ring"]]},
    }
    content = {"format": tuning.FORMAT, "host": tuning.host(), "tables": tables}
    file.write_text(json.dumps({**content, "past_cache_from": 2.5}))
    tuning.prepare(file, "0")
    found = json.loads(file.read_text())
    assert found["tables"] == {"tcp": {"2": [["broadcast", 99, "chain"]]}}
    assert "past_cache_from" not in found


def test_user_without_a_home_folder_has_no_table(monkeypatch, capsys):
    for name in (tuning.TUNING, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuning.Path, "expanduser", no_home)
    assert tuning.path() is None
    with pytest.raises(SystemExit):
        bench("--tune")
    assert "there is no home folder" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["S4", "O", "U3", "M8[s]"])
def test_bench_of_a_dtype_without_numbers_is_refused(capsys, dtype):
    with pytest.raises(SystemExit):
        bench("--dtype", dtype, "-e", "64")
    assert f"--dtype {dtype}: only arrays of numbers and bools are timed" in capsys.readouterr().err


def test_table_that_is_missing_gives_one_warning_only_if_it_was_named(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv(tuning.TUNING, str(tmp_path / "nothing.json"))
    for _ in range(2):
        local_group(2)
    assert caplog.text.count("cannot be read") == 1
    caplog.clear()
    monkeypatch.delenv(tuning.TUNING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.path() == tmp_path / "pycollective" / "tuning.json"
    local_group(2)
    assert caplog.text == ""


def test_bad_rows_from_a_launcher_raise_rendezvous_error():
    from pycollective.launch import RendezvousError, init
    from pycollective.launch.description import launched_environment

    memory = _core.ShmGroup.create(2)
    for bad in ("x", "{}", '[["all_reduce", 8, "bus"]]', json.dumps([["barrier", 1, "x"]] * 65)):
        environment = {**launched_environment(0, 2, memory.descriptor), tuning.CHOICES: bad}
        with pytest.raises(RendezvousError, match=tuning.CHOICES):
            init(environment=environment)
