"""Problems of a trial's result: an empty list means that the trial has passed."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import Any

from faults import FAULTS
from plan import Trial
from runner import Result

_CRASHES = {
    signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGSYS,
}  # fmt: skip


#: CPython's `Thread.start` waits forever for a thread that has no memory for its first call.
_LOST_START = re.compile(
    r'threading.py", line \d+ in wait\n[^\n]*threading.py", line \d+ in start\n'
)

#: An error that only the end of a process finds.
_AT_THE_END = re.compile(r"^(MismatchError) at the end of the process: (.*)", re.MULTILINE)


def judge(trial: Trial, result: Result) -> list[str]:
    """Return one line for each problem."""
    found = []
    result = _with_errors_at_the_end(trial, result)
    if result.hung and trial.fault == "no memory" and _LOST_START.search(result.errors):
        return [
            f"wrong: rank {rank}: {line['wrong']}"
            for rank, said in enumerate(result.said)
            for line in said
            if "wrong" in line
        ]
    if result.hung:
        still = [
            f"rank {rank} (last said {said[-1] if said else 'nothing'})"
            for rank, said in enumerate(result.said)
            if not _has(said, "final") and not _has(said, "left")
        ]
        found.append(f"hang: after {trial.bound:.0f} s there still run {'; '.join(still)}")
    for name, code in result.codes.items():
        number = -code if code < 0 else code - 128
        if number in _CRASHES and not result.hung:
            found.append(f"crash: {name} ended by {signal.Signals(number).name}")
    for rank, said in enumerate(result.said):
        found += [f"wrong: rank {rank}: {line['wrong']}" for line in said if "wrong" in line]
        if not result.hung:
            found += _judge_rank(trial, rank, said, _must_hear(trial, rank, result))
        if grown := next((line["grown"] for line in said if line.get("grown")), None):
            found.append(f"left behind: rank {rank}: {grown}")
    return found + [f"left behind: {what}" for what in result.left]


def _with_errors_at_the_end(trial: Trial, result: Result) -> Result:
    """Return the result, with the errors that processes wrote at their end as reports of their ranks."""
    said = [list(lines) for lines in result.said]
    for part in result.errors.split("--- ")[1:]:
        name, _, text = part.partition(".errors\n")
        for match in _AT_THE_END.finditer(text if name.isdigit() else ""):
            said[int(name)].append(
                {"error": match[1], "classes": [match[1]], "text": match[2], "ranks": None,
                 "group": _group(trial), "where": "exit"}
            )  # fmt: skip
    return replace(result, said=said)


def _has(said: list[dict[str, Any]], key: str) -> bool:
    return any(key in line for line in said)


def _is_concerned(trial: Trial, rank: int) -> bool:
    """Return True if a rank is in the group of the fault."""
    fault = FAULTS[trial.fault]
    return not fault.within_group or trial.victim in trial.members(rank, _group(trial))


def _must_hear(trial: Trial, rank: int, result: Result) -> bool:
    """Return True if a rank must have an error."""
    fault = FAULTS[trial.fault]
    if not (fault.others and fault.certain and _is_concerned(trial, rank)):
        return False
    if trial.fault != "mismatch":
        return True
    # A mismatch that no call finds is found by close(), of the ranks that close last.
    members = trial.members(trial.victim, _group(trial))
    errors = [line for r in members for line in result.said[r] if "error" in line]
    if any(line["where"] not in ("close", "exit") for line in errors):
        # Ranks that do not close their groups drop them, which raises nothing; but at the end of a
        # process the library closes the world.
        is_kept = trial.setup != "threads" and _group(trial) == "world"
        return is_kept or trial.closes or trial.closes_at_once
    return not errors


def _judge_rank(trial: Trial, rank: int, said: list[dict[str, Any]], must_hear: bool) -> list[str]:
    fault = FAULTS[trial.fault]
    if fault.all_die:
        return []
    errors = [line for line in said if "error" in line]
    if rank == trial.victim:
        allowed = (*fault.own, *fault.others) if fault.own else ()
        found = [
            f"error: the victim, rank {rank}, got {_shown(e)}, not one of {allowed}"
            for e in errors
            if not _is_one_of(e, allowed)
        ]
        has_ended = _has(said, "done") or _has(said, "left")
        if not (has_ended or fault.dies or fault.may_die):
            found.append(f"crash: the victim, rank {rank}, ended without a last report")
        return found
    found = []
    if not _has(said, "done"):
        found.append(f"crash: rank {rank} ended without a last report")
    elif not _ends(trial, said):
        found.append(f"crash: rank {rank} ended after its calls without saying so")
    if must_hear and not errors:
        found.append(f"silence: rank {rank} has not heard of the fault")
    for error in errors:
        allowed = fault.others if _is_concerned(trial, rank) else ()
        if not _is_one_of(error, allowed):
            found.append(f"error: rank {rank} got {_shown(error)}, not one of {allowed}")
        elif not names_victim(trial, rank, error):
            found.append(
                f"blame: rank {rank} does not hear of rank {trial.victim}: {_shown(error)}"
            )
    return found


def _ends(trial: Trial, said: list[dict[str, Any]]) -> bool:
    """Return True if a rank has made its last report; rank 0 reports for all threads."""
    return trial.setup == "threads" or _has(said, "final")


def _group(trial: Trial) -> str:
    return trial.steps[trial.moment].group


def _is_one_of(error: dict[str, Any], allowed: tuple[str, ...]) -> bool:
    return any(name in error["classes"] for name in allowed)


def _shown(error: dict[str, Any]) -> str:
    return f"{error['error']} in {error['where']} of the {error['group']}: {error['text']}"


def names_victim(trial: Trial, rank: int, error: dict[str, Any]) -> bool:
    """Return True if an error names the victim, by its number in the group that the error names."""
    text = error["text"]
    # Either end of a broken link may be named. A timeout names the awaited ranks, and its text also the
    # rank for which those wait.
    says_both = FAULTS[trial.fault].link or error["error"] == "CollectiveTimeoutError"
    if error["ranks"] and not says_both:  # numbers of the group in which the call was made
        members = trial.members(rank, "part" if error["group"] == "part" else "world")
        return trial.victim in [members[r] for r in error["ranks"]]
    if error["group"] == "part" and not text.startswith(
        "in the group that this one was split from"
    ):
        members = trial.members(rank, "part")
        if trial.victim not in members:
            return False
        victim = members.index(trial.victim)
    else:
        victim = trial.victim
    if error["error"] == "MismatchError":
        return bool(re.search(rf"rank {victim} (called|receives|sent)", text)) or bool(
            re.search(rf"from rank {victim}\b", text)
        )
    if error["error"] == "PeerLostError" and not FAULTS[trial.fault].link:
        # "rank 1 has left the group, while rank 0 is in …": the first one is at fault.
        first = re.search(r"ranks? (\d+(?:, \d+)*)", text)
        return first is not None and str(victim) in first.group(1).split(", ")
    return re.search(rf"\branks? (?:\d+, )*{victim}\b", text) is not None
