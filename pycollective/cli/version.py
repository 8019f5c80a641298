"""``pycollective --version``: the facts that a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from typing import Any

from pycollective import __version__, _core, array_backend, nccl
from pycollective.errors import NcclNotFoundError

_OF_EXTRAS = (
    "numpy", "threadpoolctl", "tqdm", "safetensors", "scikit-learn", "cupy-cuda12x", "cupy-cuda13x",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "ml_dtypes", "matplotlib", "h5py", "pillow",
    "tensorboard", "shtab", "ray", "mpi4py",
)  # fmt: skip


class ShowVersion(argparse.Action):
    """The option ``--version``. Only this option collects the facts: collecting them takes time."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(
            option_strings, dest, nargs=0, help="print what a bug report needs, and exit"
        )

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        """Print the facts and end the program."""
        print(facts(versions()))
        parser.exit()


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package and the packages of its extras (None: missing)."""
    import importlib.metadata  # takes 10 ms, and other commands do not need it

    found: dict[str, str | None] = {
        "pycollective": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in _OF_EXTRAS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def facts(found: dict[str, str | None]) -> str:
    """Return `versions`, the build of the core, the machine and its GPUs, in four lines."""
    cuda = _core.cuda.runtime_version()
    core = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else "without CUDA"
    quota = _core.quota_of_cores("")
    gpus, why = array_backend.gpu_count()
    try:
        library = f"NCCL {nccl.library().version_text}"
    except NcclNotFoundError:
        library = "no NCCL"
    return "\n".join(
        (
            ", ".join(f"{name} {version}" for name, version in found.items() if version),
            f"core: {core}, compiled by {_core.compiler}",
            f"cores: {_core.usable_cores()} usable of {os.cpu_count()}, "
            f"cgroup quota {f'{quota:g}' if quota else 'none'}",
            f"GPUs: {gpus}{f' ({why})' * bool(why)}, {library}",
        )
    )
