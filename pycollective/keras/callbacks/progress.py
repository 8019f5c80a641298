"""`ProgbarLogger`: the progress of training on the terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from pycollective.keras.callbacks.base import Callback

Logs = dict[str, Any]

#: Seconds between two updates of the progress line.
_INTERVAL = 0.1
#: The width of the bar in characters.
_BAR = 20


class ProgbarLogger(Callback):
    """Print the progress of training, and its results.

    With ``verbose=1`` on a terminal, one line with a bar is updated in place. With ``verbose=2``, and
    if the output is not a terminal, each epoch has one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._training = False
        self._restart()

    def _restart(self) -> None:
        self._begin = self._shown = time.perf_counter()
        self._done = 0
        self._width = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self.params.get("epochs", 1) > 1:
            print(f"Epoch {epoch + 1}/{self.params['epochs']}", flush=True)
        self._restart()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._step(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._finish(logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if not self._training:
            self._restart()

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if not self._training:
            self._step(batch, logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        if not self._training:
            self._finish(logs)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._restart()

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._step(batch, None)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        self._finish(None)

    def _step(self, batch: int, logs: Logs | None) -> None:
        self._done = batch + 1
        now = time.perf_counter()
        live = self.params.get("verbose") == 1 and sys.stdout.isatty()
        if live and now - self._shown >= _INTERVAL:
            self._shown = now
            self._write("\r" + self._line(now, logs, self._bar()), "")

    def _finish(self, logs: Logs | None) -> None:
        start = "\r" if self._width else ""
        self._write(start + self._line(time.perf_counter(), logs), "\n")

    def _write(self, line: str, end: str) -> None:
        print(line.ljust(self._width), end=end, flush=True)
        self._width = len(line)

    def _bar(self) -> str:
        """Return a bar for the finished part of the epoch, or "" if the epoch's length is unknown."""
        steps: int | None = self.params.get("steps")
        if steps is None:
            return ""
        done = _BAR * min(self._done, steps) // max(1, steps)
        return " " + "━" * done + "─" * (_BAR - done)

    def _line(self, now: float, logs: Logs | None, bar: str = "") -> str:
        seconds = now - self._begin
        steps = self.params.get("steps")
        each = 1e3 * seconds / max(1, self._done)
        parts = [
            f"{self._done}/{'Unknown' if steps is None else max(steps, self._done)}{bar}",
            f"{seconds:.0f}s",
            f"{each:.0f}ms/step" if each >= 1 else f"{1e3 * each:.0f}us/step",
            *(f"{name}: {_text(value)}" for name, value in (logs or {}).items()),
        ]
        return " - ".join(parts)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) > 1e-3 or value == 0 else f"{value:.4e}"
