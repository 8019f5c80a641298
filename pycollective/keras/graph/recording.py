"""How the call of a layer on symbolic tensors is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective import nest
from pycollective.keras.graph.symbols import KerasTensor, Node, map_symbols, shape_of, symbols_in
from pycollective.keras.layers.layer import Layer, is_shape, map_shapes
from pycollective.tensor import Tensor

__all__ = ["record"]


def record(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build a layer for symbolic inputs, note the call, and return what describes the result.

    The layer says what shape comes out; one that does not is called on zeros, a batch of one
    example.

    Raises
    ------
    ValueError
        If the shapes do not fit the layer.
    """
    inputs = args[0]
    shapes = _shapes(inputs)
    if layer.input_spec is not None:
        layer._check_inputs(inputs)
    needed = layer._shapes_to_build(inputs, args[1:], kwargs)
    if not layer.built:
        layer._ensure_built(needed)
    elif layer._built_shapes not in (None, _without_batch(needed)) and _is_known(needed):
        # Built for other inputs: whether these fit too, only the layer itself can say.
        _called_on_zeros(layer, args, kwargs)
    asks = type(layer).compute_output_shape is not Layer.compute_output_shape
    alone = len(args) == 1 and not symbols_in(kwargs)
    if asks and alone and all(inside.built for inside in layer._flatten_layers()):
        outputs = _described(layer, inputs, layer.compute_output_shape(shapes))
    else:
        outputs = nest.map_structure(
            lambda value: KerasTensor((None, *value.shape[1:]), value.dtype),
            _called_on_zeros(layer, args, kwargs),
        )
    layer._output_shape = nest.map_structure(lambda tensor: tensor.shape, outputs)
    Node(layer, args, kwargs, outputs)
    return outputs


def _shapes(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {key: _shapes(value) for key, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return [_shapes(value) for value in inputs]
    return shape_of(inputs)


def _without_batch(shapes: Any) -> Any:
    return map_shapes(lambda shape: (None, *shape[1:]), shapes)


def _is_known(shapes: Any) -> bool:
    """Whether no length but that of the batch is open."""
    if is_shape(shapes):
        return None not in tuple(shapes)[1:]
    return all(map(_is_known, shapes.values() if isinstance(shapes, dict) else shapes))


def _described(layer: Layer, inputs: Any, shapes: Any) -> Any:
    """Return symbolic tensors of these shapes."""
    if not is_shape(shapes):
        if isinstance(shapes, dict):
            return {key: _described(layer, inputs, shape) for key, shape in shapes.items()}
        return [_described(layer, inputs, shape) for shape in shapes]
    dtype = layer.compute_dtype
    if layer._keeps_dtype and isinstance(inputs, KerasTensor) and inputs.dtype.kind not in "fV":
        dtype = inputs.dtype
    return KerasTensor(shapes, dtype)


def _called_on_zeros(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def zeros(tensor: KerasTensor) -> Tensor:
        return Tensor(np.zeros([1 if n is None else n for n in tensor.shape], tensor.dtype))

    return layer._called_dry(*map_symbols(zeros, args), **map_symbols(zeros, kwargs))
