"""`CSVLogger`: the results of the epochs as a table."""

from __future__ import annotations

import csv
import os
from typing import Any

import numpy as np

from pycollective.arguments import path_of
from pycollective.keras.callbacks.base import Callback

Logs = dict[str, Any]


class CSVLogger(Callback):
    """Write the results of each epoch as a line of a file; only the chief worker writes.

    Parameters
    ----------
    filename : path
        The path of the file.
    separator : str
        The separator of columns.
    append : bool
        True to append to an existing file.
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        super().__init__()
        self.filename = path_of("filename", filename)
        self.sep = separator
        self.append = append
        self.keys: list[str] | None = None
        self._file: Any = None
        self._has_header = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._close()
        if not self.model.distribute_strategy.extended.should_save_summary:
            return
        self._has_header = (
            self.append and os.path.exists(self.filename) and os.path.getsize(self.filename) > 0
        )
        self._file = open(self.filename, "a" if self.append else "w", newline="")  # noqa: SIM115
        self.keys = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._file is None:
            return
        found = logs or {}
        writer = csv.writer(self._file, delimiter=self.sep)
        if self.keys is None:
            self.keys = sorted(found)
            # The first epoch may have no validation, but later epochs may have one.
            if self.keys and not any(key.startswith("val_") for key in self.keys):
                self.keys += [f"val_{key}" for key in self.keys]
            if not self._has_header:
                writer.writerow(["epoch", *self.keys])
        writer.writerow([epoch, *(_text(found.get(key, "NA")) for key in self.keys)])
        self._file.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._close()

    def abandon(self, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _text(value: Any) -> Any:
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return f'"[{", ".join(map(str, value))}]"'
    return value
