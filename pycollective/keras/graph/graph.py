"""`Graph`: the calls between inputs and outputs, ready to be made with values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.keras.graph.order import nodes_between, operations_of, with_inputs_of_its_own
from pycollective.keras.graph.symbols import (
    KerasTensor,
    Node,
    Shape,
    leaves_of,
    map_symbols,
)
from pycollective.keras.layers import Input, Layer
from pycollective.keras.layers.fusion import steps_of
from pycollective.tensor import Tensor, as_tensor, ops


class Graph:
    """The calls of layers between symbolic ``inputs`` and ``outputs``, which may be nests.

    Attributes
    ----------
    inputs, outputs : list of KerasTensor
        Flat; those of dicts in the order of their sorted keys.
    input_structure, output_structure, result_structure
        As they were given; and what `run` returns: the outputs, or the only one of them.
    nodes, operations : list
        The calls in an order in which they can be made; layers and operations in Keras's order.
    """

    def __init__(self, inputs: Any, outputs: Any) -> None:
        for kind, structure in (("inputs", inputs), ("outputs", outputs)):
            leaves = leaves_of(structure)
            wrong = [leaf for leaf in leaves if not isinstance(leaf, KerasTensor)]
            if wrong or not leaves:
                raise ValueError(
                    f"All `{kind}` values must be KerasTensors, as Input() and layers called on them "
                    f"return. Received: {kind}={structure!r}"
                    + (f" including invalid value {wrong[0]!r}" if wrong else "")
                )
        flat = leaves_of(inputs)
        if any(not tensor.node.is_input for tensor in flat):
            inputs, outputs = with_inputs_of_its_own(inputs, outputs, flat, _like)
        self.input_structure = inputs
        self.output_structure = outputs
        single = isinstance(outputs, (list, tuple)) and len(outputs) == 1
        self.result_structure = outputs[0] if single else outputs
        self.inputs: list[KerasTensor] = leaves_of(inputs)
        self.outputs: list[KerasTensor] = leaves_of(outputs)
        self.nodes, found = nodes_between(self.inputs, self.outputs)
        self.operations = operations_of(self.nodes, found)
        names = Counter(operation.name for operation in self.operations)
        for name, times in names.items():
            if times > 1:
                raise ValueError(
                    f'The name "{name}" is used {times} times in the model. All operation names '
                    "should be unique."
                )
        self._plan: _Plan | None = None

    @property
    def layers(self) -> list[Layer]:
        """The layers, inputs among them, without the operations that operators are."""
        return [operation for operation in self.operations if isinstance(operation, Layer)]

    def run(self, name: str, inputs: Any) -> Any:
        """Compute the outputs for inputs, which need not have exactly the structure declared.

        Other inputs, or other shapes, raise a ValueError with the model's ``name``.
        """
        plan = self._plan
        if plan is None:
            plan = self._plan = _Plan(self)
        if inputs.__class__ is Tensor and self.input_structure.__class__ is KerasTensor:
            return plan.run([_fitted(name, 0, self.input_structure, inputs)])
        try:
            leaves = _matched(self.input_structure, inputs)
        except _OtherStructureError as error:
            expected = nest.map_structure(lambda tensor: tensor.name, self.input_structure)
            raise ValueError(
                f'The structure of `inputs` does not match that of model "{name}": {error}. '
                f"Expected: {expected}"
            ) from None
        values = [
            _fitted(name, number, tensor, leaf)
            for number, (tensor, leaf) in enumerate(zip(self.inputs, leaves, strict=True))
        ]
        return plan.run(values)


# Inputs -------------------------------------------------------------------------------------------


def _like(tensor: KerasTensor) -> KerasTensor:
    return Input(batch_shape=tensor.shape, dtype=tensor.dtype)


class _OtherStructureError(Exception):
    """Inputs cannot be matched with what was declared."""


def _matched(declared: Any, given: Any) -> list[Any]:
    """Return the inputs in the order of the declared ones."""
    if isinstance(declared, KerasTensor):
        if isinstance(given, Mapping) and declared.name in given:
            given = given[declared.name]
        if isinstance(given, (list, tuple)) and len(given) == 1:
            given = given[0]
        if nest.is_nested(given):
            raise _OtherStructureError(
                f'a {type(given).__name__} of {len(given)} was given for "{declared.name}"'
            )
        return [given]
    if isinstance(given, Mapping):
        keyed = declared if isinstance(declared, Mapping) else {t.name: t for t in declared}
        missing = [key for key in keyed if key not in given]
        if missing:
            raise _OtherStructureError(
                f"there is no {', '.join(map(repr, missing))} among {', '.join(map(repr, given))}"
            )
        order = sorted(keyed) if isinstance(declared, Mapping) else list(keyed)
        return [leaf for key in order for leaf in _matched(keyed[key], given[key])]
    if isinstance(declared, Mapping):
        if list(declared) != sorted(declared):
            raise _OtherStructureError("a dict with these names is needed")
        declared = list(declared.values())
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(items) != len(declared):
        raise _OtherStructureError(f"{len(items)} inputs were given instead of {len(declared)}")
    return [leaf for d, g in zip(declared, items, strict=True) for leaf in _matched(d, g)]


def _fitted(name: str, number: int, declared: KerasTensor, value: Any) -> Tensor:
    """Return an input in the dtype that was declared, if it has the right shape."""
    tensor = as_tensor(value)
    shape, expected = tensor.array.shape, declared.shape
    if shape[1:] == expected[1:] and shape and tensor.array.dtype is declared.dtype:
        return tensor
    tensor = as_declared(tensor, expected, declared.dtype)
    fits = tensor.ndim == len(expected) and all(
        wanted is None or wanted == length
        for wanted, length in zip(expected[1:], tensor.array.shape[1:], strict=True)
    )
    if not fits:
        raise ValueError(
            f'Input {number} of layer "{name}" is incompatible with the layer: expected '
            f'shape={(None, *expected[1:])} for "{declared.name}", found shape={shape}'
        )
    return tensor


def as_declared(tensor: Tensor, shape: Shape, dtype: np.dtype[Any]) -> Tensor:
    """Return an input in the declared dtype, and with the declared number of axes.

    A last axis of length 1 is added or removed, no other one.
    """
    axes = tensor.array.ndim
    if axes == len(shape) - 1 and shape[-1] == 1:
        tensor = ops.expand_dims(tensor, -1)
    elif axes == len(shape) + 1 and tensor.array.shape[-1] == 1:
        tensor = ops.squeeze(tensor, -1)
    return tensor if tensor.array.dtype == dtype else ops.cast(tensor, dtype)


# Calls --------------------------------------------------------------------------------------------


class _Plan:
    """The calls, with places for their results.

    Where a result has one reader, and that reads nothing else, the two calls make a chain; chains
    are given to `steps_of`, so that graphs get the fused operations of a `Sequential`.
    """

    def __init__(self, graph: Graph) -> None:
        self._places: dict[int, int] = {}
        readers = Counter(id(t) for node in graph.nodes for t in node.input_tensors)
        readers.update(id(tensor) for tensor in graph.outputs)
        # By the tensor it reads, the node that may go on with a chain.
        follower = {
            id(node.args[0]): node
            for node in graph.nodes
            if _alone(node) and readers[id(node.args[0])] == 1
        }
        for tensor in graph.inputs:
            self._place(tensor)
        self._inputs = len(graph.inputs)
        self._parts: list[_Part] = []
        taken: set[int] = set()
        for node in graph.nodes:
            if node.is_input or id(node) in taken:
                continue
            chain = [node]
            while _chains(chain[-1]) and (following := follower.get(id(chain[-1].outputs))):
                chain.append(following)
            taken.update(map(id, chain))
            self._parts.append(self._part(chain))
        self._outputs = map_symbols(self._place, graph.result_structure)
        self._note_last_uses(graph)

    def _place(self, tensor: KerasTensor) -> int:
        return self._places.setdefault(id(tensor), len(self._places))

    def _part(self, chain: list[Node]) -> _Part:
        head = chain[0]
        reads = [self._place(tensor) for tensor in head.input_tensors]
        writes = [self._place(tensor) for tensor in chain[-1].output_tensors]
        if not isinstance(head.operation, Layer) or head.kwargs or len(head.args) != 1:
            steps = [head.operation]
        else:
            steps = steps_of([node.operation for node in chain])
        return _Part(
            steps,
            map_symbols(lambda tensor: _Place(self._place(tensor)), head.args),
            map_symbols(lambda tensor: _Place(self._place(tensor)), head.kwargs),
            reads,
            writes,
        )

    def _note_last_uses(self, graph: Graph) -> None:
        """Let values go after the call that needs them last."""
        seen = {self._place(tensor) for tensor in graph.outputs}
        for part in reversed(self._parts):
            part.drops = sorted({*part.reads, *part.writes} - seen)
            seen.update(part.drops)

    def run(self, inputs: list[Tensor]) -> Any:
        values: list[Any] = [None] * len(self._places)
        values[: self._inputs] = inputs
        for part in self._parts:
            part.run(values)
        outputs = self._outputs
        if outputs.__class__ is int:
            return values[outputs]
        return nest.map_structure(values.__getitem__, outputs)


class _Place(int):
    """Stands in arguments for the value in this place."""


class _Part:
    """Calls that are made one after the other, the first one with values of the graph."""

    def __init__(
        self,
        steps: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: list[int],
        writes: list[int],
    ) -> None:
        self._first, *self._rest = steps
        self._args = args
        self._kwargs = kwargs
        self._single = reads[0] if len(args) == 1 and isinstance(args[0], _Place) else None
        self._plain = self._single is not None and not kwargs
        self.reads = reads
        self.writes = writes
        #: The places whose values nobody needs after this.
        self.drops: list[int] = []

    def run(self, values: list[Any]) -> None:
        if self._plain:
            result = self._first(values[self._single])  # type: ignore[index]
        else:

            def filled(leaf: Any) -> Any:
                return values[leaf] if isinstance(leaf, _Place) else leaf

            args = nest.map_structure(filled, self._args)
            result = self._first(*args, **nest.map_structure(filled, self._kwargs))
        for step in self._rest:
            result = step(result)
        if len(self.writes) == 1 and not nest.is_nested(result):
            values[self.writes[0]] = result
        else:
            for place, value in zip(self.writes, leaves_of(result), strict=True):
                values[place] = value
        for place in self.drops:
            values[place] = None


def _alone(node: Node) -> bool:
    """Whether a node is the call of a layer on one tensor and nothing else."""
    return (
        isinstance(node.operation, Layer)
        and len(node.args) == 1
        and isinstance(node.args[0], KerasTensor)
        and not node.kwargs
    )


def _chains(node: Node) -> bool:
    """Whether a node can have another one behind it in a chain."""
    return (
        isinstance(node.operation, Layer)
        and isinstance(node.outputs, KerasTensor)
        and len(node.args) == 1
        and not node.kwargs
    )
