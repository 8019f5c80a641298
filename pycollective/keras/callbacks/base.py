"""`Callback`: what hears of the steps and epochs of training."""

from __future__ import annotations

from typing import Any

Logs = dict[str, Any]


class Callback:
    """Base class: one of your own overrides what it wants to hear of.

    They are called in the thread of `Model.fit`, outside of the replicas; ``logs`` has the numbers
    of the epoch so far, by name. Batches and epochs are counted from 0.

    Attributes
    ----------
    model : Model
        What is trained; ``model.stop_training = True`` ends training.
    params : dict
        ``verbose``, ``epochs``, and ``steps`` of an epoch (None while unknown).
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        """Take ``params``."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Take the model."""
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Hear that `Model.fit` begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Hear that `Model.fit` ends, with the numbers of the last epoch."""

    def abandon(self, error: BaseException) -> None:
        """Hear that `Model.fit` ends with an error; `on_train_end` is not called then."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Hear that an epoch of training begins."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Hear that an epoch of training and its validation end."""

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Be the older name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Be the older name of `on_train_batch_end`."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Hear that a step of training begins, or the first of ``steps_per_execution``."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Hear that a step of training ends, or the last of ``steps_per_execution``."""
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Hear that `Model.evaluate`, or the validation in `Model.fit`, begins."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Hear that it ends."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Hear that a step of it begins."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Hear that a step of it ends."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Hear that `Model.predict` begins."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Hear that it ends."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Hear that a step of it begins."""

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Hear that a step of it ends; ``logs["outputs"]`` has what came out."""


#: The methods that hear of something.
EVENTS = tuple(
    name
    for name in vars(Callback)
    if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end")
)
