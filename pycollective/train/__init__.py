"""Checkpoints: save the variables of a program to files, and restore them.

The names are those of ``tf.train``. `ClusterSpec` is defined in the package `cluster`.
"""

from __future__ import annotations

from pycollective.cluster.spec import ClusterSpec
from pycollective.train.checkpoint import Checkpoint, CheckpointMismatchError, CheckpointStatus
from pycollective.train.manager import CheckpointManager
from pycollective.train.state import CheckpointState, get_checkpoint_state, latest_checkpoint
from pycollective.train.trackable import Trackable

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointState",
    "CheckpointStatus",
    "ClusterSpec",
    "Trackable",
    "get_checkpoint_state",
    "latest_checkpoint",
]
