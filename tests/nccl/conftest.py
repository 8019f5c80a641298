"""Simulated GPUs and NCCL, for machines that have neither."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_gpus
import pytest

from pycollective.nccl import loading

sys.path.append(str(Path(__file__).parents[1] / "distribute"))  # for the module `workers`


@pytest.fixture(autouse=True)
def without_nccl():
    """Override the fixture that hides NCCL: these tests choose their library."""


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory):
    """Path of a stand-in for libnccl that uses host memory; skips without a C compiler."""
    return fake_gpus.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="session")
def older_path(tmp_path_factory):
    """Path of a stand-in for libnccl 2.21."""
    return fake_gpus.build(tmp_path_factory.mktemp("older"), 22100)


@pytest.fixture
def no_library(monkeypatch):
    """Let the test open the library again, with its own settings."""
    monkeypatch.setattr(loading, "_opened", None)
    monkeypatch.delenv("PYCOLLECTIVE_NCCL_LIBRARY", raising=False)


@pytest.fixture
def gpus(monkeypatch, fake_path, no_library):
    """Return a stand-in for CuPy with four GPUs, with NCCL between them."""
    return fake_gpus.make_gpus(monkeypatch, fake_path)


@pytest.fixture
def on_gpus(gpus, on_ranks):
    """Return a function that calls ``work(communicator)`` for each rank, each on its own GPU."""

    def run(communicators, work, close=True):
        def on_one(communicator):
            with gpus.cuda.Device(communicator.rank):
                try:
                    return work(communicator)
                finally:
                    if close:
                        communicator.close()

        return on_ranks(communicators, on_one)

    return run
