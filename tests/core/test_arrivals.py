"""`Arrivals`: spinning until another Python thread adds an item."""

from __future__ import annotations

import threading
import time

from pycollective._core import Arrivals


def test_spin_until_returns_at_once_after_arrival_and_soon_without():
    arrivals = Arrivals()
    assert arrivals.spin_until(0)
    assert not arrivals.spin_until(1)  # it returns: the caller waits in another way
    arrivals.add()
    arrivals.add()
    assert arrivals.spin_until(1)
    assert arrivals.spin_until(2)
    assert not arrivals.spin_until(3)


def test_spin_until_lets_other_threads_run():
    arrivals = Arrivals()
    end = threading.Event()

    def add():
        while not end.is_set():
            arrivals.add()
            time.sleep(0)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for number in range(1, 200):
            deadline = time.monotonic() + 30
            while not arrivals.spin_until(number):
                assert time.monotonic() < deadline
    finally:
        end.set()
        thread.join()
