"""Finding, downloading and reading the files of MNIST and of data sets in its format."""

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

#: Images and labels, of uint8; in the format of MNIST [n, 28, 28] and [n].
Images: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

_IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_NPZ_NAMES = ("x_train", "y_train", "x_test", "y_test")

# The errors of NumPy and zipfile for files that are truncated, damaged, or of another type.
_NPZ_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)

_TIMEOUT = 30  # seconds without a byte after which a download fails
_LARGEST = 64 << 20  # bytes; the largest file has 26 MB


@dataclass(frozen=True)
class Collection:
    """A data set, and the source of its files.

    Attributes
    ----------
    name : str
        The name of its folder.
    title : str
        The name in messages.
    url : str
        The address of the folder of the files, with a slash at the end.
    files : mapping of str to str
        The SHA-256 sum of each file, by the file's name.
    label_sums : frozenset of str
        SHA-256 sums of the file of training labels, packed or unpacked. They distinguish data sets
        whose files have the same names.
    """

    name: str
    title: str
    url: str
    files: Mapping[str, str]
    label_sums: frozenset[str]


def load(collection: Collection, path: str | os.PathLike[str] | None) -> tuple[Images, Images]:
    """Return training and test data from ``path``, from the default folders, or from the network."""
    if path is not None:
        return _read_given(collection, Path(path))
    named = os.environ.get("PYCOLLECTIVE_DATA")
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"PYCOLLECTIVE_DATA is {named!r}, which is not a folder; set it to the folder that "
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
    """Return the folder for downloaded files, which may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pycollective"


# Keras publishes the address and the SHA-256. The label sum is of the original idx file of training
# labels, unpacked.
MNIST = Collection(
    name="mnist",
    title="MNIST",
    url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    files={"mnist.npz": "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"},
    label_sums=frozenset({"65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"}),
)

_TRAIN_LABELS = "b0197879cbda89f3dc7b894f9fd52b858e68ea4182b6947c9d8c2b67e5f18dcc"

# Keras publishes the address but no checksums, and the authors publish MD5 only. Two independent
# public programs expect these SHA-256 sums.
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
    """Return True if the folder has any file of the data set."""
    npz = folder / f"{collection.name}.npz"
    return npz.is_file() or any(_idx_path(folder, name) for name in _IDX_NAMES)


def _complete(collection: Collection, folder: Path) -> bool:
    """Return True if the folder has all needed files."""
    npz = folder / f"{collection.name}.npz"
    return npz.is_file() or all(_idx_path(folder, name) for name in _IDX_NAMES)


def _is_other(collection: Collection, folder: Path) -> bool:
    """Return True if the idx files of the folder certainly belong to another data set."""
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
            "the same file names; put each data set into its own folder"
        )
    x_train, y_train, x_test, y_test = (_read_idx(path) for path in paths if path is not None)
    where = str(folder)
    return (
        _checked(x_train, y_train, f"{_IDX_NAMES[0]} and {_IDX_NAMES[1]} in {where!r}"),
        _checked(x_test, y_test, f"{_IDX_NAMES[2]} and {_IDX_NAMES[3]} in {where!r}"),
    )


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{str(path)!r} {what}; delete it and download it again")


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
    """Read an idx file: two zeros, type 8 (bytes), the number of axes, their lengths, the bytes."""
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
        kind = "is truncated" if len(data) - header < size else "has too many bytes"
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
            arrays = [archive[name] for name in _NPZ_NAMES]
            if not all(isinstance(array, np.ndarray) for array in arrays):
                raise ValueError("a member is no array")
            x_train, y_train, x_test, y_test = arrays
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
    """Return images and labels; raise `DataError` unless dtypes, shapes and label values are right."""
    remedy = "download the files again"
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
    """Download the files of a data set that a folder lacks."""
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
            f"{_idx_list()}, into a folder, and set PYCOLLECTIVE_DATA to it (or to its parent, if "
            f"the folder's name is {collection.name!r})"
        ) from error


def download(url: str, target: Path, checksum: str, largest: int | None = None) -> None:
    """Download a file, and replace ``target`` after the download is complete and verified.

    Raise `DataError` if the transfer is interrupted, if the file exceeds ``largest`` bytes, or if its
    SHA-256 is not ``checksum``. An unreachable server raises ``OSError`` or ``HTTPException``.
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
                        raise DataError(f"{url} sends more than {largest} bytes; nothing was kept")
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
    """Show a progress bar on a terminal if tqdm is installed; return a function to advance it."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _bytes: None
        return
    with tqdm(desc=name, total=total, unit="B", unit_scale=True, disable=None) as bar:
        advance: Callable[[int], Any] = bar.update
        yield advance
