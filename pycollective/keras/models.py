"""`Model` and `Sequential`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective.distribute.context import current_mode
from pycollective.keras.fusion import steps_of
from pycollective.keras.layers import InputLayer, Layer
from pycollective.keras.layers.layer import Shape, map_shapes
from pycollective.keras.training.trainer import Trainer
from pycollective.tensor import Tensor

__all__ = ["Model", "Sequential"]


class Model(Trainer):
    """A layer made of layers.

    A model of one's own makes its layers in ``__init__``, after ``super().__init__()``, and calls
    them in ``call(self, inputs, training=None)``. Layers and variables that are attributes, or
    stand in lists, tuples and dicts that are attributes, belong to the model in the order of their
    definition. How models are trained is in `Trainer` and `Learner`.
    """

    @property
    def layers(self) -> list[Layer]:
        """The layers directly inside."""
        return list(self._sublayers())

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

    _build_calls = True
    _converts = False

    def build(self, input_shape: Any) -> None:
        """Make the variables for inputs of a shape (None: any batch), by a call on zeros."""

        def zeros(shape: Shape) -> Tensor:
            return Tensor(np.zeros([1 if n is None else n for n in shape], self.dtype))

        self(map_shapes(zeros, input_shape))

    def summary(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print a table of the layers with their output shapes and numbers of parameters.

        Parameters
        ----------
        print_fn
            Called with each line; by default ``print``.

        Raises
        ------
        ValueError
            If the model is not built yet.
        """
        if not self.built:
            raise ValueError(
                f"model {self.name!r} is not built yet, so that nothing is known about its "
                "weights; call it on an input, or build(input_shape)"
            )
        rows = [("Layer (type)", "Output Shape", "Param #")]
        for layer in self.layers:
            shape = "?" if layer._output_shape is None else str(layer._output_shape)
            count = layer.count_params() if layer.built else 0
            rows.append((f"{layer.name} ({type(layer).__name__})", shape, f"{count:,}"))
        widths = [max(len(row[column]) for row in rows) + 2 for column in range(3)]
        lines = ["".join(f"{t:<{w}}" for t, w in zip(row, widths, strict=True)) for row in rows]
        total = _size(self.weights)
        trained = _size(self.trainable_weights)
        width = sum(widths)
        for line in (
            f'Model: "{self.name}"',
            "─" * width,
            lines[0],
            "━" * width,
            *lines[1:],
            "─" * width,
            f"Total params: {total:,}",
            f"Trainable params: {trained:,}",
            f"Non-trainable params: {total - trained:,}",
        ):
            (print_fn or print)(line.rstrip())


class Sequential(Model):
    """Layers, each called on the result of the one before.

    Parameters
    ----------
    layers
        The layers, in order. If the first one is an `Input` or has an ``input_shape``, the model is
        built at once, otherwise by its first call.
    name
        By default ``sequential`` with a number.

    Raises
    ------
    TypeError
        If something in ``layers`` is no layer.
    ValueError
        If a layer is there twice under one name.
    """

    _untracked = Model._untracked | {"_stack", "_steps"}

    def __init__(self, layers: Sequence[Layer] | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self._stack: list[Layer] = []
        self._steps: list[Any] | None = None
        for layer in layers or ():
            self._append(layer)
        self._build_if_declared()

    def add(self, layer: Layer) -> None:
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
        return self._stack.pop()

    def _append(self, layer: Layer) -> None:
        if not isinstance(layer, Layer):
            raise TypeError(
                f"Sequential: {layer!r} is no layer; give instances such as Dense(10), and wrap "
                "functions in Activation"
            )
        if not self._stack and layer.input_shape is not None and self._input_shape is None:
            self._input_shape = layer.input_shape
        if isinstance(layer, InputLayer):
            if self._stack:
                raise ValueError(f"Sequential: {layer.name!r} is an Input, which can only be first")
            return
        if any(layer.name == other.name for other in self._stack):
            raise ValueError(
                f"Sequential: there is a layer {layer.name!r} already; names must differ"
            )
        self._stack.append(layer)
        self._steps = None
        self.built = False

    def _build_if_declared(self) -> None:
        if self._input_shape is not None and self._stack and not self.built:
            self._ensure_built(self._input_shape)

    @property
    def layers(self) -> list[Layer]:
        """The layers, without `Input`."""
        return list(self._stack)

    def _trackable_children(self) -> dict[str, Any]:
        return {"layers": self._stack, **super()._trackable_children()}

    def build(self, input_shape: Any) -> None:
        """Make the variables of all layers for inputs of a shape (None: any batch)."""
        shape = tuple(input_shape)
        self._input_shape = (None, *shape[1:])
        in_replica = not _outside_replicas()
        for layer in self._stack:
            layer._ensure_built(shape)
            if in_replica and type(layer).compute_output_shape is Layer.compute_output_shape:
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

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Call the layers one after the other."""
        steps = self._steps
        if steps is None:
            steps = self._steps = steps_of(self._stack)
        for step in steps:
            inputs = step(inputs)
        return inputs


def _outside_replicas() -> bool:
    mode = current_mode()
    return mode is None or mode.replica_context is None


def _size(variables: Sequence[Any]) -> int:
    return sum(int(np.prod(variable.shape)) for variable in variables)
