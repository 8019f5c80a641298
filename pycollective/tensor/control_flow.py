"""TensorFlow's functions for programs whose functions are traced; here they call Python directly."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import to_numpy
from pycollective.dtypes import as_dtype
from pycollective.tensor.ops.arrays import stop_gradient
from pycollective.tensor.tensor import Tensor, as_tensor

_FILE = "file://"


def cond(
    pred: Any,
    true_fn: Callable[[], Any] | None = None,
    false_fn: Callable[[], Any] | None = None,
    name: str | None = None,
) -> Any:
    """Return ``true_fn()`` if ``pred`` is true, else ``false_fn()``; only one of them is called.

    ``name`` has no effect.

    Raises
    ------
    TypeError
        A function is not callable.
    """
    for function, argument in ((true_fn, "true_fn"), (false_fn, "false_fn")):
        if not callable(function):
            raise TypeError(f"'{argument}' must be callable, got {function!r}")
    chosen: Any = true_fn if pred else false_fn
    return chosen()


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    shape_invariants: Any = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: Any = None,
    name: str | None = None,
) -> Any:
    """Repeat ``loop_vars = body(*loop_vars)`` while ``cond(*loop_vars)`` is true.

    Return the loop variables as tensors, in their structure.

    Parameters
    ----------
    cond, body : callable
        Called with the loop variables. ``body`` returns them in the structure of ``loop_vars``.
    loop_vars : list or tuple
        The loop variables: tensors, and nests of tensors.
    back_prop : bool
        Let gradients flow through the iterations.
    maximum_iterations : int, optional
        The most iterations.
    shape_invariants, parallel_iterations, swap_memory, name
        Have no effect.

    Raises
    ------
    TypeError
        ``cond`` or ``body`` is not callable.
    ValueError
        There are no loop variables, or ``body`` returns another number of them.
    """
    for function, argument in ((cond, "cond"), (body, "body")):
        if not callable(function):
            raise TypeError(f"'{argument}' must be callable, got {function!r}")
    if not isinstance(loop_vars, (list, tuple)) or not loop_vars:
        raise ValueError(
            f"'loop_vars' must be a list or tuple that is not empty, got {loop_vars!r}"
        )
    values = nest.map_structure(as_tensor, loop_vars)
    count = len(nest.flatten(loop_vars))
    most = None if maximum_iterations is None else int(maximum_iterations)
    done = 0
    while (most is None or done < most) and cond(*values):
        leaves = nest.flatten(body(*values), by_key=True)
        if len(leaves) != count:
            raise ValueError(
                f"'body' returned {len(leaves)} values for {count} loop variables: it must return "
                "all of them, in the structure of 'loop_vars'"
            )
        values = nest.pack_as(loop_vars, map(as_tensor, leaves), by_key=True)
        done += 1
    return values if back_prop else nest.map_structure(stop_gradient, values)


def py_function(
    func: Callable[..., Any], inp: Sequence[Any], Tout: Any, name: str | None = None
) -> Any:
    """Return ``func(*inp)`` as tensors of the dtypes ``Tout``; gradients flow through its operations.

    Parameters
    ----------
    func : callable
        Takes and returns tensors. The results are one tensor if ``Tout`` is one dtype, and a list if it
        is a list.
    inp : list
        The arguments.
    Tout : dtype or list of dtypes
        The dtypes of the results. If it is an empty list, the function returns nothing.
    name : str, optional
        Has no effect.

    Raises
    ------
    ValueError
        The function returned another number of results.
    TypeError
        A result has another dtype.
    """
    return _results(func(*map(as_tensor, inp)), Tout)


def numpy_function(
    func: Callable[..., Any],
    inp: Sequence[Any],
    Tout: Any,
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """Return ``func(*inp)`` as tensors, where ``func`` takes read-only NumPy arrays and returns arrays.

    No gradient flows. The parameters and errors are those of `py_function`; ``stateful`` has no
    effect.
    """
    return _results(func(*(as_tensor(value).numpy() for value in inp)), Tout)


def _results(result: Any, dtypes: Any) -> Any:
    """Return a function's result as tensors of the given dtypes."""
    if not isinstance(dtypes, (list, tuple)):
        return _of_dtype(result, dtypes)
    is_list = isinstance(result, (list, tuple))
    values = list(result) if is_list else [] if result is None else [result]
    if len(values) != len(dtypes):
        raise ValueError(
            f"the function returned {len(values)} results, 'Tout' has {len(dtypes)} dtypes"
        )
    return [_of_dtype(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def _of_dtype(value: Any, dtype: Any) -> Tensor:
    result = as_tensor(value, dtype)
    wanted = as_dtype(dtype)
    if result.array.dtype != wanted:
        raise TypeError(f"the function returned {result.array.dtype}, 'Tout' asks for {wanted}")
    return result


def print(
    *inputs: Any,
    output_stream: Any = None,
    summarize: int = 3,
    sep: str = " ",
    end: str = "\n",
    name: str | None = None,
) -> None:
    """Print values, with the elements of arrays, to standard error or to ``output_stream``.

    Every replica prints.

    Parameters
    ----------
    *inputs
        Tensors, variables, arrays, strings, other objects, and nests of them.
    output_stream : file or str, optional
        A file object, or ``"file://"`` and a path, to which the text is appended.
    summarize : int
        The number of first and last elements of each axis that are printed; -1 prints all.
    sep, end : str
        The text between the inputs, and after them.
    name : str, optional
        Has no effect.

    Raises
    ------
    ValueError
        ``output_stream`` is neither a file object nor ``"file://"`` and a path.
    """
    text = sep.join(
        value if isinstance(value, str) else _text(value, summarize) for value in inputs
    )
    if isinstance(output_stream, str) and output_stream.startswith(_FILE):
        with open(output_stream.removeprefix(_FILE), "a", encoding="utf-8") as file:
            file.write(text + end)
        return
    stream = sys.stderr if output_stream is None else output_stream
    if not hasattr(stream, "write"):
        raise ValueError(
            f"'output_stream' is a file object or '{_FILE}' and a path, got {stream!r}"
        )
    builtins.print(text, end=end, file=stream, flush=True)


def _text(value: Any, summarize: int) -> str:
    """Return the text of a value; arrays have no commas."""
    if isinstance(value, dict):
        items = (f"{key!r}: {_text(item, summarize)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(item, summarize) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, str):
        return repr(value)
    try:
        array = np.asarray(to_numpy(as_tensor(value).array))
    except (TypeError, ValueError):
        return str(value)
    return np.array2string(
        array,
        max_line_width=sys.maxsize,
        threshold=sys.maxsize if summarize < 0 else 0,
        edgeitems=summarize if summarize >= 0 else None,
        formatter={"float_kind": lambda number: str(number).removesuffix(".0")},
    )
