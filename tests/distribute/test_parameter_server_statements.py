"""Statements about parameter servers, with threads, with processes that map variables, and with TCP."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import hangs
import pytest

PROGRAM = Path(__file__).parent / "parameter_server_statements.py"


def statements():
    """Return the names of the program's statements."""
    nodes = ast.parse(PROGRAM.read_text()).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    first = names.index("variables_are_placed_in_turn_in_the_order_of_their_creation")
    return [name for name in names[first:] if name != "main"]


@pytest.fixture(scope="module", params=["threads", "processes", "tcp"])
def findings(request, tmp_path_factory):
    """Run the program once for a kind of cluster; return the errors of the statements by name."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TF_CONFIG", None)
    launcher = ["-m", "pycollective", "run", "--ps", "2", "--workers", "2", "--chief"]
    if request.param == "threads":
        launcher = []
    elif request.param == "tcp":
        environment["PYCOLLECTIVE_TRANSPORT"] = "tcp"
    command = [sys.executable, *launcher, str(PROGRAM), str(folder / "found.json")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=hangs.SECONDS, env=environment, cwd=folder
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("statement", statements())
def test_statement_about_parameter_servers_holds(findings, statement):
    assert findings[statement] == ""
