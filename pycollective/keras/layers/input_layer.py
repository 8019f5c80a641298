"""`Input` and `InputLayer`: the inputs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycollective.distribute.default import get_strategy
from pycollective.dtypes import string
from pycollective.keras.backend import floatx
from pycollective.keras.graph.symbols import KerasTensor, Node
from pycollective.keras.layers.layer import SameShape
from pycollective.keras.layers.shapes import Shape
from pycollective.tensor import Tensor

__all__ = ["Input", "InputLayer"]


class InputLayer(SameShape):
    """An input of a model.

    Parameters
    ----------
    shape
        The shape of an example; None is any length.
    batch_size : int, optional
        The declared batch size, a multiple of the number of replicas. Batches may have any number of
        examples nevertheless.
    dtype
        The dtype that inputs are converted to; the default is ``floatx()``. ``tf.string`` is for inputs
        of `StringLookup`.
    batch_shape
        The batch size and the shape together.
    name : str, optional
        The name; the default is ``input_layer`` with a number.
    input_shape
        The older name of ``shape``.
    sparse, ragged, optional
        Must be False: sparse, ragged and optional inputs are not supported.

    Raises
    ------
    ValueError
        If an argument is not supported, ``batch_size`` is no multiple of the number of replicas, or
        ``shape`` and ``batch_shape`` are both given or both missing.
    """

    def __init__(
        self,
        shape: Sequence[int | None] | None = None,
        batch_size: int | None = None,
        dtype: Any = None,
        sparse: bool | None = None,
        ragged: bool | None = None,
        batch_shape: Sequence[int | None] | None = None,
        name: str | None = None,
        input_shape: Sequence[int | None] | None = None,
        optional: bool = False,
    ) -> None:
        if sparse or ragged or optional:
            raise ValueError("InputLayer: sparse, ragged and optional inputs are not supported")
        shape = input_shape if shape is None else shape
        if (shape is None) == (batch_shape is None):
            raise ValueError(
                "InputLayer needs the shape of an example, such as shape=(28, 28, 1), or batch_shape"
            )
        if batch_shape is not None:
            batch_size, *shape = batch_shape
        assert shape is not None
        replicas = get_strategy().num_replicas_in_sync
        if batch_size is not None and batch_size % replicas:
            raise ValueError(
                f"The `batch_size` argument ({batch_size}) must be divisible by the number of "
                f"replicas ({replicas})"
            )
        # A global mixed-precision policy does not apply to inputs, so pass the dtype explicitly.
        strings = dtype in (string, "string")
        super().__init__(
            dtype=floatx() if strings or dtype is None else dtype, name=name, input_shape=shape
        )
        if strings:
            self._dtype = string
        self.batch_shape: Shape = (batch_size, *shape)
        self._output_shape = self._input_shape
        self.built = True
        Node(self, (), {}, KerasTensor(self.batch_shape, self._dtype, name=self._name))

    def get_config(self) -> dict[str, Any]:
        return {
            "batch_shape": self.batch_shape,
            "dtype": "string" if self._dtype == string else self._dtype.name,
            "sparse": False,
            "name": self._name,
        }

    def call(self, inputs: Tensor) -> Tensor:
        return inputs


def Input(
    shape: Sequence[int | None] | None = None,
    batch_size: int | None = None,
    dtype: Any = None,
    sparse: bool | None = None,
    ragged: bool | None = None,
    batch_shape: Sequence[int | None] | None = None,
    name: str | None = None,
    tensor: Any = None,
    optional: bool = False,
) -> KerasTensor:
    """Return a symbolic tensor, the input of a functional model or of a `Sequential`.

    The parameters and errors are those of `InputLayer`. If ``tensor`` is given, it must be a symbolic
    tensor, and `Input` returns it.
    """
    if tensor is not None:
        if not isinstance(tensor, KerasTensor):
            raise ValueError(f"Input: tensor must be a KerasTensor, got {tensor!r}")
        return tensor
    layer = InputLayer(
        shape, batch_size, dtype, sparse, ragged, batch_shape, name=name, optional=optional
    )
    output: KerasTensor = layer.output
    return output
