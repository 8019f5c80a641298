"""`CheckpointManager`: keep the last few checkpoints of a directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re

from pycollective.arguments import path_of, whole
from pycollective.train.checkpoint import Checkpoint
from pycollective.train.files import (
    UnreadableCheckpointError,
    has_index,
    is_bare_name,
    is_complete,
)
from pycollective.train.state import (
    get_checkpoint_state,
    latest_checkpoint,
    newest_complete,
    remove_checkpoints,
)

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Numbered checkpoints of one name in a directory, of which the oldest are deleted.

    Parameters
    ----------
    checkpoint : Checkpoint
        The checkpoint to save.
    directory : path
        The directory, made if it is missing. Its checkpoints of this name count.
    max_to_keep : int or None
        The number of checkpoints to keep; None keeps all.
    checkpoint_name : str
        The name, which a number follows. Checkpoints of other names are neither deleted nor restored.

    Raises
    ------
    TypeError
        ``checkpoint`` is not a `Checkpoint`.
    ValueError
        ``max_to_keep`` is neither None nor at least 1, or ``checkpoint_name`` names a folder.
    NotADirectoryError
        ``directory`` is a file.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint must be a tf.train.Checkpoint, not {checkpoint!r}")
        if max_to_keep is not None and whole("max_to_keep", max_to_keep) < 1:
            raise ValueError(f"max_to_keep must be None or at least 1, got {max_to_keep}")
        if not is_bare_name(checkpoint_name):
            raise ValueError(
                f"checkpoint_name={checkpoint_name!r} must be the beginning of a file name; folders "
                "belong to the directory"
            )
        self._checkpoint = checkpoint
        self._directory = path_of("directory", directory)
        if os.path.isfile(self._directory):
            raise NotADirectoryError(
                errno.ENOTDIR, "directory is a file; give the path of a folder", self._directory
            )
        self._max_to_keep = max_to_keep
        self._prefix = os.path.join(self._directory, checkpoint_name)
        self._own = re.compile(rf"{re.escape(checkpoint_name)}-\d+")

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return self._directory

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the complete checkpoints, oldest first."""
        return [path for path in self._recorded() if is_complete(path)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest complete checkpoint, or None."""
        return newest_complete(self._recorded())

    def _recorded(self) -> list[str]:
        state = get_checkpoint_state(self._directory)
        paths = [] if state is None else state.all_model_checkpoint_paths
        return [path for path in paths if self._own.fullmatch(os.path.basename(path))]

    def save(self, checkpoint_number: int | None = None) -> str:
        """Write the next checkpoint, then delete the oldest beyond the limit; return its path.

        Parameters
        ----------
        checkpoint_number : int, optional
            The number in the name, by default that of the last checkpoint + 1.
        """
        if checkpoint_number is not None:
            # save() adds 1 to the counter.
            number = whole("checkpoint_number", checkpoint_number, 0, 2**63 - 1)
            before = int(self._checkpoint.save_counter)
            self._checkpoint.save_counter.assign(number - 1)
        try:
            return self._checkpoint._save(self._prefix, self._remove_old)
        except BaseException:
            if checkpoint_number is not None:
                self._checkpoint.save_counter.assign(before)
            raise

    def _remove_old(self) -> None:
        if self._max_to_keep is None:
            return
        recorded, complete = self._recorded(), []
        for path in recorded:
            with contextlib.suppress(UnreadableCheckpointError):  # neither counted nor deleted
                complete += [path] * is_complete(path)
        if not complete:
            return
        oldest = recorded.index(complete[-self._max_to_keep :][0])
        # An interrupted call has left files without an index.
        old = [path for path in recorded[:oldest] if path in complete or not has_index(path)]
        remove_checkpoints(self._directory, old)

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint if there is one; return its path or None."""
        path = self.latest_checkpoint
        if path is None:
            other = latest_checkpoint(self._directory)
            if other is not None:
                _log.warning(
                    "%r has no checkpoint %s-NUMBER, so nothing is restored; it has %r",
                    self._directory,
                    os.path.basename(self._prefix),
                    os.path.basename(other),
                )
        self._checkpoint.restore(path)
        return path
