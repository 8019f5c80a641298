"""Run PyTorch's own tests of ``torch.distributed`` with this backend, and write a table.

    run_pytorch_tests.py run {pycollective,gloo} WORLD_SIZE [-k PATTERN]... --json FILE
    run_pytorch_tests.py table FILE... >docs/reference/pytorch_tests.md

The tests are those of ``torch/testing/_internal/distributed/distributed_test.py``. They ask for a
backend by its name, and skip most tests for names that they do not know. With "pycollective" the name
"gloo" therefore makes this backend's process groups. PyTorch starts the ranks of a test anew; here they
are forks of this process, which saves the import.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

#: Tests that compare a name from PyTorch's C++ code with the backend's: they get the true name.
WITH_TRUE_NAME = {"test_ddp_logging_data_cpu"}


def use_instead_of_gloo():
    import torch.distributed.distributed_c10d as c10d

    from pycollective.torch import ProcessGroup

    class StandIn(ProcessGroup):
        """A process group that PyTorch's tests take for one of gloo."""

        def __init__(self, *args, enable_reconfigure=False, **kwargs):  # an option from 2.14 on
            super().__init__(*args, **kwargs)

        def name(self):
            return "gloo"

        def _set_sequence_number_for_group(self):
            pass

    c10d.ProcessGroupGloo = StandIn


def tests_of(folder, world_size, backend):
    """Return PyTorch's class of tests, for ranks that are forks of this process."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
    }
    import torch
    from torch.testing._internal.distributed import distributed_test

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            has_true_name = self._testMethodName in WITH_TRUE_NAME and backend == "pycollective"
            distributed_test.BACKEND = "pycollective" if has_true_name else "gloo"
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Tests


class Results(unittest.TestResult):
    """The result of each test, kept in a file."""

    def __init__(self, path, head):
        super().__init__()
        self._path, self._all = path, head | {"tests": {}}

    def startTest(self, test):
        super().startTest(test)
        self._begin = time.monotonic()

    def _record(self, test, result, reason=""):
        seconds = round(time.monotonic() - self._begin, 1)
        name = test.id().rpartition(".")[2]
        self._all["tests"][name] = [result, reason, seconds]
        print(
            f"{result:7} {seconds:6} {name} {reason.splitlines()[-1] if reason else ''}",
            flush=True,
        )
        self._path.write_text(json.dumps(self._all, indent=1, sort_keys=True) + "\n")

    def addSuccess(self, test):
        self._record(test, "passed")

    def addSkip(self, test, reason):
        self._record(test, "skipped", reason)

    def addFailure(self, test, error):
        self._record(test, "failed", str(error[1]).strip()[-2000:])

    addError = addFailure


def run(arguments):
    import torch

    if arguments.backend == "pycollective":
        use_instead_of_gloo()
    with tempfile.TemporaryDirectory() as folder:
        tests = tests_of(Path(folder), arguments.world_size, arguments.backend)
        loader = unittest.TestLoader()
        loader.testNamePatterns = [f"*{pattern}*" for pattern in arguments.k] or None
        head = {
            "backend": arguments.backend,
            "world_size": arguments.world_size,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        results = Results(arguments.json, head)
        loader.loadTestsFromTestCase(tests).run(results)


def table(arguments):
    found = [json.loads(path.read_text()) for path in arguments.files]
    results = {(one["backend"], one["world_size"]): one["tests"] for one in found}
    sizes = sorted({size for _, size in results})
    print("# PyTorch's own tests\n")
    print(
        "`tests/torch_backend/run_pytorch_tests.py` runs the tests that PyTorch "
        f"{found[0]['torch']} ships in\n`torch/testing/_internal/distributed/distributed_test.py` with "
        f"this backend and with gloo, on the same machine\n({found[0]['date']}). The script also writes "
        "this page.\n"
    )
    print(
        "The wheels of PyTorch contain no tests of DTensor and FSDP2, only the classes below them. "
        "`tests/torch_backend/torch_program.py` trains\nthe transformer of `common_dtensor.py` and "
        "models of FSDP2 with both backends, and compares the results. It also redistributes a DTensor "
        "by all\npairs of placements, and trains a step by five schedules of pipelines.\n"
    )
    print("| ranks | gloo passes | pycollective passes of these | pycollective fails |")
    print("|---|---|---|---|")
    different = []
    for size in sizes:
        gloo, ours = results["gloo", size], results["pycollective", size]
        passed = [name for name in gloo if gloo[name][0] == "passed"]
        also = [name for name in passed if ours.get(name, [""])[0] == "passed"]
        print(f"| {size} | {len(passed)} | {len(also)} | {len(passed) - len(also)} |")
        different += [(name, size) for name in passed if name not in also]
    if different:
        print("\nTests that gloo passes and this backend does not:\n")
        print("| test | ranks | result |\n|---|---|---|")
        for name, size in sorted(different):
            result, error, _ = results["pycollective", size].get(name, ["not run", "", 0])
            lines = [line for line in error.splitlines() if "Error: " in line]
            reason = lines[-1].strip() if lines else ""
            print(f"| `{name}` | {size} | {result}: {reason} |")
    print("\nAll tests that gloo passes:\n")
    names = sorted({n for (backend, _), t in results.items() if backend == "gloo" for n in t
                    if t[n][0] == "passed"})  # fmt: skip
    print("| result with this backend | tests |\n|---|---|")
    alike: dict[str, list[str]] = {}
    for name in names:
        by_result: dict[str, list[str]] = {}
        for size in sizes:
            result = results["pycollective", size].get(name, ["not run"])[0]
            by_result.setdefault(result, []).append(str(size))
        cells = (f"{result} with {', '.join(of)} ranks" for result, of in by_result.items())
        alike.setdefault("; ".join(cells), []).append(name)
    for result, tests_alike in alike.items():
        print(f"| {result} | {', '.join(f'`{name}`' for name in tests_alike)} |")
    skipped: dict[str, set[str]] = {}
    for (backend, _), tests in results.items():
        for name, (result, reason, _) in tests.items() if backend == "gloo" else ():
            if result == "skipped" and name not in names:
                skipped.setdefault(reason.strip() or "no reason given", set()).add(name)
    print("\nTests that gloo skips, by PyTorch's reason:\n")
    print("| reason | tests |\n|---|---|")
    for reason in sorted(skipped):
        print(f"| {reason} | {', '.join(f'`{name}`' for name in sorted(skipped[reason]))} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("backend", choices=["pycollective", "gloo"])
    running.add_argument("world_size", type=int)
    running.add_argument("-k", action="append", default=[], metavar="PATTERN")
    running.add_argument("--json", type=Path, required=True)
    running.set_defaults(run=run)
    writing = commands.add_parser("table")
    writing.add_argument("files", type=Path, nargs="+")
    writing.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
