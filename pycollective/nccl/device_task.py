"""Calls that run on devices."""

from __future__ import annotations

import time

_PAUSE = 50e-6


class DeviceTask:
    """A call on a device, for which a `Work` waits.

    A wait without a deadline lets this thread's stream wait, not the host. Later work of the stream can
    use the result.
    """

    #: The number of the call among those that all ranks make; 0 for other calls.
    number = 0

    def __init__(self, on_device: int, seconds: float) -> None:
        self.device, self.seconds = on_device, seconds
        self.began = time.monotonic()
        self._ordered = False

    @property
    def ended(self) -> bool:
        """True if the device has finished the call, or never will."""
        raise NotImplementedError

    def device_times(self) -> tuple[float, float] | None:
        """Return the times at which the stream began and ended the call, if the device recorded them."""
        raise NotImplementedError

    def order(self) -> bool:
        """Let this thread's stream wait for the call; return False if the call never ends."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error of the call, if there is one."""
        raise NotImplementedError

    def start(self) -> None:
        """Make sure that the call is enqueued."""

    @property
    def times(self) -> tuple[float, float]:
        """The begin and the end of the call, in seconds of `time.monotonic`.

        Without times of the device: the time at which the host made the call, and the current time.
        """
        return self.device_times() or (self.began, time.monotonic())

    @property
    def done(self) -> bool:
        """True if this thread's stream can use the result, or if the call never ends."""
        return self._ordered or self.ended

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds on the host.

        If ``timeout`` is not less than the call's own, let this thread's stream wait instead.
        """
        if timeout >= self.seconds and self.order():
            self._ordered = True
            return True
        until = time.monotonic() + timeout
        while not self.done:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        return True
