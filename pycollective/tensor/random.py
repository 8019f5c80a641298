"""Random tensors, and the default generator of all random operations of the package."""

from __future__ import annotations

import operator
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
    """Restart the default generator from a seed, or from a random one if ``seed`` is None.

    Equal seeds give equal numbers.
    """
    global _seed, _generator
    number = None if seed is None else _not_negative(seed)
    with _lock:
        _seed, _generator = number, np.random.default_rng(number)
        _by_seed.clear()


def _not_negative(seed: Any) -> int:
    """Return a seed as NumPy needs it; TensorFlow also accepts negative ones."""
    number = operator.index(seed)
    return number if number >= 0 else number % 2**64


def default_generator() -> np.random.Generator:
    """Return the generator of this thread's `generator_scope`, else the one of the process.

    NumPy's generators have a lock, so that several threads may share one; the distribution of the
    numbers over the threads then depends on timing.
    """
    return _thread.generator or _generator


@contextmanager
def generator_scope(generator: np.random.Generator) -> Iterator[None]:
    """Let all random operations of this thread use ``generator`` inside the ``with`` block."""
    before, _thread.generator = _thread.generator, generator
    try:
        yield
    finally:
        _thread.generator = before


def spawn(count: int) -> list[np.random.Generator]:
    """Return independent generators, such as one for each replica, derived from the default one.

    The numbers of the default generator do not change, so that a program's numbers do not depend on the
    number of derived generators.
    """
    bits: Any = default_generator().bit_generator
    sequence = getattr(bits, "seed_seq", None) or bits._seed_seq  # its name before NumPy 1.25
    with _lock:  # NumPy counts children without a lock
        return [np.random.default_rng(child) for child in sequence.spawn(count)]


def _generator_for(seed: int | None) -> np.random.Generator:
    """Return the generator of an operation: one for each operation seed, or the default one."""
    if seed is None:
        return default_generator()
    seed = _not_negative(seed)
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
    name: str | None = None,
) -> Tensor:
    """Return normally distributed numbers of a floating-point dtype."""
    kind = _floats(dtype, "normal")
    draw = _generator_for(seed).standard_normal(shape_of(shape))
    return Tensor(np.asarray(draw * np.asarray(stddev) + np.asarray(mean)).astype(kind))


def truncated_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Return normally distributed numbers, all within two ``stddev`` of ``mean``."""
    kind = _floats(dtype, "truncated_normal")
    draw = truncated(_generator_for(seed), shape_of(shape))
    return Tensor((draw * np.asarray(stddev) + np.asarray(mean)).astype(kind))


def truncated(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return an array of normally distributed numbers; numbers beyond 2 are drawn again."""
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
    name: str | None = None,
) -> Tensor:
    """Return uniform numbers from ``minval`` to below ``maxval`` (for floating point by default 1)."""
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
    # Rounding to fewer digits can give the upper end, which is not in the interval.
    end = high.astype(kind)
    return Tensor(
        np.where((low < high) & (rounded >= end), np.nextafter(end, low.astype(kind)), rounded)
    )


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> Tensor:
    """Return a tensor with its slices along the first axis in random order."""
    x = as_tensor(value)
    order = _generator_for(seed).permutation(len(x))
    back = np.argsort(order)
    return record(x.array[order], (x,), lambda g, _need: (g[back],))


def _of_seeds(seed: Any) -> AbstractContextManager[None]:
    """Return a scope in which random numbers depend only on two integers."""
    words = np.asarray(as_tensor(seed).array)
    if words.shape != (2,) or words.dtype.kind not in "iu":
        raise ValueError(
            f"seed must be two integers, not {words.dtype} of shape {tuple(words.shape)}"
        )
    key = np.array([int(word) % 2**64 for word in words.tolist()], np.uint64)
    return generator_scope(np.random.Generator(np.random.Philox(key=key)))


def stateless_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    name: str | None = None,
) -> Tensor:
    """Return normally distributed numbers that depend only on the seed, two integers."""
    with _of_seeds(seed):
        return normal(shape, mean, stddev, dtype)


def stateless_truncated_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = float32,
    name: str | None = None,
) -> Tensor:
    """Return numbers as `truncated_normal` does, from the seed alone, which is two integers."""
    with _of_seeds(seed):
        return truncated_normal(shape, mean, stddev, dtype)


def stateless_uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = float32,
    name: str | None = None,
) -> Tensor:
    """Return numbers as `uniform` does, from the seed alone, which is two integers."""
    with _of_seeds(seed):
        return uniform(shape, minval, maxval, dtype)
