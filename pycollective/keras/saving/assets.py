"""Assets of layers in a ``.keras`` file: ``save_assets`` writes and ``load_assets`` reads them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pycollective.errors import CheckpointError
from pycollective.keras.layers import Layer
from pycollective.keras.saving.weights import owners_of


def write_assets(model: Layer) -> dict[str, bytes]:
    """Return the files that a model's parts with ``save_assets`` write, by path."""
    with tempfile.TemporaryDirectory(prefix="pycollective-") as root:
        for path, owner in owners_of(model):
            save = getattr(owner, "save_assets", None)
            if callable(save):
                folder = os.path.join(root, path)
                os.makedirs(folder, exist_ok=True)
                save(folder)
        files = sorted(file for file in Path(root).rglob("*") if file.is_file())
        for file in files:
            if set(":\\") & set(str(file.relative_to(root))):
                raise ValueError(
                    f"the asset {file.name!r} cannot be stored: its name has a colon or a backslash"
                )
        return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def read_assets(model: Layer, assets: Mapping[str, bytes], where: str) -> None:
    """Call ``load_assets`` of the parts of a model that have files among the assets.

    ``assets`` holds files by path; no path leads out of the folder. Raise `CheckpointError`, with
    the file's name ``where``, if paths conflict.
    """
    if not assets:
        return
    with tempfile.TemporaryDirectory(prefix="pycollective-") as root:
        try:
            for name, data in assets.items():
                file = Path(root, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        except OSError as error:
            raise CheckpointError(
                f"{where} is damaged: its assets have bad names ({error})"
            ) from None
        for path, owner in owners_of(model):
            load = getattr(owner, "load_assets", None)
            folder = os.path.join(root, path)
            if callable(load) and os.path.isdir(folder):
                load(folder)
