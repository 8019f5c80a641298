"""The ``.keras`` file of Keras 3: a zip archive of metadata, a config and weights."""

from __future__ import annotations

import datetime
import io
import json
import os
import zipfile
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pycollective._core import __version__
from pycollective.errors import CheckpointError

_METADATA = "metadata.json"
_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_ASSETS = "assets/"
#: The version of Keras whose format is written.
_KERAS_VERSION = "3.8.0"
_LARGEST_CONFIG = 64 << 20  # bytes
_LARGEST_METADATA = 1 << 20  # bytes
_MOST_MEMBERS = 10_000
#: Keras stores weights and assets without compression. An archive that would expand to more than
#: this many times its size is rejected, because it could fill the memory.
_MOST_EXPANSION = 100
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Parts(NamedTuple):
    """The parts of a ``.keras`` file: the model's config, the weights, and the layers' assets."""

    config: dict[str, Any]
    weights: bytes
    assets: dict[str, bytes]


def pack(parts: Parts) -> bytes:
    """Return the bytes of the file."""
    now = datetime.datetime.now()
    metadata = {
        "keras_version": _KERAS_VERSION,
        "date_saved": now.strftime("%Y-%m-%d@%H:%M:%S"),
        "pycollective_version": __version__,
    }
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(_METADATA, json.dumps(metadata))
        archive.writestr(_CONFIG, json.dumps(parts.config))
        archive.writestr(_WEIGHTS, parts.weights)
        for name, data in parts.assets.items():
            archive.writestr(_ASSETS + name, data)
    return target.getvalue()


def unpack(path: str) -> Parts:
    """Read and check a file.

    Raises
    ------
    CheckpointError
        If the file is truncated or damaged, lacks a member, or describes no model. If a member's
        name is repeated, is an absolute path, or contains ``..``, a backslash or a colon. If there
        are more than 10,000 members, or a member has another compression than deflate. If a member
        exceeds a limit when unpacked. The limits are 64 MiB for the config and 1 MiB for the
        metadata. The limit for weights and assets together is 64 MiB or 100 times the file's size,
        whichever is larger.
    OSError
        If the file is missing or cannot be opened.
    """
    with open(path, "rb") as file:
        try:
            return _unpacked(path, file)
        except CheckpointError:
            raise
        except Exception as error:  # zipfile has no common base class for all errors of an archive
            raise CheckpointError(
                f"{path!r} is truncated, damaged, or no .keras file: {error}"
            ) from None


def _unpacked(path: str, file: BinaryIO) -> Parts:
    with zipfile.ZipFile(file) as archive:
        _check_names(path, archive)
        left = max(_LARGEST_CONFIG, _MOST_EXPANSION * os.fstat(file.fileno()).st_size)
        config = _read(path, archive, _CONFIG, left)
        left -= len(config)
        if _METADATA in archive.namelist():
            _read(path, archive, _METADATA, _LARGEST_METADATA)
        weights = _read(path, archive, _WEIGHTS, left)
        left -= len(weights)
        assets = {}
        for name in archive.namelist():
            if name.startswith(_ASSETS) and not name.endswith("/"):
                asset = assets[name.removeprefix(_ASSETS)] = _read(path, archive, name, left)
                left -= len(asset)
    try:
        body = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path!r} is damaged: its {_CONFIG} is not JSON ({error})") from None
    if not isinstance(body, dict) or "class_name" not in body:
        raise CheckpointError(f"{path!r} is no model: its {_CONFIG} describes none")
    return Parts(body, weights, assets)


def _check_names(path: str, archive: zipfile.ZipFile) -> None:
    names = archive.namelist()
    if len(names) > _MOST_MEMBERS:
        raise CheckpointError(
            f"{path!r} is refused: it has {len(names)} members, at most {_MOST_MEMBERS} are allowed"
        )
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path!r} is refused: two of its members have the same name")
    for name in names:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name:
            raise CheckpointError(
                f"{path!r} is refused: the name {name!r} in it leads out of the archive"
            )


def _read(path: str, archive: zipfile.ZipFile, name: str, largest: int) -> bytes:
    """Return a member of the archive, of at most ``largest`` bytes."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise CheckpointError(f"{path!r} is no .keras file: there is no {name} in it") from None
    if info.compress_type not in _COMPRESSIONS:
        raise CheckpointError(
            f"{path!r} is refused: {name} has a compression that Keras does not use"
        )
    if info.file_size > largest:
        raise CheckpointError(
            f"{path!r} is refused: {name} has {info.compress_size} bytes and would be "
            f"{info.file_size} unpacked, at most {largest} are allowed"
        )
    with archive.open(info) as member:
        # Read at most the limit, because the sizes in the archive's directory may be wrong.
        data = member.read(largest + 1)
    if len(data) != info.file_size:
        raise CheckpointError(
            f"{path!r} is damaged: {name} has {len(data)} bytes, its directory says {info.file_size}"
        )
    return data
