"""Measure the time until the other ranks notice a rank that is killed during an all-reduce.

    python benchmarks/fault_detection.py [--turns 7]

There are three ranks, as processes with shared memory and over TCP. Rank 1 kills itself with SIGKILL
while the others wait for it in an all-reduce. The time ends when the last rank gets its error.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
import numpy as np
import pycollective as pc
comm = pc.init(timeout=60)
comm.barrier()
if comm.rank == 1:
    time.sleep(0.3)
    with open("killed", "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(np.ones(100_000))
except pc.PeerLostError as error:
    now = time.time()
    assert "rank 1" in str(error), error
    with open(f"heard{comm.rank}", "w") as file:
        file.write(repr(now))
time.sleep(1)  # so that the other rank notices the dead rank itself, and not this one
"""


def detect(transport: str) -> float:
    """Return the seconds from the end of a rank to the last rank's error."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "script.py").write_text(SCRIPT)
        code = (
            "import os, sys\n"
            f"os.environ['PYCOLLECTIVE_TRANSPORT'] = {transport!r}\n"
            "from pycollective.cli import main\n"
            "sys.exit(main(['run', '-n', '3', 'script.py']))"
        )
        subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, timeout=60)
        killed = float((place / "killed").read_text())
        return max(float((place / f"heard{rank}").read_text()) for rank in (0, 2)) - killed


def main() -> None:
    """Measure, and print a line for each transport."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    for transport in ("shm", "tcp"):
        times = [detect(transport) * 1e3 for _ in range(args.turns)]
        print(
            f"{transport}: median {statistics.median(times):.1f} ms, at most {max(times):.1f} ms "
            f"({args.turns} turns)"
        )


if __name__ == "__main__":
    main()
