"""Threads of BLAS and of our own kernels, shared out among replicas instead of fighting for cores.

A BLAS that runs with all cores' threads in each of several replicas spends its time waiting for
itself. threadpoolctl (extra ``train``) sets the number while replicas run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pycollective import _core

__all__ = ["controls_threads", "shared_among"]

_log = logging.getLogger("pycollective")
_lock = threading.Lock()
_depth = 0
_restore: Callable[[], None] = lambda: None  # noqa: E731


#: What brings a BLAS of its own besides NumPy's, and may be imported at any time.
_WITH_BLAS = ("scipy.linalg", "torch")


def _controller() -> Any:
    return _controller_of(tuple([name in sys.modules for name in _WITH_BLAS]))


@functools.cache
def _controller_of(_imported: tuple[bool, ...]) -> Any:
    try:
        import threadpoolctl
    except ImportError:
        _log.warning(
            "threadpoolctl is not installed: each replica's BLAS uses all cores, which slows training "
            "with several CPU replicas down; pip install 'pycollective[train]'"
        )
        return None
    # Looking for the libraries takes milliseconds.
    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    for library in controller.lib_controllers:
        # Asked without letting go of the interpreter's lock: it takes less than getting it back.
        with contextlib.suppress(AttributeError):  # it keeps the library elsewhere
            library.dynlib = ctypes.PyDLL(library.filepath, handle=library.dynlib._handle)
    return controller


def controls_threads() -> bool:
    """Whether the number of BLAS threads can be set here."""
    return _controller() is not None


@contextlib.contextmanager
def shared_among(replicas: int) -> Iterator[None]:
    """Give each of ``replicas`` its share of the threads for the length of a block.

    The number is the process's; of blocks that overlap, the first one decides.
    """
    global _depth, _restore
    with _lock:
        _depth += 1
        if _depth == 1:
            _restore = _limit(replicas)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _restore()


def _limit(replicas: int) -> Callable[[], None]:
    """Divide the threads by the number of replicas, and return what sets them back."""
    from pycollective import (
        _nn as kernels,
    )  # here: the launcher asks for cores, and needs no kernels

    before = kernels.threads()
    kernels.set_threads(max(1, before // replicas))
    controller = _controller()
    limiter = None
    if controller is not None:
        limiter = controller.limit(limits=max(1, _core.usable_cores() // replicas))

    def restore() -> None:
        kernels.set_threads(before)
        if limiter is not None:
            limiter.restore_original_limits()

    return restore
