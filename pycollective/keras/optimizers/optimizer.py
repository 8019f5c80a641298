"""`Optimizer`: what all optimizers do with gradients before they update a variable."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.distribute.context import Mode, current_mode
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.strategy import Strategy
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import floatx, name_of_class, unique_name
from pycollective.keras.building import build_scope_of_new
from pycollective.keras.optimizers.overlap import summed_gradients
from pycollective.keras.optimizers.schedules import LearningRateSchedule
from pycollective.tensor import GradientTape, Tensor, Variable, VariableAggregation, as_tensor
from pycollective.train.trackable import Trackable

__all__ = ["Optimizer"]


class Optimizer(Trackable):
    """Base class of optimizers.

    One of your own overrides two methods: `slot_names`, which numbers it keeps for each number of a
    variable, and `update_step`, what one step does to a variable.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    name
        By default the class's name with a number.
    clipnorm
        The gradient of each variable is scaled down to at most this Euclidean norm.
    clipvalue
        Each number of a gradient is cut off beyond this absolute value.
    global_clipnorm
        All gradients together are scaled down to at most this Euclidean norm.

    Raises
    ------
    ValueError
        If more than one way to clip is given, or a limit is not positive.

    Notes
    -----
    Under a strategy each replica calls `apply_gradients` with its own gradients. They are summed
    over the replicas, in packs, then clipped, and each replica updates its own copy of the
    variables: equal bits in, equal bits out. Where the replicas share variables, they are updated
    once. `minimize` sums gradients while others are still computed; `apply_gradients` cannot, because
    it gets them when all are there, and `GradientTape.gradient` never communicates.
    """

    def __init__(
        self,
        learning_rate: Any,
        name: str | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
    ) -> None:
        self.name = unique_name(name_of_class(type(self))) if name is None else str(name)
        limits = {
            "clipnorm": clipnorm,
            "clipvalue": clipvalue,
            "global_clipnorm": global_clipnorm,
        }
        given = {key: value for key, value in limits.items() if value is not None}
        if len(given) > 1:
            raise ValueError(
                f"{self.name}: only one of clipnorm, clipvalue and global_clipnorm can be set, got "
                f"{given}"
            )
        for key, value in given.items():
            if not value > 0:
                raise ValueError(f"{self.name}: {key} must be positive, got {value}")
        self.clipnorm = clipnorm
        self.clipvalue = clipvalue
        self.global_clipnorm = global_clipnorm
        #: By the id of a variable: the variable, and what the optimizer keeps for it.
        self._slots: dict[int, tuple[Variable, dict[str, Variable]]] = {}
        self._warned: set[tuple[str, ...]] = set()
        self._rate: Any = None
        self._creation = build_scope_of_new()
        self._iterations = self._make("iterations", lambda: np.zeros((), np.int64), np.int64)
        if isinstance(learning_rate, LearningRateSchedule) or callable(learning_rate):
            self._rate = learning_rate
        else:
            rate = float(learning_rate)
            self._rate = self._make("learning_rate", lambda: np.asarray(rate), floatx())

    _untracked = frozenset({"_slots"})

    # What an optimizer is --------------------------------------------------------------------

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the arrays that are kept for each variable; they start at 0."""
        return ()

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one variable in place.

        Parameters
        ----------
        parameter
            The variable's array, to be written to.
        gradient
            Of the same shape and dtype; not to be written to.
        slots
            The arrays of `slot_names`, of the same shape and dtype, to be written to.
        learning_rate
            That of this step.
        step
            The number of this step, counted from 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must override update_step()")

    # Variables -------------------------------------------------------------------------------

    def _make(self, name: str, start: Callable[[], Any], dtype: Any, shape: Any = ()) -> Variable:
        return self._new_variable(
            name,
            start,
            label=f"{self.name}/{name}",
            shape=shape,
            dtype=as_dtype(dtype),
            trainable=False,
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def iterations(self) -> Variable:
        """How many steps were made: an int64 scalar."""
        return self._iterations

    @property
    def variables(self) -> list[Variable]:
        """All that the optimizer keeps: iterations, learning rate, then the slots."""
        return list(self._variables.values())

    @property
    def built(self) -> bool:
        """Whether there is a slot for any variable yet."""
        return bool(self._slots)

    @property
    def learning_rate(self) -> Any:
        """The learning rate: a variable, or that of the present step if a schedule was given."""
        if isinstance(self._rate, LearningRateSchedule):
            return self._rate(self._iterations)
        return self._rate if isinstance(self._rate, Variable) else self._rate()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not isinstance(self._rate, Variable):
            raise TypeError(
                f"{self.name}: the learning rate cannot be set, because the optimizer was made "
                "with a schedule; make it with a number instead"
            )
        self._rate.assign(float(value))

    lr = learning_rate

    def build(self, var_list: Iterable[Variable]) -> None:
        """Make what the optimizer keeps for these variables, where it has not yet."""
        with self._creation(self):
            for variable in var_list:
                if id(variable) in self._slots:
                    continue
                number = len(self._slots)
                slots = {
                    name: self._make_slot(f"{name}/{number}", variable)
                    for name in self.slot_names()
                }
                self._slots[id(variable)] = (variable, slots)

    def _make_slot(self, name: str, variable: Variable) -> Variable:
        shape, dtype = variable.shape, variable.dtype
        # Slots have as many components as their variable, wherever they are made.
        strategy = getattr(variable, "_distribute_strategy", None)
        if strategy is None or current_mode() is not None:
            return self._make(name, lambda: np.zeros(shape, dtype), dtype, shape)
        with strategy.scope():
            return self._make(name, lambda: np.zeros(shape, dtype), dtype, shape)

    # Steps -----------------------------------------------------------------------------------

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Variable:
        """Update variables by their gradients.

        Parameters
        ----------
        grads_and_vars
            Pairs of a gradient (None: the variable is left out) and a variable.
        skip_gradients_aggregation
            Whether the gradients have been summed over the replicas already.
        experimental_aggregate_gradients
            The opposite; the older name.

        Returns
        -------
        Variable
            `iterations`.

        Raises
        ------
        ValueError
            If no variable has a gradient, a gradient's shape or dtype differs from the variable's,
            or a variable is there twice.
        RuntimeError
            In cross-replica context with several replicas.

        Warns
        -----
        UserWarning
            Names the variables without a gradient.
        """
        mode = current_mode()
        replicas = 1 if mode is None else int(mode.strategy.num_replicas_in_sync)
        if mode is not None and mode.replica_context is None and replicas > 1:
            raise RuntimeError(
                "`apply_gradients() cannot be called in cross-replica context. Use "
                "`tf.distribute.Strategy.run` to enter replica context."
            )
        gradients, variables = self._checked(list(grads_and_vars))
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        if mode is not None and replicas > 1:
            context, extended = mode.replica_context, mode.strategy.extended
            assert context is not None
            _require_copies(mode, [*variables, self._iterations])
            tensors = [Tensor(g) for g in gradients]
            if extended.updates_variables_once:
                context.merge_call(self._update_once, args=(tensors, variables, aggregate))
                return self._iterations
            if aggregate:
                reduced = context.all_reduce("SUM", tensors, extended.gradient_options)
                gradients = [tensor.array for tensor in reduced]
        self._step(gradients, variables)
        return self._iterations

    def _update_once(
        self, strategy: Strategy, gradients: list[Any], variables: list[Variable], aggregate: bool
    ) -> None:
        """Update variables that the replicas share, by the sum of their gradients."""
        if aggregate:
            pairs = list(zip(gradients, variables, strict=True))
            summed = strategy.extended.batch_reduce_to(ReduceOp.SUM, pairs)
        else:
            summed = [strategy.experimental_local_results(gradient)[0] for gradient in gradients]
        self._step([gradient.array for gradient in summed], variables)

    def _step(self, gradients: list[Array], variables: list[Variable]) -> None:
        """Update this replica's copies by the gradients of all replicas."""
        if any(id(variable) not in self._slots for variable in variables):
            self.build(variables)
        self._update(self._clipped(gradients), variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Variable]) -> Variable:
        """Update variables; as `apply_gradients`, with two lists."""
        return self.apply_gradients(zip(grads, trainable_variables, strict=True))

    def minimize(
        self,
        loss: Any,
        var_list: Sequence[Variable] | Callable[[], Sequence[Variable]],
        tape: GradientTape | None = None,
    ) -> Variable:
        """Compute the gradients of a loss and apply them.

        Under a strategy gradients are summed over the replicas while the tape still computes others,
        which saves time; the result is that of `apply_gradients`, to the last bit. Every replica must
        call it with the same variables.

        Parameters
        ----------
        loss
            A function without arguments that returns the loss, or with ``tape`` a tensor.
        var_list
            The variables, or a function that returns them once the loss was computed.
        tape
            What recorded the loss, if it is a tensor.
        """
        if callable(loss):
            with GradientTape() as tape:
                loss = loss()
        elif tape is None:
            raise ValueError("minimize() needs the tape that recorded the loss, or a function")
        variables = list(var_list() if callable(var_list) else var_list)
        mode = current_mode()
        if mode is None or mode.replica_context is None:
            gradients, summed = tape.gradient(loss, variables), False
        else:
            gradients, summed = summed_gradients(mode.replica_context, tape, loss, variables)
        return self.apply_gradients(zip(gradients, variables, strict=True), summed)

    def _checked(self, pairs: list[tuple[Any, Variable]]) -> tuple[list[Array], list[Variable]]:
        """Return gradients and variables, without the pairs that have no gradient."""
        if None in [gradient if gradient is None else 0 for gradient, _ in pairs]:
            missing = tuple(variable.name for gradient, variable in pairs if gradient is None)
            pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
            if not pairs:
                raise ValueError(
                    "No gradients provided for any variable: "
                    f"{', '.join(missing)}. The loss does not depend on them, or it was not "
                    "computed inside the GradientTape"
                )
            if missing not in self._warned:
                self._warned.add(missing)
                warnings.warn(
                    f"Gradients do not exist for variables {list(missing)} when minimizing the "
                    "loss; they are left as they are",
                    stacklevel=4,
                )
        if not pairs:
            raise ValueError("No gradients provided for any variable: apply_gradients got no pairs")
        gradients, variables = [], []
        for gradient, variable in pairs:
            array = as_tensor(gradient).array
            current = variable._local()._current()
            if array.shape != current.shape or array.dtype != current.dtype:
                raise ValueError(
                    f"{self.name}: the gradient for variable {variable.name!r} has shape "
                    f"{array.shape} and dtype {array.dtype}, the variable has {current.shape} and "
                    f"{current.dtype}"
                )
            gradients.append(array)
            variables.append(variable)
        if len({id(variable) for variable in variables}) != len(variables):
            names = [variable.name for variable in variables]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{self.name}: variables {twice} are there more than once")
        return gradients, variables

    def _clipped(self, gradients: list[Array]) -> list[Array]:
        if self.clipvalue is not None:
            limit = self.clipvalue
            return [gradient.clip(-limit, limit) for gradient in gradients]
        if self.clipnorm is not None:
            limit = self.clipnorm
            return [_scaled(g, limit, _sum_of_squares(g)) for g in gradients]
        if self.global_clipnorm is not None:
            total = sum(_sum_of_squares(gradient) for gradient in gradients)
            return [_scaled(g, self.global_clipnorm, total) for g in gradients]
        return gradients

    def _update(self, gradients: list[Array], variables: list[Variable]) -> None:
        """Update this replica's copies."""
        rate = self._rate
        learning_rate = float(
            rate(self._iterations) if isinstance(rate, LearningRateSchedule) else self.learning_rate
        )
        step = int(self._iterations) + 1
        for gradient, variable in zip(gradients, variables, strict=True):
            slots = self._slots[id(variable)][1]
            names = tuple(slots)
            constraint = variable.constraint

            def update(
                arrays: list[Array],
                gradient: Array = gradient,
                names: Any = names,
                constraint: Any = constraint,
            ) -> None:
                parameter, *rest = arrays
                kept = dict(zip(names, rest, strict=True))
                self.update_step(parameter, gradient, kept, learning_rate, step)
                if constraint is not None:
                    parameter[...] = as_tensor(constraint(Tensor(parameter))).array

            _with_arrays([variable, *slots.values()], update)
        _with_arrays([self._iterations], _count)


def _count(arrays: list[Array]) -> None:
    arrays[0] += 1


def _with_arrays(variables: Sequence[Variable], function: Callable[[list[Array]], None]) -> None:
    """Call ``function`` with the writable arrays of this replica's copies of variables.

    Outside of the replicas it is called for each copy.
    """
    for copies in _copies(variables):
        _open(copies, [], function)


def _copies(variables: Sequence[Variable]) -> Iterable[Sequence[Variable]]:
    if current_mode() is None and hasattr(variables[0], "values"):
        return zip(*[getattr(variable, "values") for variable in variables], strict=True)  # noqa: B009
    return [[variable._local() for variable in variables]]


def _open(
    variables: Sequence[Variable], arrays: list[Array], function: Callable[[list[Array]], None]
) -> None:
    """Add the array of the next variable to ``arrays``, until there are all of them."""
    if len(arrays) == len(variables):
        function(arrays)
        return

    def enter(array: Array) -> None:
        _open(variables, [*arrays, array], function)

    variables[len(arrays)].update_inplace(enter)


def _require_copies(mode: Mode, variables: Sequence[Variable]) -> None:
    """Raise unless each replica has its own copy of the variables."""
    for variable in variables:
        if getattr(variable, "_distribute_strategy", None) is not mode.strategy:
            raise ValueError(
                f"variable {variable.name!r} was not created in the scope of {mode.strategy}, so "
                "that all replicas would update the same memory; create model and optimizer inside "
                "`with strategy.scope():`"
            )


def _sum_of_squares(gradient: Array) -> float:
    flat = gradient.reshape(-1)
    if gradient.dtype == np.float32:
        with np.errstate(over="ignore"):
            total = float(np.dot(flat, flat))
        if math.isfinite(total):
            return total
    # Other types, and squares that are too large for float32.
    wide = flat.astype(np.float64)
    return float(np.dot(wide, wide))


def _scaled(gradient: Array, limit: float, sum_of_squares: float) -> Array:
    norm = math.sqrt(sum_of_squares)
    return gradient if norm <= limit else gradient * gradient.dtype.type(limit / norm)
