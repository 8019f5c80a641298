"""`Arrivals`: looking out for what another thread hands over by Python's means."""

from __future__ import annotations

import threading
import time

from pycollective._core import Arrivals


def test_what_has_come_is_seen_at_once_and_what_has_not_is_not_waited_for_long():
    arrivals = Arrivals()
    assert arrivals.spin_until(0)
    assert not arrivals.spin_until(1)  # it returns: the caller waits in another way
    arrivals.add()
    arrivals.add()
    assert arrivals.spin_until(1)
    assert arrivals.spin_until(2)
    assert not arrivals.spin_until(3)


def test_others_run_meanwhile():
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
