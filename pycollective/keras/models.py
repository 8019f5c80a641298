"""`Model`, functional and of one's own, and `Sequential`."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import current_mode
from pycollective.keras.fusion import steps_of
from pycollective.keras.graph.graph import Graph, as_declared
from pycollective.keras.graph.symbols import KerasTensor
from pycollective.keras.layers import Embedding, InputLayer, Layer
from pycollective.keras.layers.layer import Shape, is_shape, map_shapes
from pycollective.keras.registration import CustomObjectScope, public
from pycollective.keras.saving.graphs import graph_config, is_graph_config, tensors_of
from pycollective.keras.saving.models import (
    load_model,
    load_weights,
    model_from_json,
    save_model,
    save_weights,
)
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object
from pycollective.keras.summary import summary_lines
from pycollective.keras.training.trainer import Trainer
from pycollective.tensor import Tensor
from pycollective.train.trackable import structure_changed

if TYPE_CHECKING:
    from typing_extensions import Self

    from pycollective.keras.cloning import clone_model

__all__ = [
    "Functional",
    "Model",
    "Sequential",
    "clone_model",
    "load_model",
    "model_from_json",
    "save_model",
]


@public("keras.models")
@public("keras")
class Model(Trainer):
    """A layer made of layers.

    ``Model(inputs, outputs)`` is what lies between symbolic tensors, which come from `Input` and
    from calling layers on them: a functional model. Several inputs and outputs stand in lists or
    dicts; layers may be called more than once, and may be models.

    A model of one's own makes its layers in ``__init__``, after ``super().__init__()``, and calls
    them in ``call(self, inputs, training=None)``. Layers and variables that are attributes, or
    stand in lists, tuples and dicts that are attributes, belong to the model in the order of their
    definition. It can also make a graph in ``__init__``, and call
    ``super().__init__(inputs=inputs, outputs=outputs)``.

    How models are trained is in `Trainer` and `Learner`.

    Parameters
    ----------
    inputs, outputs
        Symbolic tensors, or lists, tuples or dicts of them; both or neither.
    name
        By default the class's name (``functional``) with a number.
    **options
        As for `Layer`.

    Raises
    ------
    ValueError
        If outputs depend on something that is not among the inputs, or layers share a name.
    """

    _untracked = Trainer._untracked | {"_graph"}
    _graph: Graph | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a `Functional` of ``Model(inputs, outputs)``."""
        functional = cls is Model and (args or "inputs" in kwargs or "outputs" in kwargs)
        kind: Any = Functional if functional else cls  # which is a `Model`, too
        made: Self = super().__new__(kind, *args, **kwargs)
        return made

    def __init__(
        self, inputs: Any = None, outputs: Any = None, name: str | None = None, **options: Any
    ) -> None:
        super().__init__(name=name, **options)
        if inputs is None and outputs is None:
            return
        if inputs is None or outputs is None:
            raise TypeError("Model() needs inputs and outputs, or neither")
        graph = self._graph = Graph(inputs, outputs)
        self.built = True
        self._input_shape = _shapes_of(graph.input_structure)
        self._output_shape = _shapes_of(graph.result_structure)

    # Graphs ----------------------------------------------------------------------------------

    def _require_graph(self, attribute: str) -> Graph:
        if self._graph is None:
            raise AttributeError(
                f"model {self.name!r} has no {attribute}: it is not made of symbolic tensors, or not "
                "built yet"
            )
        return self._graph

    @property
    def input(self) -> Any:
        """The symbolic inputs of the graph, as they were given."""
        return self._require_graph("input").input_structure

    @property
    def output(self) -> Any:
        """The symbolic outputs of the graph, as they were given."""
        return self._require_graph("output").output_structure

    @property
    def inputs(self) -> list[KerasTensor]:
        """The symbolic inputs of the graph in a list."""
        return list(self._require_graph("inputs").inputs)

    @property
    def outputs(self) -> list[KerasTensor]:
        """The symbolic outputs of the graph in a list."""
        return list(self._require_graph("outputs").outputs)

    @property
    def operations(self) -> list[Any]:
        """The graph's layers, and the operations that operators were recorded as."""
        return list(self._require_graph("operations").operations)

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs."""
        return [tensor.name for tensor in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """The names of the layers whose results are the outputs."""
        return [tensor.history.operation.name for tensor in self.outputs]

    def _layers_of_outputs(self) -> Any:
        if self._graph is None:
            return None
        return nest.map_structure(
            lambda tensor: tensor.history.operation.name, self._graph.result_structure
        )

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the graph's outputs; a model without a graph overrides it.

        ``training`` is what holds in the call around this one.
        """
        if self._graph is None:
            raise NotImplementedError(f"{type(self).__name__} must override call()")
        return self._graph.run(self.name, inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shapes of the outputs for inputs of a shape (None: any length)."""
        if self._graph is None or _open(input_shape) != _open(self._input_shape):
            return super().compute_output_shape(input_shape)
        return self._output_shape

    def _trackable_children(self) -> dict[str, Any]:
        children = super()._trackable_children()
        return children if self._graph is None else {"layers": self._graph.layers, **children}

    @property
    def layers(self) -> list[Layer]:
        """The layers directly inside; those of a graph from the inputs to the outputs."""
        return list(self._sublayers()) if self._graph is None else self._graph.layers

    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Return a layer by its name or its place.

        Raises
        ------
        ValueError
            If there is none, or neither or both are given.
        """
        layers = self.layers
        if (name is None) == (index is None):
            raise ValueError("get_layer() needs either a name or an index")
        if index is not None:
            if not -len(layers) <= index < len(layers):
                raise ValueError(f"get_layer(index={index}): the model has {len(layers)} layers")
            return layers[index]
        for layer in layers:
            if layer.name == name:
                return layer
        raise ValueError(
            f"get_layer(name={name!r}): the layers are {', '.join(sub.name for sub in layers)}"
        )

    # Files -----------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Return what the model is made of, by Keras 3's names.

        A graph is stored with its layers. A model of one's own that takes only numbers, texts, and
        lists or dicts of them need not override this.
        """
        if self._graph is None or type(self).__init__ is not Model.__init__:
            return super().get_config()
        return {"name": self.name, "trainable": self.trainable, **graph_config(self._graph)}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Make a model of what `get_config` returned, here or in Keras.

        Parameters
        ----------
        config
            What it returned.
        custom_objects
            Classes and functions of one's own in it, by name.
        """
        with CustomObjectScope(custom_objects):
            if not is_graph_config(config):
                return super().from_config(config)
            inputs, outputs = tensors_of(config)
            options = {"name": config.get("name")}
            model = cls(inputs, outputs, **options)
        if config.get("trainable") is False:
            model._trainable = False
            structure_changed()
        return model

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the shapes that the model was built for."""
        return {"input_shape": None} if self._graph is not None else super().get_build_config()

    def to_json(self, **options: Any) -> str:
        """Return the model's config as text, which `keras.models.model_from_json` reads.

        ``options`` are those of ``json.dumps``.
        """
        return json.dumps(serialize_keras_object(self), **options)

    def save(
        self, filepath: str | os.PathLike[str], overwrite: bool = True, zipped: bool | None = None
    ) -> None:
        """Write the model with weights and optimizer to a ``.keras`` file; see `save_model`."""
        save_model(self, filepath, overwrite=overwrite, zipped=zipped)

    def save_weights(self, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Write the weights to a ``.weights.h5`` file or a checkpoint.

        See `keras.saving.save_weights`.
        """
        save_weights(self, filepath, overwrite=overwrite)

    def load_weights(
        self, filepath: str | os.PathLike[str] | None, skip_mismatch: bool = False
    ) -> None:
        """Take the weights of a ``.weights.h5`` or ``.keras`` file, or of a checkpoint.

        See `keras.saving.load_weights`.
        """
        load_weights(self, filepath, skip_mismatch=skip_mismatch)

    _build_calls = True
    _converts = False

    def build(self, input_shape: Any) -> None:
        """Make the variables for inputs of a shape (None: any batch), by a call on zeros."""

        def zeros(shape: Shape) -> Tensor:
            return Tensor(np.zeros([1 if n is None else n for n in shape], self.dtype))

        self._called_dry(map_shapes(zeros, input_shape))

    def summary(
        self,
        line_length: int | None = None,
        positions: Sequence[float] | None = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Sequence[str] | None = None,
    ) -> None:
        """Print a table of the layers with their output shapes and numbers of parameters.

        What is not known yet, because a layer is not built, is a ``?``.

        Parameters
        ----------
        line_length
            How wide the table is, in characters; by default as wide as the terminal allows, up to
            88, or 108 where the layers are no simple row.
        positions
            Where the columns end, as shares of the width.
        print_fn
            Called with each line; by default ``print``.
        expand_nested
            Whether the layers of models inside are shown too.
        show_trainable
            Whether a column says which layers are trained.
        layer_range
            The names of the first and the last layer to show, or regular expressions for them.

        Raises
        ------
        ValueError
            If ``layer_range`` names no layers.
        """
        lines = summary_lines(
            self, line_length, positions, expand_nested, show_trainable, layer_range
        )
        for line in lines:
            (print_fn or print)(line)


@public("keras.models")
@public("keras")
@public("keras.src.models.functional", registered=True)
class Functional(Model):
    """What ``Model(inputs, outputs)`` makes."""

    _config_names = ()


@public("keras.models")
@public("keras")
class Sequential(Model):
    """Layers, each called on the result of the one before.

    Parameters
    ----------
    layers
        The layers, in order. If the first one is an `Input` or has an ``input_shape``, the model is
        built at once, otherwise by its first call.
    trainable, name, dtype
        As for `Layer`; the name is by default ``sequential`` with a number.

    Raises
    ------
    TypeError
        If something in ``layers`` is no layer.
    ValueError
        If a layer is there twice under one name.
    """

    _untracked = Model._untracked | {"_stack", "_steps", "_input_layer"}
    _config_names = ()
    #: What the input is converted to; None: the layers are called on nests, or not built.
    _input_dtype: np.dtype[Any] | None = None

    def __init__(
        self,
        layers: Sequence[Layer | KerasTensor] | None = None,
        trainable: bool = True,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, trainable=trainable, dtype=dtype)
        self._stack: list[Layer] = []
        self._input_layer: InputLayer | None = None
        self._steps: list[Any] | None = None
        for layer in layers or ():
            self._append(layer)
        self._build_if_declared()

    def add(self, layer: Layer | KerasTensor) -> None:
        """Put a layer at the end."""
        self._append(layer)
        self._build_if_declared()

    def pop(self) -> Layer:
        """Take the last layer off, and return it.

        Raises
        ------
        TypeError
            If there is no layer.
        """
        if not self._stack:
            raise TypeError(f"model {self.name!r} has no layer to take off")
        self._steps = None
        layer = self._stack.pop()
        structure_changed()
        self.built = False
        self._graph = None
        self._input_dtype = None
        self._build_if_declared()
        return layer

    def _append(self, layer: Any) -> None:
        if isinstance(layer, KerasTensor):
            layer = layer.history.operation
        if not isinstance(layer, Layer):
            raise TypeError(
                f"Sequential: {layer!r} is no layer; give instances such as Dense(10), and wrap "
                "functions in Activation"
            )
        if not self._stack and layer.input_shape is not None and self._input_shape is None:
            self._input_shape = layer.input_shape
        if isinstance(layer, InputLayer):
            if self._stack or self._input_layer is not None:
                raise ValueError(f"Sequential: {layer.name!r} is an Input, which can only be first")
            self._input_layer = layer
            return
        if any(layer.name == other.name for other in self._stack):
            raise ValueError(
                f"Sequential: there is a layer {layer.name!r} already; names must differ"
            )
        self._stack.append(layer)
        structure_changed()
        self._steps = None
        self._graph = None
        self._input_dtype = None
        self.built = False

    def _build_if_declared(self) -> None:
        if self._input_shape is not None and self._stack and not self.built:
            self._ensure_built(self._input_shape)

    @property
    def layers(self) -> list[Layer]:
        """The layers, without `Input`."""
        return list(self._stack)

    def _trackable_children(self) -> dict[str, Any]:
        children = {"layers": self._stack, **super()._trackable_children()}
        # The graph's layers would have the input among them, and may not be there yet.
        children["layers"] = self._stack
        return children

    def build(self, input_shape: Any = None) -> None:
        """Make the variables of all layers for inputs of a shape (None: any batch).

        For a nest of shapes, and without a shape, the layers are built by the first call.
        """
        if input_shape is None or not is_shape(input_shape):
            return
        shape = tuple(input_shape)
        self._input_shape = (None, *shape[1:])
        declared = self._input_layer
        self._input_dtype = self._dtype_of_input() if declared is None else declared.compute_dtype
        if not _outside_replicas():
            self._build_in_replica(shape)
            return
        if self._input_layer is None:
            self._input_layer = InputLayer(batch_shape=self._input_shape, dtype=self._input_dtype)
        first = tensor = self._input_layer.output
        for layer in self._stack:
            tensor = layer(tensor)
        self._output_shape = nest.map_structure(lambda t: (None, *t.shape[1:]), tensor)
        self._graph = Graph(first, tensor)

    def _dtype_of_input(self) -> np.dtype[Any]:
        """Return the dtype that inputs of no declared dtype are converted to."""
        if not self._stack:
            return self._dtype
        first = self._stack[0]
        if isinstance(first, Sequential):
            return first._dtype_of_input()
        # Rows of large tables have numbers that no float32 has.
        return np.dtype(np.int64) if isinstance(first, Embedding) else first.compute_dtype

    def _build_in_replica(self, shape: Shape) -> None:
        for layer in self._stack:
            layer._ensure_built(shape)
            if type(layer).compute_output_shape is Layer.compute_output_shape:
                # Asking would call the layer, which may wait for the other replicas, who wait for
                # this one to build: this layer's successors are built when they are called.
                return
            shape = layer.compute_output_shape(shape)
            layer._output_shape = (None, *shape[1:])
        self._output_shape = (None, *shape[1:])

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the last layer's result."""
        shape = input_shape
        for layer in self._stack:
            shape = layer.compute_output_shape(shape)
        return shape

    def get_config(self) -> dict[str, Any]:
        """Return what the model is made of, by Keras 3's names."""
        layers = [self._input_layer, *self._stack] if self._input_layer else self._stack
        config = {
            **super().get_config(),
            "layers": [serialize_keras_object(layer) for layer in layers],
        }
        if self._graph is not None:
            config["build_input_shape"] = self._graph.inputs[0].shape
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Make a model of what `get_config` returned, here or in Keras."""
        if "name" not in config or "layers" not in config:
            raise ValueError(
                "A Sequential model configuration must be a dictionary containing the 'name' and "
                f"'layers' keys. Received: config={config}"
            )
        with CustomObjectScope(custom_objects):
            layers = [deserialize_keras_object(layer) for layer in config["layers"]]
        options = {key: config[key] for key in ("name", "trainable", "dtype") if key in config}
        model = cls(layers, **options)
        shape = config.get("build_input_shape")
        if shape and not model.built:
            model.build(shape)
        return model

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the shape that the model was built for."""
        return {"input_shape": self._input_shape or self._built_shapes} if self.built else None

    def _to_inputs(self, inputs: Any) -> Any:
        # A list or dict of one tensor is that tensor, as for any model of one input.
        if self._stack and self._stack[0]._takes_one and nest.is_nested(inputs):
            leaves = nest.flatten(inputs)
            if len(leaves) == 1 and hasattr(leaves[0], "shape"):
                inputs = leaves[0]
        return super()._to_inputs(inputs)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Call the layers one after the other; ``training`` is what holds around this call."""
        if self._input_dtype is not None and not nest.is_nested(inputs):
            assert self._input_shape is not None
            inputs = as_declared(inputs, self._input_shape, self._input_dtype)
        steps = self._steps
        if steps is None:
            steps = self._steps = steps_of(self._stack)
        for step in steps:
            inputs = step(inputs)
        return inputs


def _open(shapes: Any) -> Any:
    """Return shapes without their batches."""
    return map_shapes(lambda shape: shape[1:], shapes)


def _shapes_of(structure: Any) -> Any:
    return nest.map_structure(lambda tensor: tensor.shape, structure)


def _outside_replicas() -> bool:
    mode = current_mode()
    return mode is None or mode.replica_context is None


def __getattr__(name: str) -> Any:
    if name != "clone_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It needs the classes above.
    return importlib.import_module("pycollective.keras.cloning").clone_model
