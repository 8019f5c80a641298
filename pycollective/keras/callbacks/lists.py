"""`CallbackList`, `History` and `LambdaCallback`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pycollective import plots
from pycollective.keras.callbacks.base import EVENTS, Callback
from pycollective.keras.callbacks.progress import ProgbarLogger

Logs = dict[str, Any]


class History(Callback):
    """The results of `Model.fit`.

    Attributes
    ----------
    history : dict
        The list of the results of all epochs, by name. The names of validation results begin with
        ``val_``.
    epoch : list of int
        The epochs of the last `Model.fit`, counted from 0.
    model : Model or None
        The model, while the program holds a reference to it; None in a pickled or copied history.
    """

    def __init__(self) -> None:
        # A weak reference, because the model refers to its history. A cycle would keep the model,
        # and the threads of its strategy, until the garbage collector runs.
        self._model: weakref.ref[Any] | None = None
        super().__init__()
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []
        #: The epochs that have a result, by its name; not every epoch has a validation.
        self._epochs_of: dict[str, list[int]] = {}

    @property
    def model(self) -> Any:
        """The model, or None if it was never set or is freed."""
        return None if self._model is None else self._model()

    @model.setter
    def model(self, model: Any) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the model."""
        return {**self.__dict__, "_model": None}

    def plot(self, names: Sequence[str] | None = None) -> Any:
        """Return a plot of the results over the epochs; needs matplotlib.

        Parameters
        ----------
        names : sequence of str, optional
            The names of the results to plot, without ``val_``; the default is all. Validation
            results are in the same plots.

        Returns
        -------
        matplotlib.figure.Figure
            A figure without a window; ``figure.savefig("history.png")`` writes it to a file.

        Raises
        ------
        ValueError
            If the history has no result of a name.
        ImportError
            If matplotlib is not installed.
        """
        known = [name for name in self.history if not name.startswith("val_")]
        chosen = known if names is None else list(names)
        missing = [name for name in chosen if name not in self.history]
        if missing or not chosen:
            raise ValueError(
                f"History.plot: the history has no {missing or 'results'}, only {known}"
            )
        figure, every_axes = plots.panels(len(chosen), 5, 4)
        kinds: dict[str, Any] = {}
        for axes, name in zip(every_axes, chosen, strict=True):
            for label in (name, f"val_{name}"):
                values = self.history.get(label)
                if values is not None:
                    epochs = [epoch + 1 for epoch in self._epochs_of[label]]
                    (line,) = axes.plot(epochs, values, marker="o", label=label)
                    kinds["training" if label == name else "validation"] = line
            axes.locator_params("x", integer=True)
            axes.set_xlabel("epoch")
            axes.set_title(name)
        plots.show_legend(figure, [*kinds.values()], [*kinds])
        return figure

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epoch = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
            self._epochs_of.setdefault(name, []).append(epoch)


class LambdaCallback(Callback):
    """A callback made of functions.

    Parameters
    ----------
    **functions
        A function for each method name, such as ``on_epoch_end=lambda epoch, logs: ...``.

    Raises
    ------
    TypeError
        For a name that is not a method ``on_...``.
    """

    def __init__(self, **functions: Callable[..., Any] | None) -> None:
        super().__init__()
        for name, function in functions.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                raise TypeError(f"LambdaCallback: {name!r} is not a method of callbacks")
            if function is not None:
                setattr(self, name, function)


class CallbackList(Callback):
    """A callback that calls each callback of a list in order.

    Parameters
    ----------
    callbacks
        The callbacks, in order.
    add_history, add_progbar : bool
        True to append a `History`, or a `ProgbarLogger`, if the list has none.
    model
        The model, which is set in each callback.
    **params
        ``verbose``, ``epochs`` and ``steps``, which are set in each callback as ``params``.

    Raises
    ------
    TypeError
        If an item of ``callbacks`` is not a `Callback`.
    """

    def __init__(
        self,
        callbacks: Callback | Sequence[Callback] | None = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: Any = None,
        **params: Any,
    ) -> None:
        super().__init__()
        if callbacks is None:
            callbacks = []
        elif isinstance(callbacks, Callback):
            callbacks = [callbacks]
        self.callbacks: list[Any] = list(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: {callback!r} is not a keras.callbacks.Callback")
        if add_progbar:
            self._find_or_append(ProgbarLogger)
        if add_history:
            self.history = self._find_or_append(History)
        self.set_model(model)
        self.set_params(params)

    @classmethod
    def of(
        cls, callbacks: Any, model: Any, history: bool, verbose: Any, epochs: int, steps: int | None
    ) -> CallbackList:
        """Return the list for the ``callbacks`` argument of `Model.fit`, `evaluate` or `predict`.

        Raises
        ------
        ValueError
            If ``verbose`` is not ``"auto"``, 0, 1 or 2.
        """
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}")
        level = 1 if verbose == "auto" else int(verbose)
        params = {"verbose": level, "epochs": epochs, "steps": steps}
        if not isinstance(callbacks, cls):
            return cls(callbacks, history, level > 0, model, **params)
        callbacks.set_model(model)
        callbacks.set_params(params)
        if history:
            callbacks.history = callbacks._find_or_append(History)
        return callbacks

    def _find_or_append(self, kind: type[Any]) -> Any:
        """Return the first callback of a class; if the list has none, append a new one."""
        for callback in self.callbacks:
            if isinstance(callback, kind):
                return callback
        self.callbacks.append(kind())
        self.callbacks[-1].set_model(self.model)
        self.callbacks[-1].set_params(self.params)
        return self.callbacks[-1]

    def append(self, callback: Callback) -> None:
        """Append a callback."""
        self.callbacks.append(callback)

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params
        for callback in self.callbacks:
            callback.set_params(params)

    def set_model(self, model: Any) -> None:
        self.model = model
        for callback in self.callbacks:
            callback.set_model(model)

    def abandon(self, error: BaseException) -> None:
        for callback in self.callbacks:
            callback.abandon(error)

    def __iter__(self) -> Any:
        return iter(self.callbacks)


def _forward(name: str) -> Callable[..., None]:
    """Return a method that calls the method of this name of all callbacks.

    If a call has no ``logs``, the callbacks get an empty dict, because a function of a
    `LambdaCallback` may have no default for ``logs``.
    """
    before_logs = 1 if "batch" in name or "epoch" in name else 0

    def call(self: CallbackList, *args: Any, **kwargs: Any) -> None:
        if len(args) == before_logs and not kwargs:
            args = (*args, {})
        for callback in self.callbacks:
            getattr(callback, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"Call `Callback.{name}` of all callbacks."
    return call


# Custom training loops may also call the older names.
for _name in (*EVENTS, "on_batch_begin", "on_batch_end"):
    setattr(CallbackList, _name, _forward(_name))
