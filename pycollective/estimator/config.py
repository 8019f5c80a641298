"""`RunConfig`: the settings of an estimator's runs."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from pycollective.arguments import path_of
from pycollective.cluster.resolver import ClusterResolver
from pycollective.cluster.spec import ClusterSpec
from pycollective.cluster.tf_config import TFConfigClusterResolver
from pycollective.distribute.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of an estimator's runs.

    Parameters
    ----------
    model_dir : str, optional
        The directory of the checkpoints; by default the estimator makes a temporary one.
    tf_random_seed : int, optional
        The seed of initial values and of random layers; None: the process's random numbers.
    save_summary_steps : int, optional
        Accepted and ignored: no summaries are written.
    save_checkpoints_steps, save_checkpoints_secs : int, optional
        The number of steps, or of seconds, between checkpoints. The default is 600 seconds. None for
        both: only at the end of training.
    keep_checkpoint_max : int, optional
        The number of checkpoints to keep; None or 0: all.
    log_step_count_steps : int, optional
        The number of steps between lines of the log with the loss; None: no lines.
    train_distribute, eval_distribute : Strategy, optional
        The strategies of training and of evaluation; by default there is one replica.

    Raises
    ------
    TypeError, ValueError
        A setting has a wrong type or value, or both periods of checkpoints are given.

    Notes
    -----
    ``TF_CONFIG`` describes the cluster and this process's task, as in TensorFlow. Without it, the
    launcher of the processes does, if ``train_distribute`` is a strategy for several processes.
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = 1
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = dataclasses.field(default=-1)
    save_checkpoints_secs: int | None = dataclasses.field(default=-1)
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None

    def __post_init__(self) -> None:
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps == -1 and seconds == -1:
            steps, seconds = None, 600
        else:
            steps, seconds = (None if value == -1 else value for value in (steps, seconds))
        if steps is not None and seconds is not None:
            raise ValueError(
                "Can not provide both save_checkpoints_steps and save_checkpoints_secs."
            )
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", seconds)
        if self.model_dir is not None:
            if not path_of("model_dir", self.model_dir):
                raise ValueError("model_dir should be non-empty")
            object.__setattr__(self, "model_dir", path_of("model_dir", self.model_dir))
        for name, least in {
            "save_checkpoints_steps": 0,
            "save_checkpoints_secs": 0,
            "keep_checkpoint_max": 0,
            "save_summary_steps": 0,
            "log_step_count_steps": 1,
        }.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} should be >= {least}, got {value}")
        seed = self.tf_random_seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"tf_random_seed must be integer, from 0 on, got {seed!r}")
        for name in ("train_distribute", "eval_distribute"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Strategy):
                raise TypeError(f"{name} must be a tf.distribute.Strategy, got {value!r}")

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with other settings.

        Raises
        ------
        ValueError
            There is no such setting.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise ValueError(
                    f"Replacing {name} is not supported. Allowed properties are {names}."
                )
        for one, other in (
            ("save_checkpoints_steps", "save_checkpoints_secs"),
            ("save_checkpoints_secs", "save_checkpoints_steps"),
        ):
            if changes.get(one) is not None:
                changes.setdefault(other, None)
        return dataclasses.replace(self, **changes)

    @property
    def _resolver(self) -> ClusterResolver:
        resolver = TFConfigClusterResolver()
        of_strategy = getattr(self.train_distribute, "cluster_resolver", None)
        return resolver if resolver.task_type or of_strategy is None else of_strategy

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster."""
        return self._resolver.cluster_spec()

    @property
    def task_type(self) -> str:
        """The kind of this process's task, ``"worker"`` without a cluster."""
        return self._resolver.task_type or "worker"

    @property
    def task_id(self) -> int:
        """The number of this process's task."""
        return self._resolver.task_id or 0

    @property
    def is_chief(self) -> bool:
        """True if this process is the chief, or worker 0 of a cluster without a chief."""
        if self.task_type == "chief":
            return True
        return (
            self.task_type == "worker"
            and self.task_id == 0
            and "chief" not in self.cluster_spec.jobs
        )
