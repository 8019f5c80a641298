"""`Optimizer`: the steps of all optimizers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from pycollective.array_backend import Array, on_host, scatter_add
from pycollective.distribute.context import current_mode
from pycollective.distribute.interfaces import AnyStrategy
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.server_store import OPTIMIZERS
from pycollective.dtypes import is_differentiable
from pycollective.keras.optimizers.accumulation import this_thread
from pycollective.keras.optimizers.clipping import clipped, divided
from pycollective.keras.optimizers.copies import (
    adder,
    constrain,
    copies_of,
    count_one,
    require_copies,
    with_arrays,
)
from pycollective.keras.optimizers.overlap import summed_gradients
from pycollective.keras.optimizers.schedules import LearningRateSchedule
from pycollective.keras.optimizers.state import OptimizerState
from pycollective.nn.update import multiply
from pycollective.tensor import GradientTape, IndexedSlices, Tensor, Variable, as_tensor
from pycollective.tensor.ops import cast
from pycollective.tensor.variable import update_together


class Optimizer(OptimizerState):
    """Base class of optimizers.

    A subclass overrides `slot_names`, the names of the arrays that it keeps for each variable, and
    `update_step`, the update of one variable.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    weight_decay
        Before each step, variables are multiplied by ``1 - weight_decay * learning_rate``.
    clipnorm
        The largest Euclidean norm of each variable's gradient.
    clipvalue
        The largest absolute value of the elements of gradients.
    global_clipnorm
        The largest Euclidean norm of all gradients together.
    use_ema
        True: keep a mean of each variable, ``mean = ema_momentum * mean +
        (1 - ema_momentum) * variable`` after each step. `finalize_variable_values` sets the variables
        to the means; `Model.fit` calls it at its end.
    ema_momentum
        The decay rate of the means.
    ema_overwrite_frequency
        The number of steps between settings of the variables to their means; None: only at the end.
    loss_scale_factor
        The divisor of gradients. `scale_loss` multiplies the loss by it, and `minimize` does both.
    gradient_accumulation_steps
        The number of calls of `apply_gradients` for one step, which uses the mean of their gradients.
    name
        The name, by default the class's name with a number.

    Raises
    ------
    ValueError
        More than one clipping limit is given, a limit is not positive, or a number is out of range or
        not finite.

    Notes
    -----
    Under a strategy each replica calls `apply_gradients` with its own gradients. The gradients are
    summed over the replicas, in buckets, and clipped. Each replica then updates its own copy of the
    variables, with the same bits. Variables that replicas share are updated once.

    `minimize` overlaps the sums over the replicas with the computation of further gradients.
    `apply_gradients` cannot, because it gets all gradients at once and `GradientTape.gradient` does
    not communicate.
    """

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
            The variable's array, to be changed in place.
        gradient
            An array of the same shape and dtype, which must not change.
        slots
            The arrays of `slot_names`, of the same shape and dtype, to be changed in place.
        learning_rate : float
            The learning rate of this step.
        step : int
            The number of this step; the first is 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must override update_step()")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_update_steps" in cls.__dict__:
            type.__setattr__(cls, "update_step", _one_step_of(cls))
        elif "update_step" in cls.__dict__:
            try:
                inspect.signature(cls.update_step).bind(*(None,) * 6)
            except TypeError:
                raise TypeError(
                    f"{cls.__name__}.update_step{inspect.signature(cls.update_step)} must take "
                    "(self, parameter, gradient, slots, learning_rate, step): it updates arrays in "
                    "place, and not variables as in Keras; slot_names() names the slots"
                ) from None
            # A base class's update of all variables does not call this class's `update_step`.
            type.__setattr__(cls, "_update_steps", Optimizer._update_steps)

    def _update_steps(
        self,
        parameters: Sequence[Array],
        gradients: Sequence[Array],
        slots: Mapping[str, Sequence[Array]],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update all variables; each list in ``slots`` has an array for each variable.

        A class overrides this method or `update_step`. Each of the two calls the other by default.
        """
        for k, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            kept = {name: arrays[k] for name, arrays in slots.items()}
            self.update_step(parameter, gradient, kept, learning_rate, step)

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
            Pairs of a gradient, or None, and a variable. Gradients are converted to the dtypes of the
            variables. A variable with None does not change.
        skip_gradients_aggregation : bool
            True if the gradients are summed over the replicas already.
        experimental_aggregate_gradients : bool
            False has the effect of ``skip_gradients_aggregation=True``, which is the newer name.

        Returns
        -------
        Variable
            `iterations`.

        Raises
        ------
        ValueError
            No variable has a gradient, the shapes of a gradient and its variable differ, one of them
            is not floating-point, or a variable appears twice.
        RuntimeError
            The call is made in cross-replica context, and there are several replicas.

        Warns
        -----
        UserWarning
            Variables have no gradient; the warning names them.
        """
        mode = current_mode()
        extended = None if mode is None else mode.strategy.extended
        if extended is None or extended.num_replicas_in_sync == 1:
            context = strategy = None
        else:
            assert mode is not None
            context, strategy = mode.replica_context, mode.strategy
            if context is None:
                raise RuntimeError(
                    "`apply_gradients() cannot be called in cross-replica context. Use "
                    "`tf.distribute.Strategy.run` to enter replica context."
                )
        pairs = list(grads_and_vars)
        given = pairs
        sparse: list[tuple[IndexedSlices, Variable]] = []
        shared = extended is not None and context is not None and extended.updates_variables_once
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        if self._updates_rows() and (context is None or shared) and this_thread.sums is None:
            pairs, sparse = _split(pairs)
            if sparse and all(gradient is None for gradient, _ in pairs):
                self._warn_of_missing(tuple(variable.name for _, variable in pairs))
                every = [variable for _, variable in given]
                if shared and context is not None:
                    context.merge_call(self._update_once, args=([], [], sparse, aggregate, every))
                    return self._iterations
                self._step_rows(sparse, every)
                with_arrays([self._iterations], count_one)
                return self._iterations
        sums = this_thread.sums
        if sums is not None:
            totals = sums.add(self, pairs)
            if totals is None:
                return self._iterations
            pairs = totals
        gradients, is_new = self._as_before(pairs, strategy), False
        if gradients is None:
            gradients, pairs = self._checked(pairs, strategy)
            is_new = True
        variables = [variable for _, variable in pairs]
        if shared and context is not None:
            tensors = [Tensor(g) for g in gradients]
            every = [variable for _, variable in given]
            args = tensors, variables, sparse, aggregate, every
            context.merge_call(self._update_once, args=args)
            return self._iterations
        if is_new:
            self._build_missing([variable for _, variable in given])
        if sparse:  # after the checks, so that an error changes no variable
            self._step_rows(sparse, [variable for _, variable in given])
        if context is not None and extended is not None and aggregate:
            gradients = extended.reduce_in_replica(
                context, ReduceOp.SUM, gradients, extended.gradient_options
            )
        self._step(gradients, variables)
        return self._iterations

    def _updates_rows(self) -> bool:
        """Return True if a step changes only those rows of a variable that have a gradient.

        `_step_rows` then makes the step for gradients that are `IndexedSlices`.
        """
        return False

    def _has_plain_steps(self) -> bool:
        """Return True if no options but clipvalue and clipnorm are set, which `_step_rows` applies."""
        options = (self.weight_decay, self.global_clipnorm, self.loss_scale_factor)
        return (
            options == (None, None, None)
            and not self.use_ema
            and not self.gradient_accumulation_steps
        )

    def _build_missing(self, variables: list[Variable]) -> None:
        """Create slots for all variables of a call, also for those without a gradient.

        A saved optimizer numbers its slots in this order, and a loaded model has them for all its
        trainable variables.
        """
        if False in [id(variable) in self._slots for variable in variables]:
            self.build(variables)

    def _step_rows(
        self, pairs: list[tuple[IndexedSlices, Variable]], every: list[Variable]
    ) -> None:
        """Make a step for variables with `IndexedSlices` as gradients; change only their rows.

        Before, create the missing slots of ``every`` variable of the call.
        """
        for slices, variable in pairs:
            rows = slices.indices.array
            if (
                on_host(rows)
                and rows.size
                and not 0 <= rows.min() <= rows.max() < variable.shape[0]
            ):
                raise ValueError(
                    f"{self.name}: an index of the gradient is outside the {variable.shape[0]} rows of "
                    f"variable {variable.name!r}"
                )
        self._build_missing(every)
        learning_rate, step = self._rate_of_step(), int(self._iterations) + 1
        names = self.slot_names()
        for slices, variable in pairs:
            index, positions = np.unique(slices.indices.array, return_inverse=True)
            rows = slices.values.array
            total = np.zeros((len(index), *rows.shape[1:]), rows.dtype)
            scatter_add(total, positions.reshape(-1), rows)
            clip = clipped([total], self.clipvalue, self.clipnorm, None)

            slots = self._slots[id(variable)][1]
            group = [each.local() for each in (variable, *[slots[name] for name in names])]
            if self._updated_on_servers([group], clip, learning_rate, step, index):
                continue

            def update(arrays: list[Array], gradients: list[Array] = clip) -> None:
                kept = {name: [array] for name, array in zip(names, arrays[1:], strict=True)}
                self._update_steps(arrays[:1], gradients, kept, learning_rate, step)

            group[0].update_rows(group[1:], index, update)

    def _update_once(
        self,
        strategy: AnyStrategy,
        gradients: list[Any],
        variables: list[Variable],
        sparse: list[tuple[Any, Variable]],
        aggregate: bool,
        every: list[Variable],
    ) -> None:
        """Update variables that the replicas share, by the sum of their gradients.

        Before, create the missing slots of ``every`` variable of the call.
        """
        self._build_missing(every)
        pairs = [*zip(gradients, variables, strict=True), *sparse]
        if aggregate:
            summed = strategy.extended.batch_reduce_to(ReduceOp.SUM, pairs)
        else:
            summed = [strategy.experimental_local_results(gradient)[0] for gradient, _ in pairs]
        rows = zip(summed[len(variables) :], [variable for _, variable in sparse], strict=True)
        if sparse:
            self._step_rows(list(rows), every)
        if variables:
            self._step([gradient.array for gradient in summed[: len(variables)]], variables)
        else:
            with_arrays([self._iterations], count_one)

    def _step(self, gradients: list[Array], variables: list[Variable]) -> None:
        """Update this replica's copies by the gradients of all replicas."""
        if False in [id(variable) in self._slots for variable in variables]:
            self.build(variables)
        if self.loss_scale_factor is not None:
            gradients = [divided(g, self.loss_scale_factor) for g in gradients]
        steps = self.gradient_accumulation_steps
        if not steps:
            self._update(gradients, variables)
        elif (int(self._iterations) + 1) % steps:
            for gradient, variable in zip(gradients, variables, strict=True):
                with_arrays([self._slot(variable, "gradient_accumulator")], adder(gradient))
        else:
            means = [
                (g + self._slot(v, "gradient_accumulator").local().current().array) / steps
                for g, v in zip(gradients, variables, strict=True)
            ]
            self._update(means, variables)
            for _, slots in self._slots.values():
                with_arrays([slots["gradient_accumulator"]], lambda arrays: arrays[0].fill(0))
        if self.use_ema:
            self._average()
        for variable in variables:
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                constrain(variable, constraint)
        with_arrays([self._iterations], count_one)

    def _average(self) -> None:
        """Update the means of the variables."""
        step = int(self.iterations)
        share = 1 - self.ema_momentum if step else 1.0
        frequency = self.ema_overwrite_frequency
        overwrite = frequency is not None and (step + 1) % frequency == 0

        def update(arrays: list[Array]) -> None:
            average, current = arrays
            average += (current - average) * share
            if overwrite:
                current[...] = average

        for variable, slots in self._slots.values():
            with_arrays([slots["average"], variable], update)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Variable] | None = None
    ) -> Variable:
        """Update variables; see `apply_gradients`.

        Parameters
        ----------
        grads
            A gradient, or None, for each variable.
        trainable_variables
            The variables; by default all that have slots.

        Raises
        ------
        ValueError
            The lists differ in length, or no variables are given and the optimizer is not built.
        """
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "When passing `grads` without `variables`, the optimizer must already be built "
                    "on a list of variables. Call `optimizer.build(trainable_variables)` first. "
                )
            trainable_variables = self._updated()
        if len(grads) != len(trainable_variables):
            raise ValueError(
                f"{self.name}: {len(grads)} gradients do not fit {len(trainable_variables)} variables"
            )
        return self.apply_gradients(zip(grads, trainable_variables, strict=True))

    def _updated(self) -> list[Variable]:
        """Return the variables for which the optimizer was built."""
        return [variable for variable, _ in self._slots.values()]

    def scale_loss(self, loss: Any) -> Any:
        """Return the scaled loss, whose gradients `apply` and `apply_gradients` need.

        `minimize` needs the loss without the scale.
        """
        scale = self._scale_of(loss)
        return loss if scale is None else loss * scale

    def _loss_scale(self) -> float | Tensor | None:
        """Return the divisor of gradients: a number, or a tensor on a device."""
        return self.loss_scale_factor

    def _scale_of(self, loss: Any) -> float | Tensor | None:
        scale = self._loss_scale()
        return cast(scale, as_tensor(loss).dtype) if isinstance(scale, Tensor) else scale

    def minimize(
        self,
        loss: Any,
        var_list: Sequence[Variable] | Callable[[], Sequence[Variable]],
        tape: GradientTape | None = None,
    ) -> Variable:
        """Compute the gradients of a loss and apply them.

        Under a strategy, the sums over the replicas overlap with the computation of other gradients. The
        result has the same bits as that of `apply_gradients`. Every replica must make the call with the
        same variables.

        Parameters
        ----------
        loss
            A function without arguments that returns the loss, or with ``tape`` a tensor.
        var_list
            The variables, or a function that returns them after the loss was computed.
        tape : GradientTape, optional
            The tape that recorded the loss, if it is a tensor. The ``model_fn`` of an `Estimator`
            needs none.

        Raises
        ------
        ValueError
            The loss is a tensor without a tape; otherwise as for `apply_gradients`.
        """
        if callable(loss):
            with GradientTape() as tape:
                loss = loss()
        elif tape is None:
            recording = this_thread.recording
            if recording is None:
                raise ValueError("minimize() needs the tape that recorded the loss, or a function")
            tape, loss = recording.tape, recording.share(loss)
            recording.optimizers.append(self)
        variables = list(var_list() if callable(var_list) else var_list)
        mode = current_mode()
        # The scaled gradients are equal to the gradients of the scaled loss.
        scale = self._scale_of(loss)
        # A scale that is too large overflows, which `LossScaleOptimizer` expects.
        with nullcontext() if scale is None else np.errstate(over="ignore", invalid="ignore"):
            if mode is None or mode.replica_context is None or this_thread.sums is not None:
                gradients, summed = tape.gradient(loss, variables, scale), False
            else:
                gradients, summed = summed_gradients(
                    mode.replica_context, tape, loss, variables, scale
                )
        return self.apply_gradients(zip(gradients, variables, strict=True), summed)

    def _checked(
        self, pairs: list[tuple[Any, Variable]], strategy: AnyStrategy | None
    ) -> tuple[list[Array], list[tuple[Any, Variable]]]:
        """Return the gradients as arrays, and the pairs with a gradient, after checks of all."""
        if None in [gradient if gradient is None else 0 for gradient, _ in pairs]:
            missing = tuple(variable.name for gradient, variable in pairs if gradient is None)
            pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
            if not pairs:
                raise ValueError(
                    "No gradients provided for any variable: "
                    f"{', '.join(missing)}. The loss does not depend on them, or it was not computed "
                    "inside the GradientTape"
                )
            self._warn_of_missing(missing)
        if not pairs:
            raise ValueError("No gradients provided for any variable: apply_gradients got no pairs")
        gradients: list[Array] = []
        for gradient, variable in pairs:
            tensor = as_tensor(gradient)
            current = variable.local().like()
            floats = is_differentiable(tensor.dtype) and is_differentiable(current.dtype)
            if tensor.shape != current.shape or not floats:
                raise ValueError(
                    f"{self.name}: the gradient for variable {variable.name!r} has shape "
                    f"{tensor.shape} and dtype {tensor.dtype}, the variable has {current.shape} and "
                    f"{current.dtype}"
                )
            gradients.append(cast(tensor, current.dtype).array)
        variables = [variable for _, variable in pairs]
        if len({id(variable) for variable in variables}) != len(variables):
            names = [variable.name for variable in variables]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{self.name}: variables {twice} appear more than once")
        if strategy is not None:
            require_copies(strategy, [*variables, self._iterations])
        rows = zip(variables, gradients, strict=True)
        self._before = strategy, [(variable, g.shape, g.dtype) for variable, g in rows]
        return gradients, pairs

    def _warn_of_missing(self, missing: tuple[str, ...]) -> None:
        """Warn once that variables have no gradient."""
        if missing and missing not in self._warned:
            self._warned.add(missing)
            warnings.warn(
                f"Gradients do not exist for variables {list(missing)} when minimizing the "
                "loss; they do not change",
                stacklevel=5,
            )

    def _as_before(
        self, pairs: list[tuple[Any, Variable]], strategy: AnyStrategy | None
    ) -> list[Array] | None:
        """Return the gradients as arrays if they match the last ones that `_checked` accepted.

        Return None if they do not match, so that the caller must check them.
        """
        known_strategy, before = self._before
        if not pairs or known_strategy is not strategy or len(pairs) != len(before):
            return None
        gradients: list[Array] = []
        for (gradient, variable), (known, shape, dtype) in zip(pairs, before, strict=True):
            if variable is not known or gradient.__class__ is not Tensor:
                return None
            array = gradient.array
            if array.shape != shape or array.dtype != dtype:
                return None
            gradients.append(array)
        return gradients

    def _update(self, gradients: list[Array], variables: list[Variable]) -> None:
        """Clip gradients, and update this replica's copies of the variables."""
        gradients = clipped(gradients, self.clipvalue, self.clipnorm, self.global_clipnorm)
        learning_rate = self._rate_of_step()
        step = int(self.iterations) + 1
        names = self.slot_names()

        def update(arrays: list[Array]) -> None:
            width = 1 + len(names)
            parameters = arrays[::width]
            if self.weight_decay is not None:
                pairs = zip(parameters, variables, strict=True)
                decaying = [parameter for parameter, v in pairs if self._decays(v)]
                multiply(decaying, 1.0 - self.weight_decay * learning_rate)
            kept = {name: arrays[k::width] for k, name in enumerate(names, 1)}
            self._update_steps(parameters, gradients, kept, learning_rate, step)

        for copies in self._copies_with_slots(variables):
            width = 1 + len(names)
            groups = [copies[k : k + width] for k in range(0, len(copies), width)]
            if not self._updated_on_servers(groups, gradients, learning_rate, step):
                update_together(copies, update)

    def _updated_on_servers(
        self,
        groups: list[Sequence[Variable]],
        gradients: Sequence[Array],
        learning_rate: float,
        step: int,
        index: Array | None = None,
    ) -> bool:
        """Let parameter servers make the step, and return True, if they can.

        They can if they hold the variables and know the optimizer, which must be this package's.
        """
        update, kind = groups[0][0].update_on_servers, type(self)
        from_package = kind.__module__.startswith("pycollective.keras.optimizers.")
        if update is None or not from_package or kind.__name__ not in OPTIMIZERS:
            return False
        decay = 1.0 if self.weight_decay is None else 1.0 - self.weight_decay * learning_rate
        decays = [self.weight_decay is not None and self._decays(group[0]) for group in groups]
        numbers = {"rate": learning_rate, "step": step, "decay": decay}
        rule = kind.__name__, {name: getattr(self, name) for name in self._settings}
        return update(rule, groups, [np.asarray(g) for g in gradients], numbers, decays, index)

    def update_all(
        self,
        parameters: Sequence[Array],
        gradients: Sequence[Array],
        slots: Mapping[str, Sequence[Array]],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update several variables in place.

        Parameters
        ----------
        parameters, gradients, slots, learning_rate, step
            As for `update_step`, but each array is replaced by a list with an array for each variable.
        """
        self._update_steps(parameters, gradients, slots, learning_rate, step)

    def _rate_of_step(self) -> float:
        rate = self._rate
        schedule = isinstance(rate, LearningRateSchedule)
        return float(rate(self._iterations) if schedule else self.learning_rate)

    def _copies_with_slots(self, variables: list[Variable]) -> list[Sequence[Variable]]:
        """Return the copies of variables that this thread updates, each followed by its slots.

        The result is cached for the next step with the same variables.
        """
        mode = current_mode()
        replica = None if mode is None else mode.replica
        known = tuple(map(id, variables))
        stepped = self._stepped.get(replica)
        if stepped is None or stepped[0] != known or stepped[1] is not (mode and mode.strategy):
            names = self.slot_names()
            found: list[Variable] = []
            for variable in variables:
                slots = self._slots[id(variable)][1]
                found += [variable, *[slots[name] for name in names]]
            stepped = known, mode and mode.strategy, list(copies_of(found))
            self._stepped[replica] = stepped
        return stepped[2]


def _split(
    pairs: list[tuple[Any, Variable]],
) -> tuple[list[tuple[Any, Variable]], list[tuple[IndexedSlices, Variable]]]:
    """Return the pairs for `_step`, and those with `IndexedSlices` for `_step_rows`."""
    if True not in [gradient.__class__ is IndexedSlices for gradient, _ in pairs]:
        return pairs, []
    sparse = [
        (gradient, variable)
        for gradient, variable in pairs
        if isinstance(gradient, IndexedSlices)
        and (getattr(variable, "_by_rows", False) or type(variable) is Variable)
        and getattr(variable, "constraint", None) is None
        and gradient.shape == variable.shape
        and gradient.dtype == variable.dtype
    ]
    known = {id(variable) for _, variable in sparse}
    if len(known) < len(sparse):
        # A variable appears twice. `_checked` raises the error for this if it gets all pairs.
        return pairs, []
    return [(g, v) for g, v in pairs if id(v) not in known], sparse


def _one_step_of(cls: type[Optimizer]) -> Callable[..., None]:
    """Return a method that updates one variable by a class's ``_update_steps``."""
    together = cls._update_steps

    def update_step(
        self: Optimizer,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        kept = {name: [array] for name, array in slots.items()}
        together(self, [parameter], [gradient], kept, learning_rate, step)

    return update_step
