"""Names of ``tf.types.experimental.distributed``: values with a component for each replica."""

from __future__ import annotations

from pycollective.distribute.values import Mirrored, PerReplica

__all__ = ["Mirrored", "PerReplica"]
