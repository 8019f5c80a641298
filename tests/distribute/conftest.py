"""Fixtures of the tests of strategies."""

from __future__ import annotations

import pytest
from strategies import mirrored


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda n: f"{n} replicas")
def strategy(request):
    return mirrored(request.param)


@pytest.fixture
def two():
    return mirrored(2)
