"""Fixtures for ranks on emulated devices."""

from __future__ import annotations

import pytest
from emulated import make_devices


@pytest.fixture
def devices(monkeypatch):
    """Four devices that reach each other."""
    cupy = make_devices(monkeypatch)
    yield cupy
    cupy.emulated.hold(False)
    cupy.emulated.run()  # to the memory of arrays that are still kept for it
