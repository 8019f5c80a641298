"""Run the model checker of the board (`board_model/model.cc`), also on code with planted faults."""

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
    """Return a function that builds the model, and can replace one line of the core."""
    objects: dict[Path, Path] = {}
    models: dict[tuple[str, str, str], Path] = {}

    def run(*arguments: str | Path) -> None:
        # The padding of an execution is part of a state. -fno-lifetime-dse keeps its zeros.
        options = "-std=c++20 -march=native -fno-access-control -fno-builtin-memcpy".split()
        options.append("-fno-lifetime-dse")
        subprocess.run(["g++", *options, f"-I{_HERE}", f"-I{_CORE}", *arguments], check=True)

    def compiled(file: Path) -> Path:
        if file not in objects:
            objects[file] = tmp_path_factory.mktemp("object") / f"{file.stem}.o"
            planted = not file.is_relative_to(_CORE.parent)
            level = "-O0" if planted else "-O3"  # a planted fault is found at once
            run(level, "-c", file, "-o", objects[file])
        return objects[file]

    def make(source: str = "", line: str = "", replacement: str = "") -> Path:
        key = (source, line, replacement)
        if key not in models:
            folder = tmp_path_factory.mktemp("model")
            files = [_HERE / "model.cc"]
            for name in _SOURCES:
                file = _CORE / name
                if name == source:
                    text = file.read_text()
                    assert text.count(line) == 1, f"{name} must have this line once: {line}"
                    file = folder / Path(name).name
                    file.write_text(text.replace(line, replacement))
                files.append(file)
            models[key] = folder / "model"
            run(*map(compiled, files), "-Wl,--wrap=memcpy", "-o", models[key])
        return models[key]

    return make


def _explore(model: Path, ranks: int, faults: str) -> tuple[int, str]:
    ended = subprocess.run([model, str(ranks), faults], capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def test_model_every_interleaving_of_two_ranks_is_right(build: Build) -> None:
    status, output = _explore(build(), 2, "none")
    assert status == 0, output
    states = sum(int(line.partition(": ")[2].split()[0]) for line in output.splitlines())
    assert states > 10_000


@pytest.mark.parametrize(
    ("ranks", "faults"), [(2, "death"), (2, "timeout"), (3, "none"), (3, "death"), (3, "timeout")]
)
def test_model_ranks_that_die_or_time_out_leave_no_wrong_state(
    build: Build, ranks: int, faults: str
) -> None:
    status, output = _explore(build(), ranks, faults)
    assert status == 0, output


@pytest.mark.parametrize(
    ("source", "line", "replacement", "ranks", "faults", "found"),
    [
        ("executor/direct.cc", "if (!board_.is_slot_free(sequence_)) return false;", "",
         2, "none", "race in memory"),
        ("transport/board.cc", "has_released(r, next)", "has_released(r, next - 1)",
         2, "none", "race in memory"),
        ("executor/direct.cc", "bool DirectExecution::is_released() {",
         "bool DirectExecution::is_released() {\n  return true;", 2, "none", "wrong byte"),
        ("executor/direct.cc", "if (!input_is_read_ && staging_.input_end > board_.input_bytes() &&",
         "if (false && staging_.input_end > board_.input_bytes() &&", 2, "none", "race in memory"),
        ("executor/direct.cc",
         "if (stages && board_.has_staging() && producing_.output_end > board_.output_bytes() &&",
         "if (false && producing_.output_end > board_.output_bytes() &&",
         2, "none", "race in memory"),
        ("executor/direct.cc", "  ++staged_ahead_;\n  move_to_next(staging_);",
         "  move_to_next(staging_);", 2, "none", "waits forever"),
        # A rank that stages joins blocks, and then waits until it has staged fewer blocks ahead.
        ("executor/direct.cc", "!stages && !reduces(call_.collective)",
         "!reduces(call_.collective)", 2, "none", "waits forever"),
        # A rank publishes more blocks ahead than fit into its ring.
        ("executor/direct.cc", "lookahead_ = board_.lookahead();", "lookahead_ = 6;",
         2, "none", "waits forever"),
        ("executor/direct.cc",
         "board_.wake_others();\n  ++staged_ahead_;", "++staged_ahead_;",
         2, "none", "no rank wakes it"),
        ("executor/direct.cc", "if (slot.fingerprint != fingerprint_) board_.mismatch(checked_);", "",
         2, "none", "no rank reports the mismatch"),
        ("executor/direct.cc", "copy(0, data_of(call_.root) + own);",
         "copy(0, data_of(call_.root));", 2, "none", "wrong byte"),
        ("executor/direct.cc", "    flag_.store(1);\n", "", 2, "timeout",
         "writes arrays of rank"),
        ("executor/direct.cc", "    std::atomic_thread_fence(std::memory_order_acquire);\n"
         "    endpoint_.check();", "", 2, "timeout", "uses data that it read"),
        # A rank does not wait for remote reads of its input, and of its output.
        ("executor/direct.cc", "input_is_mapped || operands.remote_input != 0;",
         "input_is_mapped;", 2, "none", "reads arrays of rank"),
        ("executor/direct.cc", "bool is_read = is_cut_ ? output_is_read_ :",
         "bool is_read = is_cut_ ? output_is_mapped_ :", 2, "none", "reads arrays of rank"),
        # A root of a broadcast does not wait for its readers, or leaves out a part of its share.
        ("executor/direct.cc", "(may_write_ && contains_rank(roles_->readers, rank));", "false;",
         2, "none", "wrong byte"),
        ("executor/direct.cc", "theirs = readers_share(own.bytes);",
         "theirs = readers_share(own.bytes) + 1;", 2, "none", "wrong byte"),
        # A rank that writes to a peer's output does not announce it.
        ("executor/direct.cc", "PeerAccess access(board_, endpoint_, true);\n    const std::size_t",
         "PeerAccess access(board_, endpoint_, false);\n    const std::size_t",
         2, "timeout", "writes arrays of rank"),
        # A rank copies its share of a broadcast, and does not wait for that of the root.
        ("executor/direct.cc", "  if (!joins && !reached(&Board::Counters::published,",
         "  if (!joins && !output_is_mapped_ && !reached(&Board::Counters::published,",
         2, "none", "race in memory"),
        # Remote reads do not check for a failure.
        ("executor/direct.cc", "in_place || peer.input || peer.output || peer.remote_input",
         "in_place || peer.input || peer.output", 2, "timeout", "uses data that it read"),
        ("executor/direct.cc", "(mapped_of(r) || remote_of(r))", "mapped_of(r)",
         2, "timeout", "uses data that it read"),
        ("executor/direct.cc", "  return inputs && board_.peers", "  return inputs || board_.peers",
         2, "none", "waits forever"),
        ("executor/direct.cc", "  if (!found.empty() || mode_ != Mode::blocks) return found;",
         "  return found;", 2, "death", "does not name the dead rank"),
        # A rank copies out its own chunk before the chunk's claimant has published it.
        ("executor/direct.cc", "  if (all_share_ &&\n      board_.counters(rank).published",
         "  if (false &&\n      board_.counters(rank).published", 2, "none", "race in memory"),
        # A rank claims a chunk that is claimed already.
        ("executor/direct.cc", "if (seen >= claim_of(producing_.input_end, 0)) continue;",
         "if (seen >= claim_of(producing_.input_end, rank)) continue;",
         2, "none", "race in memory"),
        # A rank does not move past the places of parts that the board does not move.
        ("executor/direct.cc", "    board_.input_position = place_one_shot();\n", "",
         2, "none", "wrong byte"),
        # A rank moves its equal parts, and another rank's parts differ.
        ("executor/direct.cc", "!have_posted() || parts_differ_ ||", "!have_posted() ||",
         2, "none", "has moved parts of different lengths"),
        # A rank names the owner of a chunk, but waits for the chunk's claimant.
        ("executor/direct.cc", "const int claimant = claimant_of(counters.claim.load());",
         "const int claimant = r;", 2, "death", "does not name the dead rank"),
    ],
)  # fmt: skip
def test_model_finds_a_planted_fault(
    build: Build, source: str, line: str, replacement: str, ranks: int, faults: str, found: str
) -> None:
    status, output = _explore(build(source, line, replacement), ranks, faults)
    assert status == 1, output
    assert found in output, output
