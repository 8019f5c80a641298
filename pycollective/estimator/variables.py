"""`ModelVariables`: the variables that the calls of a model function share."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from pycollective.distribute.context import created_once
from pycollective.distribute.sharded import shards_of
from pycollective.distribute.variables import AggregateInitialValue
from pycollective.keras.backend import fresh_names
from pycollective.tensor import (
    GradientTape,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
    creator_scope,
)
from pycollective.tensor.random import generator_scope
from pycollective.train.trackable import Trackable, structure_changed


class _Thread(threading.local):
    #: The variables of the model function that this thread calls.
    current: ModelVariables | None = None


this_thread = _Thread()


class ModelVariables(Trackable):
    """The variables of a model function, by name.

    Every call of a model function makes its layers, optimizers and metrics again. Automatic names begin
    anew in each call, so that a variable has the same name in every call. The first call creates the
    variable, and later calls get the same one. A restored checkpoint gives variables their first values.

    Attributes
    ----------
    global_step : Variable
        The number of training steps.
    sums : dict
        The variables of metrics by name, which no checkpoint has.
    only_trained_are_restored : bool
        True to give the values of a restored checkpoint to trained variables only.
    """

    _untracked = frozenset({"sums"})

    def __init__(self, seed: int | None) -> None:
        self.sums: dict[str, Variable] = {}
        self.only_trained_are_restored = False
        self._seed = seed
        with creator_scope(self._creator(Counter())):
            self.global_step: Variable = Variable(
                np.int64(0),
                name="global_step",
                trainable=False,
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let a block create variables, or get the variables of an earlier call by their names."""
        before, this_thread.current = this_thread.current, self
        try:
            with fresh_names(), creator_scope(self._creator(Counter(["global_step"]))):
                yield
        finally:
            this_thread.current = before

    def trainable(self, tape: GradientTape) -> list[Variable]:
        """Return the variables that a tape watches, in the order of their first use."""
        owners = {
            id(part): variable
            for variable in shards_of(self._variables.values())
            for part in (variable, *getattr(variable, "values", ()))
        }
        found: dict[int, Variable] = {}
        for watched in tape.watched_variables():
            variable = owners.get(id(watched))
            if variable is None:
                raise ValueError(
                    f"model_fn uses the variable {watched.name!r}, which was made outside of "
                    "model_fn, so that the estimator could not save it: make the model in model_fn"
                )
            found[id(variable)] = variable
        return list(found.values())

    def _creator(self, made: Counter[str]) -> Callable[..., Variable]:
        """Return a creator of variables for one call; ``made`` counts the names of this call."""

        def create(next_creator: Callable[..., Variable], **options: Any) -> Variable:
            name = plain = options.get("name") or "Variable"
            while made[name]:
                name = f"{plain}_{made[plain]}"
                made[plain] += 1
            made[name] += 1
            # The first replica that comes here creates the variable for all.
            with created_once(self):
                return self._get_or_create(next_creator, name, options)

        return create

    def _get_or_create(
        self, next_creator: Callable[..., Variable], name: str, options: dict[str, Any]
    ) -> Variable:
        is_sum = (
            options.get("synchronization") is VariableSynchronization.ON_READ
            and options.get("aggregation") is VariableAggregation.SUM
        )
        known = self.sums if is_sum else self._variables
        found = known.get(name)
        if found is not None:
            shape = options.get("shape")
            if shape is not None and tuple(shape) != tuple(found.shape):
                raise ValueError(
                    f"Trying to share variable {name}, but specified shape {tuple(shape)} and found "
                    f"shape {tuple(found.shape)}. Every call of model_fn must make the same variables"
                )
            return found
        saved = None
        is_restored = options.get("trainable", True) or not self.only_trained_are_restored
        if self._restore is not None and is_restored and not is_sum:
            restore, node = self._restore
            if options.get("shape") is None or options.get("dtype") is None:
                value = options.get("initial_value")
                value = as_tensor(value() if callable(value) else value, options.get("dtype"))
                options.update(initial_value=value, shape=value.shape, dtype=value.dtype)
            saved = restore.initial_value(node, name, options["shape"], options["dtype"])
            if saved is not None:
                options["initial_value"] = AggregateInitialValue(saved)
        with self._random_of(name):
            variable = known[name] = next_creator(**{**options, "name": name})
        structure_changed()
        if saved is not None:
            restore.created(node, name, variable)
        return variable

    def _random_of(self, name: str) -> AbstractContextManager[None]:
        """Return a scope in which random numbers depend on a name, and not on the replica."""
        if self._seed is None:
            return nullcontext()
        return generator_scope(np.random.default_rng([self._seed, zlib.crc32(name.encode())]))
