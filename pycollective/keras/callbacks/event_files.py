"""Event files for TensorBoard, written with the package ``tensorboard``.

The package's ``EventFileWriter`` is not used, because it imports TensorFlow if that is installed.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from pycollective.array_backend import Array


class EventFile:
    """A file of events in the directory of a TensorBoard run."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        os.makedirs(directory, exist_ok=True)
        # The id makes the name unique: one process may open two files at the same time.
        suffix = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{id(self) % 10**6}"
        path = os.path.join(directory, f"events.out.tfevents.{suffix}.v2")
        self._records = RecordWriter(open(path, "wb"))  # noqa: SIM115  (closed by close)
        self._write(file_version="brain.Event:2")

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write a number."""
        self._write(summary=scalar_pb(tag, value), step=step)

    def histogram(self, tag: str, values: Array, step: int) -> None:
        """Write a histogram of the finite values."""
        self._write(summary=histogram_pb(tag, values[np.isfinite(values)]), step=step)

    def image(self, tag: str, image: Array, step: int) -> None:
        """Write values ``[height, width]`` as a grayscale image, from black (minimum) to white."""
        low, high = image.min(), image.max()
        scaled = np.rint((image - low) * (255 / (high - low) if high > low else 0))
        png = io.BytesIO()
        Image.fromarray(scaled.astype(np.uint8)).save(png, "PNG")
        height, width = image.shape
        picture = Summary.Image(
            height=height, width=width, colorspace=1, encoded_image_string=png.getvalue()
        )
        self._write(summary=Summary(value=[Summary.Value(tag=tag, image=picture)]), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text, in Markdown."""
        self._write(summary=text_pb(tag, text), step=step)

    def graph(self, nodes: Iterable[tuple[str, str, Sequence[str], Mapping[str, str]]]) -> None:
        """Write a graph, whose nodes are a name, a class, the input nodes' names, and attributes."""
        graph = GraphDef(
            node=[
                NodeDef(
                    name=name,
                    op=kind,
                    input=inputs,
                    attr={key: AttrValue(s=text.encode()) for key, text in texts.items()},
                )
                for name, kind, inputs, texts in nodes
            ]
        )
        self._write(graph_def=graph.SerializeToString())

    def _write(self, **event: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())

    def flush(self) -> None:
        """Flush the file, so that TensorBoard sees the events."""
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()
