"""Files that TensorBoard reads: records of protocol buffers, written by hand.

What is written is a small part of the messages ``Event``, ``Summary`` and ``GraphDef`` of TensorFlow
(``tensorflow/core/util/event.proto``, ``framework/summary.proto``, ``framework/graph.proto``), in
the format ``TFRecord``: length, checksum of the length, data, checksum of the data. The checksums
are CRC-32C (Castagnoli), masked.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pycollective.array_backend import Array

__all__ = ["EventFile"]

_HISTOGRAM_BUCKETS = 30


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a record's part."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# Protocol buffers: fields as bytes ----------------------------------------------------------------


def _varint(value: int) -> bytes:
    # Negative numbers are those of 64 bits.
    value &= 0xFFFFFFFFFFFFFFFF
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _doubles(field: int, values: Array) -> bytes:
    return _bytes(field, np.asarray(values, "<f8").tobytes())


# Messages -----------------------------------------------------------------------------------------


def _histogram(values: Array) -> bytes:
    """Return a ``HistogramProto`` of the finite ones among values."""
    flat = np.asarray(values, np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        flat = np.zeros(1)
    numbers, edges = np.histogram(flat, _HISTOGRAM_BUCKETS)
    return b"".join(
        (
            _double(1, flat.min()),
            _double(2, flat.max()),
            _double(3, float(flat.size)),
            _double(4, flat.sum()),
            _double(5, np.square(flat).sum()),
            _doubles(6, edges[1:]),
            _doubles(7, numbers),
        )
    )


def _png(image: Array) -> bytes:
    """Return an image of bytes ``[height, width, 1 or 3]`` as a PNG file."""
    height, width, channels = image.shape
    # Each row begins with how it is filtered: not at all.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(rows.tobytes())),
        (b"IEND", b""),
    ):
        parts.append(struct.pack(">I", len(data)) + kind + data)
        parts.append(struct.pack(">I", zlib.crc32(kind + data)))
    return b"".join(parts)


def _image(image: Array) -> bytes:
    """Return a ``Summary.Image`` of numbers ``[height, width, 1 or 3]``, from dark to bright."""
    values = np.asarray(image, np.float64)
    low, high = values.min(), values.max()
    scaled = np.rint((values - low) * (255 / (high - low) if high > low else 0))
    height, width, channels = values.shape
    return (
        _int(1, height)
        + _int(2, width)
        + _int(3, channels)
        + _bytes(4, _png(scaled.astype(np.uint8)))
    )


_DT_STRING = 7
_DATA_CLASS_TENSOR = 2


class EventFile:
    """A file of events in a directory of TensorBoard's.

    Parameters
    ----------
    directory
        Made if need be; its name is that of the run.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        os.makedirs(directory, exist_ok=True)
        now = time.time()
        # Two files of one process would begin in the same second.
        name = (
            f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}.{id(self) % 10**6}"
        )
        self.path = os.path.join(directory, f"{name}.v2")
        self._file = open(self.path, "wb")  # noqa: SIM115  (closed by close)
        self._write(_double(1, now) + _bytes(3, "brain.Event:2"))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write a number."""
        self._summary(tag, _float(2, value), step)

    def histogram(self, tag: str, values: Array, step: int) -> None:
        """Write how values are distributed."""
        self._summary(tag, _bytes(5, _histogram(values)), step)

    def image(self, tag: str, image: Array, step: int) -> None:
        """Write numbers ``[height, width, 1 or 3]`` as a picture; the largest is the brightest."""
        self._summary(tag, _bytes(4, _image(image)), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write text, in Markdown."""
        plugin = _bytes(1, _bytes(1, "text")) + _int(4, _DATA_CLASS_TENSOR)
        tensor = _int(1, _DT_STRING) + _bytes(2, b"") + _bytes(8, text)
        self._summary(tag, _bytes(9, plugin) + _bytes(8, tensor), step)

    def graph(self, nodes: Iterable[tuple[str, str, Sequence[str], Mapping[str, str]]]) -> None:
        """Write a graph.

        Parameters
        ----------
        nodes
            Name, kind, the names of the nodes that it gets its inputs from, and texts by name.
        """
        parts = []
        for name, kind, inputs, texts in nodes:
            node = _bytes(1, name) + _bytes(2, kind)
            node += b"".join(_bytes(3, each) for each in inputs)
            for key, text in texts.items():
                node += _bytes(5, _bytes(1, key) + _bytes(2, _bytes(2, text)))
            parts.append(_bytes(1, node))
        self._write(_double(1, time.time()) + _bytes(4, b"".join(parts)))

    def _summary(self, tag: str, value: bytes, step: int) -> None:
        body = _bytes(5, _bytes(1, _bytes(1, tag) + value))
        self._write(_double(1, time.time()) + _int(2, step) + body)

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", masked_crc32c(length)))
        self._file.write(event + struct.pack("<I", masked_crc32c(event)))

    def flush(self) -> None:
        """Let readers see what was written."""
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()
