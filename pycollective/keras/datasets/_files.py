"""Finding, downloading and reading the files of MNIST and of what has its form."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...atomic_files import replacing
from ...errors import DataError

__all__ = ["Collection", "Images", "cache_folder", "download", "load"]

#: Images [n, 28, 28] and labels [n], of uint8.
Images: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

_IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_NPZ_NAMES = ("x_train", "y_train", "x_test", "y_test")

# What NumPy and zipfile raise for files that are cut off, changed, or something else.
_NPZ_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)

_TIMEOUT = 30  # seconds without a byte until a download is given up
_LARGEST = 64 << 20  # bytes; the largest file has 26 MB


@dataclass(frozen=True)
class Collection:
    """A data set, and where it can be had.

    ``name`` is that of its folder, ``title`` the one for people; ``files`` have their SHA-256. One of
    ``label_sums`` is the SHA-256 of the training labels, packed or unpacked: it tells this data set from
    others whose files have the same names.
    """

    name: str
    title: str
    url: str
    files: Mapping[str, str]
    label_sums: frozenset[str]


def load(collection: Collection, path: str | os.PathLike[str] | None) -> tuple[Images, Images]:
    """Return training and test data from ``path``, or from where they are found or downloaded to.

    Raises
    ------
    DataError
        If there are no files, or they are damaged.
    """
    if path is not None:
        return _read_given(collection, Path(path))
    named = os.environ.get("PYCOLLECTIVE_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"PYCOLLECTIVE_DATA names {named!r}, which is no folder; set it to the folder that "
                f"holds the files of {collection.title}, or unset it"
            )
        if _found(collection, folder / collection.name):
            return _read_folder(collection, folder / collection.name)
        # The folder may hold another data set, with files of the same names.
        if _found(collection, folder) and not _is_other(collection, folder):
            return _read_folder(collection, folder)
    cache = cache_folder() / collection.name
    if not _complete(collection, cache):
        _download_missing(collection, cache)
    return _read_folder(collection, cache)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pycollective"


# The address and the SHA-256 are those that Keras publishes. The other fingerprint is of the
# training labels as the original idx file has them, unpacked.
MNIST = Collection(
    name="mnist",
    title="MNIST",
    url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    files={"mnist.npz": "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"},
    label_sums=frozenset({"65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"}),
)

_TRAIN_LABELS = "b0197879cbda89f3dc7b894f9fd52b858e68ea4182b6947c9d8c2b67e5f18dcc"

# The address is that of Keras, which publishes no checksums for these files, and the authors
# publish MD5 only. These SHA-256 are what two public programs that share no code expect.
FASHION_MNIST = Collection(
    name="fashion_mnist",
    title="Fashion-MNIST",
    url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    files={
        "train-images-idx3-ubyte.gz": (
            "08dc20ab1689590a0bcd66e874647b6ee8464e2d501b5a3f1f78831db19a3fdc"
        ),
        "train-labels-idx1-ubyte.gz": _TRAIN_LABELS,
        "t10k-images-idx3-ubyte.gz": (
            "78dcbbfb5a27efaf1b6c1d616caca68560be8766c5bffcb2791df9273a534229"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "42bd18137a62d5998cdeae52bf3a0676ac6b706f5cf8439b47bb5b151ae3dccf"
        ),
    },
    label_sums=frozenset({_TRAIN_LABELS}),
)


# Reading ------------------------------------------------------------------------------------------


def _idx_path(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _found(collection: Collection, folder: Path) -> bool:
    """Whether any file of the data set is in the folder."""
    npz = folder / f"{collection.name}.npz"
    return npz.is_file() or any(_idx_path(folder, name) for name in _IDX_NAMES)


def _complete(collection: Collection, folder: Path) -> bool:
    """Whether all that is needed is in the folder."""
    npz = folder / f"{collection.name}.npz"
    return npz.is_file() or all(_idx_path(folder, name) for name in _IDX_NAMES)


def _is_other(collection: Collection, folder: Path) -> bool:
    """Whether the idx files of the folder are known to be those of another data set."""
    if (folder / f"{collection.name}.npz").is_file():
        return False
    path = _idx_path(folder, _IDX_NAMES[1])
    if path is None:
        return False
    sums = {hashlib.sha256(data).hexdigest() for data in (path.read_bytes(), _unpacked(path))}
    others = (other for other in (MNIST, FASHION_MNIST) if other.name != collection.name)
    return any(sums & other.label_sums for other in others)


def _read_given(collection: Collection, path: Path) -> tuple[Images, Images]:
    if path.is_file():
        return _read_npz(path)
    if not _found(collection, path):
        raise DataError(
            f"no files of {collection.title} at {str(path)!r}: give an npz file, or a folder with "
            f"{collection.name}.npz or with {_idx_list()}; without a path they are downloaded"
        )
    return _read_folder(collection, path)


def _read_folder(collection: Collection, folder: Path) -> tuple[Images, Images]:
    npz = folder / f"{collection.name}.npz"
    if npz.is_file():
        return _read_npz(npz)
    paths = [_idx_path(folder, name) for name in _IDX_NAMES]
    missing = [name for name, path in zip(_IDX_NAMES, paths, strict=True) if path is None]
    if missing:
        raise DataError(
            f"the folder {str(folder)!r} lacks {', '.join(missing)} (.gz or unpacked); put all "
            f"four idx files of {collection.title} there, or none of them"
        )
    if _is_other(collection, folder):
        raise DataError(
            f"the files in {str(folder)!r} are not {collection.title} but another data set with "
            "the same file names; put each data set into a folder of its own"
        )
    x_train, y_train, x_test, y_test = (_read_idx(path) for path in paths if path is not None)
    where = str(folder)
    return (
        _checked(x_train, y_train, f"{_IDX_NAMES[0]} and {_IDX_NAMES[1]} in {where!r}"),
        _checked(x_test, y_test, f"{_IDX_NAMES[2]} and {_IDX_NAMES[3]} in {where!r}"),
    )


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{str(path)!r} {what}; delete it and get it anew")


def _unpacked(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if its name ends in ``.gz``."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as stream:
            return stream.read()
    except EOFError as error:
        raise _damaged(path, "is truncated: the gzip data ends too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, f"is no gzip file, or a corrupt one ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from error


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an idx file: zeros, type 8 (bytes), number of axes; their lengths; the bytes."""
    data = _unpacked(path)
    axes = 3 if "idx3" in path.name else 1
    magic = bytes((0, 0, 8, axes))
    if data[:4] != magic:
        raise _damaged(
            path,
            f"is no idx file of bytes with {axes} axes: it begins with {data[:4].hex()!r}, "
            f"not {magic.hex()!r}",
        )
    header = 4 + 4 * axes
    if len(data) < header:
        raise _damaged(path, f"is truncated: {len(data)} bytes, the header alone has {header}")
    shape = [int(n) for n in np.frombuffer(data, ">u4", axes, 4)]
    size = 1
    for n in shape:
        size *= n
    if len(data) - header != size:
        kind = "is truncated" if len(data) - header < size else "has bytes too many"
        raise _damaged(
            path, f"{kind}: {len(data) - header} bytes of data, its shape {shape} needs {size}"
        )
    values: npt.NDArray[np.uint8] = np.empty(shape, np.uint8)
    values.reshape(-1)[:] = np.frombuffer(data, np.uint8, size, header)
    return values


def _read_npz(path: Path) -> tuple[Images, Images]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds one array")
            missing = [name for name in _NPZ_NAMES if name not in archive.files]
            if missing:
                raise _damaged(path, f"lacks the arrays {', '.join(missing)}")
            x_train, y_train, x_test, y_test = (archive[name] for name in _NPZ_NAMES)
    except DataError:
        raise
    except _NPZ_ERRORS as error:
        raise _damaged(
            path, f"is no npz file of plain arrays, or a corrupt one ({error})"
        ) from error
    return (
        _checked(x_train, y_train, f"x_train and y_train of {str(path)!r}"),
        _checked(x_test, y_test, f"x_test and y_test of {str(path)!r}"),
    )


def _checked(images: npt.NDArray[Any], labels: npt.NDArray[Any], where: str) -> Images:
    """Check that images and labels are what they should be, and belong together."""
    remedy = "get the files anew"
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28) or not len(images):
        raise DataError(
            f"{where}: the images have dtype {images.dtype} and shape {images.shape}, not uint8 "
            f"and (n, 28, 28); {remedy}"
        )
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(
            f"{where}: the labels have dtype {labels.dtype} and shape {labels.shape}, not integers "
            f"and (n,); {remedy}"
        )
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images and {len(labels)} labels; {remedy}")
    wrong = np.flatnonzero((labels < 0) | (labels > 9))
    if len(wrong):
        raise DataError(
            f"{where}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0..9 "
            f"({len(wrong)} such labels); {remedy}"
        )
    return images, labels.astype(np.uint8)


# Downloading --------------------------------------------------------------------------------------


def _idx_list() -> str:
    return ", ".join(f"{name}[.gz]" for name in _IDX_NAMES)


def _download_missing(collection: Collection, folder: Path) -> None:
    """Download those files of a data set that are not in a folder yet.

    Raises
    ------
    DataError
        If that fails; the message says where the files can be put by hand.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, checksum in collection.files.items():
            if not (folder / name).is_file():
                download(collection.url + name, folder / name, checksum)
    except (OSError, http.client.HTTPException, DataError) as error:
        named = os.environ.get("PYCOLLECTIVE_DATA") or "not set"
        raise DataError(
            f"{collection.title} was found neither in PYCOLLECTIVE_DATA ({named}) nor in "
            f"{str(folder)!r}, and the download failed: {error}. Put {collection.name}.npz, or "
            f"{_idx_list()}, into a folder, and set PYCOLLECTIVE_DATA to it (a subfolder "
            f"{collection.name!r} of it will do)"
        ) from error


def download(url: str, target: Path, checksum: str, largest: int | None = None) -> None:
    """Download a file; ``target`` is replaced when all of it is there and right, else untouched.

    A file larger than ``largest`` bytes or of another SHA-256 than ``checksum``, and an interrupted
    transfer, raise DataError; a server that cannot be reached raises OSError or HTTPException.
    """
    largest = _LARGEST if largest is None else largest
    digest = hashlib.sha256()
    with replacing(str(target)) as out:
        with _open_url(url) as response:
            announced = response.headers.get("Content-Length")
            total = int(announced) if announced and announced.isdigit() else None
            done = 0
            with _progress(target.name, total) as advance:
                while block := response.read(1 << 16):
                    done += len(block)
                    if done > largest:
                        raise DataError(f"{url} sends more than {largest} bytes, and is not used")
                    digest.update(block)
                    out.write(block)
                    advance(len(block))
        if total is not None and done != total:
            raise DataError(f"the transfer of {url} was interrupted after {done} of {total} bytes")
        if digest.hexdigest() != checksum:
            raise DataError(
                f"{url} sent a file with SHA-256 {digest.hexdigest()}, expected {checksum}; it was "
                "not kept"
            )


def _open_url(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=_TIMEOUT)


@contextlib.contextmanager
def _progress(name: str, total: int | None) -> Any:
    """Show a progress bar on a terminal if tqdm is installed; gives a function to advance it."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _bytes: None
        return
    with tqdm(desc=name, total=total, unit="B", unit_scale=True, disable=None) as bar:
        advance: Callable[[int], Any] = bar.update
        yield advance
