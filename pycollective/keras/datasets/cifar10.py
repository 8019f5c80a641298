"""CIFAR-10: small colour photographs (Krizhevsky, 2009)."""

from __future__ import annotations

import http.client
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from ...errors import DataError
from ._files import Images, cache_folder, download

# The "binary version" of the data set, because the other versions are pickles, which may run code.
# A file with this SHA-256 has the size and the MD5 sum that the data set's page publishes.
URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_LARGEST = 256 << 20  # bytes of the archive, and of a file in it
_NAMES = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")
_RECORD = 1 + 3 * 32 * 32  # the label, then the pixels of each colour


def load_data(path: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Return 50,000 training and 10,000 test images with their labels.

    The classes 0 to 9 are airplane, automobile, bird, cat, deer, dog, frog, horse, ship and truck.

    Parameters
    ----------
    path : path, optional
        The file ``cifar-10-binary.tar.gz``, or a folder with this file or with its six ``.bin``
        files. The default folders are ``$PYCOLLECTIVE_DATA``, its subfolder ``cifar10``, and the
        cache ``pycollective/cifar10`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. If none has the data,
        it is downloaded into the cache (170 MB).

    Returns
    -------
    ((x_train, y_train), (x_test, y_test))
        NumPy arrays of uint8: images [n, 32, 32, 3] from 0 to 255, labels [n, 1].

    Raises
    ------
    DataError
        If the files are missing or damaged; the message explains what to do.
    """
    parts = [_records(name, data) for name, data in _files(_location(path))]
    images, labels = (list(each) for each in zip(*parts, strict=True))
    return (np.concatenate(images[:-1]), np.concatenate(labels[:-1])), (images[-1], labels[-1])


def _location(path: str | os.PathLike[str] | None) -> Path:
    """Return the archive, or the folder of the unpacked files."""
    if path is not None:
        given = Path(path)
        found = given if given.is_file() else _in_folder(given)
        if found is None:
            raise DataError(
                f"no files of CIFAR-10 at {str(given)!r}: give {ARCHIVE}, or a folder with it or with "
                f"{', '.join(_NAMES)}; without a path they are downloaded"
            )
        return found
    cache = cache_folder() / "cifar10"
    named = os.environ.get("PYCOLLECTIVE_DATA")
    folders = [Path(named).expanduser() / "cifar10", Path(named).expanduser()] if named else []
    for folder in (*folders, cache):
        found = _in_folder(folder)
        if found is not None:
            return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        download(URL + ARCHIVE, cache / ARCHIVE, SHA256, _LARGEST)
    except (OSError, http.client.HTTPException, DataError) as error:
        raise DataError(
            f"CIFAR-10 was found neither in PYCOLLECTIVE_DATA ({named or 'not set'}) nor in "
            f"{str(cache)!r}, and the download failed: {error}. Put {ARCHIVE} into a folder, and set "
            "PYCOLLECTIVE_DATA to it (or to its parent, if the folder's name is 'cifar10')"
        ) from error
    return cache / ARCHIVE


def _in_folder(folder: Path) -> Path | None:
    if (folder / ARCHIVE).is_file():
        return folder / ARCHIVE
    for inside in (folder, folder / "cifar-10-batches-bin"):
        if any((inside / name).is_file() for name in _NAMES):
            return inside
    return None


def _files(location: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names (for messages) and bytes of the six files, in order."""
    if location.is_dir():
        for name in _NAMES:
            try:
                yield str(location / name), (location / name).read_bytes()
            except FileNotFoundError:
                raise DataError(
                    f"the folder {str(location)!r} lacks {name}; put all six files of CIFAR-10 there"
                ) from None
        return
    found: dict[str, bytes] = {}
    try:
        # The archive is read as a stream. No file is unpacked, so that member names are harmless.
        with tarfile.open(location, "r|gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in _NAMES and member.isfile() and member.size <= _LARGEST:
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{str(location)!r} is truncated, or no archive of CIFAR-10's binary version ({error}); "
            "delete it and download it again"
        ) from error
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise DataError(
            f"{str(location)!r} lacks {', '.join(missing)}; delete it and download {ARCHIVE} again (the "
            "'python version' holds pickles, and is not read)"
        )
    for name in _NAMES:
        yield f"{name} in {str(location)!r}", found[name]


def _records(where: str, data: bytes) -> Images:
    if not data or len(data) % _RECORD:
        raise DataError(
            f"{where} is truncated: it has {len(data)} bytes, which are no whole records of {_RECORD} "
            "bytes; download the files again"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    labels = records[:, :1].copy()
    if labels.max() > 9:
        raise DataError(
            f"{where} has the label {labels.max()}, which is not in 0..9; download it again"
        )
    pixels = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels
