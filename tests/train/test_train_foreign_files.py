"""Untrusted folders of checkpoints: no access outside of them, and one error class for damage."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from json_nodes import wrong_copies

from pycollective import keras, train
from pycollective.errors import CheckpointError
from pycollective.tensor import Variable
from pycollective.train import files

OUTSIDE = {
    "absolute": lambda victim, folder: str(victim),
    "parent": lambda victim, folder: os.path.relpath(victim, folder),
    "subfolder": lambda victim, folder: f"sub/../../{victim.name}",
    "backslash": lambda victim, folder: f"..\\{victim.name}",
    "dots": lambda victim, folder: "..",
    "nothing": lambda victim, folder: "",
    "a null byte": lambda victim, folder: "a\0b",
    "half a character": lambda victim, folder: "\ud800",
    "a number": lambda victim, folder: 5,
}


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "precious.safetensors"
    path.write_text("all that I have")
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


def sign(path, body):
    body.pop("index_sha256", None)
    body["index_sha256"] = files._index_digest(body)
    path.write_text(json.dumps(body))


def point_data_at(index, name):
    body = json.loads(index.read_text())
    body["data"]["file"] = name
    sign(index, body)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_an_index_that_names_a_file_outside_is_refused_and_deletes_nothing(folder, victim, kind):
    checkpoint = train.Checkpoint(v=Variable(1.0))
    path = checkpoint.write(folder / "c")
    point_data_at(folder / "c.index.json", OUTSIDE[kind](victim, folder))
    with pytest.raises(CheckpointError, match="is not the name of a file in the same folder"):
        checkpoint.read(path)
    checkpoint.write(path)
    assert victim.read_text() == "all that I have"
    checkpoint.read(path).assert_consumed()


def test_an_index_that_names_a_neighbour_does_not_delete_it(folder):
    checkpoint = train.Checkpoint(v=Variable(1.0))
    path = checkpoint.write(folder / "c")
    neighbour = folder / "thesis.txt"
    neighbour.write_text("mine")
    point_data_at(folder / "c.index.json", "thesis.txt")
    checkpoint.write(path)
    point_data_at(folder / "c.index.json", "thesis.txt")
    files.remove_files(path)
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize("user", ["manager", "BackupAndRestore"])
def test_a_state_file_that_names_a_checkpoint_outside_is_refused(tmp_path, folder, kind, user):
    outside = tmp_path / "outside"
    path = train.Checkpoint(v=Variable(1.0)).save(outside / "c")
    before = sorted(outside.iterdir())
    folder.mkdir()
    name = OUTSIDE[kind](Path(path), folder)
    names = [name, name, name]
    (folder / "checkpoint").write_text(json.dumps({"latest": names[-1], "all": names}))
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint in the same folder"):
        if user == "manager":
            train.CheckpointManager(train.Checkpoint(v=Variable(2.0)), folder, 1).save()
        else:
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            backup = keras.callbacks.BackupAndRestore(folder)
            model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[backup])
    assert sorted(outside.iterdir()) == before


def test_an_index_with_a_wrong_type_at_any_node_raises_checkpoint_error(folder):
    variables = [Variable(np.ones(3)), Variable(2.0)]
    path = train.Checkpoint(v=variables).write(folder / "c")
    index = folder / "c.index.json"
    body = json.loads(index.read_text())
    refused = 0
    for _, _, changed in wrong_copies(body):
        if isinstance(changed, dict):
            sign(index, changed)
        else:
            index.write_text(json.dumps(changed))
        target = train.Checkpoint(v=[Variable(np.zeros(3)), Variable(0.0)])
        try:
            # A file that is still a checkpoint, but of other objects, is refused here.
            target.read(path).assert_consumed()
        except CheckpointError:
            refused += 1
        with contextlib.suppress(files.UnreadableCheckpointError):
            assert files.is_complete(path) in (True, False)
    assert refused > 200


@pytest.mark.parametrize(
    "raw",
    [b"", b"[" * 100_000, b'{"format":' * 100_000, b"1" * 10_000, b"\xff", b"NaN", b"{}", b"[]"],
    ids=lambda raw: repr(raw[:12]),
)
@pytest.mark.parametrize("name", ["c-1.index.json", "checkpoint"])
def test_a_file_that_is_something_else_raises_checkpoint_error(folder, name, raw):
    checkpoint = train.Checkpoint(v=Variable(1.0))
    path = checkpoint.save(folder / "c")
    (folder / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged|not the index"):
        checkpoint.restore(path if name != "checkpoint" else train.latest_checkpoint(folder))


def test_a_state_file_with_a_wrong_type_at_any_node_raises_checkpoint_error(folder):
    checkpoint = train.Checkpoint(v=Variable(1.0))
    checkpoint.save(folder / "c")
    checkpoint.save(folder / "c")
    state = folder / "checkpoint"
    body = json.loads(state.read_text())
    for path, wrong, changed in wrong_copies(body):
        state.write_text(json.dumps(changed))
        try:
            found = train.latest_checkpoint(folder)
        except CheckpointError:
            continue
        # Only other checkpoints' names are not damage.
        assert wrong == "x" or (path == ("all",) and wrong == [])
        assert found in (None, str(folder / "c-1"), str(folder / "c-2"))


def test_truncated_and_flipped_files_raise_checkpoint_error(folder):
    checkpoint = train.Checkpoint(v=Variable(np.arange(5.0)))
    path = checkpoint.save(folder / "c")
    random = np.random.default_rng(3)
    for name in ("c-1.index.json", "c-1.safetensors"):
        whole = (folder / name).read_bytes()
        for place in random.integers(0, len(whole), 40):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << int(random.integers(8))
            for damaged in (whole[:place], bytes(flipped)):
                (folder / name).write_bytes(damaged)
                with pytest.raises(CheckpointError):
                    checkpoint.restore(path)
        (folder / name).write_bytes(whole)
    checkpoint.restore(path).assert_consumed()


def test_data_with_the_right_digest_that_is_no_safetensors_raises_checkpoint_error(folder):
    import hashlib

    checkpoint = train.Checkpoint(v=Variable(np.arange(5.0)))
    path = checkpoint.write(folder / "c")
    index, data = folder / "c.index.json", folder / "c.safetensors"
    whole, body = data.read_bytes(), json.loads(index.read_text())
    for damaged in (b"", whole[:20], b"\xff" * 50, whole.replace(b'"F64"', b'"F99"')):
        data.write_bytes(damaged)
        body["data"].update(bytes=len(damaged), sha256=hashlib.sha256(damaged).hexdigest())
        sign(index, body)
        with pytest.raises(CheckpointError, match="is not in the safetensors format"):
            checkpoint.read(path)


@pytest.mark.parametrize("name", ["c.index.json", "c.safetensors", "checkpoint"])
def test_a_folder_in_the_place_of_a_file_raises_checkpoint_error(folder, name):
    checkpoint = train.Checkpoint(v=Variable(1.0))
    path = checkpoint.write_recorded(folder / "c", True)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(CheckpointError):
        checkpoint.read(path if name != "checkpoint" else train.latest_checkpoint(folder))
