"""Recording of a layer's call on symbolic tensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.keras.graph.symbols import KerasTensor, Node, map_symbols, symbols_in
from pycollective.keras.layers.shapes import is_shape, map_shapes, shapes_of, without_batch
from pycollective.tensor import Tensor


def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool | None) -> Any:
    """Build a layer for symbolic inputs, record the call, and return the symbolic outputs.

    The shapes of the outputs come from `compute_output_shape` if the class overrides it, the call
    has one argument, and all sublayers are built. Otherwise the layer is called on zeros.
    """
    if training is not None:
        kwargs = {**kwargs, "training": training}
    inputs = args[0]
    shapes = shapes_of(inputs)
    if layer.input_spec is not None:
        layer._check_inputs(inputs)
    needed = layer._shapes_to_build(inputs, args[1:], kwargs)
    if not layer.built:
        layer.ensure_built(needed)
    elif layer._built_shapes not in (None, map_shapes(without_batch, needed)) and _is_known(needed):
        # The layer was built for other shapes, and only a call checks that these fit too.
        _called_on_zeros(layer, args, kwargs, 1)
    has_one_argument = len(args) == 1 and not symbols_in(kwargs)
    if (
        layer.knows_output_shape()
        and has_one_argument
        and all(inside.built for inside in layer._flatten_layers())
    ):
        outputs = _symbols_of(layer, inputs, layer.compute_output_shape(shapes))
        graph = getattr(layer, "call_graph", None)
        if graph is not None:  # the dtypes of a model's outputs are those of its layers
            outputs = nest.map_structure(
                lambda output, own: KerasTensor(output.shape, own.dtype),
                outputs,
                graph.result_structure,
            )
    else:
        outputs = outputs_on_zeros(layer, args, kwargs)
    layer._output_shape = nest.map_structure(lambda tensor: tensor.shape, outputs)
    Node(layer, args, kwargs, outputs)
    return outputs


def _is_known(shapes: Any) -> bool:
    """Return True if all lengths except the batch's are known."""
    if is_shape(shapes):
        return None not in tuple(shapes)[1:]
    return all(map(_is_known, shapes.values() if isinstance(shapes, dict) else shapes))


def _symbols_of(layer: Any, inputs: Any, shapes: Any) -> Any:
    """Return symbolic tensors of these shapes, in the layer's output dtype."""
    if not is_shape(shapes):
        if isinstance(shapes, dict):
            return {key: _symbols_of(layer, inputs, shape) for key, shape in shapes.items()}
        return [_symbols_of(layer, inputs, shape) for shape in shapes]
    dtype = layer.compute_dtype
    if layer._keeps_dtype and isinstance(inputs, KerasTensor) and inputs.dtype.kind not in "fV":
        dtype = inputs.dtype
    return KerasTensor(shapes, dtype)


#: The two lengths in place of an unknown one; those of Keras.
_LENGTHS = 83, 89


_LARGER_BATCH = 12


def outputs_on_zeros(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer on zeros in place of symbolic tensors, and return symbolic outputs.

    If lengths besides the batch are unknown, the layer is called with two lengths. Lengths of the
    outputs that differ are unknown.
    """

    def symbol(first: Tensor, second: Tensor) -> KerasTensor:
        pairs = list(zip(first.shape, second.shape, strict=True))
        return KerasTensor(
            [None if i == 0 or a != b else a for i, (a, b) in enumerate(pairs)], first.dtype
        )

    if all(None not in tensor.shape[1:] for tensor in symbols_in((args, kwargs))):
        found = _called_on_zeros(layer, args, kwargs, 1)
        return nest.map_structure(symbol, found, found)
    both = [_called_on_zeros(layer, args, kwargs, length) for length in _LENGTHS]
    return nest.map_structure(symbol, *both)


def _called_on_zeros(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> Any:
    """Return the outputs for zeros in place of the symbolic tensors.

    The batch has one example, or `_LARGER_BATCH` if the layer fails for one: it may take parts of
    the batch. Other unknown lengths become ``length``.
    """

    def called(batch: int) -> Any:
        def zeros(tensor: KerasTensor) -> Tensor:
            known = [
                (length if i else batch) if n is None else n for i, n in enumerate(tensor.shape)
            ]
            return Tensor(np.zeros(known, tensor.dtype))

        return layer._called_dry(*map_symbols(zeros, args), **map_symbols(zeros, kwargs))

    try:
        return called(1)
    except Exception as error:
        try:
            return called(_LARGER_BATCH)
        except Exception:
            if sys.version_info >= (3, 11):
                error.add_note(
                    f"The layer {layer.name!r} was called on zeros, to find the shape of its outputs."
                )
            raise error from None
