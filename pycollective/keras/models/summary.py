"""The table that `Model.summary` prints, in the format of Keras."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pycollective.keras.layers.layer import Layer

_MARGIN = 3  # characters of a column that are not text: its border and two spaces


def summary_lines(
    model: Any,
    line_length: int | None,
    positions: Sequence[float] | None,
    expand_nested: bool,
    show_trainable: bool,
    layer_range: Sequence[str] | None,
) -> list[str]:
    """Return the lines of the table; the arguments are those of `Model.summary`."""
    graph = model._graph if _is_branched(model) else None
    header = ["Layer (type)", "Output Shape", "Param #"]
    if graph is None:
        longest, ends = 88, list(positions or (0.45, 0.80, 1.0))
    else:
        header.append("Connected to")
        longest, ends = 108, list(positions or (0.3, 0.56, 0.74, 1.0))
    if show_trainable:
        header.append("Trainable")
        longest += 12
        if positions is None:
            ends = [end * 0.9 for end in ends] + [1.0]
    if len(ends) != len(header):
        raise ValueError(f"summary: {len(header)} positions are needed, got {len(ends)}")
    length = line_length or min(longest, shutil.get_terminal_size().columns - 4)
    edges = [0, *(int(end * (length - 1)) for end in ends)]
    widths = [b - a - _MARGIN for a, b in itertools.pairwise(edges)]
    if min(widths) < 4:
        raise ValueError(
            f"summary: {length} characters are too few for {len(header)} columns; give a larger "
            "line_length"
        )
    rows = [
        row
        for layer in _selected(model.layers if graph is None else graph.operations, layer_range)
        for row in _rows(layer, graph, expand_nested, show_trainable)
    ]
    return [f'Model: "{model.name}"', *_table(header, rows, widths), *_totals(model)]


def _is_branched(model: Any) -> bool:
    """Return True if a model's graph is not a single chain of layers."""
    graph = model._graph
    if graph is None or hasattr(model, "_stack"):
        return False
    read = [tensor for node in graph.nodes for tensor in node.input_tensors]
    return (
        len(graph.nodes) > len(graph.operations)
        or len(read) > len({id(tensor) for tensor in read})
        or any(len(node.input_tensors) > 1 for node in graph.nodes)
        or len(graph.inputs) + len(graph.outputs) > 2
    )


def _selected(layers: list[Any], layer_range: Sequence[str] | None) -> list[Any]:
    if layer_range is None:
        return layers
    if len(layer_range) != 2:
        raise ValueError(f"layer_range must be the names of two layers, got {layer_range!r}")
    matches = [[i for i, x in enumerate(layers) if re.match(n, x.name)] for n in layer_range]
    if not all(matches):
        raise ValueError(
            f"layer_range {list(layer_range)} does not match the layers "
            f"{', '.join(layer.name for layer in layers)}"
        )
    first, last = sorted((matches[0][0], matches[1][-1]))
    return layers[first : last + 1]


def _rows(
    layer: Any, graph: Any, expand_nested: bool, show_trainable: bool, depth: int = 0
) -> Iterator[list[str]]:
    name = f"{'   ' * depth}{'└ ' if depth else ''}{layer.name} ({type(layer).__name__})"
    known = isinstance(layer, Layer)
    if not layer.built:
        count = "0 (unbuilt)"
    else:
        count = f"{layer.count_params():,}" if known else "0"
    row = [name, _shape(layer), count]
    if graph is not None:
        row.append(_connected_to(layer, graph) if not depth else "-")
    if show_trainable:
        trained = "Y" if known and layer.trainable else "N"
        row.append(trained if known and layer.weights else "-")
    yield row
    if expand_nested:
        for inside in getattr(layer, "layers", []):
            yield from _rows(inside, graph, expand_nested, show_trainable, depth + 1)


def _shape(layer: Any) -> str:
    if layer.inbound_nodes:
        shapes = [str(tensor.shape) for tensor in layer.inbound_nodes[-1].output_tensors]
        return shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]"
    shape = getattr(layer, "output_shape", None)
    return "?" if shape is None else str(shape)


def _connected_to(layer: Any, graph: Any) -> str:
    inside = {id(node) for node in graph.nodes}
    read = [
        f"{tensor.history.operation.name}[{tensor.history.node_index}][{tensor.history.tensor_index}]"
        for node in layer.inbound_nodes
        if id(node) in inside
        for tensor in node.input_tensors
    ]
    return ", ".join(read) or "-"


# Text ---------------------------------------------------------------------------------------------


def _table(header: list[str], rows: list[list[str]], widths: list[int]) -> Iterator[str]:
    def rule(left: str, line: str, middle: str, right: str) -> str:
        return left + middle.join(line * (width + 2) for width in widths) + right

    yield rule("┏", "━", "┳", "┓")
    yield from _row(header, widths, "┃")
    yield rule("┡", "━", "╇", "┩")
    for number, row in enumerate(rows):
        if number:
            yield rule("├", "─", "┼", "┤")
        yield from _row(row, widths, "│")
    yield rule("└", "─", "┴", "┘")


def _row(cells: list[str], widths: list[int], border: str) -> Iterator[str]:
    columns = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        lines = textwrap.wrap(cell, width, drop_whitespace=number != 0) or [""]
        # Column 2 holds parameter counts, which are right-aligned.
        columns.append(
            [f"{line:>{width}}" if number == 2 else f"{line:<{width}}" for line in lines]
        )
    for line in range(max(map(len, columns))):
        parts = [
            column[line] if line < len(column) else " " * width
            for column, width in zip(columns, widths, strict=True)
        ]
        yield f"{border} " + f" {border} ".join(parts) + f" {border}"


def _totals(model: Any) -> Iterator[str]:
    trained, fixed = model.trainable_weights, model.non_trainable_weights
    optimizer = getattr(model, "optimizer", None)
    kept = optimizer.variables if optimizer is not None and optimizer.built else []
    yield f" Total params: {_size([*trained, *fixed, *kept])}"
    yield f" Trainable params: {_size(trained)}"
    yield f" Non-trainable params: {_size(fixed)}"
    if kept:
        yield f" Optimizer params: {_size(kept)}"


def _size(variables: Iterable[Any]) -> str:
    counts = [(int(np.prod(v.shape)), np.dtype(v.dtype).itemsize) for v in variables]
    size = float(sum(count * item for count, item in counts))
    units = ["B", "KB", "MB", "GB", "TB", "PB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{sum(count for count, _ in counts):,} ({size:.2f} {units[0]})"
