"""The division of the threads of BLAS and of kernels among replicas, and among processes of a host.

With one BLAS thread per core in each replica, threads wait for each other. threadpoolctl (extra
``train``) limits the number.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
from typing import Any

from pycollective import _core
from pycollective import _nn as kernels

_log = logging.getLogger("pycollective")
_lock = threading.Lock()

#: Modules with a BLAS of their own, which may be imported at any time.
_WITH_BLAS = ("scipy.linalg", "torch")


def _controller() -> Any:
    return _controller_of(*map(sys.modules.__contains__, _WITH_BLAS))


@functools.cache
def _controller_of(*_imported: bool) -> Any:
    try:
        import threadpoolctl
    except ImportError:
        _log.warning(
            "threadpoolctl is not installed: each replica's BLAS uses all cores, which makes training "
            "with several CPU replicas slow; pip install 'pycollective[train]'"
        )
        return None
    # The search for the libraries takes milliseconds, so its result is kept.
    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    for library in controller.lib_controllers:
        # PyDLL keeps the GIL during calls, which are shorter than taking the GIL again.
        with contextlib.suppress(AttributeError):  # another version of threadpoolctl
            library.dynlib = ctypes.PyDLL(library.filepath, handle=library.dynlib._handle)
    return controller


def controls_threads() -> bool:
    """Return True if the number of BLAS threads can be set."""
    return _controller() is not None


#: The numbers of threads before the first limit: of kernels and reductions, and of each BLAS library.
_unlimited: list[tuple[int, list[tuple[Any, int]]]] = []


def limit_to_share(processes: int) -> None:
    """Use a share of the host's cores from now on; ``processes`` of the job run on the host.

    Cores to which a launcher has bound this process are its share already.
    """
    if processes == 1 and not _unlimited:
        return
    cores = os.cpu_count() or 1
    quota = _core.quota_of_cores("")
    share = int(min(cores, quota or cores) // processes)
    share = max(1, min(_core.usable_cores(), share))
    with _lock:
        if not _unlimited:
            controller = _controller()
            libraries = [] if controller is None else controller.lib_controllers
            _unlimited.append((kernels.threads(), [(x, x.get_num_threads()) for x in libraries]))
        threads, of_libraries = _unlimited[0]
        kernels.set_threads(min(threads, share))
        _core.set_threads(min(threads, share))  # these are not divided among replicas
        for library, most in of_libraries:
            library.set_num_threads(min(most, share))
        shared_among.cores = share


class shared_among:
    """Divide the threads among ``replicas`` for the length of a block.

    The limit holds for the whole process. If blocks overlap, the first one sets it.
    """

    #: The cores of this process.
    cores = _core.usable_cores()
    _depth = 0
    _threads_before = 0
    _limiter: Any = None

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def __enter__(self) -> None:
        kind, replicas = shared_among, self._replicas
        with _lock:
            kind._depth += 1
            if kind._depth > 1:
                return
            kind._threads_before = kernels.threads()
            kernels.set_threads(max(1, kind._threads_before // replicas))
            controller = _controller()
            if controller is not None:
                limits = max(1, kind.cores // replicas)
                kind._limiter = controller.limit(limits=limits)

    def __exit__(self, *exc_info: object) -> None:
        kind = shared_among
        with _lock:
            kind._depth -= 1
            if kind._depth:
                return
            kernels.set_threads(kind._threads_before)
            if kind._limiter is not None:
                kind._limiter.restore_original_limits()
