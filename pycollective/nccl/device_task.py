"""Calls that devices have been given."""

from __future__ import annotations

import time

_PAUSE = 50e-6


class DeviceTask:
    """A call that a device has been given; a `Work` waits for it.

    To wait for ever means that this thread's stream waits, and not the host: the result can then be used
    in the order of the stream.
    """

    #: Which of the calls that all ranks make it is; 0: none of them.
    number = 0

    def __init__(self, on_device: int, seconds: float) -> None:
        self.device, self.seconds = on_device, seconds
        self.began = time.monotonic()
        self._ordered = False

    @property
    def ended(self) -> bool:
        """True if the device is done with it, or will never be."""
        raise NotImplementedError

    def device_times(self) -> tuple[float, float] | None:
        """Return the times at which its stream began and ended it; None if the device noted none."""
        raise NotImplementedError

    def order(self) -> bool:
        """Let this thread's stream wait for it; False if there is nothing to wait for any more."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise why it has failed, if it has."""
        raise NotImplementedError

    def start(self) -> None:
        """See that the device has been given it."""

    @property
    def times(self) -> tuple[float, float]:
        """The times at which its stream began and ended it, as of `time.monotonic`.

        Of a call that was not timed, or has not ended: the time at which it was made, and now.
        """
        return self.device_times() or (self.began, time.monotonic())

    @property
    def done(self) -> bool:
        """True if its result can be used on this thread's stream, or will never be there."""
        return self._ordered or self.ended

    def wait(self, timeout: float) -> bool:
        """Wait on the host for ``timeout`` seconds; for ever: let this thread's stream wait."""
        if timeout >= self.seconds and self.order():
            self._ordered = True
            return True
        until = time.monotonic() + timeout
        while not self.done:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        return True
