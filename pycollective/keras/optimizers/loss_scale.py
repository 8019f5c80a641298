"""`LossScaleOptimizer`: gradients of float16 that neither vanish nor overflow."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array, asarray, beside, on_host
from pycollective.keras import configs
from pycollective.keras.optimizers.copies import with_arrays
from pycollective.keras.optimizers.named import deserialize
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nccl.device import Fetch
from pycollective.nn import together
from pycollective.tensor import Tensor, Variable

__all__ = ["LossScaleOptimizer"]


class LossScaleOptimizer(Optimizer):
    """Lets another optimizer work on gradients of a loss that is scaled as far up as it can be.

    The scale is halved, and the step left out, when a gradient is no longer finite; it is doubled
    after ``dynamic_growth_steps`` steps in a row. Gradients are looked at when they are summed over
    the replicas: all of them decide alike.

    Parameters
    ----------
    inner_optimizer
        What makes the steps.
    initial_scale
        The scale at first; too high is soon corrected.
    dynamic_growth_steps
        After how many steps with finite gradients it is doubled.
    name
        By default the class's name with a number.

    Attributes
    ----------
    dynamic_scale, step_counter : Variable
        The scale, and the steps since it was changed.

    Raises
    ------
    ValueError
        If ``inner_optimizer`` is no optimizer, or a number is not positive.

    Notes
    -----
    On a GPU no step waits to hear whether its gradients are finite: it is made, and put back there if
    they were not, for which the values before it are kept. Whether it counts is known in the next step;
    `iterations` waits for it, as does what writes files.
    """

    _untracked = Optimizer._untracked | {"_late"}

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer):
            raise ValueError(f"LossScaleOptimizer: {inner_optimizer!r} is no optimizer")
        for key, value in {
            "initial_scale": initial_scale,
            "dynamic_growth_steps": dynamic_growth_steps,
        }.items():
            if not 0 < value < np.inf:
                raise ValueError(f"LossScaleOptimizer: {key} must be positive, got {value}")
        super().__init__(0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.initial_scale = float(initial_scale)
        self.dynamic_growth_steps = int(dynamic_growth_steps)
        #: Of each replica that is on a GPU: its count of steps, and whether the last one was made.
        self._late: dict[int, tuple[Variable, Fetch]] = {}
        # Gradients would be divided twice.
        inner_optimizer.loss_scale_factor = None
        self.step_counter = self._make("step_counter", lambda: np.zeros((), np.int64), np.int64)
        self.dynamic_scale = self._make(
            "dynamic_scale", lambda: np.asarray(self.initial_scale), np.float32
        )

    @property
    def variables(self) -> list[Variable]:
        """The scale, its counter, and those of the inner optimizer."""
        self._settle()
        return [*super().variables, *self.inner_optimizer.variables]

    @property
    def built(self) -> bool:
        """Whether there is a slot for any variable yet."""
        return self.inner_optimizer.built

    @property
    def iterations(self) -> Any:
        """How many steps were made, without those that were left out."""
        self._settle()
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """That of the inner optimizer."""
        self._settle()
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    lr = learning_rate

    def build(self, var_list: Iterable[Variable]) -> None:
        """Make what the inner optimizer keeps for these variables."""
        self.inner_optimizer.build(var_list)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Variable:
        """Update variables by gradients of the scaled loss; as `Optimizer.apply_gradients`."""
        super().apply_gradients(*args, **kwargs)
        return self.inner_optimizer._iterations

    def _trackable_children(self) -> dict[str, Any]:
        self._settle()
        return super()._trackable_children()

    def _step(self, gradients: list[Array], variables: list[Variable]) -> None:
        if not on_host(gradients[0]):
            self._step_on_device(gradients, variables)
            return
        scale = float(self.dynamic_scale)
        finite = [np.isfinite(gradient).all() for gradient in gradients]
        if functools.reduce(operator.and_, finite):
            unscaled = [gradient / gradient.dtype.type(scale) for gradient in gradients]
            self.inner_optimizer._step(unscaled, variables)
            count = int(self.step_counter) + 1
            if count >= self.dynamic_growth_steps:
                scale, count = 2 * scale, 0
        else:
            scale, count = scale / 2, 0

        def note(arrays: list[Array]) -> None:
            arrays[0][...], arrays[1][...] = scale, count

        with_arrays([self.dynamic_scale, self.step_counter], note)

    def _step_on_device(self, gradients: list[Array], variables: list[Variable]) -> None:
        """Do as `_step` without asking the device: make the step, and put it back there."""
        inner = self.inner_optimizer
        count = inner._iterations.local()
        self._settle(count)
        if any(id(variable) not in inner._slots for variable in variables):
            inner.build(variables)
        for own in (self.dynamic_scale.local(), self.step_counter.local()):
            own.set_array(asarray(own.current().array, like=gradients[0]))
        scale = self.dynamic_scale.local().current().array
        unscaled, finite = together.unscaled(gradients, scale)
        changed = [
            kept
            for variable, slots in inner._slots.values()
            for kept in (variable, *slots.values())
        ]
        before = together.copies([kept.local().current().array for kept in changed])
        inner._step(unscaled, variables)
        with_arrays(changed, lambda arrays: together.put_back(arrays, before, finite))

        def note(arrays: list[Array]) -> None:
            together.next_scale(arrays[0], arrays[1], finite, self.dynamic_growth_steps)

        with_arrays([self.dynamic_scale, self.step_counter], note)
        with beside(finite):
            self._late[id(count)] = (count, Fetch(finite))

    def _settle(self, only: Variable | None = None) -> None:
        """Take back from counts of steps, or one of them, what was not made after all."""
        for key in list(self._late) if only is None else [id(only)]:
            count, made = self._late.pop(key, (None, None))
            if count is not None and made is not None and not made.value():
                count.assign_sub(1)

    def _loss_scale(self) -> float | Tensor:
        scale = self.dynamic_scale.local().current()
        return float(scale) if on_host(scale.array) else scale

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Say which variables have no weight decay; as the inner optimizer's."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Give variables the values that training ends with."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as what JSON can hold."""
        return {
            "name": self.name,
            "inner_optimizer": configs.serialize(self.inner_optimizer),
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the optimizer that `get_config` described."""
        arguments = dict(config)
        inner = deserialize(arguments.pop("inner_optimizer"), custom_objects)
        return cls(inner, **arguments)
