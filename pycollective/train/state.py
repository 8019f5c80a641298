"""The file ``checkpoint`` of a directory, which records the directory's checkpoints."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from pycollective.arguments import path_of
from pycollective.atomic_files import write_atomically
from pycollective.errors import CheckpointError
from pycollective.train.files import is_bare_name, is_complete, parse_json

_log = logging.getLogger(__name__)
STATE_FILE = "checkpoint"


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
        The file is damaged.
    """
    directory = path_of("checkpoint_dir", checkpoint_dir)
    state_path = os.path.join(directory, STATE_FILE)
    try:
        state = parse_json(state_path, Path(state_path).read_bytes())
        latest, names = _latest_and_all(state)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
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
            raise CheckpointError(f"{name!r} is not the name of a checkpoint in the same folder")
    return str(latest), names


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint of a directory, or None if there is none.

    A checkpoint whose files are missing or truncated is skipped, with a warning in the log.

    Raises
    ------
    CheckpointError
        The directory's file ``checkpoint`` is damaged.
    """
    state = get_checkpoint_state(checkpoint_dir)
    if state is None:
        return None
    newest_first = [state.model_checkpoint_path, *reversed(state.all_model_checkpoint_paths)]
    for path in dict.fromkeys(newest_first):
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


def add_to_state(path: str) -> None:
    """Record a new checkpoint as its directory's latest one; the caller holds the lock."""
    directory = os.path.dirname(path) or "."
    state = get_checkpoint_state(directory)
    known = [] if state is None else state.all_model_checkpoint_paths
    target = os.path.normpath(path)
    kept = [p for p in known if os.path.normpath(p) != target and is_complete(p)]
    write_state(directory, [*kept, path])
