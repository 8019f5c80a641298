"""Files of a checkpoint: write them safely, read and check them.

A checkpoint ``path`` consists of

* ``path.safetensors``: the values, in the safetensors format (which cannot contain code).
* ``path.index.json``: the objects and their variables with shapes and dtypes. The index also has the
  name, size and SHA-256 of the data file, and a SHA-256 of itself.

Each file is written under a temporary name, flushed to the disk and renamed; the index comes last. A
checkpoint exists if its index does, so that an interrupted write leaves the previous state. If
``path`` exists already, the new data file gets another name, and the old one is removed after the new
index is in place.

A folder of checkpoints may come from an untrusted source. Names in its files must be bare file names,
and no file is deleted because another file names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pycollective.array_backend import Array
from pycollective.atomic_files import write_atomically
from pycollective.dtypes import as_dtype
from pycollective.errors import CheckpointError

DATA_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_FORMAT = "pycollective checkpoint"
_VERSION = 1


class Node(NamedTuple):
    """An object in a checkpoint: its parts by name, and the tensor's name if it is a variable."""

    children: dict[str, int]
    tensor: str | None


class Contents(NamedTuple):
    """Contents of a checkpoint: objects (the first one is the root), and tensors by name.

    ``digest`` is the SHA-256 of the data file, if the contents were read from one.
    """

    nodes: list[Node]
    tensors: dict[str, Array]
    digest: str = ""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint that may be intact, but that this program cannot read."""


def write_files(path: str, contents: Contents) -> None:
    """Write a checkpoint; the previous contents of ``path`` stay valid until it is complete.

    The caller holds the lock of the folder, which exists. The package safetensors is needed.
    """
    if not is_bare_name(os.path.basename(path)):
        raise ValueError(f"{os.path.basename(path)!r} cannot be the name of a checkpoint's files")
    data = _safetensors().save(contents.tensors)
    digest = hashlib.sha256(data).hexdigest()
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
    """Read and check a checkpoint."""
    index = _read_index(path)
    try:
        size = os.stat(index.data_path).st_size
        if size != index.size or not os.path.isfile(index.data_path):
            raise CheckpointError(
                f"checkpoint {path!r}: the data file {index.data_path!r} has {size} bytes, its index "
                f"says {index.size}"
            )
        data = Path(index.data_path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {index.data_path!r} that its index names is missing"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {index.data_path!r} cannot be read ({error})"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != index.digest:
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {index.data_path!r} was changed or damaged: it has "
            f"SHA-256 {digest}, its index says {index.digest}"
        )
    try:
        tensors = _loaded(data)
    except ImportError:
        raise
    except Exception as error:  # the classes of safetensors' errors differ between its versions
        raise CheckpointError(
            f"checkpoint {path!r}: the data file {index.data_path!r} is not in the "
            f"safetensors format ({error})"
        ) from None
    for name, spec in index.tensors.items():
        found = tensors.get(name)
        if found is None or spec != {"shape": list(found.shape), "dtype": str(found.dtype)}:
            raise CheckpointError(
                f"checkpoint {path!r}: tensor {name!r} is not in the data file as its index says"
            )
    return Contents(index.nodes, tensors, digest)


def is_complete(path: str) -> bool:
    """Return True if the index is intact, and the data file has the size in the index.

    Raises
    ------
    UnreadableCheckpointError
        The index has a newer version of the format, or may not be read.
    """
    try:
        index = _read_index(path)
        return os.path.getsize(index.data_path) == index.size
    except UnreadableCheckpointError:
        raise
    except (CheckpointError, OSError):
        return False


def has_index(path: str) -> bool:
    """Return True if a checkpoint has an index, which `remove_files` deletes first."""
    return os.path.lexists(path + INDEX_SUFFIX)


def has_files(path: str) -> bool:
    """Return True if any file of a checkpoint exists."""
    return has_index(path) or bool(_data_files(path))


def remove_files(path: str) -> None:
    """Delete a checkpoint, the index first, so that leftover files are never taken for a checkpoint."""
    _unlink(path + INDEX_SUFFIX)
    for data_file in _data_files(path):
        _unlink(data_file)


def is_bare_name(name: object) -> bool:
    """Return True if ``name``, which comes from a file, is the name of a file in the same folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def parse_json(path: str, raw: bytes) -> Any:
    """Return the parsed JSON of a file; raise CheckpointError if it is not valid."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path!r} is truncated or damaged: {len(raw)} bytes that are not JSON ({error})"
        ) from None


class _Index(NamedTuple):
    """The checked contents of an index."""

    data_path: str
    size: int
    digest: str
    nodes: list[Node]
    tensors: dict[str, Any]


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _data_files(path: str) -> set[str]:
    """Return the data files of a checkpoint, including those of killed writers."""
    pattern = re.compile(
        rf"{re.escape(os.path.basename(path))}(\.[0-9a-f]{{16}})?{re.escape(DATA_SUFFIX)}"
    )
    directory = os.path.dirname(path)
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(directory or ".")
        return {os.path.join(directory, name) for name in names if pattern.fullmatch(name)}
    return set()


def _read_index(path: str) -> _Index:
    index_path = path + INDEX_SUFFIX
    try:
        raw = Path(index_path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no checkpoint {path!r}: no file {index_path!r}") from None
    except OSError as error:
        raise UnreadableCheckpointError(f"{index_path!r} cannot be read ({error})") from None
    index = parse_json(index_path, raw)
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise CheckpointError(f"{index_path!r} is not the index of a checkpoint")
    version = index.get("version")
    if version != _VERSION:
        is_newer = isinstance(version, int) and version > _VERSION
        raise (UnreadableCheckpointError if is_newer else CheckpointError)(
            f"{index_path!r} has version {version!r} of the format; this pycollective reads version "
            f"{_VERSION}"
        )
    try:
        right = index.pop("index_sha256", None) == _index_digest(index)
    except RecursionError:
        right = False
    if not right:
        raise CheckpointError(f"{index_path!r} was changed or damaged: its checksum is wrong")
    problem = _problem(index)
    if problem:
        raise CheckpointError(f"{index_path!r} is damaged: {problem}")
    data = index["data"]
    nodes = [Node(item.get("children", {}), item.get("tensor")) for item in index["objects"]]
    data_path = os.path.join(os.path.dirname(path), data["file"])
    return _Index(data_path, data["bytes"], data["sha256"], nodes, index["tensors"])


def _problem(index: Mapping[str, Any]) -> str:
    """Return the first problem of an index, or ``""``."""
    data, objects, tensors = (index.get(part) for part in ("data", "objects", "tensors"))
    if not isinstance(data, dict) or not {"bytes", "sha256"} <= data.keys():
        return f"data={data!r} does not describe a data file"
    if not is_bare_name(data.get("file")):
        return (
            f"data file {data.get('file')!r} is not the name of a file in the same folder, and a "
            "checkpoint has no files elsewhere. Do not use checkpoints of this origin"
        )
    if not isinstance(tensors, dict):
        return f"tensors={tensors!r} is not a table of tensors"
    if not isinstance(objects, list) or not objects:
        return f"objects={objects!r} is not a list of objects"
    for item in objects:
        children = item.get("children", {}) if isinstance(item, dict) else None
        if not isinstance(children, dict) or not all(
            type(child) is int and 0 <= child < len(objects) for child in children.values()
        ):
            return f"object {item!r} has parts that do not exist"
        tensor = item.get("tensor")
        if tensor is not None and not (isinstance(tensor, str) and tensor in tensors):
            return f"object {item!r} has a tensor that does not exist"
    return ""


def _index_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _node_to_json(node: Node) -> dict[str, Any]:
    return {"children": node.children} if node.tensor is None else {"tensor": node.tensor}


def _loaded(data: bytes) -> dict[str, Array]:
    """Return the tensors of a data file; safetensors.numpy writes bfloat16, but does not read it."""
    _safetensors()
    import safetensors

    deserialize: Any = safetensors.deserialize
    kinds = {"BOOL": "bool", "BF16": "bfloat16"}
    found = {}
    for name, view in deserialize(data):
        kind = kinds.get(view["dtype"]) or view["dtype"].replace("F", "float").replace("U", "uint")
        dtype = as_dtype(kind.replace("I", "int"))
        found[name] = np.frombuffer(view["data"], dtype).reshape(view["shape"])
    return found


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "checkpoints need the package safetensors: pip install 'pycollective[train]'"
        ) from error
    return safetensors.numpy
