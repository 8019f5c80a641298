"""The settings and variables of an optimizer, and their serialization."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from pycollective.arguments import number_of
from pycollective.distribute.context import current_mode
from pycollective.distribute.interfaces import AnyStrategy
from pycollective.distribute.sharded import shards_of, whole_of
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import floatx, name_of_class, unique_name
from pycollective.keras.building import build_scope_of_new
from pycollective.keras.copying import CopiedByConfig
from pycollective.keras.optimizers import schedules
from pycollective.keras.optimizers.schedules import LearningRateSchedule
from pycollective.tensor import Variable, VariableAggregation
from pycollective.train.trackable import Trackable

_COMMON_SETTINGS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


class OptimizerState(CopiedByConfig, Trackable):
    """Settings of an `Optimizer`, and its slot variables."""

    #: The arguments of a subclass's constructor that are attributes of the same name.
    _settings: tuple[str, ...] = ()
    _untracked = frozenset({"_slots", "_stepped", "_before"})

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
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
        if not 0 <= ema_momentum <= 1:
            raise ValueError(
                f"`ema_momentum` must be in the range [0, 1]. Received: ema_momentum={ema_momentum}"
            )
        if use_ema and not (ema_overwrite_frequency is None or ema_overwrite_frequency >= 1):
            raise ValueError(
                "`ema_overwrite_frequency` must be an integer >= 1 or None. Received: "
                f"ema_overwrite_frequency={ema_overwrite_frequency}"
            )
        if gradient_accumulation_steps is not None and not gradient_accumulation_steps >= 2:
            raise ValueError(
                "`gradient_accumulation_steps` must be an integer >= 2. Received: "
                f"gradient_accumulation_steps={gradient_accumulation_steps}"
            )
        if loss_scale_factor is not None and not 0 < loss_scale_factor < math.inf:
            raise ValueError(
                f"{self.name}: loss_scale_factor must be positive and finite, got {loss_scale_factor}"
            )
        self.weight_decay = weight_decay
        self.use_ema = bool(use_ema)
        self.ema_momentum = float(ema_momentum)
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.loss_scale_factor = loss_scale_factor
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._never_decays: tuple[frozenset[int], re.Pattern[str] | None] = (frozenset(), None)
        self.clipnorm = clipnorm
        self.clipvalue = clipvalue
        self.global_clipnorm = global_clipnorm
        #: Each variable with its slots by name, by the id of the variable.
        self._slots: dict[int, tuple[Variable, dict[str, Variable]]] = {}
        #: Ids of the variables, strategy, and updated copies of the last step, by replica.
        self._stepped: dict[
            int | None, tuple[tuple[int, ...], AnyStrategy | None, list[Sequence[Variable]]]
        ] = {}
        #: The strategy of the last step, and each variable with its gradient's shape and dtype.
        self._before: tuple[AnyStrategy | None, list[tuple[Variable, tuple[int, ...], Any]]] = (
            None,
            [],
        )
        self._warned: set[tuple[str, ...]] = set()
        self._rate: Any = None
        self._creation = build_scope_of_new()
        self._iterations = self._make("iterations", lambda: np.zeros((), np.int64), np.int64)
        if isinstance(learning_rate, LearningRateSchedule) or callable(learning_rate):
            self._rate = learning_rate
        else:
            rate = self._finite(learning_rate)
            self._rate = self._make("learning_rate", lambda: np.asarray(rate), floatx())

    # Variables -------------------------------------------------------------------------------

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the slots of each variable. Slots start at 0."""
        return ()

    def _slot_order(self) -> Sequence[Sequence[str]]:
        """Return the names of the slots in the order of `variables`, in groups for each variable."""
        return [self.slot_names()]

    def _slot_start(self, name: str) -> float:
        """Return the first value of a slot."""
        return 0.0

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
    def iterations(self) -> Any:
        """The number of steps: an int64 scalar."""
        steps = self.gradient_accumulation_steps
        return self._iterations // steps if steps else self._iterations

    @iterations.setter
    def iterations(self, variable: Variable) -> None:
        if self.built:
            raise RuntimeError(
                "Cannot set `iterations` to a new Variable after the Optimizer weights have been "
                "created. Here it is attempting to set `iterations` to "
                f"{variable.name!r}"
            )
        self._variables["iterations"] = self._iterations = variable

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's variables in Keras's order: iterations, learning rate, the slots."""
        slots = self.slot_variables
        slot_ids = {id(slot) for slot in slots}
        created = list(self._variables.values())
        first = next((i for i, v in enumerate(created) if id(v) in slot_ids), len(created))
        return [*created[:first], *slots, *(v for v in created[first:] if id(v) not in slot_ids)]

    @property
    def slot_variables(self) -> list[Variable]:
        """The slots of all variables, in Keras's order; the shards of a variable share one slot."""
        groups = [*((name,) for name in self._common_slots()), *self._slot_order()]
        found = [
            whole_of(slots[name])
            for group in groups
            for _, slots in self._slots.values()
            for name in group
        ]
        return list({id(slot): slot for slot in found}.values())

    @property
    def built(self) -> bool:
        """True after `build` got a variable, even if the optimizer has no slots."""
        return bool(self._slots)

    @property
    def learning_rate(self) -> Any:
        """The learning rate: a variable, or the rate of the schedule or function at this step."""
        if isinstance(self._rate, LearningRateSchedule):
            return self._rate(self._iterations)
        return self._rate if isinstance(self._rate, Variable) else self._rate()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if isinstance(value, LearningRateSchedule) or callable(value):
            self._variables.pop("learning_rate", None)
            self._rate = value
            return
        if not isinstance(self._rate, Variable):
            raise TypeError(
                f"{self.name}: the learning rate cannot be set, because the optimizer has a schedule; "
                "give the constructor a number instead"
            )
        self._rate.assign(self._finite(value))

    lr = learning_rate

    def _finite(self, learning_rate: Any) -> float:
        rate = number_of(f"{self.name}: the learning rate", learning_rate)
        if not math.isfinite(rate):
            raise ValueError(f"{self.name}: the learning rate must be a finite number, got {rate}")
        return rate

    def build(self, var_list: Iterable[Variable]) -> None:
        """Create the missing slots of these variables; for a shard, those of its whole variable.

        If the list has all variables with slots, its order becomes the slots' order.
        """
        var_list = list(var_list)
        with self._creation(self):
            number = len({id(whole_of(variable)) for variable, _ in self._slots.values()})
            for variable in var_list:
                if id(variable) in self._slots:
                    continue
                whole, slots = whole_of(variable), {}
                for name in (*self._common_slots(), *self.slot_names()):
                    start = self._slot_start(name)
                    slot = self._make_like(whole, f"{name}/{number}", whole.shape, start)
                    slots[name] = shards_of([slot])
                number += 1
                for place, part in enumerate(shards_of([whole])):
                    own = {name: parts[place] for name, parts in slots.items()}
                    self._slots[id(part)] = (part, own)
            places = {id(whole_of(v)): place for place, v in enumerate(var_list)}
            if all(id(whole_of(v)) in places for v, _ in self._slots.values()):
                entries = sorted(
                    self._slots.items(), key=lambda entry: places[id(whole_of(entry[1][0]))]
                )
                self._slots = dict(entries)

    def _common_slots(self) -> tuple[str, ...]:
        """Return the names of the slots that every optimizer can have."""
        names = ("average",) if self.use_ema else ()
        return (*names, "gradient_accumulator") if self.gradient_accumulation_steps else names

    def _make_like(
        self, variable: Variable, name: str, shape: tuple[int, ...], start: float
    ) -> Variable:
        """Make a variable with the dtype and the number of components, or shards, of another one."""
        dtype = variable.dtype
        strategy = getattr(variable, "_distribute_strategy", None)
        if strategy is None:
            return self._make(name, lambda: np.full(shape, start, dtype), dtype, shape)
        with (
            strategy.scope() if current_mode() is None else nullcontext(),
            strategy.extended.colocate_vars_with(variable),
        ):
            return self._make(name, lambda: np.full(shape, start, dtype), dtype, shape)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Exclude variables from weight decay, before the first step.

        Parameters
        ----------
        var_list
            Variables.
        var_names
            Regular expressions for the names of variables.

        Raises
        ------
        ValueError
            The optimizer is built.
        """
        if self.built:
            raise ValueError(
                "`exclude_from_weight_decay()` can only be configured before the optimizer is built."
            )
        names = list(var_names or ())
        self._never_decays = (
            frozenset(id(variable) for variable in var_list or ()),
            re.compile("|".join(names)) if names else None,
        )

    def _decays(self, variable: Variable) -> bool:
        excluded, pattern = self._never_decays
        return id(variable) not in excluded and not (pattern and pattern.search(variable.name))

    def _slot(self, variable: Variable, name: str) -> Variable:
        return self._slots[id(variable)][1][name]

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Set variables to their final values: with ``use_ema`` their means."""
        if not self.use_ema:
            return
        for variable in var_list:
            if id(variable) in self._slots:
                variable.assign(self._slot(variable, "average").value())

    # Descriptions ----------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for JSON.

        Raises
        ------
        TypeError
            The learning rate is a function, which cannot be serialized.
        """
        rate: Any = self._rate
        if isinstance(rate, LearningRateSchedule):
            rate = schedules.serialize(rate)
        elif isinstance(rate, Variable):
            rate = float(rate)
        else:
            raise TypeError(
                f"{self.name}: the learning rate is the function {rate!r}, which cannot be serialized; "
                "use a LearningRateSchedule"
            )
        names = (*_COMMON_SETTINGS, *self._settings)
        return {
            "name": self.name,
            "learning_rate": rate,
            **{name: getattr(self, name) for name in names},
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the optimizer that `get_config` described."""
        arguments = dict(config)
        if isinstance(arguments.get("learning_rate"), Mapping):
            arguments["learning_rate"] = schedules.deserialize(
                arguments["learning_rate"], custom_objects
            )
        return cls(**arguments)

    def save_own_variables(self, store: Any) -> None:
        """Store the values of `variables` in a mapping, by their numbers."""
        for number, variable in enumerate(self.variables):
            store[str(number)] = variable.numpy()

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Set `variables` to the values of `save_own_variables`.

        Raises
        ------
        ValueError
            The number of values, or a shape, differs. No variable changes then.
        """
        variables = self.variables
        values = [np.asarray(store[key]) for key in sorted(store, key=int)]
        shapes = [value.shape for value in values]
        expected = [tuple(variable.shape) for variable in variables]
        if shapes != expected:
            raise ValueError(
                f"optimizer {self.name!r} has variables of shapes {expected}, the stored ones have "
                f"{shapes}"
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value.astype(variable.dtype))
