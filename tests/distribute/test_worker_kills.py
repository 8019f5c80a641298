"""Random kills of workers of a cluster with parameter servers: all functions end, and no call hangs."""

from __future__ import annotations

import sys

import pytest
from worker_kills import check, kill_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_workers_killed_at_random_lose_no_function(tmp_path, monkeypatch, transport):
    if transport == "tcp":
        monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", "tcp")
    check(kill_workers(tmp_path, 200), 200)


@pytest.mark.parametrize(
    "found", [(200, 199, 200.0), (200, 212, 200.0), (200, 200, 199.5), (180, 180, 180.0)]
)
def test_check_of_lost_or_unexplained_functions_raises(found):
    with pytest.raises(AssertionError):
        check(found, 10)
