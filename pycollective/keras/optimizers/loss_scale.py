"""`LossScaleOptimizer`: loss scaling against underflow and overflow of float16 gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array, asarray, beside, on_host
from pycollective.keras import configs
from pycollective.keras.optimizers.clipping import divided
from pycollective.keras.optimizers.copies import with_arrays
from pycollective.keras.optimizers.named import deserialize
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nccl.device import Fetch
from pycollective.nn import together
from pycollective.tensor import Tensor, Variable


class LossScaleOptimizer(Optimizer):
    """An optimizer that scales the loss, and passes the unscaled gradients to another optimizer.

    If a gradient is not finite, the step is skipped and the scale is halved. The scale is doubled after
    ``dynamic_growth_steps`` finite steps in a row. The test uses the sums over the replicas, so that all
    replicas have the same result.

    Parameters
    ----------
    inner_optimizer : Optimizer
        The optimizer that updates the variables.
    initial_scale : float
        The first scale. If it is too high, the first steps are skipped and halve it.
    dynamic_growth_steps : int
        The number of steps with finite gradients after which the scale is doubled.
    name : str, optional
        The name, by default the class's name with a number.

    Attributes
    ----------
    dynamic_scale, step_counter : Variable
        The scale, and the number of steps since its last change.

    Raises
    ------
    ValueError
        ``inner_optimizer`` is not an optimizer, or a number is not positive and finite.

    Notes
    -----
    On a GPU no step waits for the test of its gradients. The GPU makes the step, and restores the
    earlier values if a gradient is not finite. The next step, `iterations` and saving wait for the
    result of the test.
    """

    _untracked = Optimizer._untracked | {"_pending"}

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer):
            raise ValueError(f"LossScaleOptimizer: {inner_optimizer!r} is not an optimizer")
        for key, value in {
            "initial_scale": initial_scale,
            "dynamic_growth_steps": dynamic_growth_steps,
        }.items():
            if not 0 < value < np.inf:
                raise ValueError(
                    f"LossScaleOptimizer: {key} must be positive and finite, got {value}"
                )
        super().__init__(0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.initial_scale = float(initial_scale)
        self.dynamic_growth_steps = int(dynamic_growth_steps)
        #: The last step of each replica on a GPU: the replica's count of steps, and a result that
        #: is True if the gradients were finite. The key is the id of the count.
        self._pending: dict[int, tuple[Variable, Fetch]] = {}
        # Otherwise the inner optimizer would divide the gradients a second time.
        inner_optimizer.loss_scale_factor = None
        self.step_counter = self._make("step_counter", lambda: np.zeros((), np.int64), np.int64)
        self.dynamic_scale = self._make(
            "dynamic_scale", lambda: np.asarray(self.initial_scale), np.float32
        )

    @property
    def variables(self) -> list[Variable]:
        """The variables of this optimizer, such as the scale, then those of the inner optimizer."""
        self._subtract_skipped()
        return [*super().variables, *self.inner_optimizer.variables]

    @property
    def built(self) -> bool:
        """True if the inner optimizer is built."""
        return self.inner_optimizer.built

    def _updated(self) -> list[Variable]:
        return self.inner_optimizer._updated()

    @property
    def iterations(self) -> Any:
        """The number of steps, without skipped ones."""
        self._subtract_skipped()
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, variable: Variable) -> None:
        self.inner_optimizer.iterations = variable

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        self._subtract_skipped()
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    lr = learning_rate

    def build(self, var_list: Iterable[Variable]) -> None:
        """Create the inner optimizer's slots of these variables."""
        self.inner_optimizer.build(var_list)

    def _build_missing(self, variables: list[Variable]) -> None:
        self.inner_optimizer._build_missing(variables)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Variable:
        """Update variables by gradients of the scaled loss; see `Optimizer.apply_gradients`."""
        super().apply_gradients(*args, **kwargs)
        return self.inner_optimizer._iterations

    def _trackable_children(self) -> dict[str, Any]:
        self._subtract_skipped()
        return super()._trackable_children()

    def _step(self, gradients: list[Array], variables: list[Variable]) -> None:
        if not on_host(gradients[0]):
            self._step_on_device(gradients, variables)
            return
        scale = float(self.dynamic_scale)
        finite = [np.isfinite(gradient).all() for gradient in gradients]
        if functools.reduce(operator.and_, finite):
            unscaled = [divided(gradient, scale) for gradient in gradients]
            self.inner_optimizer._step(unscaled, variables)
            count = int(self.step_counter) + 1
            if count >= self.dynamic_growth_steps:
                scale, count = 2 * scale, 0
        else:
            scale, count = scale / 2, 0

        def set_both(arrays: list[Array]) -> None:
            arrays[0][...], arrays[1][...] = scale, count

        with_arrays([self.dynamic_scale, self.step_counter], set_both)

    def _step_on_device(self, gradients: list[Array], variables: list[Variable]) -> None:
        """Make a step, and restore the variables on the device if a gradient is not finite."""
        inner = self.inner_optimizer
        count = inner._iterations.local()
        self._subtract_skipped(count)
        for copy in (self.dynamic_scale.local(), self.step_counter.local()):
            copy.set_array(asarray(copy.current().array, like=gradients[0]))
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

        def set_both(arrays: list[Array]) -> None:
            together.next_scale(arrays[0], arrays[1], finite, self.dynamic_growth_steps)

        with_arrays([self.dynamic_scale, self.step_counter], set_both)
        with beside(finite):
            self._pending[id(count)] = (count, Fetch(finite))

    def _subtract_skipped(self, only: Variable | None = None) -> None:
        """Wait for the pending tests, and subtract the skipped steps from the counts of steps.

        ``only`` is the count of the only replica to handle; None: handle all replicas.
        """
        for key in list(self._pending) if only is None else [id(only)]:
            count, finite = self._pending.pop(key, (None, None))
            if count is not None and finite is not None and not finite.value():
                count.assign_sub(1)

    def _loss_scale(self) -> float | Tensor:
        scale = self.dynamic_scale.local().current()
        return float(scale) if on_host(scale.array) else scale

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Exclude variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Set variables to the final values of the inner optimizer."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for JSON."""
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
