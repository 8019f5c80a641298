"""The stubs of compiled modules have the functions, methods and parameters that the modules have."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycollective import _core, _nn

STUBS = Path(__file__).resolve().parents[2] / "pycollective"
MODULES = {
    "_core/__init__": _core,
    "_core/cuda": _core.cuda,
    "_core/nccl": _core.nccl,
    "_core/device": _core.device,
    "_nn": _nn,
}


def declared(stub: Path) -> dict[str, list[str]]:
    """Return the parameters of every function and method that a stub declares."""
    found = {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                if any(getattr(d, "id", "") == "property" for d in node.decorator_list):
                    continue
                if node.name.startswith("_") and node.name != "__init__":
                    continue
                found[prefix + node.name] = [a.arg for a in node.args.posonlyargs + node.args.args]

    visit(ast.parse(stub.read_text()).body, "")
    return found


def documented(function) -> list[str]:
    """Return the parameters, from the first line of pybind11's docstring or from the signature."""
    if "->" not in function.__doc__.splitlines()[0]:
        return list(inspect.signature(function).parameters)
    signature = re.match(r"\w+\((.*)\) ->", function.__doc__.splitlines()[0])[1]
    depth, parts, part = 0, [], ""
    for letter in signature + ",":
        depth += letter in "[(<"
        depth -= letter in "])>"
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [p.split(":")[0].strip() for p in parts if p.strip()]


def compiled(module) -> dict[str, list[str]]:
    """Return the parameters of every function and method of a compiled module."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            for method, function in vars(value).items():
                if isinstance(function, staticmethod):
                    function = function.__func__
                is_public = method == "__init__" or not method.startswith("_")
                if is_public and callable(function) and "->" in (function.__doc__ or ""):
                    found[f"{name}.{method}"] = documented(function)
        elif callable(value):
            found[name] = documented(value)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_stub_has_the_names_of_the_module(name):
    module = MODULES[name]
    want = {k: v for k, v in compiled(module).items() if not _is_enum(module, k)}
    assert declared(STUBS / f"{name}.pyi") == want


def _is_enum(module, name):
    return hasattr(getattr(module, name.split(".")[0]), "__members__")


USED = """
import sys
import pycollective
(comm,) = pycollective.local_group(1)
comm.all_reduce([1.0, 2.0])
comm.all_reduce_many([[1.0], [2.0]])
print("pycollective._core" in sys.modules, "pycollective._nn" in sys.modules)
import pycollective.nn
print("pycollective._nn" in sys.modules)
"""


def test_kernels_are_loaded_at_their_first_use(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", USED], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", "True"]
