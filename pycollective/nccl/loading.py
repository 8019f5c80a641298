"""The search for libnccl: in the process, by a variable, in NVIDIA's package, in the system."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from pycollective import _core
from pycollective.errors import NcclNotFoundError

VARIABLE = "PYCOLLECTIVE_NCCL_LIBRARY"
"""Path of the library to use."""

_NAME = "libnccl.so.2"
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE", 23000
"""NCCL's variable for several processes on one GPU, and its first version with that variable."""
_log = logging.getLogger("pycollective")
_lock = threading.Lock()
_opened: _core.nccl.Library | None = None


def library() -> _core.nccl.Library:
    """Return NCCL's library, opened at the first call.

    A library that CuPy or PyTorch has loaded comes first, because two copies in one process would not
    work together. The next ones are the library that ``PYCOLLECTIVE_NCCL_LIBRARY`` names, that of the
    package ``nvidia-nccl-cu12`` or ``-cu13``, and the system's.

    Raises
    ------
    NcclNotFoundError
        No usable library was found; the message lists the places searched.
    """
    global _opened
    with _lock:
        if _opened is None:
            _opened = _open()
        return _opened


def _open() -> _core.nccl.Library:
    tried = []
    for source, find, loaded in _places():
        name = find()
        if name is None:
            tried.append(f"{source}: none")
            continue
        try:
            found = _core.nccl.Library(name, loaded)
        except NcclNotFoundError as error:
            # The program chose this library: do not search for another one.
            if source == VARIABLE or (loaded and error.is_too_old):
                raise NcclNotFoundError(f"NCCL cannot be used ({source}): {error}") from None
            tried.append(f"{source}: {error}")
            continue
        _log.info("NCCL %s, %s: %s", found.version_text, source, found.path)
        return found
    raise NcclNotFoundError(
        "NCCL was not found: pip install nvidia-nccl-cu12 (or -cu13, the CUDA version of CuPy), or "
        f"set {VARIABLE} to a {_NAME}. Searched: {'; '.join(tried)}"
    )


def _places() -> Iterator[tuple[str, Callable[[], str | None], bool]]:
    """Yield for each place its name, a function that finds its library, and True if it is loaded."""
    yield "loaded in this process", lambda: _NAME, True
    named = os.environ.get(VARIABLE)
    if named:
        yield VARIABLE, lambda: named, False
    yield "package nvidia-nccl", _in_package, False
    yield "system", lambda: _NAME, False


def _in_package() -> str | None:
    """Return the library of NVIDIA's package, found by cuda-pathfinder or at its usual path."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        return str(pathfinder.load_nvidia_dynamic_lib("nccl").abs_path)
    except (ImportError, RuntimeError):  # not installed, or no library found
        pass
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder, "nccl", "lib", _NAME)
        if path.exists():
            return str(path)
    return None


def cuda_major(found: _core.nccl.Library) -> int | None:
    """Return the major version of CUDA with which a library was built, or None if it is unknown.

    NCCL has no function for it. Its file contains the line that ``NCCL_DEBUG=VERSION`` prints.
    """
    path = Path(found.path)
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        match = re.search(rb"NCCL version [0-9.]+\+cuda([0-9]+)\.", content)
        return None if match is None else int(match[1])


def may_share_gpus(found: _core.nccl.Library) -> bool:
    """Return True if NCCL's variable allows several ranks on one GPU, and its version supports it."""
    variable, since = _SHARING
    return found.version >= since and os.environ.get(variable, "0").strip() not in ("", "0")


def require_cuda(found: _core.nccl.Library, driver: int) -> None:
    """Raise NcclNotFoundError if a library needs a newer CUDA than the driver's (12040 is 12.4)."""
    major = cuda_major(found)
    if major is not None and major > driver // 1000:
        raise NcclNotFoundError(
            f"NCCL {found.version_text} ({found.path}) was built with CUDA {major}, but the driver here "
            f"supports CUDA up to {driver // 1000}.{driver // 10 % 100}: install nvidia-nccl-cu"
            f"{driver // 1000} instead, or a newer driver"
        )
