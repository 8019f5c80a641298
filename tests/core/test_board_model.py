"""Model check of the board: every interleaving of a few ranks, and planted faults.

`board_model/model.cc` describes the model.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent / "board_model"
_CORE = Path(__file__).parents[2] / "csrc"
_SOURCES = (
    "executor/direct.cc",
    "transport/board.cc",
    "schedule/collective.cc",
    "support/copy.cc",
    "support/cores_linux.cc",
)

pytestmark = [
    pytest.mark.slow,  # compiling takes several seconds
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs a linker with --wrap"),
]

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return a function that builds the model, with one line of the core replaced."""
    objects: dict[Path, Path] = {}
    made: dict[tuple[str, str, str], Path] = {}

    def run(*arguments: str | Path) -> None:
        # The padding of an execution is part of a state: zeros written before its constructor stay.
        options = "-std=c++20 -O2 -fno-access-control -fno-builtin-memcpy -fno-lifetime-dse".split()
        subprocess.run(["g++", *options, f"-I{_HERE}", f"-I{_CORE}", *arguments], check=True)

    def compiled(file: Path) -> Path:
        if file not in objects:
            objects[file] = tmp_path_factory.mktemp("object") / f"{file.stem}.o"
            run("-c", file, "-o", objects[file])
        return objects[file]

    def make(source: str = "", line: str = "", replacement: str = "") -> Path:
        key = (source, line, replacement)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            files = [_HERE / "model.cc"]
            for name in _SOURCES:
                file = _CORE / name
                if name == source:
                    text = file.read_text()
                    assert text.count(line) == 1, f"{name} has changed: {line}"
                    file = folder / Path(name).name
                    file.write_text(text.replace(line, replacement))
                files.append(file)
            made[key] = folder / "model"
            run(*map(compiled, files), "-Wl,--wrap=memcpy", "-o", made[key])
        return made[key]

    return make


def _explore(model: Path, ranks: int, faults: str) -> tuple[int, str]:
    ended = subprocess.run([model, str(ranks), faults], capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def test_model_every_interleaving_of_two_ranks_is_right(build: Build) -> None:
    status, said = _explore(build(), 2, "none")
    assert status == 0, said
    states = sum(int(line.partition(": ")[2].split()[0]) for line in said.splitlines())
    assert states > 10_000


@pytest.mark.parametrize(
    ("ranks", "faults"), [(2, "death"), (2, "timeout"), (3, "none"), (3, "death"), (3, "timeout")]
)
def test_model_ranks_that_die_or_time_out_leave_no_wrong_state(
    build: Build, ranks: int, faults: str
) -> None:
    status, said = _explore(build(), ranks, faults)
    assert status == 0, said


@pytest.mark.parametrize(
    ("source", "line", "replacement", "ranks", "faults", "found"),
    [
        ("executor/direct.cc", "if (!board_.is_free(turn_)) return false;", "",
         2, "none", "meet in memory"),
        ("transport/board.cc", "has_read(r, next)", "has_read(r, next - 1)",
         2, "none", "meet in memory"),
        ("executor/direct.cc", "bool DirectExecution::is_over() {",
         "bool DirectExecution::is_over() {\n  return true;", 2, "none", "wrong byte"),
        ("executor/direct.cc", "if (staging_.input_end > kInputStagingBytes &&",
         "if (false && staging_.input_end > kInputStagingBytes &&", 2, "none", "meet in memory"),
        ("executor/direct.cc",
         "if (board_.has_staging() && producing_.output_end > kOutputStagingBytes &&",
         "if (false && producing_.output_end > kOutputStagingBytes &&",
         2, "none", "meet in memory"),
        ("executor/direct.cc", "  ++staged_ahead_;\n  go_on(staging_);",
         "  go_on(staging_);", 2, "none", "waits for ever"),
        ("executor/direct.cc",
         "board_.wake_others();\n  ++staged_ahead_;", "++staged_ahead_;",
         2, "none", "nobody wakes it"),
        ("executor/direct.cc", "if (slot.fingerprint != fingerprint_) board_.mismatch(come_);", "",
         2, "none", "nobody finds the call that differs"),
        ("executor/direct.cc", "copy(0, brought(call_.root) + own);", "copy(0, brought(call_.root));",
         2, "none", "wrong byte"),
        ("executor/direct.cc", "    flag_.store(1);\n", "", 2, "timeout",
         "writes arrays of rank"),
        ("executor/direct.cc", "    std::atomic_thread_fence(std::memory_order_acquire);\n"
         "    endpoint_.check();", "", 2, "timeout", "goes on with what it read"),
        # A root that does not wait for those that read its array through the system.
        ("executor/direct.cc", "slot.places.input != 0 || slot.places.lent != 0;",
         "slot.places.input != 0;", 2, "none", "reads arrays of rank"),
        # Readers that do not look for a failure.
        ("executor/direct.cc", "reaches || peer.input || peer.output || peer.lent",
         "reaches || peer.input || peer.output", 2, "timeout", "goes on with what it read"),
        ("executor/direct.cc", "  return inputs && board_.peers", "  return inputs || board_.peers",
         2, "none", "wrong byte"),
        ("executor/direct.cc", "  if (!found.empty() || mode_ != Mode::blocks) return found;",
         "  return found;", 2, "death", "does not name the dead rank"),
    ],
)  # fmt: skip
def test_model_finds_a_planted_fault(
    build: Build, source: str, line: str, replacement: str, ranks: int, faults: str, found: str
) -> None:
    status, said = _explore(build(source, line, replacement), ranks, faults)
    assert status == 1, said
    assert found in said, said
