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
    cupy.emulated.run()  # while the arrays that the queued work uses are still kept
