"""Snapshots of a parameter server's variables: files that a server writes while others train."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import numpy as np

from pycollective.atomic_files import write_atomically
from pycollective.distribute.shared_values import Block
from pycollective.distribute.task_links import shape_and_dtype, spec_of
from pycollective.errors import CheckpointError, FailedPreconditionError
from pycollective.launch.handshake import HandshakeError

_INDEX = "index.json"
_log = logging.getLogger("pycollective")


class Snapshots:
    """The snapshot of one server in a directory of its own.

    A variable is a file with the bytes of its value. The index names the files, and is replaced at
    once, so that a snapshot is complete or has not been made. Only variables that have changed since
    the last snapshot are written. Each saved value is one that the variable had at some time. The values
    of different variables may be from different times.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        os.makedirs(directory, exist_ok=True)
        self._written: dict[int, dict[str, Any]] = {}

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
                fresh = True
            entries.append(known)
        if not fresh and len(entries) == len(self._written):
            return
        text = json.dumps({"run": run, "variables": entries})
        write_atomically(os.path.join(self._directory, _INDEX), text.encode())
        self._written = {entry["number"]: entry for entry in entries}
        names = {f"{entry['number']}.{entry['version']}" for entry in entries}
        for name in os.listdir(self._directory):
            if name.replace(".", "").isdigit() and name not in names:
                os.unlink(os.path.join(self._directory, name))

    def read(self, run: str) -> list[tuple[int, str, Any, int]]:
        """Return the numbers, in ascending order, keys, values and versions of a run's snapshot.

        There are none if there is no snapshot of the run.
        """
        path = os.path.join(self._directory, _INDEX)
        try:
            with open(path, "rb") as file:
                index = json.load(file)
            if index["run"] != run:
                return []
            found: list[tuple[int, str, Any, int]] = []
            for entry in index["variables"]:
                number, version = int(entry["number"]), int(entry["version"])
                if found and number <= found[-1][0]:
                    raise ValueError(f"the numbers of variables do not ascend at {number}")
                shape, dtype = shape_and_dtype(entry["spec"])
                with open(os.path.join(self._directory, f"{number}.{version}"), "rb") as file:
                    value = np.frombuffer(file.read(), dtype).reshape(shape)
                found.append((number, str(entry["key"]), value, version))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, HandshakeError) as error:
            raise CheckpointError(f"the snapshot {path!r} is damaged: {error}") from None
        _log.warning("%d variables are restored from %s", len(found), self._directory)
        return found
