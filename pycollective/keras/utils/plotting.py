"""`plot_model`: a drawing of the graph of a model's layers."""

from __future__ import annotations

import html
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pycollective.arguments import path_of
from pycollective.atomic_files import write_atomically
from pycollective.keras.layers import Layer
from pycollective.keras.utils.layering import layout

_LETTER = 7.5  # pixels: the width of a letter in Helvetica of 13 pixels
_LINE = 18  # pixels: the height of a line of text
_GAP = 36.0  # pixels between boxes
_SECONDS = 60  # the timeout of Graphviz


def plot_model(
    model: Any,
    to_file: str | os.PathLike[str] = "model.png",
    show_shapes: bool = False,
    show_dtype: bool = False,
    show_layer_names: bool = False,
    rankdir: str = "TB",
    expand_nested: bool = False,
    dpi: int = 200,
    show_layer_activations: bool = False,
    show_trainable: bool = False,
) -> Any:
    """Write a drawing of a model to a file.

    Graphviz draws it, if its program ``dot`` is installed. Without Graphviz, only the formats
    ``.svg``, in a simpler layout, and ``.dot``, the input of Graphviz, are available.

    Parameters
    ----------
    model
        A built model.
    to_file : path
        The path of the file, whose ending selects the format.
    show_shapes, show_dtype, show_layer_names, show_layer_activations, show_trainable : bool
        True to show these properties of a layer, in addition to its class.
    rankdir : str
        ``"TB"``: from top to bottom. ``"LR"``: from left to right.
    expand_nested : bool
        True to draw the layers of nested models instead of one box.
    dpi : int
        The resolution of raster images, in dots per inch.

    Returns
    -------
    IPython.display.Image, IPython.display.SVG or None
        In a notebook, an object that shows the drawing.

    Raises
    ------
    ValueError
        If ``rankdir`` is another one, the model is not built, or Graphviz cannot draw the file.
    ImportError
        If Graphviz is needed and not installed.
    """
    _check_direction(rankdir)
    path = path_of("to_file", to_file)
    ending = os.path.splitext(path)[1].lstrip(".").lower() or "png"
    options = _Options(
        show_shapes,
        show_dtype,
        show_layer_names,
        show_layer_activations,
        show_trainable,
        expand_nested,
    )
    boxes, arrows = _drawing(model, options)
    if ending == "dot":
        write_atomically(path, _dot(boxes, arrows, rankdir, dpi).encode())
        return None
    program = shutil.which("dot")
    if program is not None:
        _draw(program, _dot(boxes, arrows, rankdir, dpi), path, ending)
    elif ending == "svg":
        write_atomically(path, _svg(boxes, arrows, rankdir).encode())
    else:
        raise ImportError(
            f"plot_model: a file of type {ending!r} needs Graphviz (https://graphviz.org), whose "
            "program 'dot' was not found. Install it, or give a name that ends in .svg or .dot"
        )
    return _shown(path, ending)


def model_to_dot(
    model: Any,
    show_shapes: bool = False,
    show_dtype: bool = False,
    show_layer_names: bool = True,
    rankdir: str = "TB",
    expand_nested: bool = False,
    dpi: int = 200,
    show_layer_activations: bool = False,
    show_trainable: bool = False,
) -> str:
    """Return the input of Graphviz for a drawing of a model; parameters as for `plot_model`."""
    _check_direction(rankdir)
    options = _Options(
        show_shapes,
        show_dtype,
        show_layer_names,
        show_layer_activations,
        show_trainable,
        expand_nested,
    )
    boxes, arrows = _drawing(model, options)
    return _dot(boxes, arrows, rankdir, dpi)


class _Options(NamedTuple):
    shapes: bool
    dtype: bool
    names: bool
    activations: bool
    trainable: bool
    nested: bool


class _Box(NamedTuple):
    """The box of a layer: its key and its lines of text."""

    key: int
    lines: list[str]


def _drawing(model: Any, options: _Options) -> tuple[list[_Box], list[tuple[int, int]]]:
    """Return the boxes, sorted so that each follows its inputs, and the arrows between their keys."""
    if not model.built:
        raise ValueError(
            "This model has not yet been built. Build the model first by calling `build()` or by "
            "calling the model on a batch of data."
        )
    boxes: dict[int, _Box] = {}
    arrows: dict[tuple[int, int], None] = {}
    _collect(model, options, boxes, arrows)
    return list(boxes.values()), list(arrows)


def _collect(
    model: Any, options: _Options, boxes: dict[int, _Box], arrows: dict[tuple[int, int], None]
) -> tuple[list[int], list[int]]:
    """Add a model's layers; return the keys of the layers at its inputs and at its outputs."""
    graph = model.call_graph
    if graph is None:
        # The calls of a subclassed model are unknown, so its layers are drawn as a chain.
        keys = [_add(layer, options, boxes) for layer in model.layers]
        arrows.update(dict.fromkeys(itertools.pairwise(keys)))
        return keys[:1], keys[-1:]
    ends: dict[int, tuple[list[int], list[int]]] = {}
    for node in graph.nodes:
        operation = node.operation
        if id(operation) not in ends:
            if options.nested and getattr(operation, "call_graph", None) is not None:
                ends[id(operation)] = _collect(operation, options, boxes, arrows)
            else:
                key = _add(operation, options, boxes)
                ends[id(operation)] = [key], [key]
        for tensor in node.input_tensors:
            for source in ends[id(tensor.history.operation)][1]:
                arrows.update({(source, target): None for target in ends[id(operation)][0]})
    first = [key for tensor in graph.inputs for key in ends[id(tensor.history.operation)][0]]
    last = [key for tensor in graph.outputs for key in ends[id(tensor.history.operation)][1]]
    return first, last


def _add(layer: Any, options: _Options, boxes: dict[int, _Box]) -> int:
    boxes.setdefault(id(layer), _Box(id(layer), list(_lines(layer, options))))
    return id(layer)


def _lines(layer: Any, options: _Options) -> Iterator[str]:
    kind = type(layer).__name__
    yield f"{layer.name} ({kind})" if options.names else kind
    activation = getattr(layer, "activation", None)
    if options.activations and activation is not None:
        yield f"Activation: {getattr(activation, '__name__', activation)}"
    if options.dtype:
        dtype = layer.dtype if isinstance(layer, Layer) else layer.inbound_nodes[0].outputs.dtype
        yield f"Dtype: {dtype}"
    if options.shapes:
        if layer.inbound_nodes:
            node = layer.inbound_nodes[0]
            if node.input_tensors:
                yield f"Input shape: {', '.join(str(t.shape) for t in node.input_tensors)}"
            yield f"Output shape: {', '.join(str(t.shape) for t in node.output_tensors)}"
        else:
            shape = getattr(layer, "output_shape", None)
            yield f"Output shape: {'?' if shape is None else shape}"
    if options.trainable and isinstance(layer, Layer) and layer.weights:
        yield "Trainable" if layer.trainable else "Non-trainable"


# Graphviz -----------------------------------------------------------------------------------------


def _check_direction(rankdir: str) -> None:
    if rankdir not in ("TB", "LR"):
        raise ValueError(f"rankdir must be 'TB' or 'LR', got {rankdir!r}")


def _dot(boxes: Sequence[_Box], arrows: Sequence[tuple[int, int]], rankdir: str, dpi: int) -> str:
    number = {box.key: place for place, box in enumerate(boxes)}
    lines = [
        "digraph model {",
        f"  graph [rankdir={rankdir}, dpi={int(dpi)}];",
        '  node [shape=box, fontname="Helvetica"];',
    ]
    for box in boxes:
        text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in box.lines)
        lines.append(f'  n{number[box.key]} [label="{text}"];')
    lines += [f"  n{number[source]} -> n{number[target]};" for source, target in arrows]
    return "\n".join([*lines, "}", ""])


def _draw(program: str, text: str, path: str, ending: str) -> None:
    made = subprocess.run(
        [program, f"-T{ending}"],
        input=text.encode(),
        capture_output=True,
        timeout=_SECONDS,
        check=False,
    )
    if made.returncode:
        raise ValueError(
            f"plot_model: Graphviz cannot draw {path!r}: {made.stderr.decode(errors='replace')}"
        )
    write_atomically(path, made.stdout)


# Without Graphviz ---------------------------------------------------------------------------------


def _svg(boxes: Sequence[_Box], arrows: Sequence[tuple[int, int]], rankdir: str) -> str:
    """Return an SVG drawing with a row of boxes for each distance from the inputs."""
    down = rankdir == "TB"

    def turned(point: tuple[float, float]) -> tuple[float, float]:
        return point if down else point[::-1]

    sizes = {
        box.key: (max(map(len, box.lines)) * _LETTER + 20, len(box.lines) * _LINE + 12)
        for box in boxes
    }
    found = layout({key: turned(size) for key, size in sizes.items()}, arrows, _GAP)
    width, height = turned(found.size)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for line in found.lines:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(turned, line))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="black" stroke-linejoin="round" '
            'marker-end="url(#tip)"/>'
        )
    for box in boxes:
        (x, y), (w, h) = turned(found.corners[box.key]), sizes[box.key]
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="#f4f6fa" '
            'stroke="black"/>'
        )
        parts += [
            f'<text x="{x + w / 2:.1f}" y="{y + 20 + row * _LINE:.1f}" text-anchor="middle">'
            f"{html.escape(line)}</text>"
            for row, line in enumerate(box.lines)
        ]
    return "\n".join([*parts, "</svg>", ""])


def _shown(path: str, ending: str) -> Any:
    try:
        from IPython import display, get_ipython
    except ImportError:
        return None
    if get_ipython() is None:
        return None
    return display.SVG(path) if ending == "svg" else display.Image(path)
