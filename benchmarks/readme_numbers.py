"""Write the table of numbers in README.md from the newest results in benchmarks/results.

    python benchmarks/readme_numbers.py

The table has all_reduce beside MPI (compare.py), and training beside TensorFlow and PyTorch
(compare_training.py, compare_workers.py). The date is the one in the name of the results' file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare

TOP = Path(__file__).resolve().parents[1]
README = TOP / "README.md"
BEGIN = "<!-- numbers: written by benchmarks/readme_numbers.py -->\n"
END = "<!-- end of numbers -->\n"
SIZES = (8, 64 * compare.KI, compare.MI, 16 * compare.MI)


def newest(name: str) -> tuple[str, Any]:
    """Return the date and the contents of the newest results of a benchmark."""
    files = sorted((TOP / "benchmarks" / "results").glob(f"{name}_[0-9]*.json"))
    return files[-1].stem.removeprefix(f"{name}_"), json.loads(files[-1].read_text())


def collectives() -> list[str]:
    """Return the table of all_reduce in two processes."""
    date, contents = newest("compare")
    results = contents["parts"]["processes2"]["all_reduce"]
    rows = []
    for title, name in (
        ("ordinary arrays", compare.OURS),
        ("`comm.empty()`", f"{compare.OURS}, comm.empty()"),
    ):
        cells = []
        for size in SIZES:
            ours = compare.median(results, name, size)
            peer = compare.best_peer(results, size, kind="mpi")
            assert ours and peer
            cells.append(f"{compare.time_text(ours)} ({ours / peer:.2f})")
        rows.append([title, *cells])
    peers = [compare.best_peer(results, size, kind="mpi") for size in SIZES]
    rows.append(["best of Open MPI, MPICH, Intel MPI", *(compare.time_text(p or 0) for p in peers)])
    cores = contents["machine"]["cores"]
    text = (
        f"`all_reduce` of float32 in place, 2 processes on {cores} cores, {date}: µs, and in brackets "
        "the time divided by that of the best MPI."
    )
    return [text, "", *compare.table(["", *map(compare.size_text, SIZES)], rows)]


def training() -> list[str]:
    """Return the table of training the tutorial's CNN."""
    date, threads = newest("compare_training")
    worker_date, workers = newest("compare_workers")
    speeds = {name: value["median"] for name, value in threads["samples_per_s"].items()}
    processes = workers["samples_per_s"]
    rows = [
        ["1 replica", speeds["pycollective x1"], speeds["TensorFlow Mirrored x1"],
         speeds["PyTorch x1"]],
        ["2 replicas in one process", speeds["pycollective x2"], speeds["TensorFlow Mirrored x2"], None],
        ["2 worker processes" if worker_date == date else f"2 worker processes ({worker_date})",
         processes["pycollective x2"], processes["TensorFlow x2"], processes["PyTorch DDP x2"]],
    ]  # fmt: skip
    cells = [[row[0], *("–" if x is None else f"{x:,.0f}" for x in row[1:])] for row in rows]
    peak = threads["peak_mib"]
    text = (
        f"Training the CNN of TensorFlow's tutorial (64 examples a replica), {threads['cores']} cores, "
        f"{date}: samples per second. Two replicas use at most "
        f"{peak['pycollective x2']} MiB of memory (TensorFlow: {peak['TensorFlow Mirrored x2']:,})."
    )
    return [text, "", *compare.table(["", "pycollective", "TensorFlow", "PyTorch"], cells)]


def section() -> str:
    """Return the section between the two marks in README.md."""
    return "\n".join([*collectives(), *training()]).rstrip() + "\n"


def replaced(readme: str) -> str:
    """Return the text of README.md with the section made anew."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + "\n" + section() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
