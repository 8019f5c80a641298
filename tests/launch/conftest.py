"""Fixture that runs groups of real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PREAMBLE = """
import os, signal, sys, time
import numpy as np
import pycollective as pc
comm = pc.init(timeout=20)
"""


@pytest.fixture(params=["shm", "tcp"])
def run_on(request, tmp_path):
    """Return a function that runs a script on n ranks and returns status, output and errors."""

    def run(ranks, body):
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE + body)
        how = ["run", "--transport", request.param, "-n", str(ranks), str(script)]
        done = subprocess.run(
            [sys.executable, "-m", "pycollective", *how],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run
