"""What needs a GPU: the real CuPy in the place of the stand-in, and the cases of the other rooms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The cases are theirs; what differs here is where they are computed.
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("core", "keras", "nn")]


@pytest.fixture(autouse=True)
def without_nccl():
    """Leave the library that there is to the tests."""


@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy")
    if not module.cuda.runtime.getDeviceCount():
        pytest.skip("CuPy finds no GPU")
    return module
