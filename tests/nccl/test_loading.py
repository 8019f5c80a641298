"""The choice of libnccl, the errors without one, and calls of its functions."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from pycollective import _core
from pycollective.errors import NcclError, NcclNotFoundError
from pycollective.nccl import loading as finding
from pycollective.nccl.types import count_and_type, reduction_of

SYSTEM_HAS_NONE = "cannot open shared object file"


@pytest.fixture
def nowhere(monkeypatch, no_library):
    """A machine without NCCL: not loaded, in no package, not in the system."""
    monkeypatch.setattr(finding, "_NAME", "libnccl-that-is-not-there.so.2")
    monkeypatch.setattr(finding, "_in_package", lambda: None)


def test_library_not_found_lists_the_places_searched(nowhere):
    with pytest.raises(NcclNotFoundError, match="pip install nvidia-nccl-cu12") as raised:
        finding.library()
    for place in ("loaded in this process: ", "package nvidia-nccl: none", "system: "):
        assert place in str(raised.value)


def test_library_named_by_the_variable_is_used(nowhere, monkeypatch, fake_path, caplog):
    monkeypatch.setenv(finding.VARIABLE, str(fake_path))
    with caplog.at_level("INFO", "pycollective"):
        found = finding.library()
    assert (found.version, found.version_text, found.path) == (22803, "2.28.3", str(fake_path))
    assert f"NCCL 2.28.3, {finding.VARIABLE}: {fake_path}" in caplog.text
    assert finding.library() is found
    assert len(found.unique_id()) == 128 != found.unique_id()
    assert found.error_text(5) == "invalid usage"


def test_library_named_wrongly_raises(nowhere, monkeypatch, tmp_path):
    for name, why in ((tmp_path / "none.so", SYSTEM_HAS_NONE), ("libm.so.6", "it is not NCCL")):
        monkeypatch.setenv(finding.VARIABLE, str(name))
        with pytest.raises(NcclNotFoundError, match=f"cannot be used .{finding.VARIABLE}.*{why}"):
            finding.library()


def test_library_that_is_too_old_raises(nowhere, monkeypatch, fake_path):
    monkeypatch.setenv(finding.VARIABLE, str(fake_path))
    monkeypatch.setenv("FAKE_NCCL_VERSION", "21200")
    with pytest.raises(NcclNotFoundError, match=r"is NCCL 2\.12\.0, which is too old: 2\.14\.0"):
        finding.library()


def test_library_search_order_is_loaded_then_variable_then_package(
    nowhere, monkeypatch, fake_path, older_path
):
    monkeypatch.setattr(finding, "_in_package", lambda: str(older_path))
    assert finding.library().version == 22100
    finding._opened = None
    monkeypatch.setenv(finding.VARIABLE, str(fake_path))
    assert finding.library().version == 22803
    finding._opened = None
    ctypes.CDLL(str(older_path))
    monkeypatch.setattr(finding, "_NAME", str(older_path))  # this process has loaded it
    assert finding.library().version == 22100


def test_library_of_the_system_is_loaded(nowhere, monkeypatch, fake_path, tmp_path, caplog):
    other = shutil.copy(fake_path, tmp_path / "libnccl-of-the-system.so.2")  # not loaded so far
    monkeypatch.setattr(finding, "_NAME", str(other))
    with caplog.at_level("INFO", "pycollective"):
        assert finding.library().path == str(other)
    assert f"NCCL 2.28.3, system: {other}" in caplog.text


def test_library_in_the_package_is_found(monkeypatch, tmp_path):
    here = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    here.parent.mkdir(parents=True)
    here.touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert finding._in_package() == str(here)
    found = types.SimpleNamespace(abs_path="/elsewhere/libnccl.so.2")
    pathfinder = types.SimpleNamespace(load_nvidia_dynamic_lib=lambda name: found)
    monkeypatch.setitem(sys.modules, "cuda", types.SimpleNamespace(pathfinder=pathfinder))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    assert finding._in_package() == "/elsewhere/libnccl.so.2"


def test_cuda_major_is_read_from_the_file(tmp_path):
    file = tmp_path / "libnccl.so.2"
    file.write_bytes(bytes(5000) + b"NCCL version 2.27.3+cuda13.0\0" + bytes(100))
    library = types.SimpleNamespace(path=str(file), version_text="2.27.3")
    assert finding.cuda_major(library) == 13
    finding.require_cuda(library, 13000)
    with pytest.raises(
        NcclNotFoundError, match="built with CUDA 13, but the driver.*to 12.4.*cu12"
    ):
        finding.require_cuda(library, 12040)
    file.write_bytes(b"another file")
    finding.require_cuda(library, 12040)  # the version is unknown


def test_functions_missing_in_a_version_raise(older_path):
    library = _core.nccl.Library(str(older_path))
    comm = _core.nccl.Comm(*_alone(library))
    for name, call in (
        ("ncclCommShrink, which came with 2.27.0", lambda: comm.shrink([1])),
        ("ncclAlltoAll, which came with 2.28.0", lambda: comm.all_to_all(0, 0, 0, 7, 0)),
    ):
        with pytest.raises(NcclError, match=f"NCCL 2.21.0 .*has no {name}"):
            call()
    with pytest.raises(
        TypeError, match=r"NCCL 2\.21\.0 .* does not support float8_e5m2: install NCCL 2\.24"
    ):
        float8 = pytest.importorskip("ml_dtypes").float8_e5m2
        count_and_type(library, 1, np.dtype(float8))
    comm.destroy()


def _alone(library):
    return library, library.unique_id(), 1, 0


def test_every_function_on_one_rank_works(fake_path):
    library = _core.nccl.Library(str(fake_path))
    comm = _core.nccl.Comm(*_alone(library), blocking=True, min_ctas=2, max_ctas=4)
    assert (comm.size(), comm.rank(), comm.async_error(), comm.alive) == (1, 0, 0, True)
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    a, b = x.ctypes.data, y.ctypes.data
    calls = [
        lambda: comm.all_reduce(a, b, 4, 7, 0, 1),
        lambda: comm.reduce(a, b, 4, 7, 4, 0, 1),
        lambda: comm.broadcast(a, b, 4, 7, 0, 1),
        lambda: comm.all_gather(a, b, 4, 7, 1),
        lambda: comm.reduce_scatter(a, b, 4, 7, 2, 1),
        lambda: comm.all_to_all(a, b, 4, 7, 1),
        lambda: comm.gather(a, b, 4, 7, 0, 1),
        lambda: comm.scatter(a, b, 4, 7, 0, 1),
        lambda: (library.group_start(), comm.send(a, 4, 7, 0, 1), comm.recv(b, 4, 7, 0, 1),
                 library.group_end()),
    ]  # fmt: skip
    for call in calls:
        y[:] = -1
        call()
        np.testing.assert_array_equal(y, x)
    half = comm.make_pre_mul_sum(np.float32(0.5).tobytes(), 7)
    comm.all_reduce(a, b, 4, 7, half, 1)
    np.testing.assert_array_equal(y, x / 2)
    comm.destroy_op(half)
    memory = library.mem_alloc(64)
    comm.deregister(comm.register(memory, 64))
    library.mem_free(memory)
    with pytest.raises(NcclError, match="ncclReduce failed: invalid argument: Reduce : in") as e:
        comm.reduce(a, b, 4, 7, 0, 3, 1)
    assert e.value.code == 4
    with pytest.raises(ValueError, match="has 128 bytes, not 3"):
        _core.nccl.Comm(library, b"abc", 1, 0)
    comm.finalize()
    comm.destroy()
    assert not comm.alive
    for call in (calls[0], comm.destroy, comm.abort, comm.async_error):
        with pytest.raises(NcclError, match="destroyed or aborted"):
            call()


def test_comm_passes_its_configuration(fake_path):
    """Unset options are left to NCCL; the version is never newer than the library's."""
    fake = ctypes.CDLL(str(fake_path))
    fake.fake_log.restype = ctypes.c_char_p
    library = _core.nccl.Library(str(fake_path))
    unset = -(2**31)
    for given, want in (
        ({}, (unset,) * 5),
        ({"blocking": True, "min_ctas": 2, "max_ctas": 4}, (1, 2, 4, unset, unset)),
        ({"blocking": False, "cga_cluster_size": 3, "split_share": True}, (0, unset, unset, 3, 1)),
    ):
        fake.fake_clear()
        comm = _core.nccl.Comm(*_alone(library), **given)
        words = re.findall(r"\w+=(\S+)", fake.fake_log().decode())
        assert [int(word) for word in words] == [1, *want, 21800]
        while comm.async_error() == _core.nccl.IN_PROGRESS:
            pass
        comm.abort()
        assert not comm.alive


TYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""NumPy's types by NCCL's numbers."""


def on_three(path, work):
    """Call ``work(comm, rank)`` on three ranks, and return the results."""
    library = _core.nccl.Library(str(path))
    unique_id = library.unique_id()
    found = [None] * 3

    def rank(r):
        ctypes.CDLL(str(path)).fake_set_device(r)
        found[r] = work(_core.nccl.Comm(library, unique_id, 3, r, blocking=True), r)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("name", TYPES)
def test_pre_mul_sum_scales(fake_path, name):
    """Each rank multiplies by its own factor."""
    number = TYPES.index(name)
    known = np.dtype(name) if number < 9 else getattr(pytest.importorskip("ml_dtypes"), name)
    kind = np.dtype(known)
    values = [np.array([1, 2, 3]).astype(kind), np.array([2, 0, 1]).astype(kind)] * 2
    outputs = [np.zeros(3, kind) for _ in range(3)]
    all_done = threading.Barrier(3)

    def work(comm, r):
        op = comm.make_pre_mul_sum(np.array(r + 1).astype(kind).tobytes(), number)
        a, b = values[r].ctypes.data, outputs[r].ctypes.data
        comm.all_reduce(a, b, 3, number, op, 1 + r)
        all_done.wait(20)
        total = outputs[r].astype(float).tolist()
        comm.reduce_scatter(a, b, 1, number, op, 1 + r)
        all_done.wait(20)
        comm.destroy_op(op)
        with pytest.raises(NcclError, match="ncclRedOpDestroy failed: invalid argument"):
            comm.destroy_op(0)
        comm.destroy()
        return total, float(outputs[r][0])

    want = [8.0, 8.0, 14.0]
    assert on_three(fake_path, work) == [(want, part) for part in want]


def test_comm_split_and_shrink_work(fake_path):
    def work(comm, r):
        part = comm.split(-1 if r == 1 else 0, -r)
        assert comm.device() == r
        rest = None if r == 2 else comm.shrink([2], abort=True)
        return [c and (c.rank(), c.size()) for c in (part, rest)]

    assert on_three(fake_path, work) == [[(1, 2), (0, 2)], [None, (1, 2)], [(0, 2), None]]


@pytest.mark.parametrize(
    ("dtype", "op", "why"),
    [("int16", "sum", "dtype int16"), (">f4", "sum", "dtype >f4"), ("bool", "sum", "'sum' .* bool"),
     ("complex64", "prod", "'prod' for dtype complex64"), ("int32", "xor", "'xor' for dtype int32")],
)  # fmt: skip
def test_unsupported_reductions_raise_type_error(dtype, op, why):
    library = types.SimpleNamespace(version=22803)
    with pytest.raises(TypeError, match=f"NCCL has no reduction.*{why}"):
        count_and_type(library, 1, np.dtype(dtype))
        reduction_of(op, np.dtype(dtype))


@pytest.fixture
def package():
    """Path of the library of NVIDIA's package."""
    if importlib.util.find_spec("nvidia") is None or finding._in_package() is None:
        pytest.skip("no package nvidia-nccl-cu12 or -cu13")
    return Path(finding._in_package())


@pytest.mark.slow
def test_declarations_match_the_header(package):
    """Functions and how many parameters they take, fields of the configuration, numbers of types."""
    header = (package.parents[1] / "include" / "nccl.h").read_text()
    ours = (Path(__file__).parents[2] / "csrc" / "nccl" / "api.h").read_text()
    functions = re.findall(r"F\((\w+), \d+,\s*\\?\s*\(([^)]*)\)\)", ours.split("FUNCTIONS(F)")[1])
    assert len(functions) == 30
    symbols = package.read_bytes()
    for name, parameters in functions:
        theirs = re.search(rf"^ncclResult_t\s+nccl{name}\(([^)]*)\)", header, re.MULTILINE)
        count = 0 if theirs[1].strip() in ("", "void") else theirs[1].count(",") + 1
        assert count == (parameters.count(",") + 1 if parameters else 0), name
        assert f"nccl{name}\0".encode() in symbols
    config = re.search(r"struct ncclConfig_v\w+ \{(.*?)\}", header, re.DOTALL)[1]
    fields = re.findall(r"^\s+[\w ]+[ *]+(\w+);", config, re.MULTILINE)[:9]
    known = re.findall(r"^  [\w:* ]+[ *](\w+) = ", ours.split("struct Config {")[1], re.MULTILINE)
    known = [name for name in known if not name.startswith("k")][:9]
    assert [f.lower() for f in fields] == [name.replace("_", "") for name in known]
    names = {"Char": "int8", "Bfloat16": "bfloat16", "Float8e4m3": "float8_e4m3fn",
             "Float8e5m2": "float8_e5m2"}  # fmt: skip
    for theirs, number in re.findall(r"\bnccl([UIBF]\w+\d)\s*= (\d+)", header):
        assert TYPES[int(number)] == names.get(theirs, theirs.lower())
    for op, number in (("Sum", 0), ("Prod", 1), ("Max", 2), ("Min", 3), ("Avg", 4)):
        assert re.search(rf"\bnccl{op}\s*= {number}\b", header)


@pytest.mark.slow
def test_real_library_can_be_opened(package):
    """The version, the unique id and the errors of NVIDIA's library need no GPU."""
    # In another process, because a process keeps an opened library.
    code = """
from pycollective import _core, nccl
from pycollective.errors import NcclError, NcclNotFoundError
from pycollective.nccl.loading import cuda_major, require_cuda
found = nccl.library()
assert "nvidia" in found.path and found.version >= 21900, found.path
assert cuda_major(found) in (12, 13), cuda_major(found)
assert len(found.unique_id()) == 128 != found.unique_id()
assert _core.nccl.Library("libnccl.so.2", loaded=True).path == found.path
try:
    require_cuda(found, 11080)
except NcclNotFoundError as error:
    assert "driver here supports CUDA up to 11.8" in str(error)
else:
    raise AssertionError
try:
    found.group_end()
except NcclError as error:
    assert error.code == 5 and "ncclGroupEnd failed: " in str(error), error
else:
    raise AssertionError
try:  # rank 5 of 2 does not exist, and the driver may be missing
    _core.nccl.Comm(found, found.unique_id(), 2, 5, blocking=False)
except NcclError as error:
    assert error.code in (1, 4, 5) and "ncclCommInitRankConfig failed: " in str(error), error
else:
    raise AssertionError
try:
    found.mem_free(found.mem_alloc(64))
except NcclError as error:  # without a driver
    assert error.code == 1 and "ncclMemAlloc failed: unhandled cuda error" in str(error), error
print("well")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert run.stdout == "well\n", run.stdout + run.stderr


def test_library_opened_by_several_threads_does_not_crash(fake_path, tmp_path):
    """pybind11 registers the new instances in a table, which needs the GIL."""
    program = f"""
import sys, threading
from pycollective import _core
sys.setswitchinterval(1e-6)
def open_some():
    for _ in range(20000):
        _core.nccl.Library({str(fake_path)!r}, False)
threads = [threading.Thread(target=open_some) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
