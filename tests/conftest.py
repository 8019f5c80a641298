"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import device_arrays
import leftovers
import namespaces
import pytest

# The tests expect the built-in table of algorithms, not one that was measured on this machine.
os.environ["PYCOLLECTIVE_TUNING"] = "none"
# Many tests wait for a deadline and compare stderr; only tests/observe turns warnings on.
os.environ["PYCOLLECTIVE_WARN_AFTER"] = "inf"
# For the processes that tests start. Idle threads of BLAS spin, which makes an import of NumPy take
# half as much processor time again.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The tests and the imported modules are 300,000 objects. A collection of garbage that visits them takes
# 0.2 s, and many tests ask for one.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _bytecode(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep compiled modules for the processes that tests start, if Python is told to write none.

    Compiling the package takes a third of the time that such a process needs to start.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("bytecode"))


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    leftovers.before = set(threading.enumerate())


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for CuPy, which is imported while the test runs."""
    module = device_arrays.make_cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    # The real CUDA module cannot read the stand-in's arrays.
    monkeypatch.setattr("pycollective.comm.on_device.runtime", lambda: None)
    return module


@pytest.fixture(autouse=True)
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no libnccl, also where NVIDIA's package is installed; folders with NCCL tests override this.

    A library that is loaded once stays in the process. Tests would use it instead of their own.
    """
    monkeypatch.setattr("pycollective.nccl.loading._opened", None)
    monkeypatch.setattr("pycollective.nccl.loading._places", lambda: iter(()))


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """Folder of the real MNIST files; skips where there is none."""
    here = Path(__file__).resolve().parents[1]
    named = os.environ.get("PYCOLLECTIVE_DATA")
    for folder in ([Path(named), Path(named) / "mnist"] if named else []) + [
        here.parent / "shared/data/mnist"
    ]:
        if (folder / "train-images-idx3-ubyte.gz").exists():
            return folder
    pytest.skip("no MNIST files: set PYCOLLECTIVE_DATA to their folder")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Return the names of three network namespaces, with the addresses 10.213.7.1 to .3."""
    with namespaces.hosts(3) as names:
        yield names


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Return a function that calls ``work(communicator)`` for each rank in a thread of its own.

    The results stand in rank order; a rank that raised has its exception there. An assertion that
    failed on a rank fails the test. Never hangs: threads are joined with a time limit.
    """

    def run(communicators: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = [None] * len(communicators)

        def rank(i: int) -> None:
            try:
                results[i] = work(communicators[i])
            except BaseException as error:
                results[i] = error

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(communicators))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        for result in results:
            if isinstance(result, (AssertionError, pytest.fail.Exception)):
                raise result
        return results

    return run


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT, which a shell's background job starts without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
