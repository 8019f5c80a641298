"""`save_model`, `load_model` and what belongs to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycollective.atomic_files import write_atomically
from pycollective.distribute.context import current_mode, get_strategy
from pycollective.distribute.workers import Workers
from pycollective.errors import CheckpointError
from pycollective.keras.saving.archive import Parts, pack, unpack
from pycollective.keras.saving.assets import read_assets, write_assets
from pycollective.keras.saving.checkpoints import read_checkpoint, write_checkpoint
from pycollective.keras.saving.weights import read_weights, write_weights
from pycollective.keras.serialization import (
    deserialize_keras_object,
    serialize_shared,
    sharing,
)
from pycollective.keras.training.learner import Learner
from pycollective.train.checkpoint import require_same
from pycollective.train.files import INDEX_SUFFIX, read_files

_Path = str | os.PathLike[str]


def save_model(
    model: Learner, filepath: _Path, overwrite: bool = True, zipped: bool | None = None
) -> None:
    """Write a model to a ``.keras`` file, in the format of Keras 3, which Keras loads.

    The file has the layers, the weights, what `compile` was given, the optimizer's variables, and the
    files of layers with ``save_assets(folder)``. It appears under its name when all of it is written.
    Strategies are not stored: a model is loaded with any number of replicas.

    Parameters
    ----------
    model
        What is saved.
    filepath
        Where to; the name ends in ``.keras``.
    overwrite
        Whether a file that is there is replaced.
    zipped
        Only True: there are no folders of this format here.

    Raises
    ------
    ValueError
        For another ending, and for parts that cannot be stored, such as lambdas.
    TypeError, NotImplementedError
        If a layer of one's own does not say how it is stored (``get_config``).
    FileExistsError
        If the file is there and is not to be replaced.
    ImportError
        If h5py is not installed.
    """
    _require_outside_replicas("Model.save")
    path = os.fspath(filepath)
    if zipped is False or not path.endswith(".keras"):
        raise ValueError(
            "Invalid filepath extension for saving. Please add a `.keras` extension for the native "
            f"Keras format; folders and other formats are not written. Received: filepath={path}"
        )
    _check_overwrite(path, overwrite)
    config = serialize_shared(model)
    _begin_together(model, "save", path)
    _write(model, path, pack(Parts(config, write_weights(model), write_assets(model))))


def load_model(
    filepath: _Path,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    """Return the model of a ``.keras`` file, which this package or Keras 3 wrote.

    In the scope of a strategy it is made for its replicas.

    Parameters
    ----------
    filepath
        The file.
    custom_objects
        Classes and functions of one's own in it, by name, unless they are registered.
    compile
        Whether the model is compiled, with the optimizer's variables, if it was saved so.
    safe_mode
        Accepted for Keras's sake: code in files (lambdas) is never run here.

    Raises
    ------
    FileNotFoundError
        If the file is not there.
    CheckpointError
        If it is truncated or damaged, leads out of itself, or is larger unpacked than 64 MiB and 100
        times its size; or if its weights do not fit its layers. On every worker of the strategy in
        whose scope it is loaded, if they do not find the same file.
    TypeError
        If it has a layer, or another class or function, that is unknown.
    ValueError
        If a layer cannot have the settings that it has in the file.

    Notes
    -----
    Layers with ``load_assets(folder)`` get the files that their ``save_assets`` wrote, in a folder
    that is deleted afterwards.
    """
    path = os.fspath(filepath)
    if not path.endswith(".keras"):
        raise ValueError(
            f"File format not supported: filepath={path}. What is loaded are V3 `.keras` files; for "
            "weights alone, give a model and use model.load_weights('….weights.h5')"
        )
    _require_same(path, get_strategy().extended.workers, "keras.models.load_model")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"File not found: filepath={path}. There is no such `.keras` file")
    parts = unpack(path)
    config = parts.config if compile else {**parts.config, "compile_config": None}
    try:
        with sharing():
            model = deserialize_keras_object(config, custom_objects, safe_mode)
    except (CheckpointError, TypeError, ValueError, ImportError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path!r} is damaged, or of a version that is not known: its config cannot be read "
            f"({type(error).__name__}: {error})"
        ) from error
    if not hasattr(model, "load_weights"):
        raise CheckpointError(f"{path!r} has no model in it, but a {type(model).__name__}")
    read_weights(model, parts.weights, repr(path))
    read_assets(model, parts.assets, repr(path))
    return model


def save_weights(model: Learner, filepath: _Path, overwrite: bool = True) -> None:
    """Write a model's weights, and its optimizer's variables, to a ``.weights.h5`` file.

    Parameters
    ----------
    model
        It must be built.
    filepath
        The path of the file, whose name ends in ``.weights.h5``. The file appears when all of it is
        written. A path without an ending is that of a checkpoint, as ``tf.train.Checkpoint`` writes
        it; ``tf.train.latest_checkpoint`` finds it.
    overwrite
        Whether a file that is there is replaced.

    Raises
    ------
    ValueError
        For another ending, and if the model is not built.
    FileExistsError
        If the file is there and is not to be replaced.
    ImportError
        If h5py is not installed.
    """
    _require_outside_replicas("Model.save_weights")
    path = os.fspath(filepath)
    checkpoint = os.path.basename(path) != "" and not os.path.splitext(path)[1]
    if not checkpoint and not path.endswith(".weights.h5"):
        raise ValueError(
            f"The filename must end in `.weights.h5`. Received: filepath={path}. A name without an "
            "ending is that of a checkpoint"
        )
    _require_built(model, "saving", "of")
    _check_overwrite(path + INDEX_SUFFIX if checkpoint else path, overwrite)
    if checkpoint:
        write_checkpoint(model, path)
        return
    _begin_together(model, "save_weights", path)
    _write(model, path, write_weights(model))


def load_weights(model: Learner, filepath: _Path | None, skip_mismatch: bool = False) -> None:
    """Give a model, and its optimizer, the values of a file or a checkpoint.

    Parameters
    ----------
    model
        The model. It must be built, unless the values come from a checkpoint: a checkpoint restores
        variables that are made later, too.
    filepath
        The path of a ``.weights.h5`` or ``.keras`` file, which this package or Keras 3 wrote; or that
        of a checkpoint, as `save_weights`, `ModelCheckpoint` and ``tf.train.Checkpoint`` write it and
        ``tf.train.latest_checkpoint`` returns it.
    skip_mismatch
        Whether layers that do not fit are left as they are, with a warning; otherwise they are an
        error, and nothing is changed.

    Raises
    ------
    FileNotFoundError
        If the file is not there.
    CheckpointError
        If it is damaged or does not fit; the message lists what does not. On every worker of the
        model's strategy if they do not find the same file; each of them makes this call.
    ValueError
        For another ending, for None, and if the model is not built.
    """
    _require_outside_replicas("Model.load_weights")
    if filepath is None:
        raise ValueError(
            "load_weights(None): there is no file to load. latest_checkpoint() returns None where a "
            "folder has no checkpoint; give the path of a `.weights.h5` file itself"
        )
    path = os.fspath(filepath)
    whole = path.endswith((".weights.h5", ".keras"))
    if whole:
        _require_built(model, "loading", "into")
    _require_same(path, model.distribute_strategy.extended.workers, "Model.load_weights")
    if not whole:
        if not os.path.isfile(path + INDEX_SUFFIX):
            raise ValueError(
                f"File format not supported: filepath={path}. Weights are taken from `.weights.h5` and "
                "`.keras` files, and from checkpoints; there is no checkpoint of this name"
            )
        read_checkpoint(model, path, skip_mismatch)
        return
    if not os.path.isfile(path):
        raise FileNotFoundError(f"File not found: filepath={path}")
    data = unpack(path).weights if path.endswith(".keras") else Path(path).read_bytes()
    read_weights(model, data, repr(path), skip_mismatch)


def model_from_json(json_string: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the model that `Model.to_json` described, with new weights.

    Parameters
    ----------
    json_string
        What it returned, here or in Keras.
    custom_objects
        Classes and functions of one's own in it, by name.

    Raises
    ------
    ValueError
        If the text is no JSON, is nested too deeply, or describes no model.
    TypeError
        If it has a class or function that is unknown.
    """
    try:
        return deserialize_keras_object(json.loads(json_string), custom_objects)
    except (KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"the JSON text describes no model ({type(error).__name__}: {error}); give what "
            "Model.to_json() returned"
        ) from error


def _require_outside_replicas(method: str) -> None:
    mode = current_mode()
    if mode is None or mode.replica_context is None:
        return
    if mode.strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{method}() was called in a replica function, where each replica would do it; call it "
            "outside of strategy.run()"
        )


def _require_same(path: str, workers: Workers, call: str) -> None:
    """Raise on every worker unless each makes this call, and their files are the same."""
    if workers.count == 1:
        return
    workers.begin_together(f"{call}({path!r})", call)
    digest, found = "", f"{path!r}, which it cannot read"
    with contextlib.suppress(OSError, CheckpointError):
        if path.endswith(".keras"):  # in which there is also when it was written
            parts = unpack(path)
            data = json.dumps(parts.config, sort_keys=True).encode() + parts.weights
            data += b"".join(name.encode() + asset for name, asset in sorted(parts.assets.items()))
            digest = hashlib.sha256(data).hexdigest()
        elif path.endswith(".weights.h5"):
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        else:
            digest = read_files(path).digest
        found = f"{path!r}, SHA-256 {digest}"
    require_same(workers.every(digest, found))


def _require_built(model: Learner, doing: str, how: str) -> None:
    if not model.built:
        raise ValueError(
            f"You are {doing} weights {how} a model that has not yet been built. Try building the "
            "model first by calling it on some data or by using `build()`."
        )


def _check_overwrite(path: str, overwrite: bool) -> None:
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"{path!r} exists, and overwrite=False was given")


def _begin_together(model: Learner, call: str, path: str) -> None:
    """Return when every worker makes this call: values that are aggregated when read need all."""
    model.distribute_strategy.extended.workers.begin_together(f"Model.{call}({path!r})", call)


def _write(model: Learner, path: str, data: bytes) -> None:
    """Write a file that every worker of the model's strategy has made."""

    def write() -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_atomically(path, data)

    model.distribute_strategy.extended.workers.write_once(path, write)
