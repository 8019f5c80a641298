"""The common base and checks of layers that take images."""

from __future__ import annotations

from typing import Any

from pycollective.keras.layers.layer import Layer

IMAGES = "images of shape [n, height, width, channels]"


def data_format_of(value: str | None) -> str:
    """Return ``"channels_last"``, also for None; raise ``ValueError`` for any other format."""
    if value not in (None, "channels_last"):
        raise ValueError(
            f"data_format must be 'channels_last', got {value!r}; transpose images to "
            "[n, height, width, channels] first"
        )
    return "channels_last"


def padding_of(value: str) -> str:
    """Return ``"valid"`` or ``"same"``, or raise ``ValueError``."""
    padding = str(value).lower()
    if padding not in ("valid", "same"):
        raise ValueError(f"padding must be 'valid' or 'same', got {value!r}")
    return padding


def window_positions(length: int | None, window: int, stride: int, padding: str) -> int | None:
    """Return the number of positions of a window along an axis, or None for an unknown length."""
    if length is None:
        return None
    covered = length if padding == "same" else length - window + 1
    return -(-covered // stride)


class ImageLayer(Layer):
    """Base of layers that take images ``[n, height, width, channels]``."""

    takes_one_tensor = True

    def _check_images(self, shape: Any) -> None:
        """Raise ``ValueError`` unless this is the shape of images."""
        if len(shape) != 4:
            raise self._incompatible(tuple(shape), IMAGES)

    def _check_extent(self, shape: Any, height: int, width: int, padding: str) -> None:
        """Raise ``ValueError`` unless a window of this size fits into images of this shape."""
        self._check_images(shape)
        if padding == "same":
            return
        if (shape[1] is not None and shape[1] < height) or (
            shape[2] is not None and shape[2] < width
        ):
            raise self._incompatible(
                tuple(shape),
                f"images at least as large as the window of {height} x {width} (or padding='same')",
            )
