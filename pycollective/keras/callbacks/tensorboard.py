"""`TensorBoard`: the results of training as event files."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective.arguments import path_of
from pycollective.array_backend import Array
from pycollective.keras.callbacks.base import Callback

if TYPE_CHECKING:
    from pycollective.keras.callbacks.event_files import EventFile

Logs = dict[str, Any]

#: The largest height or width of an image of weights.
_LARGEST_IMAGE = 512


class TensorBoard(Callback):
    """Write event files, which ``tensorboard --logdir=logs`` shows.

    The callback needs the package tensorboard (``pip install 'pycollective[tensorboard]'``), but not
    TensorFlow. Each result of an epoch is a scalar ``epoch_<name>`` in the runs ``train`` and
    ``validation``. Each evaluation also adds scalars ``evaluation_<name>_vs_iterations`` to the run
    ``validation``. If there are several workers, the chief writes.

    Parameters
    ----------
    log_dir : path
        The directory of the runs.
    histogram_freq : int
        A number n, for histograms of the weights after the first epoch and every n-th epoch after it;
        0: never.
    write_graph : bool
        True to write the layers, as a graph and as the text of `Model.summary`.
    write_images : bool
        True to write weights as images too, along with their histograms.
    write_steps_per_second : bool
        True to write the number of training steps per second in each epoch.
    update_freq : str or int
        ``"epoch"``: write results after epochs only. ``"batch"``, or a number n: also write the
        results after every batch, or every n batches, as ``batch_<name>``.
    profile_batch, embeddings_freq, embeddings_metadata
        Must be 0, 0 and None; for a profile, set ``PYCOLLECTIVE_TIMELINE``.

    Raises
    ------
    ValueError
        For an unsupported argument, or a wrong ``update_freq``.
    ImportError
        If tensorboard or Pillow is not installed.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: Any = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Any = None,
    ) -> None:
        super().__init__()
        if profile_batch not in (0, "0", None):
            raise ValueError(
                f"TensorBoard: profile_batch={profile_batch!r} is not supported; set the environment "
                "variable PYCOLLECTIVE_TIMELINE for a timeline"
            )
        if embeddings_freq or embeddings_metadata is not None:
            raise ValueError(
                "TensorBoard: embeddings_freq and embeddings_metadata are not supported"
            )
        if update_freq == "batch":
            update_freq = 1
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise ValueError(
                f"TensorBoard: update_freq must be 'epoch', 'batch' or a positive integer, got "
                f"{update_freq!r}"
            )
        try:
            from pycollective.keras.callbacks.event_files import EventFile
        except ImportError as error:
            raise ImportError(
                "the TensorBoard callback needs the packages tensorboard and Pillow: "
                f"pip install 'pycollective[tensorboard]' ({error})"
            ) from error
        self._make_file = EventFile
        self.log_dir = path_of("log_dir", log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_images = write_images
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = update_freq
        self._files: dict[str, EventFile] = {}
        self._batches = 0
        self._epoch_began = (0.0, 0)

    def _file(self, run: str) -> EventFile | None:
        if not self.model.distribute_strategy.extended.should_save_summary:
            return None
        if run not in self._files:
            self._files[run] = self._make_file(os.path.join(self.log_dir, run))
        return self._files[run]

    def _scalars(self, run: str, start: str, logs: Logs, step: int, end: str = "") -> None:
        for name, value in logs.items():
            file = self._file(run) if isinstance(value, (int, float)) else None
            if file is not None:
                file.scalar(f"{start}{name}{end}", float(value), step)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._batches = 0
        self._close()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._close()

    def abandon(self, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch_began = (time.perf_counter(), self._batches)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._first_batch = batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        before = self._batches
        self._batches += batch - self._first_batch + 1
        if self.write_graph and not before:
            self._write_layers()
        every = self.update_freq
        if isinstance(every, int) and self._batches // every > before // every:
            self._scalars("train", "batch_", logs or {}, self._batches)

    def on_test_end(self, logs: Logs | None = None) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None:
            step = int(optimizer.iterations)
            self._scalars("validation", "evaluation_", logs or {}, step, "_vs_iterations")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        found = logs or {}
        train = {name: value for name, value in found.items() if not name.startswith("val_")}
        if self.model.optimizer is not None:
            train["learning_rate"] = float(self.model.optimizer.learning_rate)
        if self.write_steps_per_second:
            began, batches = self._epoch_began
            seconds = time.perf_counter() - began
            train["steps_per_second"] = (self._batches - batches) / max(seconds, 1e-9)
        self._scalars("train", "epoch_", train, epoch)
        held_out = {name[4:]: value for name, value in found.items() if name.startswith("val_")}
        self._scalars("validation", "epoch_", held_out, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_weights(epoch)
        for file in self._files.values():
            file.flush()

    def _write_weights(self, epoch: int) -> None:
        file = self._file("train")
        for weight in self.model.weights:
            # Every worker reads the value, because reading an aggregated variable needs all workers.
            values = np.asarray(weight.numpy(), np.float64)
            if file is None:
                continue
            file.histogram(f"{weight.name}/histogram", values, epoch)
            picture = _picture(values) if self.write_images else None
            if picture is not None:
                file.image(f"{weight.name}/image", picture, epoch)

    def _write_layers(self) -> None:
        file = self._file("train")
        if file is None:
            return
        lines: list[str] = []
        if self.model.built:
            self.model.summary(print_fn=lines.append)
            file.text("model", "\n".join(["```", *lines, "```"]), 0)
        file.graph(_nodes(self.model))


def _nodes(model: Any) -> list[tuple[str, str, list[str], dict[str, str]]]:
    """Return each layer's name, class, input layers' names, and attributes such as the shape."""
    sources: dict[int, tuple[Any, list[str]]] = {}
    graph = getattr(model, "_graph", None)
    if graph is None:
        # The calls of a subclassed model are unknown, so its layers are drawn as a chain.
        before: list[str] = []
        for layer in model.layers:
            sources[id(layer)] = layer, before
            before = [layer.name]
    else:
        for node in graph.nodes:
            # A layer with several calls is one node.
            inputs = sources.setdefault(id(node.operation), (node.operation, []))[1]
            inputs += [tensor.history.operation.name for tensor in node.input_tensors]
    nodes = []
    for layer, inputs in sources.values():
        shape = getattr(layer, "output_shape", None)
        texts = {} if shape is None else {"output_shape": str(shape)}
        nodes.append((layer.name, type(layer).__name__, inputs, texts))
    return nodes


def _picture(values: Array) -> Array | None:
    """Return a weight as ``[height, width]``, or None if it is empty, too large or not finite."""
    image = values.squeeze()
    if image.ndim > 2:
        # The filters of a convolution, in the last axis, become rows of the image.
        image = np.moveaxis(image, -1, 0).reshape(image.shape[-1], -1)
    elif image.ndim < 2:
        image = image.reshape(1, -1)
    if not math.prod(image.shape) or max(image.shape) > _LARGEST_IMAGE:
        return None
    if not np.isfinite(image).all():
        return None
    return image
