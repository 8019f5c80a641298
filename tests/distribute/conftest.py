"""Strategies for the tests of this room."""

from __future__ import annotations

import pytest

from pycollective import distribute


def mirrored(replicas, ops=None):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], ops)


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda n: f"{n} replicas")
def strategy(request):
    return mirrored(request.param)


@pytest.fixture
def two():
    return mirrored(2)
