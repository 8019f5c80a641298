"""Regularization layers: they return their inputs unchanged outside of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycollective import nn
from pycollective.arguments import number_of
from pycollective.keras import regularizers
from pycollective.keras.layers.core import positive
from pycollective.keras.layers.layer import SameShape
from pycollective.keras.layers.seeded import Seeded
from pycollective.keras.layers.shapes import Shape
from pycollective.tensor import Tensor

__all__ = ["ActivityRegularization", "Dropout"]


class Dropout(Seeded):
    """In training, set random elements to 0 and divide the others by ``1 - rate``.

    Parameters
    ----------
    rate : float
        The probability that an element becomes 0.
    noise_shape
        The shape of the random mask, which broadcasts to the input: all elements along an axis of
        length 1 share one decision. None is the input's length.
    seed : int, optional
        The seed. Each replica derives its own random numbers from the seed and its replica number,
        so that a run can be repeated.
    """

    def __init__(
        self,
        rate: float,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, **options)
        self.rate = number_of("Dropout: rate", rate)
        if not 0 <= self.rate <= 1:
            raise ValueError(f"Dropout: rate must be from 0 to 1, got {rate}")
        if noise_shape is not None:
            noise_shape = tuple(
                n if n is None else positive("Dropout: noise_shape", n) for n in noise_shape
            )
        self.noise_shape = noise_shape

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Return the inputs, with elements dropped if ``training``."""
        self.compute_output_shape(inputs.shape)
        if not training or self.rate == 0:
            return inputs
        with self._drawing():
            return nn.dropout(inputs, self.rate, self.noise_shape)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        noise, shape = self.noise_shape, tuple(input_shape)
        if noise is not None and (
            len(noise) != len(shape)
            or any(
                n not in (None, 1, m) and m is not None for n, m in zip(noise, shape, strict=True)
            )
        ):
            raise self._incompatible(shape, f"axes for a noise_shape of {noise}")
        return shape


class ActivityRegularization(SameShape):
    """Return the inputs unchanged, and add their `regularizers.L1L2` penalty to `losses`.

    Parameters
    ----------
    l1, l2 : float
        The factors of ``sum(|x|)`` and of ``sum(x²)``. Each sum is divided by the number of rows.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.0, **options: Any) -> None:
        super().__init__(activity_regularizer=regularizers.L1L2(l1, l2), **options)
        self.l1 = l1
        self.l2 = l2

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["activity_regularizer"]
        return config

    def call(self, inputs: Tensor) -> Tensor:
        return inputs
