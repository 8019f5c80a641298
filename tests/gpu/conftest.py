"""Fixtures for tests on a GPU, with the real CuPy and the cases of other folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The tests import cases from these folders, and compute them on the GPU.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("core", "keras", "nn")]


@pytest.fixture(autouse=True)
def without_nccl():
    """Override the fixture that hides NCCL: these tests use the installed library."""


@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy")
    if not module.cuda.runtime.getDeviceCount():
        pytest.skip("CuPy finds no GPU")
    return module
