"""The file ``checkpoint`` of a directory, which records the directory's checkpoints."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pycollective.arguments import path_of
from pycollective.atomic_files import write_atomically
from pycollective.errors import CheckpointError
from pycollective.train.files import (
    has_files,
    is_bare_name,
    is_complete,
    parse_json,
    remove_files,
)

_log = logging.getLogger(__name__)
STATE_FILE = "checkpoint"


class _DamagedRecordError(CheckpointError):
    """The record of a directory's checkpoints is damaged."""


class _ForeignNameError(CheckpointError):
    """The record of a directory's checkpoints names a file elsewhere."""


class CheckpointState(NamedTuple):
    """The checkpoints of a directory.

    Attributes
    ----------
    model_checkpoint_path : str
        The last checkpoint that was written.
    all_model_checkpoint_paths : list of str
        All checkpoints that are kept, oldest first.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]


def get_checkpoint_state(checkpoint_dir: str | os.PathLike[str]) -> CheckpointState | None:
    """Return the contents of a directory's file ``checkpoint``, or None if there is none.

    Raises
    ------
    CheckpointError
        The file is damaged, cannot be read, or comes from TensorFlow.
    """
    directory = path_of("checkpoint_dir", checkpoint_dir)
    state_path = os.path.join(directory, STATE_FILE)
    try:
        raw = Path(state_path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{state_path!r} cannot be read ({error})") from None
    if raw.startswith(b"model_checkpoint_path:"):
        raise CheckpointError(
            f"{state_path!r} is TensorFlow's record of its own checkpoints; use another folder"
        )
    try:
        latest, names = _latest_and_all(parse_json(state_path, raw))
    except CheckpointError as error:
        kind = CheckpointError if isinstance(error, _ForeignNameError) else _DamagedRecordError
        raise kind(
            f"{state_path!r} is damaged ({error}); delete it, and restore one of the checkpoints "
            "beside it by its name"
        ) from None
    paths = [os.path.join(directory, name) for name in names]
    return CheckpointState(os.path.join(directory, latest), paths)


def _latest_and_all(state: Any) -> tuple[str, list[str]]:
    latest, names = (
        (state.get("latest"), state.get("all")) if isinstance(state, dict) else (None, None)
    )
    if not isinstance(names, list):
        raise CheckpointError("it has no list of checkpoints")
    for name in (latest, *names):
        if not is_bare_name(name):
            raise _ForeignNameError(f"{name!r} is not the name of a checkpoint in the same folder")
    return str(latest), names


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint of a directory, or None if there is none.

    A checkpoint whose files are missing or truncated is skipped, with a warning in the log.

    Raises
    ------
    CheckpointError
        The directory's file ``checkpoint`` is damaged, or the newest checkpoint may be intact, but
        cannot be read.
    """
    state = get_checkpoint_state(checkpoint_dir)
    if state is None:
        return None
    return newest_complete([*state.all_model_checkpoint_paths, state.model_checkpoint_path])


def newest_complete(paths: Sequence[str]) -> str | None:
    """Return the last complete checkpoint of ``paths``, or None; log a warning for those it skips."""
    for path in dict.fromkeys(reversed(paths)):
        if is_complete(path):
            return path
        _log.warning("checkpoint %r is missing or not complete, and is skipped", path)
    return None


def write_state(directory: str, paths: list[str]) -> None:
    """Record the checkpoints of a directory, oldest first; the last one is the latest.

    The caller holds the lock of the directory.
    """
    names = [os.path.basename(path) for path in paths]
    body = {"latest": names[-1], "all": names}
    write_atomically(os.path.join(directory, STATE_FILE), json.dumps(body, indent=1).encode())


def remove_checkpoints(directory: str, paths: list[str]) -> None:
    """Delete checkpoints of a directory and their records; the caller holds the lock."""
    for path in paths:
        remove_files(path)
    state = get_checkpoint_state(directory)
    if not paths or state is None:
        return
    kept = [path for path in state.all_model_checkpoint_paths if path not in paths]
    if kept:
        write_state(directory, kept)
    else:
        os.remove(os.path.join(directory, STATE_FILE))


def add_to_state(path: str) -> None:
    """Record a new checkpoint as its directory's latest one; the caller holds the lock.

    A damaged record is replaced, with a warning in the log.
    """
    directory = os.path.dirname(path) or "."
    try:
        state = get_checkpoint_state(directory)
    except _DamagedRecordError as error:
        _log.warning("%s. A new record lists only later checkpoints", error)
        state = None
    known = [] if state is None else state.all_model_checkpoint_paths
    target = os.path.normpath(path)
    kept = [p for p in known if os.path.normpath(p) != target and has_files(p)]
    write_state(directory, [*kept, path])
