"""`Model`, functional or subclassed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective import nest
from pycollective.keras.graph.graph import Graph
from pycollective.keras.graph.symbols import KerasTensor
from pycollective.keras.layers import Layer
from pycollective.keras.layers.fusion import lines_of
from pycollective.keras.layers.shapes import Shape, map_shapes
from pycollective.keras.models.summary import summary_lines
from pycollective.keras.registration import CustomObjectScope, public
from pycollective.keras.saving.graphs import graph_config, is_graph_config, tensors_of
from pycollective.keras.saving.models import (
    load_weights,
    save_model,
    save_weights,
)
from pycollective.keras.serialization import serialize_keras_object
from pycollective.keras.training.trainer import Trainer
from pycollective.tensor import Tensor
from pycollective.train.trackable import structure_changed

if TYPE_CHECKING:
    from typing_extensions import Self


@public("keras.models")
@public("keras")
class Model(Trainer):
    """A layer made of layers.

    ``Model(inputs, outputs)`` consists of the layer calls between symbolic tensors. A layer may be
    called more than once, and may be a model.

    A subclass makes its layers in ``__init__``, after ``super().__init__()``, and calls them in
    ``call(self, inputs, training=None)``. The model tracks layers and variables that are attributes,
    or are in lists, tuples and dicts that are attributes, in the order of their definition. A
    subclass can also make a graph in ``__init__``, and call
    ``super().__init__(inputs=inputs, outputs=outputs)``.

    See `Trainer` and `Learner` for training.

    Parameters
    ----------
    inputs, outputs
        Symbolic tensors, or lists, tuples or dicts of them; both or neither.
    name
        The name; the default is the class's name (``functional``) with a number.
    **options
        The parameters of `Layer`.

    Raises
    ------
    TypeError
        If only one of ``inputs`` and ``outputs`` is given.
    ValueError
        If outputs depend on a tensor that is not among the inputs, layers share a name, or an item
        is not a symbolic tensor.
    """

    _untracked = Trainer._untracked | {"_graph"}
    _graph: Graph | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a `Functional` of ``Model(inputs, outputs)``."""
        functional = cls is Model and (args or "inputs" in kwargs or "outputs" in kwargs)
        kind: Any = Functional if functional else cls
        model: Self = super().__new__(kind, *args, **kwargs)
        return model

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

    @property
    def call_graph(self) -> Graph | None:
        """The graph of layer calls that the model consists of, or None if it has no graph."""
        return self._graph

    @property
    def is_functional(self) -> bool:
        """True if the model has a graph, made from symbolic tensors."""
        return self._graph is not None

    def _require_graph(self, attribute: str) -> Graph:
        if self._graph is None:
            raise AttributeError(
                f"model {self.name!r} has no {attribute}: it is not made of symbolic tensors, or not "
                "built yet"
            )
        return self._graph

    @property
    def input(self) -> Any:
        """The symbolic inputs of the graph, in their original structure."""
        return self._require_graph("input").input_structure

    @property
    def output(self) -> Any:
        """The symbolic outputs of the graph, in their original structure."""
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
        """The graph's layers and other operations."""
        return list(self._require_graph("operations").operations)

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs."""
        return [tensor.name for tensor in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """The names of the layers that compute the outputs."""
        return [tensor.history.operation.name for tensor in self.outputs]

    def _layers_of_outputs(self) -> Any:
        if self._graph is None:
            return None
        return nest.map_structure(
            lambda tensor: tensor.history.operation.name, self._graph.result_structure
        )

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the graph's outputs; a model without a graph overrides this method.

        ``training`` applies to every layer, because the layers' calls inherit its value.
        """
        if self._graph is None:
            raise NotImplementedError(f"{type(self).__name__} must override call()")
        return self._graph.run(self.name, inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        if self._graph is None or _unbatched(input_shape) != _unbatched(self._input_shape):
            return super().compute_output_shape(input_shape)
        return self._output_shape

    def _trackable_children(self) -> dict[str, Any]:
        children = super()._trackable_children()
        return children if self._graph is None else {"layers": self._graph.layers, **children}

    @property
    def layers(self) -> list[Layer]:
        """The direct sublayers; in a graph, ordered from the inputs to the outputs."""
        return list(self._sublayers()) if self._graph is None else self._graph.layers

    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Return a layer by its name or its index.

        Raises
        ------
        ValueError
            If there is no such layer, or unless exactly one of ``name`` and ``index`` is given.
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
        """Return the model's config, under Keras 3's names.

        The config of a graph includes its layers. A subclass whose arguments are numbers, strings,
        and lists or dicts of them need not override this method.
        """
        if self._graph is None or type(self).__init__ is not Model.__init__:
            return super().get_config()
        return {"name": self.name, "trainable": self.trainable, **graph_config(self._graph)}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Make a model from the result of `get_config`, of this package or of Keras.

        Parameters
        ----------
        config : mapping
            The result of `get_config`.
        custom_objects : mapping, optional
            The custom classes and functions in the config, by name.
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
        return {"input_shape": None} if self._graph is not None else super().get_build_config()

    def to_json(self, **options: Any) -> str:
        """Return the model's config as JSON, for `keras.models.model_from_json`.

        ``options`` are passed to ``json.dumps``.
        """
        return json.dumps(serialize_keras_object(self), **options)

    def save(
        self, filepath: str | os.PathLike[str], overwrite: bool = True, zipped: bool | None = None
    ) -> None:
        """Write the model with weights and optimizer to a ``.keras`` file; see `save_model`."""
        save_model(self, filepath, overwrite=overwrite, zipped=zipped)

    def save_weights(self, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Write the weights to a file or a checkpoint; see `keras.saving.save_weights`."""
        save_weights(self, filepath, overwrite=overwrite)

    def load_weights(
        self, filepath: str | os.PathLike[str] | None, skip_mismatch: bool = False
    ) -> None:
        """Load the weights of a file or a checkpoint; see `keras.saving.load_weights`."""
        load_weights(self, filepath, skip_mismatch=skip_mismatch)

    _build_calls = True
    _converts = False

    def build(self, input_shape: Any) -> None:
        """Make the variables for an input shape, by a call on zeros; None is any batch size."""

        def zeros(shape: Shape) -> Tensor:
            return Tensor(np.zeros([1 if n is None else n for n in shape], self.dtype))

        self._called_dry(map_shapes(zeros, input_shape))

    def _steps_of_calls(self) -> list[Any]:
        """Return the steps that a call runs; an empty list before the first call."""
        return [] if self._graph is None else self._graph.steps

    def describe_records(self) -> str:
        """Return a text that lists the replayed layers, and the reason why others run from Python.

        The text about a record has the shape of its input, its memory in bytes, and the line of the
        program that called the model. Calls on arrays of a GPU are not in the text.
        """
        lines: list[str] = []
        for model in self._flatten_layers():
            if isinstance(model, Model):
                found = list(lines_of(model._steps_of_calls()))
                lines.append(f"{model.name}:" if found else f"{model.name}: no steps are known yet")
                lines += [f"  {line}" for line in found]
        return "\n".join(lines)

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

        A ``?`` marks an unknown output shape, and ``0 (unbuilt)`` a layer without its variables.

        Parameters
        ----------
        line_length : int, optional
            The width of the table in characters. The default is 4 less than the terminal's width,
            but at most 88, or 108 for a graph with branches. ``show_trainable`` adds 12 to this
            limit.
        positions : sequence of float, optional
            The ends of the columns, as fractions of the width.
        print_fn : callable, optional
            The function to call with each line; the default is ``print``.
        expand_nested : bool
            True to show the layers of nested models too.
        show_trainable : bool
            True to add a column that shows which layers are trained.
        layer_range : sequence of str, optional
            The names of the first and the last layer to show, or regular expressions for them.

        Raises
        ------
        ValueError
            If ``layer_range`` matches no layers, or ``positions`` or the width do not fit the columns.
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
    """The class of the models that ``Model(inputs, outputs)`` makes."""

    _config_names = ()


def _unbatched(shapes: Any) -> Any:
    """Return shapes without the batch axis."""
    return map_shapes(lambda shape: shape[1:], shapes)


def _shapes_of(structure: Any) -> Any:
    return nest.map_structure(lambda tensor: tensor.shape, structure)
