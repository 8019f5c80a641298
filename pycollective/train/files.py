"""The files of a checkpoint: how they are written so that a crash cannot harm, read and checked.

A checkpoint ``path`` consists of

* ``path.safetensors``: the values, in the safetensors format (no code can hide in it);
* ``path.index.json``: which object has which variable, the shape and dtype of each, the name, size
  and SHA-256 of the data file, and a SHA-256 of the index itself.

Each file is written under a temporary name, flushed to the disk and renamed; the index comes last.
A checkpoint exists when its index does, so whatever interrupts the writing leaves what was there
before. When ``path`` exists already, the new data file gets a name of its own, and the old one is
removed after the new index stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pycollective.array_backend import Array
from pycollective.errors import CheckpointError

__all__ = [
    "Contents",
    "Node",
    "data_file_of",
    "is_complete",
    "read_files",
    "remove_files",
    "write_atomically",
    "write_files",
]

DATA_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_TEMPORARY_SUFFIX = ".unfinished"
#: Temporary files that nobody has touched for this long belong to a process that was killed.
_ABANDONED_SECONDS = 3600.0
_FORMAT = "pycollective checkpoint"
_VERSION = 1


class Node(NamedTuple):
    """An object in a checkpoint: its parts by name, and the tensor it holds if it is a variable."""

    children: dict[str, int]
    tensor: str | None


class Contents(NamedTuple):
    """What a checkpoint holds: objects (the first one is the root) and tensors by name.

    One that was read has the SHA-256 of its data file.
    """

    nodes: list[Node]
    tensors: dict[str, Array]
    digest: str = ""


def write_files(path: str, contents: Contents) -> None:
    """Write a checkpoint; what ``path`` held before stays intact until the new one is complete.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    OSError
        If the disk does not take the files.
    """
    data = _safetensors().save(contents.tensors)
    digest = hashlib.sha256(data).hexdigest()
    directory = os.path.dirname(path) or "."
    os.makedirs(directory, exist_ok=True)
    _remove_abandoned(directory)
    before = _data_files(path)
    data_path = path + DATA_SUFFIX
    if data_path in before:
        data_path = f"{path}.{digest[:16]}{DATA_SUFFIX}"
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "data": {"file": os.path.basename(data_path), "bytes": len(data), "sha256": digest},
        "objects": [_node_to_json(node) for node in contents.nodes],
        "tensors": {
            name: {"shape": list(array.shape), "dtype": str(array.dtype)}
            for name, array in contents.tensors.items()
        },
    }
    body["index_sha256"] = _index_digest(body)
    write_atomically(data_path, data)
    write_atomically(path + INDEX_SUFFIX, json.dumps(body, indent=1).encode())
    for old in before - {data_path}:
        _unlink(old)


def read_files(path: str) -> Contents:
    """Read and check a checkpoint.

    Raises
    ------
    CheckpointError
        If it does not exist, or a file is missing, truncated or changed.
    ImportError
        If safetensors is not installed.
    """
    index = _read_index(path)
    data_path, size = data_file_of(path, index)
    try:
        data = Path(data_path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {data_path!r} that its index names is missing"
        ) from None
    if len(data) != size:
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {data_path!r} has {len(data)} bytes, its index "
            f"says {size}"
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest != index["data"]["sha256"]:
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {data_path!r} was changed or damaged: it has "
            f"SHA-256 {digest}, its index says {index['data']['sha256']}"
        )
    tensors = _safetensors().load(data)
    for name, spec in index["tensors"].items():
        found = tensors.get(name)
        if found is None or list(found.shape) != spec["shape"] or str(found.dtype) != spec["dtype"]:
            raise CheckpointError(
                f"checkpoint {path!r}: tensor {name!r} is not in the data file as its index says"
            )
    nodes = [Node(dict(item.get("children", {})), item.get("tensor")) for item in index["objects"]]
    return Contents(nodes, tensors, digest)


def is_complete(path: str) -> bool:
    """Whether the checkpoint has an index that can be read, and a data file of the right size."""
    try:
        data_path, size = data_file_of(path, _read_index(path))
        return os.path.getsize(data_path) == size
    except (CheckpointError, OSError):
        return False


def data_file_of(path: str, index: Mapping[str, Any]) -> tuple[str, int]:
    """Return the path and the size that an index gives for its data file."""
    name, size = index["data"]["file"], index["data"]["bytes"]
    return os.path.join(os.path.dirname(path), name), size


def remove_files(path: str) -> None:
    """Delete a checkpoint: its index first, so that no half of it is ever taken for a whole."""
    data_files = _data_files(path) | {path + DATA_SUFFIX}
    _unlink(path + INDEX_SUFFIX)
    for data_file in data_files:
        _unlink(data_file)


def write_atomically(path: str, data: bytes) -> None:
    """Give ``path`` new contents: after a crash it has the old ones or all of the new ones."""
    temporary = f"{path}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
    _sync_directory(os.path.dirname(path) or ".")


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(directory: str) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(_TEMPORARY_SUFFIX):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                        os.unlink(entry.path)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _data_files(path: str) -> set[str]:
    """Return the data file that the present index of ``path`` names, if there is one."""
    try:
        return {data_file_of(path, _read_index(path))[0]}
    except CheckpointError:
        return set()


def _read_index(path: str) -> dict[str, Any]:
    index_path = path + INDEX_SUFFIX
    try:
        raw = Path(index_path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no checkpoint {path!r}: no file {index_path!r}") from None
    try:
        index = json.loads(raw)
        if not isinstance(index, dict) or index.get("format") != _FORMAT:
            raise CheckpointError(f"{index_path!r} is not the index of a checkpoint")
        if index.get("version") != _VERSION:
            raise CheckpointError(
                f"{index_path!r} has version {index.get('version')!r} of the format; this "
                f"pycollective reads version {_VERSION}"
            )
        if index.pop("index_sha256", None) != _index_digest(index):
            raise CheckpointError(f"{index_path!r} was changed or damaged: its checksum is wrong")
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{index_path!r} is truncated or damaged: {len(raw)} bytes that are no JSON ({error})"
        ) from None
    return index


def _index_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _node_to_json(node: Node) -> dict[str, Any]:
    return {"children": node.children} if node.tensor is None else {"tensor": node.tensor}


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "checkpoints need the package safetensors: pip install 'pycollective[train]'"
        ) from error
    return safetensors.numpy
