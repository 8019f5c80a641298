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


@pytest.fixture(params=["memory", "tcp"])
def transport(request, monkeypatch):
    """Run a test with mapped variables, and with copies of variables."""
    if request.param == "tcp":
        monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    return request.param
