"""`save_model`, `load_model` and the functions for weights and JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycollective.arguments import path_of
from pycollective.atomic_files import write_atomically
from pycollective.distribute.context import current_mode
from pycollective.distribute.default import get_strategy
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

    The file holds the layers, the weights, the arguments of `compile`, the optimizer's variables, and
    the files of layers with ``save_assets(folder)``. The file gets its name after it is completely
    written. Strategies are not stored: a model can be loaded with any number of replicas.

    Parameters
    ----------
    model
        The model to save.
    filepath
        The path of the file, which must end in ``.keras``.
    overwrite : bool
        True to replace an existing file.
    zipped : bool, optional
        Must be True or None: the unzipped format is not supported.

    Raises
    ------
    ValueError
        If the path has another ending, or a part cannot be stored, such as a lambda.
    TypeError, NotImplementedError
        If a custom layer needs a ``get_config`` method and has none.
    FileExistsError
        If the file exists and ``overwrite`` is False.
    ImportError
        If h5py is not installed.
    RuntimeError
        If a replica function makes this call, and there are several replicas.
    """
    _require_outside_replicas("Model.save")
    path = path_of("filepath", filepath)
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
    """Load a model from a ``.keras`` file of this package or of Keras 3.

    In the scope of a strategy, the model is made for the strategy's replicas.

    Parameters
    ----------
    filepath
        The path of the file.
    custom_objects : mapping, optional
        The custom classes and functions of the model, by name, unless they are registered.
    compile : bool
        True to compile a model that was saved compiled, and to load the optimizer's variables.
    safe_mode : bool
        Accepted for compatibility with Keras and ignored: code in files (lambdas) is never run.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    CheckpointError
        If the file is truncated or damaged, or has weights that do not fit the layers. If the name of
        a member is an absolute path or contains ``..``. If the unpacked size exceeds both 64 MiB and
        100 times the file's size. On every worker of the current strategy, if the workers' files
        differ.
    TypeError
        If the model has a layer, or another class or function, that is unknown.
    ValueError
        If the path has another ending, or a layer's settings in the file are not supported.
    ImportError
        If h5py is not installed.

    Notes
    -----
    Layers with ``load_assets(folder)`` get a temporary folder of the files that ``save_assets``
    wrote.
    """
    path = path_of("filepath", filepath)
    if not path.endswith(".keras"):
        raise ValueError(
            f"File format not supported: filepath={path}. load_model() reads V3 `.keras` files; for "
            "weights alone, make the model and call model.load_weights('….weights.h5')"
        )
    _require_same(path, get_strategy().extended.workers, "keras.models.load_model")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"File not found: filepath={path}. No such `.keras` file exists")
    parts = unpack(path)
    config = parts.config if compile else {**parts.config, "compile_config": None}
    for name in ("config", "build_config", "compile_config"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise CheckpointError(f"{path!r} is damaged: {name!r} in its config.json is no object")
    try:
        with sharing():
            model = deserialize_keras_object(config, custom_objects, safe_mode)
    except (CheckpointError, TypeError, ValueError, ImportError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path!r} is damaged, or of an unknown version: its config cannot be read "
            f"({type(error).__name__}: {error})"
        ) from error
    if not hasattr(model, "load_weights"):
        raise CheckpointError(f"{path!r} holds a {type(model).__name__} instead of a model")
    read_weights(model, parts.weights, repr(path))
    read_assets(model, parts.assets, repr(path))
    return model


def save_weights(model: Learner, filepath: _Path, overwrite: bool = True) -> None:
    """Write a model's weights, and its optimizer's variables, to a ``.weights.h5`` file.

    Parameters
    ----------
    model
        A built model.
    filepath
        The path of the file, which must end in ``.weights.h5``. The file gets its name after it is
        completely written. A path without an ending makes a checkpoint, as ``tf.train.Checkpoint``
        does; ``tf.train.latest_checkpoint`` finds it.
    overwrite : bool
        True to replace an existing file.

    Raises
    ------
    ValueError
        If the path has another ending, or the model is not built.
    FileExistsError
        If the file exists and ``overwrite`` is False.
    ImportError
        If h5py is not installed.
    RuntimeError
        If a replica function makes this call, and there are several replicas.
    """
    _require_outside_replicas("Model.save_weights")
    path = path_of("filepath", filepath)
    checkpoint = os.path.basename(path) != "" and not os.path.splitext(path)[1]
    if not checkpoint and not path.endswith(".weights.h5"):
        raise ValueError(
            f"The filename must end in `.weights.h5`. Received: filepath={path}. A name without an "
            "ending makes a checkpoint"
        )
    _require_built(model, "saving", "of")
    _check_overwrite(path + INDEX_SUFFIX if checkpoint else path, overwrite)
    if checkpoint:
        write_checkpoint(model, path)
        return
    _begin_together(model, "save_weights", path)
    _write(model, path, write_weights(model))


def load_weights(model: Learner, filepath: _Path | None, skip_mismatch: bool = False) -> None:
    """Load the variables of a model and its optimizer from a file or a checkpoint.

    Parameters
    ----------
    model
        A built model. For a checkpoint it need not be built, because a checkpoint also restores
        variables that are made later.
    filepath
        The path of a ``.weights.h5`` or ``.keras`` file of this package or of Keras 3, or of a
        checkpoint of `save_weights`, `ModelCheckpoint` or ``tf.train.Checkpoint``.
    skip_mismatch : bool
        True to skip layers that do not fit, with a warning. If False, such a layer is an error, and
        nothing is changed.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    CheckpointError
        If the file is damaged or does not fit; the message lists the differences. On every worker of
        the model's strategy, if the workers' files differ.
    ValueError
        If the path is None, or has another ending and there is no such checkpoint. If the model is
        not built.
    ImportError
        If h5py is not installed.
    RuntimeError
        If a replica function makes this call, and there are several replicas.

    Notes
    -----
    Every worker of the model's strategy must make this call.
    """
    _require_outside_replicas("Model.load_weights")
    if filepath is None:
        raise ValueError(
            "load_weights(None): there is no file to load. latest_checkpoint() returns None if a "
            "folder has no checkpoint; give the path of a `.weights.h5` file itself"
        )
    path = path_of("filepath", filepath)
    whole = path.endswith((".weights.h5", ".keras"))
    if whole:
        _require_built(model, "loading", "into")
    _require_same(path, model.distribute_strategy.extended.workers, "Model.load_weights")
    if not whole:
        if not os.path.isfile(path + INDEX_SUFFIX):
            raise ValueError(
                f"File format not supported: filepath={path}. load_weights() reads `.weights.h5` and "
                "`.keras` files, and checkpoints; no checkpoint has this name"
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
    json_string : str
        The result of `Model.to_json`, of this package or of Keras.
    custom_objects : mapping, optional
        The custom classes and functions of the model, by name.

    Raises
    ------
    ValueError
        If the text is not JSON, is nested too deeply, or does not describe a model.
    TypeError
        If the model has a class or function that is unknown.
    """
    try:
        model = deserialize_keras_object(json.loads(json_string), custom_objects)
    except (KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _no_model(f"{type(error).__name__}: {error}") from error
    if not isinstance(model, Learner):
        raise _no_model(f"but a {type(model).__name__}")
    return model


def _no_model(reason: str) -> ValueError:
    return ValueError(
        f"the JSON text describes no model ({reason}); give the result of Model.to_json()"
    )


def _require_outside_replicas(method: str) -> None:
    mode = current_mode()
    if mode is None or mode.replica_context is None:
        return
    if mode.strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{method}() was called in a replica function, so that each replica would run it; call "
            "it outside of strategy.run()"
        )


def _require_same(path: str, workers: Workers, call: str) -> None:
    """Raise on every worker unless all workers make this call and have the same file."""
    if workers.count == 1:
        return
    workers.begin_together(f"{call}({path!r})", call)
    digest, found = "", f"{path!r}, which it cannot read"
    with contextlib.suppress(OSError, CheckpointError):
        if path.endswith(".keras"):  # compared without its metadata, which holds a date
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
    """Wait until every worker makes this call, because reading aggregated variables needs them all."""
    model.distribute_strategy.extended.workers.begin_together(f"Model.{call}({path!r})", call)


def _write(model: Learner, path: str, data: bytes) -> None:
    """Write a file on one worker; every worker of the model's strategy calls with the same bytes."""

    def write() -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_atomically(path, data)

    model.distribute_strategy.extended.workers.write_once(path, write)
