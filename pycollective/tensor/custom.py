"""``custom_gradient``: a function with its own gradient."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .. import nest
from ..array_backend import Array
from .tape import GradientTape, paused, record_many
from .tensor import Tensor, as_tensor


def custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that returns its result and a function for its gradient.

    Parameters
    ----------
    f : callable
        ``f(*args, **kwargs)`` returns ``(y, grad_fn)``, where y is a tensor or a nest of tensors.
        ``grad_fn(*dys)`` takes the gradient of each tensor of y. It returns the gradient of each
        tensor in ``args``; if there is one tensor, its gradient. If ``f`` reads trainable
        variables, ``grad_fn`` must take them as ``variables=None`` (a list) and return
        ``(gradients, variable_gradients)``.

    Returns
    -------
    callable
        A function with the same arguments that returns y.

    Raises
    ------
    TypeError
        ``f`` reads trainable variables, and ``grad_fn`` does not take ``variables``.
    ValueError
        While the gradient is computed: ``grad_fn`` returns too many or too few gradients, or one
        whose shape is not its input's. Gradients of another floating-point dtype are converted to
        the input's dtype.
    """
    name = getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        inputs = [as_tensor(item) for item in nest.flatten(args)]
        with paused(), GradientTape() as watcher:
            result, grad_fn = f(*nest.pack_as(args, inputs), **kwargs)
        variables = [v for v in watcher.watched_variables() if v.dtype.kind in "fV"]
        if variables and not _takes_variables(grad_fn):
            raise TypeError(
                f"custom_gradient: {name} reads trainable variables "
                f"({', '.join(v.name for v in variables)}), so its gradient function must take "
                "'variables=None' and return (gradients, variable_gradients)"
            )
        outputs = [as_tensor(item) for item in nest.flatten(result)]
        known = (*inputs, *(v._read() for v in variables))

        def vjp(dys: tuple[Array, ...], need: tuple[bool, ...]) -> Sequence[Array | None]:
            extra = {"variables": list(variables)} if variables else {}
            answer = grad_fn(*(Tensor(dy) for dy in dys), **extra)
            first, second = answer if variables else (answer, [])
            gradients = [*_flat(first), *_flat(second)]
            if len(gradients) != len(known):
                raise ValueError(
                    f"custom_gradient: the gradient function of {name} returned "
                    f"{len(gradients)} gradients for {len(known)} inputs and variables"
                )
            return [
                _checked(gradient, value, name) if needed and gradient is not None else None
                for gradient, value, needed in zip(gradients, known, need, strict=True)
            ]

        return nest.pack_as(result, record_many([t.array for t in outputs], known, vjp))

    return decorated


def _flat(gradients: Any) -> list[Any]:
    return nest.flatten(gradients) if nest.is_nested(gradients) else [gradients]


def _checked(gradient: Any, value: Tensor, name: str) -> Array:
    array = as_tensor(gradient, like=value).array
    if array.dtype != value.dtype and array.dtype.kind in "fV" and value.dtype.kind in "fV":
        array = array.astype(value.dtype)
    if array.shape != value.shape or array.dtype != value.dtype:
        raise ValueError(
            f"custom_gradient: the gradient function of {name} returned shape {array.shape} and "
            f"dtype {array.dtype} for an input of shape {value.shape} and dtype {value.dtype}"
        )
    return array


def _takes_variables(grad_fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(grad_fn).parameters.values()
    return any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters)
