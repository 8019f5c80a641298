"""The types of the public interface, as checkers see them in a user's program."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pycollective as pc

TOP = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("program.py")


@pytest.mark.slow
def test_mypy_finds_the_marked_errors_of_a_users_program():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", str(PROGRAM)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("Success: no issues found in 1 source file\n", "")


@pytest.mark.slow
def test_pyright_finds_the_marked_errors_of_a_users_program(tmp_path):
    pytest.importorskip("basedpyright", reason="pyright as a package of PyPI is not installed")
    settings = {
        "include": [str(PROGRAM)],
        "extraPaths": [str(TOP)],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "0 errors, 0 warnings, 0 notes\n"


@pytest.mark.parametrize("name", [one for one in dir(pc.Communicator) if one[0] != "_"])
def test_communicator_signatures_have_no_any(name):
    call = getattr(pc.Communicator, name)
    if not callable(call):
        return
    types = {**call.__annotations__}
    if name == "from_mpi":
        del types["comm"]  # of mpi4py, which need not be installed
    if name.endswith("_object"):
        types.pop("return")  # an object of any type
    assert [one for one, kind in types.items() if "Any" in str(kind)] == []
    assert inspect.signature(call).return_annotation is not inspect.Signature.empty
