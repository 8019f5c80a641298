"""Data from a network is bytes and JSON; no code path unpickles it."""

from __future__ import annotations

import ast
from pathlib import Path

import pycollective

ROOT = Path(pycollective.__file__).parent
RUN_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
#: A process and the children that it starts by `multiprocessing` exchange pickles. Ranks do so only
#: if the program passes ``pickle=True`` on each of them.
TRUSTED = {
    ROOT / "launch/spawn.py": {"pickle"},
    ROOT / "comm/objects.py": {"pickle"},
}
#: mpi4py's methods in small letters pickle sent data and unpickle received data.
PICKLE_IN_MPI = {
    "allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "gather", "ibsend", "improbe",
    "iprobe", "irecv", "isend", "issend", "mprobe", "probe", "recv", "reduce", "scan", "scatter", "send",
    "sendrecv", "ssend",
}  # fmt: skip


def nodes_of(source):
    return list(ast.walk(ast.parse(source)))


def calls_in(nodes):
    return [node for node in nodes if isinstance(node, ast.Call)]


def imported(nodes):
    """Return the first parts of the names of all modules that a source imports, at any time."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]
    for call in calls_in(nodes):
        named = call.args[0] if call.args else None
        importing = ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")
        if importing and isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value.split(".")[0]


def pickling(nodes):
    """Return the calls for which mpi4py would pickle."""
    return [
        call.func.attr
        for call in calls_in(nodes)
        if isinstance(call.func, ast.Attribute) and call.func.attr in PICKLE_IN_MPI
    ]


def test_modules_import_no_pickle():
    """Ray itself pickles what it hands to its actors: that is Ray's own transport."""
    seen = set()
    for path in ROOT.rglob("*.py"):
        nodes = nodes_of(path.read_text(encoding="utf-8"))
        modules, calls = set(imported(nodes)), calls_in(nodes)
        seen |= modules
        assert RUN_CODE & modules == TRUSTED.get(path, set()), path
        allowed = [k for c in calls for k in c.keywords if k.arg == "allow_pickle"]
        assert all(ast.unparse(k.value) == "False" for k in allowed), path
        names = [c.func.id for c in calls if isinstance(c.func, ast.Name)]
        assert not {"eval", "exec"} & set(names), path
    assert {"json", "numpy", "mpi4py", "ray"} <= seen


def test_mpi_calls_pass_arrays_only():
    users = [p for p in ROOT.rglob("*.py") if "mpi4py.MPI" in p.read_text(encoding="utf-8")]
    found = {p.relative_to(ROOT).as_posix() for p in users}
    assert {"comm/mpi_group.py", "cluster/over_mpi.py"} <= found
    for path in [*users, ROOT / "comm" / "mpi.py"]:
        assert not pickling(nodes_of(path.read_text(encoding="utf-8"))), path
    assert pickling(nodes_of("names = comm.allgather(name)")) == ["allgather"]
