"""Kernels that process many arrays of a step on a GPU in one launch.

A kernel gets arrays as rows of a table with the address of each operand and its length. The table is
passed by value, as an argument of the launch, so that nothing is copied to the device and no thread
waits. CuPy compiles the kernels at their first use and keeps them in its cache; nvcc is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..array_backend import Array, array_module, beside, device_of, empty, on_host

#: Rows of a table; with the other arguments of a launch it must stay below 4096 bytes.
_ROWS = 96
_THREADS = 256
#: Elements of a row for each thread of a block, and the most blocks.
_EACH = 4
_BLOCKS = 512

_TABLE = np.dtype([("address", np.uint64, (4, _ROWS)), ("size", np.int64, _ROWS)], align=True)

_SOURCE = """
struct Table {
  unsigned long long address[4][ROWS];
  long long size[ROWS];
};

template <class T>
__device__ T* operand(const Table& table, int number) {
  return reinterpret_cast<T*>(table.address[number][blockIdx.y]);
}

#define EACH_ELEMENT(i)                                                               \\
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;   \\
       i < table.size[blockIdx.y]; i += static_cast<long long>(gridDim.x) * blockDim.x)

extern "C" __global__ void adam(const Table table, REAL alpha, REAL rise1, REAL rise2,
                                REAL epsilon) {
  REAL* param = operand<REAL>(table, 0);
  const REAL* grad = operand<const REAL>(table, 1);
  REAL* m = operand<REAL>(table, 2);
  REAL* v = operand<REAL>(table, 3);
  EACH_ELEMENT(i) {
    const REAL slope = grad[i];
    const REAL mean = m[i] + (slope - m[i]) * rise1;
    const REAL square = v[i] + (slope * slope - v[i]) * rise2;
    m[i] = mean;
    v[i] = square;
    param[i] -= alpha * mean / (sqrt(square) + epsilon);
  }
}

extern "C" __global__ void sgd(const Table table, REAL rate, REAL momentum, int nesterov) {
  REAL* param = operand<REAL>(table, 0);
  const REAL* grad = operand<const REAL>(table, 1);
  REAL* velocity = operand<REAL>(table, 2);
  EACH_ELEMENT(i) {
    const REAL step = grad[i] * rate;
    if (velocity == nullptr) {
      param[i] -= step;
      continue;
    }
    const REAL speed = velocity[i] * momentum - step;
    velocity[i] = speed;
    param[i] += nesterov ? momentum * speed - step : speed;
  }
}

extern "C" __global__ void unscale(const Table table, const float* scale, bool* finite) {
  REAL* result = operand<REAL>(table, 0);
  const REAL* grad = operand<const REAL>(table, 1);
  const REAL by = static_cast<REAL>(*scale);
  EACH_ELEMENT(i) {
    const REAL slope = grad[i];
    if (!(slope - slope == 0)) *finite = false;  // all threads write the same value
    result[i] = slope / by;
  }
}

extern "C" __global__ void times(const Table table, REAL factor) {
  REAL* param = operand<REAL>(table, 0);
  EACH_ELEMENT(i) param[i] *= factor;
}

extern "C" __global__ void copy(const Table table) {
  REAL* target = operand<REAL>(table, 0);
  const REAL* source = operand<const REAL>(table, 1);
  EACH_ELEMENT(i) target[i] = source[i];
}

extern "C" __global__ void put_back(const Table table, const bool* keep) {
  if (*keep) return;
  REAL* target = operand<REAL>(table, 0);
  const REAL* source = operand<const REAL>(table, 1);
  EACH_ELEMENT(i) target[i] = source[i];
}

extern "C" __global__ void next_scale(float* scale, long long* count, const bool* finite,
                                      long long growth) {
  const bool good = *finite;
  const bool grows = good && *count + 1 >= growth;
  *scale *= grows ? 2.0f : good ? 1.0f : 0.5f;
  *count = good && !grows ? *count + 1 : 0;
}
"""

_NAMES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def source(real: str) -> str:
    """Return the kernels' CUDA C++ source for a type of numbers."""
    return f"#define REAL {real}\n#define ROWS {_ROWS}\n{_SOURCE}"


@functools.cache
def _kernel(module: Any, name: str, real: str) -> Any:
    return module.RawKernel(source(real), name)


def fits(*columns: Sequence[Array] | None) -> bool:
    """Return True if the kernels support these arrays: float32 or float64, of one GPU, in C order.

    Each column has an array for each row; an optional column may be None.
    """
    given = [column for column in columns if column is not None]
    first = given[0][0] if given and len(given[0]) else None
    if first is None or on_host(first) or first.dtype not in _NAMES:
        return False
    where, kind = device_of(first), first.dtype
    return all(
        not on_host(array)
        and array.dtype == kind
        and array.flags.c_contiguous
        and array.shape == row.shape
        and device_of(array) == where
        for column in given
        for array, row in zip(column, given[0], strict=True)
    )


def _launch(name: str, columns: Sequence[Sequence[Array] | None], *scalars: Any) -> None:
    """Launch a kernel for all rows, on the device of the first one; `fits` must be True."""
    rows = columns[0]
    assert rows is not None
    kernel = _kernel(array_module(rows[0]), name, _NAMES[np.dtype(rows[0].dtype)])
    real = rows[0].dtype.type
    arguments = [real(s) if isinstance(s, float) else s for s in scalars]
    for begin in range(0, len(rows), _ROWS):
        part = rows[begin : begin + _ROWS]
        table = np.zeros(1, _TABLE)
        table["size"][0, : len(part)] = [array.size for array in part]
        for number, column in enumerate(columns):
            if column is not None:
                table["address"][0, number, : len(part)] = [
                    array.data.ptr  # type: ignore[attr-defined]  # a GPU's array
                    for array in column[begin : begin + _ROWS]
                ]
        longest = max(array.size for array in part)
        blocks = min(max(1, -(-longest // (_THREADS * _EACH))), _BLOCKS)
        with beside(rows[0]):
            kernel((blocks, len(part)), (_THREADS,), (table, *arguments))


def adam(
    params: Sequence[Array],
    grads: Sequence[Array],
    ms: Sequence[Array],
    vs: Sequence[Array],
    alpha: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """Make one step of Adam; see `update.adam_update`."""
    _launch("adam", (params, grads, ms, vs), float(alpha), 1.0 - beta1, 1.0 - beta2, float(epsilon))


def sgd(
    params: Sequence[Array],
    grads: Sequence[Array],
    velocities: Sequence[Array] | None,
    rate: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Make one step of gradient descent; see `update.sgd_update`."""
    columns = (params, grads, velocities)
    _launch("sgd", columns, float(rate), float(momentum), np.int32(nesterov))


def times(arrays: Sequence[Array], factor: float) -> None:
    """Multiply arrays by a number, in place."""
    _launch("times", (arrays,), float(factor))


def unscaled(gradients: Sequence[Array], scale: Array) -> tuple[list[Array], Array]:
    """Return gradients divided by a scale, and a bool that is True if all are finite, on the device."""
    with beside(scale):
        if not fits(gradients):
            found: list[Any] = [np.isfinite(gradient).all() for gradient in gradients]
            finite: Array = functools.reduce(np.logical_and, found)
            # Halves are divided in float32, because a scale may exceed the largest float16.
            quotients = [g / scale.astype(np.result_type(g.dtype, scale.dtype)) for g in gradients]
            return [q.astype(g.dtype) for q, g in zip(quotients, gradients, strict=True)], finite
        results = [empty(gradient.shape, gradient.dtype, scale) for gradient in gradients]
        finite = array_module(scale).ones((), np.bool_)
        _launch("unscale", (results, gradients), scale, finite)
        return results, finite


def copies(arrays: Sequence[Array]) -> list[Array]:
    """Return copies of arrays on one GPU."""
    if not fits(arrays):
        return [array.copy() for array in arrays]
    results = [empty(array.shape, array.dtype, array) for array in arrays]
    _launch("copy", (results, arrays))
    return results


def put_back(arrays: Sequence[Array], before: Sequence[Array], keep: Array) -> None:
    """Restore the values of arrays on one GPU, unless ``keep``, a bool on the device, is True."""
    if fits(arrays, before):
        _launch("put_back", (arrays, before), keep)
        return
    for array, old in zip(arrays, before, strict=True):
        np.copyto(array, old, where=~keep)


def next_scale(scale: Array, count: Array, finite: Array, growth_steps: int) -> None:
    """Update a loss scale (float32) and its counter (int64) after a step, all on the device.

    After ``growth_steps`` finite steps in a row the scale is doubled; after a step that is not finite it
    is halved. Each change resets the counter.
    """
    kernel = _kernel(array_module(scale), "next_scale", "float")
    with beside(scale):
        kernel((1,), (1,), (scale, count, finite, np.int64(growth_steps)))
