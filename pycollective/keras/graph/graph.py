"""`Graph`: the recorded calls between inputs and outputs, and their execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.dtypes import string
from pycollective.keras.graph.order import nodes_between, operations_of, with_own_inputs
from pycollective.keras.graph.symbols import (
    KerasTensor,
    Node,
    Shape,
    leaves_of,
    map_symbols,
)
from pycollective.keras.layers import Input, Layer
from pycollective.keras.layers.fusion import steps_of, with_replays
from pycollective.keras.layers.on_gpu import OnGpu
from pycollective.tensor import Tensor, as_tensor, ops


class Graph:
    """The calls of layers between symbolic ``inputs`` and ``outputs``, which may be nests.

    Attributes
    ----------
    inputs, outputs : list of KerasTensor
        Flat lists; the items of a dict are in the order of the sorted keys.
    input_structure, output_structure, result_structure
        The original structures, and the structure of `run`'s result: the outputs, or a single output
        without its list.
    nodes, operations : list
        The calls in execution order, and the layers and operations in Keras's order.
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
            inputs, outputs = with_own_inputs(inputs, outputs, flat, _like)
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
        #: The function that calls the layers.
        self._run: Callable[..., Any]

    @property
    def layers(self) -> list[Layer]:
        """The layers, including inputs, without other operations."""
        return [operation for operation in self.operations if isinstance(operation, Layer)]

    @property
    def steps(self) -> list[Any]:
        """The steps that a call runs; an empty list before the first call."""
        return [] if self._plan is None else self._plan.steps

    def run(self, name: str, inputs: Any) -> Any:
        """Compute the outputs for inputs in the declared structure.

        A dict of inputs by name may replace a declared list, and a list may replace a declared dict. A
        list or dict of one input may replace a single input. Raise ``ValueError``, with the model's
        ``name``, if the structure or a shape does not fit.
        """
        if self._plan is None:
            plan = _Plan(self)
            single = len(self.inputs) == 1 and isinstance(self.result_structure, KerasTensor)
            self._run = OnGpu(plan.run, self.layers) if single else plan.run
            # Last, because replicas that find a plan call `_run`.
            self._plan = plan
        if inputs.__class__ is Tensor and self.input_structure.__class__ is KerasTensor:
            return self._run(_fitted(name, 0, self.input_structure, inputs))
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
        return self._run(*values)


# Inputs -------------------------------------------------------------------------------------------


def _like(tensor: KerasTensor) -> KerasTensor:
    return Input(batch_shape=tensor.shape, dtype=tensor.dtype)


class _OtherStructureError(Exception):
    """The inputs do not match the declared structure."""


def _matched(declared: Any, given: Any) -> list[Any]:
    """Return a list of the given inputs, in the order of the declared inputs."""
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
        keyed = (
            declared if isinstance(declared, Mapping) else {t.name: t for t in leaves_of(declared)}
        )
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
    """Return an input in the declared dtype; raise ``ValueError`` if its shape does not fit."""
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
    """Return an input in the declared dtype; add or remove a last axis of length 1 if needed."""
    axes = tensor.array.ndim
    if axes == len(shape) - 1 and shape[-1] == 1:
        tensor = ops.expand_dims(tensor, -1)
    elif axes == len(shape) + 1 and tensor.array.shape[-1] == 1:
        tensor = ops.squeeze(tensor, -1)
    if tensor.array.dtype == dtype:
        return tensor
    if string in (tensor.array.dtype, dtype):
        kind = "strings" if dtype == string else f"numbers of dtype {dtype}"
        raise TypeError(f"the model takes {kind}, got a tensor of dtype {tensor.array.dtype}")
    return ops.cast(tensor, dtype)


# Calls --------------------------------------------------------------------------------------------


class _Plan:
    """The calls of a graph in execution order, with numbered slots for their results.

    Two calls are joined in a chain if only the second call reads the result of the first call, and
    reads nothing else. `steps_of` fuses the layers of a chain, as in a `Sequential`.
    """

    def __init__(self, graph: Graph) -> None:
        self._slots: dict[int, int] = {}
        readers = Counter(id(t) for node in graph.nodes for t in node.input_tensors)
        readers.update(id(tensor) for tensor in graph.outputs)
        # The node that may extend a chain, by the id of the tensor that it reads.
        follower = {
            id(node.args[0]): node
            for node in graph.nodes
            if _reads_one_tensor(node) and readers[id(node.args[0])] == 1
        }
        for tensor in graph.inputs:
            self._slot(tensor)
        self._inputs = len(graph.inputs)
        self._parts: list[_Part] = []
        taken: set[int] = set()
        for node in graph.nodes:
            if node.is_input or id(node) in taken:
                continue
            chain = [node]
            while _can_continue(chain[-1]) and (following := follower.get(id(chain[-1].outputs))):
                chain.append(following)
            taken.update(map(id, chain))
            self._parts.append(self._part(chain))
        self._outputs = map_symbols(self._slot, graph.result_structure)
        self._set_drops(graph)

    def _slot(self, tensor: KerasTensor) -> int:
        return self._slots.setdefault(id(tensor), len(self._slots))

    def _part(self, chain: list[Node]) -> _Part:
        head = chain[0]
        reads = [self._slot(tensor) for tensor in head.input_tensors]
        writes = [self._slot(tensor) for tensor in chain[-1].output_tensors]
        if not isinstance(head.operation, Layer) or head.kwargs or len(head.args) != 1:
            steps = [head.operation]
        else:
            steps = with_replays(steps_of([node.operation for node in chain]))
        return _Part(
            steps,
            map_symbols(lambda tensor: _Slot(self._slot(tensor)), head.args),
            map_symbols(lambda tensor: _Slot(self._slot(tensor)), head.kwargs),
            reads,
            writes,
        )

    @property
    def steps(self) -> list[Any]:
        """The steps of all parts."""
        return [step for part in self._parts for step in (part._first, *part._rest)]

    def _set_drops(self, graph: Graph) -> None:
        """Let each part release the values that no later part reads."""
        seen = {self._slot(tensor) for tensor in graph.outputs}
        for part in reversed(self._parts):
            part.drops = sorted({*part.reads, *part.writes} - seen)
            seen.update(part.drops)

    def run(self, *inputs: Tensor) -> Any:
        """Return the outputs."""
        values: list[Any] = [None] * len(self._slots)
        values[: self._inputs] = inputs
        for part in self._parts:
            part.run(values)
        outputs = self._outputs
        if outputs.__class__ is int:
            return values[outputs]
        return nest.map_structure(values.__getitem__, outputs)


class _Slot(int):
    """The number of a slot, in arguments, where a call needs the slot's value."""


class _Part:
    """A chain of calls: the first reads slots, each other call reads the previous result."""

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
        self._single = reads[0] if len(args) == 1 and isinstance(args[0], _Slot) else None
        self._plain = self._single is not None and not kwargs
        self.reads = reads
        self.writes = writes
        #: The slots whose values no later part reads.
        self.drops: list[int] = []

    def run(self, values: list[Any]) -> None:
        if self._plain:
            result = self._first(values[self._single])  # type: ignore[index]
        else:

            def filled(leaf: Any) -> Any:
                return values[leaf] if isinstance(leaf, _Slot) else leaf

            args = nest.map_structure(filled, self._args)
            result = self._first(*args, **nest.map_structure(filled, self._kwargs))
        for step in self._rest:
            result = step(result)
        if len(self.writes) == 1 and not nest.is_nested(result):
            values[self.writes[0]] = result
        else:
            for slot, value in zip(self.writes, leaves_of(result), strict=True):
                values[slot] = value
        for slot in self.drops:
            values[slot] = None


def _reads_one_tensor(node: Node) -> bool:
    """Return True if a node is a layer's call with one tensor as its only argument."""
    return (
        isinstance(node.operation, Layer)
        and len(node.args) == 1
        and isinstance(node.args[0], KerasTensor)
        and not node.kwargs
    )


def _can_continue(node: Node) -> bool:
    """Return True if a chain can continue after this node."""
    return (
        isinstance(node.operation, Layer)
        and isinstance(node.outputs, KerasTensor)
        and len(node.args) == 1
        and not node.kwargs
    )
