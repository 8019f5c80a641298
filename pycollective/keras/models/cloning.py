"""`clone_model`: a copy of a model's layers with new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollective.keras.graph.graph import Graph
from pycollective.keras.graph.symbols import KerasTensor, leaves_of, map_symbols
from pycollective.keras.layers import Input, InputLayer, Layer
from pycollective.keras.metrics import Metric
from pycollective.keras.models.model import Functional, Model
from pycollective.keras.models.sequential import Sequential
from pycollective.keras.optimizers import Optimizer


def clone_model(
    model: Model,
    input_tensors: Any = None,
    clone_function: Callable[[Any], Any] | None = None,
    call_function: Callable[..., Any] | None = None,
    recursive: bool = False,
) -> Any:
    """Return a copy of a model with new layers of the same configs, and new weights.

    The copy of a compiled model is compiled, with a new optimizer and new metrics.

    Parameters
    ----------
    model
        A `Sequential` or functional model. A subclassed model needs ``get_config``, and accepts no
        other arguments than ``recursive``.
    input_tensors
        The symbolic inputs of the copy; the default is new inputs like the model's.
    clone_function : callable, optional
        ``f(layer)``, which returns the new layer; the default makes one from the same config. Inputs
        are cloned without it.
    call_function : callable, optional
        ``f(layer, *args, **kwargs)``, which calls a new layer; not for `Sequential`.
    recursive : bool
        True to clone nested models with these functions too, layer by layer.

    Raises
    ------
    ValueError
        A function or ``input_tensors`` are given for a subclassed model, or ``call_function`` for a
        `Sequential`. Or the number of ``input_tensors`` is wrong.
    """

    def cloned(layer: Any) -> Any:
        if recursive and isinstance(layer, Model) and layer._graph is not None:
            calls = None if isinstance(layer, Sequential) else call_function
            return clone_model(layer, None, clone_function, calls, recursive)
        if clone_function is None or not isinstance(layer, Layer):
            return type(layer).from_config(layer.get_config())
        return clone_function(layer)

    return _compiled_like(
        model, _clone(model, input_tensors, cloned, clone_function, call_function)
    )


def _clone(
    model: Model,
    input_tensors: Any,
    cloned: Callable[[Any], Any],
    clone_function: Callable[[Any], Any] | None,
    call_function: Callable[..., Any] | None,
) -> Any:
    if isinstance(model, Sequential):
        if call_function is not None:
            raise ValueError("`call_function` argument is not supported with Sequential models")
        layers: list[Any] = [cloned(layer) for layer in model.layers]
        if input_tensors is not None:
            layers[:0] = leaves_of(input_tensors)
        elif model._input_layer is not None:
            layers.insert(0, _input_like(model._input_layer))
        return Sequential(layers, trainable=model.trainable, name=model.name)
    graph = model._graph
    if graph is None:
        if any(given is not None for given in (clone_function, call_function, input_tensors)):
            raise ValueError(
                f"clone_model: the inputs and layers of {type(model).__name__} are unknown, because "
                "it is neither Sequential nor made of symbolic tensors; give only the model"
            )
        return type(model).from_config(model.get_config())
    return _cloned_graph(model, graph, input_tensors, cloned, call_function)


def _compiled_like(model: Model, clone: Any) -> Any:
    """Compile a clone like its model, with a new optimizer and new metrics, and return it."""
    if model.compiled and not clone.compiled:
        arguments = {name: _copied(value) for name, value in model.compile_arguments.items()}
        clone.compile(**arguments)
        if clone.optimizer is not None and clone.built:
            clone.optimizer.build(clone.trainable_variables)
    return clone


def _copied(value: Any) -> Any:
    """Return an argument of `compile` with a copy of each optimizer and metric in it."""
    if isinstance(value, (Optimizer, Metric)):
        return type(value).from_config(value.get_config())
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value


def _cloned_graph(
    model: Model,
    graph: Graph,
    input_tensors: Any,
    cloned: Callable[[Any], Any],
    call_function: Callable[..., Any] | None,
) -> Any:
    if input_tensors is None:
        begin = [_input_like(tensor.history.operation) for tensor in graph.inputs]
    else:
        begin = leaves_of(input_tensors)
        if len(begin) != len(graph.inputs):
            raise ValueError(
                f"clone_model: model {model.name!r} has {len(graph.inputs)} inputs, got {len(begin)}"
            )
    symbols: dict[int, KerasTensor] = {
        id(old): new for old, new in zip(graph.inputs, begin, strict=True)
    }

    def copy_of(tensor: KerasTensor) -> KerasTensor:
        return symbols[id(tensor)]

    layers: dict[int, Any] = {}
    for node in graph.nodes:
        if node.is_input:
            continue
        layer = layers.get(id(node.operation))
        if layer is None:
            layer = layers[id(node.operation)] = cloned(node.operation)
        args, kwargs = map_symbols(copy_of, node.args), map_symbols(copy_of, node.kwargs)
        if call_function is None:
            results = layer(*args, **kwargs)
        else:
            results = call_function(layer, *args, **kwargs)
        symbols.update(zip(map(id, node.output_tensors), leaves_of(results), strict=True))
    outputs = map_symbols(copy_of, graph.output_structure)
    # A subclass's constructor makes its own graph.
    kind = type(model) if type(model).__init__ is Model.__init__ else Functional
    return kind(
        map_symbols(copy_of, graph.input_structure),
        outputs,
        name=model.name,
        trainable=model.trainable,
    )


def _input_like(layer: InputLayer) -> KerasTensor:
    return Input(batch_shape=layer.batch_shape, dtype=layer.dtype, name=layer.name)
