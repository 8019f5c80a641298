"""Random tensors, and the generator behind everything random in the package."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ..array_backend import Array
from ..dtypes import as_dtype, float32
from .ops.arrays import shape_of
from .tape import record
from .tensor import Tensor, as_tensor

__all__ = [
    "default_generator",
    "generator_scope",
    "normal",
    "set_seed",
    "shuffle",
    "spawn",
    "stateless_normal",
    "stateless_truncated_normal",
    "stateless_uniform",
    "truncated_normal",
    "uniform",
]

_lock = threading.Lock()
_seed: int | None = None
_generator = np.random.default_rng()
_by_seed: dict[int, np.random.Generator] = {}


class _ThreadState(threading.local):
    generator: np.random.Generator | None = None


_thread = _ThreadState()


def set_seed(seed: int | None) -> None:
    """Start the default generator anew; equal seeds give equal numbers. None: from the system."""
    global _seed, _generator
    with _lock:
        _seed = None if seed is None else int(seed)
        _generator = np.random.default_rng(_seed)
        _by_seed.clear()


def default_generator() -> np.random.Generator:
    """Return the generator of this thread's `generator_scope`, else the one of the process.

    NumPy's generators lock themselves for each call, so several threads may draw from one; which of
    them gets which numbers is then a matter of chance.
    """
    return _thread.generator or _generator


@contextmanager
def generator_scope(generator: np.random.Generator) -> Iterator[None]:
    """Let everything random in this thread draw from ``generator`` inside the ``with`` block."""
    before, _thread.generator = _thread.generator, generator
    try:
        yield
    finally:
        _thread.generator = before


def spawn(count: int) -> list[np.random.Generator]:
    """Return independent generators, say one per replica, that follow from the default one.

    The default one goes on as if nothing had been: what a program draws does not depend on how many
    helpers there are.
    """
    bits: Any = default_generator().bit_generator
    sequence = getattr(bits, "seed_seq", None) or bits._seed_seq  # its name before NumPy 1.25
    with _lock:  # NumPy's count of children is not locked
        return [np.random.default_rng(child) for child in sequence.spawn(count)]


def _generator_for(seed: int | None) -> np.random.Generator:
    """Return the generator of an operation: each operation seed has its own, which goes on."""
    if seed is None:
        return default_generator()
    with _lock:
        if seed not in _by_seed:
            _by_seed[seed] = np.random.default_rng([seed, *([] if _seed is None else [_seed])])
        return _by_seed[seed]


def _floats(dtype: Any, name: str) -> np.dtype[Any]:
    kind = as_dtype(dtype)
    if kind.kind not in "fV":
        raise TypeError(f"{name} makes floating-point numbers, got dtype {kind}")
    return kind


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    seed: int | None = None,
) -> Tensor:
    """Return normally distributed numbers."""
    kind = _floats(dtype, "normal")
    draw = _generator_for(seed).standard_normal(shape_of(shape))
    return Tensor(np.asarray(draw * np.asarray(stddev) + np.asarray(mean)).astype(kind))


def truncated_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    seed: int | None = None,
) -> Tensor:
    """Return normally distributed numbers, none further than two ``stddev`` from ``mean``."""
    kind = _floats(dtype, "truncated_normal")
    draw = truncated(_generator_for(seed), shape_of(shape))
    return Tensor((draw * np.asarray(stddev) + np.asarray(mean)).astype(kind))


def truncated(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return an array of normally distributed numbers, drawn again until none is beyond 2."""
    draw: Array = np.asarray(generator.standard_normal(shape))
    outside = np.abs(draw) > 2
    while outside.any():
        draw[outside] = generator.standard_normal(int(outside.sum()))
        outside = np.abs(draw) > 2
    return draw


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = float32,
    seed: int | None = None,
) -> Tensor:
    """Return numbers from ``minval`` up to, and without, ``maxval`` (1 for floating point)."""
    kind = as_dtype(dtype)
    generator = _generator_for(seed)
    sizes = shape_of(shape)
    if kind.kind in "iu":
        if maxval is None:
            raise ValueError(f"uniform: integers ({kind}) need a maxval")
        if not int(minval) < int(maxval):
            raise ValueError(f"uniform: minval {minval} must be below maxval {maxval}")
        return Tensor(np.asarray(generator.integers(int(minval), int(maxval), sizes, dtype=kind)))
    kind = _floats(dtype, "uniform")
    low = np.asarray(minval, np.float64)
    high = np.asarray(1 if maxval is None else maxval, np.float64)
    numbers = np.asarray(low + (high - low) * generator.random(sizes))
    rounded = numbers.astype(kind)
    # Rounding to fewer digits can reach the upper end, which does not belong to the interval.
    end = high.astype(kind)
    return Tensor(np.where(rounded >= end, np.nextafter(end, low.astype(kind)), rounded))


def shuffle(value: Any, seed: int | None = None) -> Tensor:
    """Return the parts of a tensor along its first axis in random order."""
    x = as_tensor(value)
    order = _generator_for(seed).permutation(len(x))
    back = np.argsort(order)
    return record(x.array[order], (x,), lambda g, _need: (g[back],))


def _of_seeds(seed: Any) -> AbstractContextManager[None]:
    """Return the scope in which numbers follow from two integers alone, as `make_seeds` gives them."""
    words = np.asarray(as_tensor(seed).array)
    if words.shape != (2,) or words.dtype.kind not in "iu":
        raise ValueError(
            f"seed must be two integers, not {words.dtype} of shape {tuple(words.shape)}"
        )
    key = np.array([int(word) % 2**64 for word in words.tolist()], np.uint64)
    return generator_scope(np.random.Generator(np.random.Philox(key=key)))


def stateless_normal(
    shape: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = float32
) -> Tensor:
    """Return normally distributed numbers: always the same ones for two integers as the seed."""
    with _of_seeds(seed):
        return normal(shape, mean, stddev, dtype)


def stateless_truncated_normal(
    shape: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = float32
) -> Tensor:
    """Return numbers as `truncated_normal` does, always the same for two integers as the seed."""
    with _of_seeds(seed):
        return truncated_normal(shape, mean, stddev, dtype)


def stateless_uniform(
    shape: Any, seed: Any, minval: Any = 0, maxval: Any = None, dtype: Any = float32
) -> Tensor:
    """Return numbers as `uniform` does, always the same for two integers as the seed."""
    with _of_seeds(seed):
        return uniform(shape, minval, maxval, dtype)
