"""Snapshots of a parameter server's variables: files that a server writes while others train."""

from __future__ import annotations

import json
import logging
import os
import zlib
from typing import Any

import numpy as np

from pycollective.atomic_files import write_atomically
from pycollective.distribute.shared_values import Block
from pycollective.distribute.task_links import shape_and_dtype, spec_of
from pycollective.errors import CheckpointError, FailedPreconditionError
from pycollective.launch.handshake import HandshakeError

_INDEX, _PREVIOUS = "index.json", "previous.json"
_log = logging.getLogger("pycollective")


class Snapshots:
    """The snapshot of one server in a directory of its own.

    A variable is a file with the bytes of its value. The index names the files, and is replaced at
    once, so that a snapshot is complete or has not been made. Only variables that have changed since
    the last snapshot are written. Each saved value is one that the variable had at some time. The values
    of different variables may be from different times.

    The directory also has the snapshot before the last one, which is read if the last one is damaged.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        os.makedirs(directory, exist_ok=True)
        self._written: dict[int, dict[str, Any]] = {}
        #: The index of the last snapshot that was written or read.
        self._text = b""

    def write(self, run: str, variables: dict[str, Block]) -> None:
        """Write the variables that have changed, and the index for a run of the chief's program."""
        entries, fresh = [], False
        for key, block in variables.items():
            known = self._written.get(block.number)
            if known is None or known["version"] != block.version:
                try:
                    with block.locked(False) as value:
                        data, version = value.tobytes(), block.version
                except FailedPreconditionError:  # dropped meanwhile
                    continue
                name = f"{block.number}.{version}"
                write_atomically(os.path.join(self._directory, name), data)
                spec = spec_of(block.value)
                known = {"key": key, "number": block.number, "version": version, "spec": spec}
                known["crc32"] = zlib.crc32(data)
                fresh = True
            entries.append(known)
        if not fresh and len(entries) == len(self._written):
            return
        if self._text:
            write_atomically(os.path.join(self._directory, _PREVIOUS), self._text)
        text = json.dumps({"run": run, "variables": entries}).encode()
        write_atomically(os.path.join(self._directory, _INDEX), text)
        self._text = text
        kept = [*entries, *self._written.values()]
        self._written = {entry["number"]: entry for entry in entries}
        names = {f"{entry['number']}.{entry['version']}" for entry in kept}
        for name in os.listdir(self._directory):
            if name.replace(".", "").isdigit() and name not in names:
                os.unlink(os.path.join(self._directory, name))

    def read(self, run: str) -> list[tuple[int, str, Any, int]]:
        """Return the number, key, value and version of each variable in a run's snapshot, by number.

        The list is empty if the run has no snapshot.
        """
        damage = None
        for index in (_INDEX, _PREVIOUS):
            path = os.path.join(self._directory, index)
            try:
                with open(path, "rb") as file:
                    text = file.read()
                saved = json.loads(text)
                if saved["run"] != run:
                    break
                found = [self._value(entry) for entry in saved["variables"]]
                numbers = [number for number, _, _, _ in found]
                if numbers != sorted(set(numbers)):
                    raise ValueError("the numbers of variables do not ascend")
            except FileNotFoundError as error:
                if error.filename == path:
                    continue
                damage = damage or f"{path!r}: {error}"
            except (OSError, ValueError, KeyError, TypeError, HandshakeError) as error:
                damage = damage or f"{path!r}: {error}"
            else:
                if index == _PREVIOUS:
                    _log.error(
                        "the last snapshot is damaged, so the one before is used: %s", damage
                    )
                self._text = text
                self._written = {entry["number"]: entry for entry in saved["variables"]}
                _log.warning("%d variables are restored from %s", len(found), self._directory)
                return found
        if damage is None:
            return []
        raise CheckpointError(
            f"the snapshot is damaged, and there is no other one of this run: {damage}. End all tasks, "
            "remove the snapshots, start the program again, and restore a checkpoint"
        )

    def _value(self, entry: dict[str, Any]) -> tuple[int, str, Any, int]:
        """Return the number, the key, the value and the version of a variable."""
        number, version = int(entry["number"]), int(entry["version"])
        shape, dtype = shape_and_dtype(entry["spec"])
        with open(os.path.join(self._directory, f"{number}.{version}"), "rb") as file:
            data = file.read()
        if zlib.crc32(data) != entry["crc32"]:
            raise ValueError(f"the value of variable {entry['key']!r} has changed on the disk")
        return number, str(entry["key"]), np.frombuffer(data, dtype).reshape(shape), version
