"""`Sequential`: a model that calls its layers in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import current_mode
from pycollective.keras.graph.graph import Graph, as_declared
from pycollective.keras.graph.symbols import KerasTensor
from pycollective.keras.layers import Embedding, InputLayer, Layer
from pycollective.keras.layers.fusion import steps_of, with_replays
from pycollective.keras.layers.on_gpu import OnGpu
from pycollective.keras.layers.shapes import Shape, is_shape
from pycollective.keras.models.model import Model
from pycollective.keras.registration import CustomObjectScope, public
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object
from pycollective.tensor import Tensor
from pycollective.train.trackable import structure_changed


@public("keras.models")
@public("keras")
class Sequential(Model):
    """A model that calls each layer on the output of the previous layer.

    Parameters
    ----------
    layers
        The layers, in order. If the first layer is an `Input` or has an ``input_shape``, the model is
        built immediately, otherwise by its first call.
    trainable, name, dtype
        As for `Layer`; the default name is ``sequential`` with a number.

    Raises
    ------
    TypeError
        If an item of ``layers`` is not a layer.
    ValueError
        If two layers have the same name, or an `Input` is not the first item.
    """

    _untracked = Model._untracked | {"_stack", "_steps", "_run", "_input_layer"}
    _config_names = ()
    is_functional = False
    #: The dtype that inputs are converted to; None: the inputs are nests, or the model is not built.
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
        #: The function that calls the steps.
        self._run: OnGpu
        if layers is not None and not np.iterable(layers):
            raise TypeError(f"layers must be a list of layers, not {layers!r}")
        for layer in () if layers is None else layers:
            self._append(layer)
        self._build_if_declared()

    def add(self, layer: Layer | KerasTensor) -> None:
        """Append a layer."""
        self._append(layer)
        self._build_if_declared()

    def pop(self) -> Layer:
        """Remove the last layer, and return it.

        Raises
        ------
        TypeError
            If the model has no layer.
        """
        if not self._stack:
            raise TypeError(f"model {self.name!r} has no layer to remove")
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
                f"Sequential: the model already has a layer {layer.name!r}; names must differ"
            )
        self._stack.append(layer)
        structure_changed()
        self._steps = None
        self._graph = None
        self._input_dtype = None
        self.built = False

    def _build_if_declared(self) -> None:
        if self._input_shape is not None and self._stack and not self.built:
            self.ensure_built(self._input_shape)

    @property
    def layers(self) -> list[Layer]:
        """The layers, without `Input`."""
        return list(self._stack)

    def _trackable_children(self) -> dict[str, Any]:
        children = {"layers": self._stack, **super()._trackable_children()}
        # The graph's layers would include the input, and the graph may not exist yet.
        children["layers"] = self._stack
        return children

    def build(self, input_shape: Any = None) -> None:
        """Make the variables of all layers for an input shape; None is any batch size.

        Without a shape, or with a nest of shapes, the first call builds the layers.
        """
        if input_shape is None or not is_shape(input_shape):
            return
        shape = tuple(input_shape)
        before = self._input_layer, self._input_shape, self._input_dtype
        self._input_shape = (None, *shape[1:])
        declared = self._input_layer
        self._input_dtype = self._dtype_of_input() if declared is None else declared.compute_dtype
        if not _outside_replicas():
            self._build_in_replica(shape)
            return
        if self._input_layer is None:
            self._input_layer = InputLayer(batch_shape=self._input_shape, dtype=self._input_dtype)
        first = tensor = self._input_layer.output
        try:
            for layer in self._stack:
                tensor = layer(tensor)
        except BaseException:
            # Another shape may fit, and must not meet the input of this one.
            self._input_layer, self._input_shape, self._input_dtype = before
            raise
        self._output_shape = nest.map_structure(lambda t: (None, *t.shape[1:]), tensor)
        self._graph = Graph(first, tensor)

    def _dtype_of_input(self) -> np.dtype[Any]:
        """Return the dtype that inputs without a declared dtype are converted to."""
        if not self._stack:
            return self._dtype
        first = self._stack[0]
        if isinstance(first, Sequential):
            return first._dtype_of_input()
        # float32 cannot represent all row numbers of a large table.
        return np.dtype(np.int64) if isinstance(first, Embedding) else first.compute_dtype

    def _build_in_replica(self, shape: Shape) -> None:
        for layer in self._stack:
            layer.ensure_built(shape)
            if not layer.knows_output_shape():
                # compute_output_shape() would call the layer. The call may wait for other replicas,
                # which wait for this build. So the next layers are built when they are called.
                return
            shape = layer.compute_output_shape(shape)
            layer._output_shape = (None, *shape[1:])
        self._output_shape = (None, *shape[1:])

    def compute_output_shape(self, input_shape: Any) -> Any:
        shape = input_shape
        for layer in self._stack:
            shape = layer.compute_output_shape(shape)
        return shape

    def get_config(self) -> dict[str, Any]:
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
        return {"input_shape": self._input_shape or self._built_shapes} if self.built else None

    def _to_inputs(self, inputs: Any) -> Any:
        # A model with one input also accepts a list or dict that holds this one tensor.
        if self._stack and self._stack[0].takes_one_tensor and nest.is_nested(inputs):
            leaves = nest.flatten(inputs)
            if len(leaves) == 1 and hasattr(leaves[0], "shape"):
                inputs = leaves[0]
        return super()._to_inputs(inputs)

    def _steps_of_calls(self) -> list[Any]:
        return self._steps or []

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Call the layers in order; each call inherits ``training`` from this call."""
        if self._input_dtype is not None and (
            inputs.__class__ is Tensor or not nest.is_nested(inputs)
        ):
            assert self._input_shape is not None
            inputs = as_declared(inputs, self._input_shape, self._input_dtype)
        if self._steps is None:
            steps = with_replays(steps_of(self._stack))
            self._run = OnGpu(partial(_output_of, steps), self._stack)
            # Last, because replicas that find steps call `_run`.
            self._steps = steps
        if inputs.__class__ is Tensor and inputs.array.__class__ is not np.ndarray:
            return self._run(inputs)
        return _output_of(self._steps, inputs)


def _output_of(steps: Sequence[Any], inputs: Any) -> Any:
    """Return the output of the last step."""
    for step in steps:
        inputs = step(inputs)
    return inputs


def _outside_replicas() -> bool:
    mode = current_mode()
    return mode is None or mode.replica_context is None
