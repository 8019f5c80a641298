"""The copies of variables that a replica updates, and functions that update them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pycollective.array_backend import Array, on_host
from pycollective.distribute.context import current_mode
from pycollective.distribute.interfaces import AnyStrategy
from pycollective.tensor import Tensor, Variable, as_tensor
from pycollective.tensor.variable import update_together


def with_arrays(variables: Sequence[Variable], function: Callable[[list[Array]], None]) -> None:
    """Call ``function`` with the writable arrays of this replica's copies of variables.

    Outside of replica functions, ``function`` is called for each copy.
    """
    for copies in copies_of(variables):
        update_together(copies, function)


def copies_of(variables: Sequence[Variable]) -> Iterable[Sequence[Variable]]:
    """Return this replica's copies of variables.

    Outside of replica functions, return the copies of each replica.
    """
    if current_mode() is None and hasattr(variables[0], "values"):
        return zip(*[getattr(variable, "values") for variable in variables], strict=True)  # noqa: B009
    return [[variable.local() for variable in variables]]


def require_copies(strategy: AnyStrategy, variables: Sequence[Variable]) -> None:
    """Raise an error unless each replica has its own copy of the variables."""
    for variable in variables:
        if getattr(variable, "_distribute_strategy", None) is not strategy:
            raise ValueError(
                f"variable {variable.name!r} was not created in the scope of {strategy}, so "
                "that all replicas would update the same memory; create model and optimizer inside "
                "`with strategy.scope():`"
            )


def count_one(arrays: list[Array]) -> None:
    """Add 1 to a count of steps."""
    count = arrays[0]
    if on_host(count):
        # Python's addition is faster than NumPy's, whose code a step has removed from the caches.
        count[()] = count.item() + 1
    else:
        count += 1


def adder(amount: Array) -> Callable[[list[Array]], None]:
    """Return a function that adds an amount to a single array."""

    def add(arrays: list[Array]) -> None:
        arrays[0] += amount

    return add


def constrain(variable: Variable, constraint: Callable[[Any], Any]) -> None:
    """Apply a variable's constraint."""

    def project(arrays: list[Array]) -> None:
        # The constraint gets a copy, because a tensor must not change.
        arrays[0][...] = as_tensor(constraint(Tensor(arrays[0].copy()))).array

    with_arrays([variable], project)
