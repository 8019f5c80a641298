"""Strategies for the tests of this room."""

from __future__ import annotations

from pycollective import distribute


def mirrored(replicas, ops=None):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], ops)
