"""Run random fault trials: ``python tests/faults/trials.py --seed S --count N``.

Trial i has the seed S + i, and everything in it follows from that. The exit code is 1 if a trial
failed. Each failure is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [p for p in (str(HERE), str(HERE.parent)) if p not in sys.path]
sys.path.append(str(HERE.parents[1]))  # last: an installed package takes precedence


def _environment() -> dict[str, str]:
    """Return the environment of all processes of the trials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLLECTIVE_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYCOLLECTIVE_WARN_AFTER": "inf",
        "PYCOLLECTIVE_TUNING": "none",
        "OPENBLAS_NUM_THREADS": "1",  # threads of a library would not survive a fork
        "PYTHONDONTWRITEBYTECODE": "1",  # a rank that is killed would leave half a file
    }


def _compile() -> None:
    """Write the bytecode that the ranks load: without it, each of them compiles all modules."""
    package = importlib.util.find_spec("pycollective")
    places = list(package.submodule_search_locations or []) if package else []
    for place in (str(HERE), *places):
        compileall.compile_dir(place, quiet=2)


class Job:
    """A process that runs one trial after the other."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--job", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
        )

    def run(self, *trial: Any) -> dict[str, Any]:
        """Run a trial given by seed, set-up, fault and planted fault; return its result."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(trial) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the job of trial {trial} has ended: {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _be_a_job(folder: Path) -> int:
    """Run the trials that come on stdin; the processes of a trial are forks of this one."""
    import plan
    import runner
    import verdict

    runner.adopt_orphans()
    answers = os.fdopen(os.dup(1), "w")
    os.set_inheritable(answers.fileno(), False)
    for line in sys.stdin:
        trial = plan.make(*json.loads(line))
        place = folder / f"{os.getpid()}-{trial.seed}"
        place.mkdir()
        try:
            result = runner.run(trial, place)
        except runner.BecomeError as become:
            os.close(answers.fileno())
            role = become.role
            break
        problems = verdict.judge(trial, result)
        answers.write(
            json.dumps(
                {
                    "setup": trial.setup,
                    "fault": trial.fault,
                    "seconds": result.seconds,
                    "problems": problems,
                    "evidence": evidence(trial, result) if problems else "",
                    "said": result.said,
                    "codes": result.codes,
                    "trial": repr(trial),
                }
            )
            + "\n"
        )
        answers.flush()
    else:
        return 0
    return role()


def evidence(trial: Any, result: Any) -> str:
    """Return the text that explains a failure."""
    steps = [f"step {i}: {step}" for i, step in enumerate(trial.steps)]
    lines = [repr(dataclasses.replace(trial, steps=())), *steps, f"exit codes: {result.codes}"]
    for rank, said in enumerate(result.said):
        lines += [f"rank {rank} said: {json.dumps(line)}" for line in said if "ok" not in line]
    return "\n".join([*lines, result.errors[-6000:]])


def run_trials(
    seeds: range,
    setup: str = "",
    fault: str = "",
    planted: str = "",
    jobs: int = 1,
    tell: Any = None,
) -> list[dict[str, Any]]:
    """Run the trials of several seeds; return the results in the order of the seeds.

    Parameters
    ----------
    seeds : range
        The seed of each trial.
    setup, fault : str
        The same for all trials; drawn by each trial where empty.
    planted : str
        A fault of the harness's own worker, which the verdict must find.
    jobs : int
        Trials at the same time.
    tell : callable, optional
        Called with each result.
    """
    results: dict[int, dict[str, Any]] = {}
    errors: list[BaseException] = []
    waiting = iter(seeds)
    lock = threading.Lock()

    def work(folder: Path) -> None:
        try:
            job = Job(folder)
            try:
                while not errors:
                    with lock:
                        seed = next(waiting, None)
                    if seed is None:
                        return
                    given = seed, setup, fault, planted
                    result = job.run(*given) | {"given": given}
                    with lock:
                        results[seed] = result
                        if tell is not None:
                            tell(result)
            finally:
                job.close()
        except BaseException as error:
            errors.append(error)

    _compile()
    with tempfile.TemporaryDirectory(prefix="pycollective-trials-") as name:
        threads = [threading.Thread(target=work, args=(Path(name),)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [results[seed] for seed in seeds]


def repeat_command(result: dict[str, Any]) -> str:
    """Return the command that repeats a trial."""
    seed, setup, fault, planted = result["given"]
    words = [f"python tests/faults/trials.py --seed {seed} --count 1"]
    words += [f"--setup {setup}"] if setup else []
    words += [f'--fault "{fault}"'] if fault else []
    words += [f'--plant "{planted}"'] if planted else []
    return " ".join([*words, "--verbose"])


def _table(results: list[dict[str, Any]]) -> str:
    """Return the number of trials, and of failures, by fault and set-up."""
    from plan import SETUPS

    count: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for result in results:
        for key in ((result["fault"], result["setup"]), (result["fault"], "all"),
                    ("all", result["setup"]), ("all", "all")):  # fmt: skip
            count[key][0] += 1
            count[key][1] += bool(result["problems"])
    faults = sorted({result["fault"] for result in results})
    columns = [*SETUPS, "all"]
    lines = ["failed/trials".ljust(24) + "".join(c.rjust(13) for c in columns)]
    for fault in [*faults, "all"]:
        cells = [count[fault, c] for c in columns]
        text = [f"{failed}/{n}" if n else "-" for n, failed in cells]
        lines.append(fault.ljust(24) + "".join(t.rjust(13) for t in text))
    return "\n".join(lines)


class _Progress:
    """A progress bar where tqdm is installed, lines where not."""

    def __init__(self, count: int, verbose: bool) -> None:
        self._done, self._failed, self._count = 0, 0, count
        self._verbose = verbose
        self._bar: Any = None
        try:
            from tqdm import tqdm

            self._bar = tqdm(total=count, unit="trial", disable=not sys.stderr.isatty())
        except ImportError:
            pass

    def tell(self, result: dict[str, Any]) -> None:
        self._done += 1
        self._failed += bool(result["problems"])
        if self._bar is not None:
            self._bar.set_postfix(failed=self._failed)
            self._bar.update()
        if result["problems"]:
            self._say(f"FAILED {result['setup']}, {result['fault']}: {repeat_command(result)}")
            for problem in result["problems"]:
                self._say(f"    {problem}")
            if self._verbose:
                self._say(result["evidence"])
        elif self._verbose:
            self._say(f"ok {result['given'][0]} {result['setup']}, {result['fault']}: "
                      f"{result['seconds']:.2f} s")  # fmt: skip
        elif not sys.stderr.isatty() and self._done % 100 == 0:
            self._say(f"{self._done} of {self._count} trials, {self._failed} failed")

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text)
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    from faults import FAULTS
    from plan import SETUPS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial (0)")
    parser.add_argument("--count", type=int, default=100, help="number of trials (100)")
    parser.add_argument("--setup", default="", choices=SETUPS, help="only this set-up")
    parser.add_argument("--fault", default="", choices=list(FAULTS), help="only this fault")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1),
                        help="trials at the same time (twice the number of cores)")  # fmt: skip
    parser.add_argument(
        "--verbose", action="store_true", help="print each trial, and the reports of a failed one"
    )
    parser.add_argument("--plant", default="", help="a fault of the worker itself, for tests")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.jobs < 1:
        parser.error("--count and --jobs must be 1 or more")
    given = options.setup, options.fault, options.plant
    progress = _Progress(options.count, options.verbose)
    began = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    results = run_trials(seeds, *given, min(options.jobs, options.count), progress.tell)
    failed = [r for r in results if r["problems"]]
    print(_table(results))
    seconds = time.monotonic() - began
    print(f"{len(results)} trials in {seconds:.0f} s, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        sys.exit(_be_a_job(Path(sys.argv[2])))
    sys.exit(main())
