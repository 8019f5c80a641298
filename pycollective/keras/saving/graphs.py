"""Configs of functional models: the layers, and the arguments of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollective import nest
from pycollective.keras.graph.graph import Graph
from pycollective.keras.graph.symbols import KerasTensor, Node
from pycollective.keras.layers import Layer
from pycollective.keras.serialization import (
    StoredSymbol,
    deserialize_keras_object,
    serialize_keras_object,
    stored_symbol,
)
from pycollective.keras.training.learner import Learner

_PARTS = ("layers", "input_layers", "output_layers")


def graph_config(graph: Graph) -> dict[str, Any]:
    """Return the entries of a functional model's config that describe its graph.

    In the config, the calls of a layer are numbered from 0 within this graph, because the layer may
    also have calls in other graphs.
    """
    numbers: dict[int, int] = {}
    for operation in graph.operations:
        inside = {id(node) for node in graph.nodes if node.operation is operation}
        known = [node for node in operation.inbound_nodes if id(node) in inside]
        numbers.update((id(node), number) for number, node in enumerate(known))

    def stored(leaf: Any) -> Any:
        if not isinstance(leaf, KerasTensor):
            return leaf
        operation, _, tensor_index = leaf.history
        return stored_symbol(leaf, operation.name, numbers[id(leaf.node)], tensor_index)

    def calls(operation: Any) -> list[dict[str, Any]]:
        found = [
            node
            for node in operation.inbound_nodes
            if id(node) in numbers and node.operation is operation and not node.is_input
        ]
        return [
            {
                "args": serialize_keras_object(_mapped(stored, node.args)),
                "kwargs": serialize_keras_object(_mapped(stored, node.kwargs)),
            }
            for node in found
        ]

    layers = [
        {**serialize_keras_object(each), "name": each.name, "inbound_nodes": calls(each)}
        for each in graph.operations
    ]

    def reference(tensor: KerasTensor) -> list[Any]:
        operation, _, tensor_index = tensor.history
        # Keras counts the definition of a nested functional model as its first call.
        first = 1 if _is_functional(operation) else 0
        return [operation.name, numbers[id(tensor.node)] + first, tensor_index]

    return {
        "layers": layers,
        "input_layers": nest.map_structure(reference, graph.input_structure),
        "output_layers": nest.map_structure(reference, graph.output_structure),
    }


def _is_functional(operation: Any) -> bool:
    return getattr(operation, "is_functional", False)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Map the leaves of a structure; unlike ``nest``, allow ``function`` to return a dict."""
    if isinstance(structure, Mapping):
        return {key: _mapped(function, value) for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_mapped(function, item) for item in structure]
    return function(structure)


def is_graph_config(config: Mapping[str, Any]) -> bool:
    """Return True if a model's config contains a graph."""
    return all(part in config for part in _PARTS)


def tensors_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Make the layers of a config, repeat the recorded calls, and return inputs and outputs."""
    layers: dict[str, Any] = {}
    waiting: dict[str, list[Any]] = {}
    for stored in config["layers"]:
        name = stored["name"]
        if name in layers:
            raise ValueError(f"the config of a model has two layers named {name!r}")
        layers[name] = deserialize_keras_object(
            {key: value for key, value in stored.items() if key not in ("name", "inbound_nodes")}
        )
        waiting[name] = list(stored["inbound_nodes"])
    while any(waiting.values()):
        progress = False
        for name, calls in waiting.items():
            while calls:
                try:
                    args, kwargs = _arguments(calls[0], layers)
                except _NotCalledYetError:
                    break
                layers[name](*args, **_known_kwargs(layers[name], kwargs))
                calls.pop(0)
                progress = True
        if not progress:
            left = ", ".join(f'"{name}"' for name, calls in waiting.items() if calls)
            raise ValueError(
                f"the config of a model has loops or refers to calls that are not in it: the inputs "
                f"of {left} are missing"
            )

    def tensor(reference: list[Any]) -> Any:
        name, number, index = reference
        if name not in layers:
            raise ValueError(f'the config of a model refers to a layer "{name}" that is not in it')
        first = 1 if _is_functional(layers[name]) else 0
        try:
            return _result(layers[name], number - first, index)
        except _NotCalledYetError:
            raise ValueError(
                f'the config of a model refers to call {number} of layer "{name}", which is not in it'
            ) from None

    def tensors(structure: Any) -> Any:
        if isinstance(structure, Mapping):
            return {key: tensors(value) for key, value in structure.items()}
        if len(structure) == 3 and isinstance(structure[0], str):
            return tensor(structure)
        return nest.rebuild(structure, map(tensors, structure))

    return tensors(config["input_layers"]), tensors(config["output_layers"])


class _NotCalledYetError(Exception):
    """A call refers to the result of a call that has not been made yet."""


def _result(layer: Any, number: int, index: int) -> KerasTensor:
    nodes: list[Node] = layer.inbound_nodes
    if not 0 <= number < len(nodes):
        raise _NotCalledYetError
    results = nodes[number].output_tensors
    if not 0 <= index < len(results):
        raise ValueError(
            f'the config of a model refers to result {index} of layer "{layer.name}", which has '
            f"{len(results)}"
        )
    return results[index]


def _arguments(call: Any, layers: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(call, list):
        # The older format: rows of [layer, call, result, keyword arguments].
        inputs = [_restored(row[:3], layers) for row in call]
        kwargs = call[-1][3] if call and len(call[-1]) > 3 else {}
        return [inputs[0] if len(inputs) == 1 else inputs], dict(kwargs)

    def restored(leaf: Any) -> Any:
        return _restored(leaf.history, layers) if isinstance(leaf, StoredSymbol) else leaf

    args = _mapped(restored, deserialize_keras_object(call["args"]))
    return args, _mapped(restored, deserialize_keras_object(call["kwargs"]))


def _restored(history: Any, layers: Mapping[str, Any]) -> KerasTensor:
    name, number, index = history
    if name not in layers:
        raise ValueError(f'the config of a model refers to a layer "{name}" that is not in it')
    return _result(layers[name], number, index)


def _known_kwargs(layer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without those that Keras stores by default."""
    given = dict(kwargs)
    if given.get("mask", 0) is None:
        del given["mask"]
    # For a layer that is not a model, Keras stores the default of ``training``, and ignores it when
    # loading. For a nested model, Keras stores the value that the program passed.
    if isinstance(layer, Layer) and not isinstance(layer, Learner):
        given.pop("training", None)
    return given
