"""The calls between the inputs and the outputs of a graph, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycollective.keras.graph.symbols import KerasTensor, Node, map_symbols, symbols_in


def nodes_between(
    inputs: Sequence[KerasTensor], outputs: Sequence[KerasTensor]
) -> tuple[list[Node], list[Any]]:
    """Return the nodes of the inputs and of the calls that the outputs need, and their operations.

    The nodes are in execution order, and the operations are in the order of the search. Raise
    ``ValueError`` if an output depends on an input that is not among ``inputs``.
    """
    known = {id(tensor) for tensor in inputs}
    done: set[int] = set()
    nodes: list[Node] = []
    operations: dict[int, Any] = {}
    for output in outputs:
        # Depth-first without recursion, because graphs may be deeper than the recursion limit. The
        # flag of a pair is True once the node's own inputs are done.
        stack = [(output, False)]
        while stack:
            tensor, ready = stack.pop()
            node = tensor.node
            if id(node) in done:
                continue
            if ready:
                done.add(id(node))
                nodes.append(node)
                continue
            if id(tensor) in known and not node.is_input:
                continue
            operations.setdefault(id(node.operation), node.operation)
            if node.is_input and id(tensor) not in known:
                raise ValueError(_disconnected(tensor, output, operations.values(), inputs))
            stack.append((tensor, True))
            stack.extend((each, False) for each in reversed(node.input_tensors))
    for tensor in inputs:
        if tensor.node.is_input and id(tensor.node) not in done:
            # No output needs this input, but a loss may.
            nodes.insert(0, tensor.node)
            operations = {id(tensor.node.operation): tensor.node.operation, **operations}
            done.add(id(tensor.node))
    return nodes, list(operations.values())


def _disconnected(tensor: KerasTensor, output: KerasTensor, passed: Any, inputs: Any) -> str:
    layers = ", ".join(f'"{each.name}"' for each in passed if each is not tensor.history.operation)
    return (
        f'Graph disconnected: layer "{output.history.operation.name}" needs the input '
        f'"{tensor.history.operation.name}" of shape {tensor.shape}, through {layers or "nothing"}; '
        "the model's inputs are "
        + ", ".join(f'"{each.history.operation.name}"' for each in inputs)
        + ". Pass all inputs that the outputs depend on"
    )


def operations_of(nodes: Sequence[Node], found: Sequence[Any]) -> list[Any]:
    """Return the called operations in Keras's order: the furthest from the outputs first.

    Files name the weights of a layer by the layer's index in this order.
    """
    inside = {id(node) for node in nodes}
    depths: dict[int, int] = {}
    furthest: dict[int, int] = {}
    for node in reversed(nodes):
        depth = max(depths.get(id(node), 0), furthest.get(id(node.operation), 0))
        depths[id(node)] = furthest[id(node.operation)] = depth
        for tensor in node.input_tensors:
            before = tensor.node
            if id(before) in inside:
                depths[id(before)] = max(depth + 1, depths.get(id(before), 0))
    return sorted(found, key=lambda operation: -furthest[id(operation)])


def with_own_inputs(
    inputs: Any, outputs: Any, flat: Sequence[KerasTensor], new_input: Any
) -> tuple[Any, Any]:
    """Return inputs and outputs of a copy of a graph, for a model that begins inside the graph.

    For each of ``inputs`` that is the result of a layer, ``new_input`` makes a new input. The calls
    between inputs and outputs are recorded again on the new inputs. ``flat`` is the list of all
    ``inputs``.
    """
    copies: dict[int, KerasTensor] = {
        id(tensor): tensor if tensor.node.is_input else new_input(tensor) for tensor in flat
    }

    def copy_of(tensor: KerasTensor) -> KerasTensor:
        return copies[id(tensor)]

    def new_result(tensor: KerasTensor) -> KerasTensor:
        copies[id(tensor)] = KerasTensor(tensor.shape, tensor.dtype)
        return copies[id(tensor)]

    for node in nodes_between(flat, symbols_in(outputs))[0]:
        if not node.is_input:
            Node(
                node.operation,
                map_symbols(copy_of, node.args),
                map_symbols(copy_of, node.kwargs),
                map_symbols(new_result, node.outputs),
            )
    return map_symbols(copy_of, inputs), map_symbols(copy_of, outputs)
