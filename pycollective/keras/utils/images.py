"""`image_dataset_from_directory`: folders of image files as a `Dataset`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective.arguments import path_of
from pycollective.array_backend import Array
from pycollective.data import Dataset
from pycollective.errors import DataError
from pycollective.keras.utils.resizing import INTERPOLATIONS, cropped, padded, resized

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_MODES = {"grayscale": ("L", 1), "rgb": ("RGB", 3), "rgba": ("RGBA", 4)}
_LABEL_MODES = ("int", "categorical", "binary", None)
_SUBSETS = ("training", "validation", "both", None)


def image_dataset_from_directory(
    directory: str | os.PathLike[str],
    labels: Any = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    batch_size: int | None = 32,
    image_size: Sequence[int] = (256, 256),
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    interpolation: str = "bilinear",
    follow_links: bool = False,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    data_format: str | None = None,
    verbose: bool = True,
) -> Any:
    """Return a dataset of the images in a folder, which are read when needed.

    Parameters
    ----------
    directory : path
        A folder with a subfolder for each class, of ``.jpg``, ``.jpeg``, ``.png``, ``.bmp`` and
        ``.gif`` files.
    labels
        ``"inferred"``: the subfolders, in alphabetical order. A list of ints: one for each file, in
        the order of their paths. None: no labels.
    label_mode : str or None
        ``"int"``: int32 ``[n]``. ``"categorical"``: float32 ``[n, classes]``. ``"binary"``: float32
        ``[n, 1]``, for two classes. None: no labels.
    class_names : sequence of str, optional
        The subfolders that are classes, in this order.
    color_mode : str
        ``"grayscale"``, ``"rgb"`` or ``"rgba"``: 1, 3 or 4 channels.
    batch_size : int or None
        The number of images in a batch; None: single images.
    image_size : sequence of int
        The (height, width) that images are resized to.
    shuffle : bool
        True for a random order, which differs in each pass, except in the validation part. False
        for the order of the paths.
    seed : int, optional
        The seed of the random order.
    validation_split, subset
        The fraction of the files, at the end of their order, that is held out for validation; and the
        part to return: ``"training"``, ``"validation"`` or ``"both"``. Give both or neither.
    interpolation : str
        The method of resizing: ``"bilinear"``, ``"nearest"``, ``"bicubic"``, ``"area"``,
        ``"lanczos3"`` or ``"lanczos5"``, without antialiasing, as in Keras.
    follow_links : bool
        True to search folders that are symbolic links.
    crop_to_aspect_ratio, pad_to_aspect_ratio : bool
        True to crop images, or to pad them with black, instead of stretching them.
    data_format : str, optional
        Must be ``"channels_last"``.
    verbose : bool
        True to print the number of files.

    Returns
    -------
    Dataset
        A dataset of ``(images, labels)``, or without labels of images. Images are float32
        ``[n, height, width, channels]`` from 0 to 255. The dataset has the attributes ``class_names``
        and ``file_paths``. With ``"both"``, a list of two datasets.

    Raises
    ------
    ValueError
        For an argument with an unknown value, and for arguments that contradict each other.
    DataError
        If the folder does not exist or has no images. When reading, if an image cannot be read.
    ImportError
        If Pillow is not installed.
    """
    _pillow()
    _check(labels, label_mode, class_names, color_mode, interpolation, data_format)
    if crop_to_aspect_ratio and pad_to_aspect_ratio:
        raise ValueError("Only one of `pad_to_aspect_ratio`, `crop_to_aspect_ratio` can be True.")
    _check_split(validation_split, subset, shuffle, seed)
    if labels is None or label_mode is None:
        labels = label_mode = None
    top = path_of("directory", directory)
    paths, numbers, names = _found(top, labels, class_names, follow_links)
    if not paths:
        raise DataError(
            f"No images found in directory {top!r}. Allowed formats: {', '.join(_ENDINGS)}"
        )
    if label_mode == "binary" and len(names) != 2:
        raise ValueError(
            'When passing `label_mode="binary"`, there must be exactly 2 class_names. Received: '
            f"class_names={names}"
        )
    if verbose:
        classes = "" if label_mode is None else f" belonging to {len(names)} classes"
        print(f"Found {len(paths)} files{classes}.")
    order = np.arange(len(paths))
    if shuffle:
        start = np.random.randint(10**6) if seed is None else seed  # noqa: NPY002  (Keras's order)
        order = np.random.RandomState(start).permutation(len(paths))
    held_out = int((validation_split or 0) * len(paths))
    if validation_split and not 0 < held_out < len(paths):
        raise ValueError(
            f"validation_split={validation_split} of {len(paths)} files makes an empty subset"
        )
    split = len(paths) - held_out
    reader = _Reader(
        color_mode, image_size, interpolation, crop_to_aspect_ratio, pad_to_aspect_ratio
    )
    parts = {"training": order[:split], "validation": order[split:], None: order}

    def dataset(part: str | None) -> Dataset:
        files = [paths[index] for index in parts[part]]
        again = shuffle and part != "validation"
        made = _dataset(
            files,
            _targets(numbers[parts[part]], label_mode, len(names)),
            reader,
            batch_size,
            again,
            seed,
        )
        made.class_names = names  # type: ignore[attr-defined]
        made.file_paths = files  # type: ignore[attr-defined]
        if verbose and part is not None:
            print(f"Using {len(files)} files for {part}.")
        return made

    return [dataset("training"), dataset("validation")] if subset == "both" else dataset(subset)


def _check(
    labels: Any,
    label_mode: str | None,
    class_names: Any,
    color_mode: str,
    interpolation: str,
    data_format: str | None,
) -> None:
    if not (labels is None or labels == "inferred" or isinstance(labels, (list, tuple))):
        raise ValueError(
            "`labels` argument should be 'inferred', None, or a list/tuple of integer labels, of the "
            "same size as the number of image files. Received: "
            f"labels={labels!r}"
        )
    if class_names is not None and labels != "inferred":
        raise ValueError("`class_names` is for labels='inferred' only")
    for name, value, allowed in (
        ("label_mode", label_mode, _LABEL_MODES),
        ("color_mode", color_mode, tuple(_MODES)),
        ("interpolation", interpolation, tuple(INTERPOLATIONS)),
        ("data_format", data_format, ("channels_last", None)),
    ):
        if value not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}. Received: {name}={value!r}")


def _check_split(
    validation_split: float | None, subset: str | None, shuffle: bool, seed: int | None
) -> None:
    if subset not in _SUBSETS:
        raise ValueError(
            '`subset` must be either "training", "validation" or "both". Received: '
            f"subset={subset!r}"
        )
    if validation_split and not 0 < validation_split < 1:
        raise ValueError(
            "`validation_split` must be between 0 and 1. Received: "
            f"validation_split={validation_split}"
        )
    if bool(validation_split) != (subset is not None):
        raise ValueError("`validation_split` and `subset` must be set together, or neither")
    if validation_split and shuffle and seed is None:
        raise ValueError(
            "If using `validation_split` and shuffling the data, you must provide a `seed` argument. "
            "Otherwise the training and validation subsets would overlap."
        )


def _found(
    top: str, labels: Any, class_names: Sequence[str] | None, follow_links: bool
) -> tuple[list[str], Array, list[str]]:
    """Return the paths, class numbers and class names."""
    if not os.path.isdir(top):
        raise DataError(f"the folder {top!r} does not exist")
    if labels != "inferred":
        paths = _pictures(top, follow_links)
        if labels is None:
            return paths, np.zeros(len(paths), np.int32), []
        if len(labels) != len(paths):
            raise ValueError(
                "Expected the lengths of `labels` to match the number of files in the target "
                f"directory. len(labels) is {len(labels)} while we found {len(paths)} files in "
                f"directory {top}."
            )
        return paths, np.asarray(labels, np.int32), [str(label) for label in sorted(set(labels))]
    with os.scandir(top) as entries:
        found = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    names = found if class_names is None else list(class_names)
    if not set(names) <= set(found):
        raise ValueError(
            "The `class_names` passed did not match the names of the subdirectories of the target "
            f"directory. Expected: {found} (or a subset of it), but received: class_names={names}"
        )
    per_class = [_pictures(os.path.join(top, name), follow_links) for name in names]
    numbers = np.repeat(np.arange(len(names), dtype=np.int32), [len(each) for each in per_class])
    return [path for each in per_class for path in each], numbers, names


def _pictures(folder: str, follow_links: bool) -> list[str]:
    walked = sorted(os.walk(folder, followlinks=follow_links), key=lambda entry: entry[0])
    return [
        os.path.join(inside, name)
        for inside, _, files in walked
        for name in sorted(files)
        if name.lower().endswith(_ENDINGS)
    ]


def _targets(numbers: Array, label_mode: str | None, classes: int) -> Array | None:
    if label_mode == "categorical" and len(numbers):
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f'`label_mode="categorical"` needs labels from 0 to {classes - 1}, for {classes} '
                f"different ones. Received labels from {low} to {high}"
            )
    if label_mode == "categorical":
        return np.eye(classes, dtype=np.float32)[numbers]
    if label_mode == "binary":
        return numbers.astype(np.float32)[:, None]
    return numbers if label_mode == "int" else None


def _dataset(
    files: list[str],
    targets: Array | None,
    reader: _Reader,
    batch_size: int | None,
    shuffle: bool,
    seed: int | None,
) -> Dataset:
    indices = np.arange(len(files))
    dataset = Dataset.from_tensor_slices(indices if targets is None else (indices, targets))
    if shuffle:
        dataset = dataset.shuffle(len(files), seed)
    if targets is None:
        dataset = dataset.map(lambda index: reader(files[int(index)]), num_parallel_calls=-1)
    else:
        dataset = dataset.map(
            lambda index, target: (reader(files[int(index)]), target), num_parallel_calls=-1
        )
    if batch_size is not None:
        dataset = dataset.batch(batch_size)
    return dataset.prefetch(-1)


class _Reader:
    """A function that reads an image file in a given size and color mode."""

    def __init__(
        self, color_mode: str, image_size: Sequence[int], interpolation: str, crop: bool, pad: bool
    ) -> None:
        if len(image_size) != 2 or min(image_size) < 1:
            raise ValueError(f"image_size must be (height, width), got {image_size!r}")
        self._mode, self._channels = _MODES[color_mode]
        self._size = int(image_size[0]), int(image_size[1])
        self._interpolation = interpolation
        self._crop, self._pad = crop, pad

    def __call__(self, path: str) -> Array:
        pillow = _pillow()
        try:
            with pillow.open(path) as file:
                if file.mode.startswith("I;16"):
                    # `convert` would clip 16 bits at 255.
                    file = pillow.fromarray((np.asarray(file) >> 8).astype(np.uint8))
                picture = np.asarray(file.convert(self._mode))
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise DataError(f"the image {path!r} cannot be read: {error}") from error
        picture = picture.reshape(*picture.shape[:2], self._channels)
        if self._crop:
            picture = cropped(picture, self._size)
        elif self._pad:
            return padded(picture, self._size, self._interpolation)
        return resized(picture, self._size, self._interpolation)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading images needs the package Pillow: pip install 'pycollective[files]'"
        ) from error
    return Image
