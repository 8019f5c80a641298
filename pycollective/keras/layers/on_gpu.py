"""Layers whose work on a GPU is launched together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective.distribute.variables import MirroredVariable, SyncOnReadVariable
from pycollective.keras import layers as known
from pycollective.keras.layers import Layer
from pycollective.keras.layers.layer import training_in_calls, training_of_call
from pycollective.keras.layers.replayed import LAYERS, has_known_activation
from pycollective.tensor import Tensor, Variable
from pycollective.tensor.captured import Captured

#: Layers that are functions of their inputs, their variables and ``training`` alone. Their subclasses
#: may compute something else.
_LAYERS = LAYERS | {
    *(known.Add, known.BatchNormalization, known.Concatenate, known.DepthwiseConv2D),
    *(known.GlobalAveragePooling2D, known.InputLayer, known.LayerNormalization, known.Multiply),
    *(known.UpSampling2D, known.ZeroPadding2D),
}
_TRAINED_TYPES = (Variable, MirroredVariable)
_OTHER_TYPES = (*_TRAINED_TYPES, SyncOnReadVariable)


class OnGpu(Captured):
    """A model as a function of one tensor, which CUDA graphs compute on a GPU.

    CUDA graphs are used only if `_can_capture` is True for all layers.

    Parameters
    ----------
    call
        The function that calls the layers.
    layers
        The layers that the function calls.
    """

    def __init__(self, call: Callable[[Tensor], Any], layers: Sequence[Layer]) -> None:
        super().__init__()
        self._call = call
        self._layers = list(layers)
        self._changes = -1
        self._found: tuple[list[Variable], list[Variable]] | None = None

    def __call__(self, inputs: Any) -> Any:
        """Return the output of the model."""
        if inputs.__class__ is not Tensor or inputs.array.__class__ is np.ndarray:
            return self._call(inputs)
        return self.output(inputs, training_of_call())

    def function(self, tensor: Tensor, state: bool | None) -> Any:
        """Return the output of the layers; ``state`` is ``training``."""
        with training_in_calls(state):
            return self._call(tensor)

    def variables(self) -> tuple[list[Variable], list[Variable]] | None:
        """Return the trained and the other variables; None if the model cannot be captured."""
        changes = sum([layer._changes for layer in self._layers])
        if changes != self._changes:
            self._changes = changes
            both = [v for layer in self._layers for v in layer._own_variables()]
            trained = [v for v in both if v.trainable]
            others = [v for v in both if not v.trainable]
            fits = (
                all(map(_can_capture, self._layers))
                and all(type(v) in _TRAINED_TYPES for v in trained)
                and all(type(v) in _OTHER_TYPES for v in others)
            )
            self._found = (trained, others) if fits else None
        return self._found


def _can_capture(layer: Layer) -> bool:
    """Return True if the layer's output depends on its input, variables and ``training`` alone."""
    return (
        type(layer) in _LAYERS
        and layer.built
        and layer.activity_regularizer is None
        and has_known_activation(layer)
        and not getattr(layer, "synchronized", False)
    )
