"""`Callback`: the base of objects that training calls at its steps and epochs."""

from __future__ import annotations

from typing import Any

Logs = dict[str, Any]


class Callback:
    """Base class of callbacks; a subclass overrides methods.

    The methods are called in the thread of `Model.fit`, outside of the replicas. ``logs`` holds the
    results of the epoch so far, by name. Batches and epochs are counted from 0.

    Attributes
    ----------
    model : Model
        The model; ``model.stop_training = True`` ends training.
    params : dict
        ``verbose``, ``epochs``, and ``steps`` of an epoch (None while unknown).
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        """Set ``params``."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Set the model."""
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Handle the beginning of `Model.fit`."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Handle the end of `Model.fit`; ``logs`` holds the results of the last epoch."""

    def abandon(self, error: BaseException) -> None:
        """Handle an error of `Model.fit`, after which `on_train_end` is not called."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Handle the beginning of an epoch of training."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Handle the end of an epoch of training and its validation."""

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Handle `on_train_batch_begin`, under its older name."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Handle `on_train_batch_end`, under its older name."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Handle the beginning of a training step, or of ``steps_per_execution`` steps."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Handle the end of a training step, or of ``steps_per_execution`` steps."""
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Handle the beginning of `Model.evaluate`, or of the validation in `Model.fit`."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Handle the end of `Model.evaluate`, or of the validation in `Model.fit`."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Handle the beginning of an evaluation step, or of ``steps_per_execution`` steps."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Handle the end of an evaluation step, or of ``steps_per_execution`` steps."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Handle the beginning of `Model.predict`."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Handle the end of `Model.predict`."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Handle the beginning of a prediction step, or of ``steps_per_execution`` steps."""

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Handle the end of a prediction step, or of ``steps_per_execution`` steps.

        ``logs["outputs"]`` holds the outputs of the last step. With parameter servers, ``logs`` is
        empty.
        """


#: The names of the methods that handle events, without the two older names.
EVENTS = tuple(
    name
    for name in vars(Callback)
    if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end")
)
