"""The base of layers that draw random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pycollective.distribute.context import current_mode
from pycollective.keras.layers.layer import SameShape
from pycollective.tensor.random import default_generator, generator_scope


class Seeded(SameShape):
    """A layer with a seed, from which each replica derives its own random numbers.

    Parameters
    ----------
    seed : int, optional
        The seed. Without a seed, `build` draws one from the default generator.
    """

    def __init__(self, seed: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.seed = seed
        self._generators: dict[int, np.random.Generator] = {}
        self._entropy = seed

    def build(self, input_shape: Any) -> None:
        if self._entropy is None:
            self._entropy = int(default_generator().integers(0, 2**63))

    def _drawing(self) -> AbstractContextManager[Any]:
        """Return a context in which random numbers come from this replica's generator."""
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        replica = 0
        if context is not None:
            # `replica_id_in_sync_group` is a tensor on the device, and reading it would wait.
            replica = context.strategy.extended.first_replica + context.local_replica_id
        generator = self._generators.get(replica)
        if generator is None:
            assert self._entropy is not None
            generator = np.random.default_rng([self._entropy, replica])
            self._generators[replica] = generator
        return generator_scope(generator)
