"""Some trials of the fault harness, and faults planted to show that its verdict can fail."""

from __future__ import annotations

import dataclasses
import sys

import plan
import pytest
import runner
import trials
import verdict
from fast_cases import some_fast
from faults import FAULTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and memfd")

# One quick trial in each set-up.
_QUICK = {
    "threads": "none", "run-shm": "kill", "run-tcp": "leave", "address-shm": "mismatch",
    "address-tcp": "abort", "mixed": "close",
}  # fmt: skip

# Planted fault, fault of the trial, and beginning of the problem that the verdict finds.
_PLANTED = {
    "wrong number": ("none", "wrong: rank 0: step 1,"),
    "late write": ("kill", "wrong: rank"),
    "wrong blame": ("kill", "blame: rank"),
    "crash": ("none", "crash: 0 ended by SIGABRT"),
    "file": ("none", "left behind: home/left behind"),
    "process": ("none", "left behind: process"),
    "descriptor": ("none", "left behind: rank 0: {'/dev/null': 1}"),
    "hang": ("none", "hang: after"),
}
_FAST_SETUPS = ("threads", "run-shm", "mixed")


def problems(results):
    failed = [result for result in results if result["problems"]]
    return {trials.repeat_command(result): result["problems"] for result in failed}


@pytest.mark.parametrize("setup", some_fast(plan.SETUPS, _FAST_SETUPS))
def test_a_trial_of_each_setup_has_no_problems(setup):
    assert not problems(trials.run_trials(range(1), setup, _QUICK[setup]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_trials_of_each_fault_have_no_problems(fault):
    assert not problems(trials.run_trials(range(3), fault=fault, jobs=2))


@pytest.mark.slow
@pytest.mark.parametrize("planted", _PLANTED)
def test_a_planted_fault_is_found(planted):
    fault, begins = _PLANTED[planted]
    (result,) = trials.run_trials(range(1), "address-shm", fault, planted)
    assert any(problem.startswith(begins) for problem in result["problems"]), result


def test_a_failed_trial_gives_exit_code_1_and_the_command_that_repeats_it(capfd):
    options = "--seed 7 --count 1 --setup threads --fault none --plant".split()
    assert trials.main([*options, "wrong number"]) == 1
    command = 'trials.py --seed 7 --count 1 --setup threads --fault "none" --plant "wrong number"'
    assert command in capfd.readouterr().out


def test_plan_of_a_seed_is_the_same_in_each_call():
    for fault in FAULTS:
        assert plan.make(5, fault=fault) == plan.make(5, fault=fault)
    assert plan.make(5) != dataclasses.replace(plan.make(6), seed=5)


def test_plan_fault_that_a_setup_cannot_have_raises_value_error():
    with pytest.raises(ValueError, match="'kill' is not for the set-up 'threads'"):
        plan.make(0, "threads", "kill")


def _mismatch(where):
    """Return a trial of two ranks' differing calls, and the report of rank 1, the victim."""
    trial = dataclasses.replace(
        plan.make(0, "address-tcp", "mismatch"), ranks=2, victim=1, colors=(0, 0), closes=True
    )
    group = trial.steps[trial.moment].group
    text = "rank 0 called barrier #1, rank 1 called all_gather #1 (int8[1], direct)"
    error = {"error": "MismatchError", "classes": ["MismatchError"], "text": text, "ranks": None}
    return trial, {**error, "group": group, "where": where}


def _verdict(trial, *said, errors=""):
    end = [{"done": True}, {"final": True, "grown": {}}]
    return verdict.judge(trial, runner.Result(said=[[*each, *end] for each in said], errors=errors))


def test_verdict_mismatch_that_one_rank_does_not_report_is_a_problem():
    trial, error = _mismatch("barrier")
    assert _verdict(trial, [], [error]) == ["silence: rank 0 has not heard of the fault"]
    assert _verdict(trial, [error], [error]) == []


def test_verdict_mismatch_that_no_rank_reports_is_a_problem():
    trial, _ = _mismatch("barrier")
    assert _verdict(trial, [], []) == ["silence: rank 0 has not heard of the fault"]


def test_verdict_mismatch_that_only_the_last_close_finds_is_no_problem():
    trial, error = _mismatch("close")
    assert _verdict(trial, [], [error]) == []


def test_verdict_mismatch_that_a_rank_reports_at_its_exit_is_no_problem():
    trial, error = _mismatch("barrier")
    errors = f"--- 0.errors\nMismatchError at the end of the process: {error['text']}\n"
    assert _verdict(trial, [], [error], errors=errors) == []
