"""`Holder`: the variables, metrics and losses of a layer and of its sublayers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.distribute.sharded import shards_of
from pycollective.keras.dry_run import in_dry_run
from pycollective.keras.metrics.metric import Metric
from pycollective.tensor import Tensor, Variable, as_tensor
from pycollective.train.trackable import Trackable, containers_of, parts_of, structure_stamp


class Holder(Trackable):
    """Base of `Layer`: access to the variables, metrics and losses of a layer and its sublayers."""

    _name: str
    _trainable: bool
    built: bool
    #: Regularizers, each with its variable.
    _regularized: list[tuple[Callable[[Any], Any], Variable]]
    _added_losses: threading.local
    #: True after the first add_loss of the process. Until then calls skip the search for old losses.
    _any_added_loss = False
    add_weight: Callable[..., Variable]

    def _sublayers(self) -> Iterator[Any]:
        """Yield the direct sublayers in the order of their definition, each once."""
        return iter(_Inside(self).layers)

    def _own_variables(self) -> list[Variable]:
        """Return this layer's variables, without its sublayers' variables."""
        return _Inside(self).variables

    def _walk(self) -> list[tuple[Holder, list[Variable]]]:
        """Return this layer and all nested sublayers, each once, with its own variables."""
        known = self._current_walk()
        return [(self, known.variables), *known.inside]

    def _current_walk(self) -> _Walk:
        """Return the cached `_Walk`; search again only after a change of the structure."""
        stamp = structure_stamp()
        known: _Walk | None = self.__dict__.get("_cached_walk")
        if known is None or known.stamp is not stamp or not known.is_current():
            known = _Walk(self, stamp)
            object.__setattr__(self, "_cached_walk", known)
        return known

    def _flatten_layers(self) -> Iterator[Holder]:
        """Yield this layer and all nested sublayers, each once."""
        for layer, _ in self._walk():
            yield layer

    def _all_variables(self) -> list[tuple[Variable, bool]]:
        """Return each variable once, with True if it is trained."""
        found: dict[int, tuple[Variable, bool]] = {}
        for layer, variables in self._walk():
            for variable in shards_of(variables):
                trained = variable.trainable and layer._trainable and self._trainable
                found.setdefault(id(variable), (variable, trained))
        return list(found.values())

    @property
    def trainable_weights(self) -> list[Variable]:
        """The variables that are trained, in the order of their definition."""
        known = self._current_walk()
        if known.trained is None:
            known.trained = [variable for variable, trained in self._all_variables() if trained]
        return list(known.trained)

    @property
    def non_trainable_weights(self) -> list[Variable]:
        """The variables that are not trained, in the order of their definition."""
        return [variable for variable, trained in self._all_variables() if not trained]

    @property
    def weights(self) -> list[Variable]:
        """All variables, layer by layer, each layer's trainable variables first; as in Keras.

        The shards of a `ShardedVariable` are variables of their own.
        """
        found: dict[int, Variable] = {}
        for _, variables in self._walk():
            for variable in sorted(shards_of(variables), key=lambda v: not v.trainable):
                found.setdefault(id(variable), variable)
        return list(found.values())

    variables = weights
    trainable_variables = trainable_weights
    non_trainable_variables = non_trainable_weights

    def count_params(self) -> int:
        """Return the number of elements of all variables.

        Raises
        ------
        ValueError
            If the layer is not built yet.
        """
        if not self.built:
            raise ValueError(
                f"layer {self._name!r} has no weights yet: it is not built; call it on an input, "
                "or build(input_shape)"
            )
        return sum(int(np.prod(v.shape)) for v in self.weights)

    def get_weights(self) -> list[Array]:
        """Return copies of all variables' values, in the order of `weights`."""
        return [np.asarray(variable.numpy()) for variable in self.weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set all variables, in the order of `weights`, in every replica.

        Raises
        ------
        ValueError
            If the number of values or a shape is wrong; nothing is changed.
        """
        variables = self.weights
        if len(weights) != len(variables):
            hint = "" if self.built else "; it is not built yet: call it on an input first"
            raise ValueError(
                f"set_weights: layer {self._name!r} has {len(variables)} weights, got "
                f"{len(weights)} values{hint}"
            )
        values = [np.asarray(value) for value in weights]
        for variable, value in zip(variables, values, strict=True):
            if value.shape != variable.shape:
                raise ValueError(
                    f"set_weights: weight {variable.name!r} of layer {self._name!r} has shape "
                    f"{variable.shape}, the value has shape {value.shape}"
                )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def stored_variables(self) -> list[Variable]:
        """Return the layer's own variables in file order: trainable variables first."""
        own = self._own_variables()
        return [v for v in own if v.trainable] + [v for v in own if not v.trainable]

    def save_own_variables(self, store: Any) -> None:
        """Store this layer's state, without its sublayers' state, in a dict of arrays.

        The default stores the layer's own variables as ``"0"``, ``"1"``, …. A subclass that stores
        something else overrides this method and `load_own_variables`.
        """
        for number, variable in enumerate(self.stored_variables()):
            store[str(number)] = np.asarray(variable.numpy())

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Restore the state that `save_own_variables` stored in a dict of arrays.

        Raises
        ------
        ValueError
            If the number of arrays or a shape differs from the layer's; nothing is changed.
        """
        variables = self.stored_variables()
        values = [np.asarray(store[key]) for key in sorted(store, key=int)]
        expected, found = ([tuple(each.shape) for each in group] for group in (variables, values))
        if expected != found:
            raise ValueError(
                f"layer {self._name!r} has variables of shapes {expected}, the stored ones have {found}"
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def add_variable(
        self,
        shape: Any,
        initializer: Any = None,
        dtype: Any = None,
        trainable: bool = True,
        **options: Any,
    ) -> Variable:
        """Make a variable of this layer; ``options`` are further arguments of `add_weight`."""
        return self.add_weight(
            options.pop("name", None), shape, dtype, initializer, trainable=trainable, **options
        )

    # Metrics ---------------------------------------------------------------------------------

    def _own_metrics(self) -> list[Metric]:
        """Return the metrics that are attributes of this layer and of its sublayers."""
        inside = [part for layer in self._flatten_layers() for part in parts_of(layer)]
        return list({id(part): part for part in inside if isinstance(part, Metric)}.values())

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that are attributes of this layer and of its sublayers."""
        return self._own_metrics()

    @property
    def metrics_variables(self) -> list[Variable]:
        """The variables of `metrics`, which are not among `variables`."""
        return [variable for metric in self.metrics for variable in metric.variables]

    # Losses ----------------------------------------------------------------------------------

    def add_loss(self, loss: Any) -> None:
        """Add a tensor, or several, to the `losses` of the current call.

        Each replica (thread) has its own values. The values last until the next outermost call: a
        call of the layer itself, or of a model that contains the layer.
        """
        if in_dry_run():
            return
        Holder._any_added_loss = True
        values = loss if isinstance(loss, (list, tuple)) else [loss]
        kept = self._added_losses.__dict__.setdefault("values", [])
        kept.extend(as_tensor(value) for value in values)

    def _forget_losses(self) -> None:
        for layer in self._flatten_layers():
            layer._added_losses.__dict__.clear()

    @property
    def losses(self) -> list[Tensor]:
        """The losses added in the last call, and the regularization losses of the variables.

        Each access computes the regularization losses from this replica's variables, so that a
        `GradientTape` block records them.
        """
        found: list[Tensor] = []
        for layer, _ in self._walk():
            if Holder._any_added_loss:
                found += layer._added_losses.__dict__.get("values", ())
            if self._trainable and layer._trainable and layer._regularized:
                found += [penalty(v) for penalty, v in layer._regularized if v.trainable]
        return found


def variables_in(layer: Holder) -> list[Variable]:
    """Return the variables of a layer and of its metrics, without its sublayers' variables."""
    parts = list(parts_of(layer))
    own = [part for part in parts if isinstance(part, Variable)]
    return [*own, *(v for part in parts if isinstance(part, Metric) for v in part.variables)]


class _Inside:
    """The direct sublayers and variables of a layer, each once, also those in its lists and dicts."""

    def __init__(self, layer: Holder) -> None:
        found = list({id(part): part for part in parts_of(layer)}.values())
        self.layers: list[Holder] = [part for part in found if isinstance(part, Holder)]
        self.variables: list[Variable] = [part for part in found if isinstance(part, Variable)]


class _Walk:
    """The nested sublayers and variables of a layer, with the containers that were searched.

    The layer caches its `_Walk`. So a `_Walk` holds no reference to the layer: only the garbage
    collector could free such a cycle.
    """

    def __init__(self, root: Holder, stamp: object) -> None:
        self.stamp = stamp
        self.variables: list[Variable] = []
        self.inside: list[tuple[Holder, list[Variable]]] = []
        #: The trained variables; None until the first access.
        self.trained: list[Variable] | None = None
        self._containers: list[tuple[Any, list[int]]] = []
        seen: set[int] = set()
        stack = [root]
        while stack:
            layer = stack.pop()
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            found = _Inside(layer)
            if layer is root:
                self.variables = found.variables
            else:
                self.inside.append((layer, found.variables))
            for value in containers_of(layer):
                self._containers.append((value, _identities(value)))
            # Reversed, so that a layer that two layers share is listed with the first of them.
            stack.extend(reversed(found.layers))

    def is_current(self) -> bool:
        """Return True if the searched lists and dicts still hold the same objects."""
        return all(map(_is_unchanged, self._containers))


def _is_unchanged(known: tuple[Any, list[int]]) -> bool:
    container, held = known
    return _identities(container) == held


def _identities(container: Any) -> list[int]:
    values = container.values() if isinstance(container, Mapping) else container
    return [id(value) for value in values]
