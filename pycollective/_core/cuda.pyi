"""The CUDA part of this build, and its kernels alone for tests and benchmarks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def built() -> bool: ...
def runtime_version() -> int: ...
def device_count() -> tuple[int, str]: ...
def combine(
    op: str,
    dtype: np.dtype[Any],
    targets: Sequence[int],
    sources: Sequence[int],
    count: int,
    size: int = 0,
    device: int = 0,
    stream: int = 0,
) -> None: ...
def combine_on_host(
    op: str,
    sources: Sequence[npt.NDArray[Any]],
    outputs: Sequence[npt.NDArray[Any]],
    size: int = 0,
    multiprocessors: int = 1,
) -> None: ...
def pack_on_host(
    packed: npt.NDArray[Any],
    pieces: Sequence[npt.NDArray[Any]],
    offsets: Sequence[int],
    scale: float = 1.0,
    unpacks: bool = False,
    multiprocessors: int = 1,
) -> None: ...
def cut(
    arrays: Sequence[int],
    count: int,
    item: int,
    tile_vectors: int,
    multiprocessors: int,
) -> tuple[int, int, int, bool, int]: ...
