"""The files of checkpoints: damage is found, and an interrupted write harms nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pycollective import train
from pycollective.errors import CheckpointError
from pycollective.tensor import Variable
from pycollective.train import files


@pytest.fixture
def two(tmp_path):
    """Save a checkpoint of 1s, then one of 2s; return the checkpoint, its variable and the paths."""
    weight = Variable(np.ones(1000, np.float32))
    checkpoint = train.Checkpoint(weight=weight)
    first = checkpoint.save(tmp_path / "ckpt")
    weight.assign(np.full(1000, 2, np.float32))
    return checkpoint, weight, first, checkpoint.save(tmp_path / "ckpt")


def truncate(path):
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])


def flip_a_byte(path):
    data = bytearray(Path(path).read_bytes())
    data[-5] ^= 1
    Path(path).write_bytes(bytes(data))


def change_a_number(path):
    text = Path(path).read_text()
    assert '"weight": 2' in text
    Path(path).write_text(text.replace('"weight": 2', '"weight": 1'))


@pytest.mark.parametrize("strange", [3, 1.5, ["a"], object()])
def test_object_that_is_no_path_raises_type_error(strange):
    checkpoint = train.Checkpoint(weight=Variable(1.0))
    for name, call in (
        ("save_path", checkpoint.restore),
        ("save_path", checkpoint.read),
        ("file_prefix", checkpoint.save),
        ("file_prefix", checkpoint.write),
        ("checkpoint_dir", train.latest_checkpoint),
        ("checkpoint_dir", train.get_checkpoint_state),
        ("directory", lambda path: train.CheckpointManager(checkpoint, path, 3)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be a path, not "):
            call(strange)


def test_path_of_bytes_is_that_of_text(tmp_path):
    checkpoint = train.Checkpoint(weight=Variable(1.0))
    path = checkpoint.save(os.fsencode(tmp_path / "ckpt"))
    assert path == str(tmp_path / "ckpt-1") == train.latest_checkpoint(os.fsencode(tmp_path))


def test_folder_that_is_a_file_raises_not_a_directory_error(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    checkpoint = train.Checkpoint(weight=Variable(1.0))
    with pytest.raises(NotADirectoryError, match="directory is a file"):
        train.CheckpointManager(checkpoint, file, 3)
    for prefix in (file / "ckpt", file / "folder" / "ckpt"):
        with pytest.raises(NotADirectoryError, match="a file is in the place of a folder"):
            checkpoint.save(prefix)
    assert file.read_text() == "mine" and int(checkpoint.save_counter) == 0


DAMAGES = {
    "data file truncated": ("safetensors", truncate, "bytes, its index says"),
    "data file changed": ("safetensors", flip_a_byte, "changed or damaged"),
    "data file missing": ("safetensors", os.unlink, "is missing"),
    "data file empty": ("safetensors", lambda p: Path(p).write_bytes(b""), "0 bytes"),
    "index truncated": ("index.json", truncate, "truncated or damaged"),
    "index missing": ("index.json", os.unlink, "there is no checkpoint"),
    "index changed": ("index.json", change_a_number, "checksum is wrong"),
    "index of another kind": ("index.json", lambda p: Path(p).write_text("[]"), "is not the index"),
    "index not text": ("index.json", lambda p: Path(p).write_bytes(b"\xff\xfe\0"), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_that_names_the_intact_checkpoint(two, damage):
    checkpoint, weight, first, second = two
    suffix, harm, text = DAMAGES[damage]
    harm(f"{second}.{suffix}")
    before = weight.numpy()
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(second)
    assert text in str(error.value)
    assert f"intact other checkpoint is {first!r}" in str(error.value)
    np.testing.assert_array_equal(weight.numpy(), before)
    checkpoint.restore(first).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), np.ones(1000))


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d != "data file changed"])
def test_latest_checkpoint_skips_incomplete_checkpoints(two, damage, caplog):
    _, _, first, second = two
    suffix, harm, _ = DAMAGES[damage]
    harm(f"{second}.{suffix}")
    assert train.latest_checkpoint(os.path.dirname(second)) == first
    assert second in caplog.text


def test_a_newer_format_is_refused(two):
    checkpoint, _, _, second = two
    path = Path(second + ".index.json")
    body = json.loads(path.read_text())
    body.pop("index_sha256")
    body["version"] = 2
    body["index_sha256"] = files._index_digest(body)
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="version 2 of the format"):
        checkpoint.restore(second)


def test_restore_of_a_missing_checkpoint_raises(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint.*No other intact"):
        train.Checkpoint(v=Variable(1.0)).restore(tmp_path / "none" / "c-1")


def test_latest_checkpoint_without_a_checkpoint_is_none(tmp_path):
    assert train.latest_checkpoint(tmp_path) is None
    assert train.latest_checkpoint(tmp_path / "missing") is None
    train.Checkpoint(v=Variable(1.0)).write(tmp_path / "x")
    assert train.latest_checkpoint(tmp_path) is None


def test_deleted_checkpoints_are_removed_from_the_state_file(two):
    checkpoint, _, first, second = two
    files.remove_files(first)
    third = checkpoint.save(Path(first).parent / "ckpt")
    state = train.get_checkpoint_state(Path(first).parent)
    assert state == (third, [second, third])


def test_damaged_state_file_is_an_error(two):
    directory = Path(two[3]).parent
    (directory / "checkpoint").write_text('{"latest": ')
    with pytest.raises(CheckpointError, match="delete it"):
        train.latest_checkpoint(directory)


def test_a_moved_directory_still_works(two, tmp_path_factory):
    checkpoint, weight, _, second = two
    target = tmp_path_factory.mktemp("moved") / "here"
    os.rename(os.path.dirname(second), target)
    path = train.latest_checkpoint(target)
    assert path == str(target / "ckpt-2")
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), np.full(1000, 2))


# Interrupted writes -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", range(7))
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_at_any_step_leaves_the_previous_checkpoint(two, monkeypatch, step, call):
    checkpoint, weight, _, second = two
    weight.assign(np.full(1000, 3, np.float32))
    counted = 0
    real = getattr(os, step)

    def failing(*args):
        nonlocal counted
        counted += 1
        if counted == call + 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, step, failing)
    try:
        path = checkpoint.save(Path(second).parent / "ckpt")
    except OSError:
        expected, value = second, 2
        assert int(checkpoint.save_counter) == 2
    else:
        # The save has fewer steps: nothing failed.
        assert call >= {"fsync": 6, "replace": 3}[step]
        expected, value = path, 3
    monkeypatch.undo()
    latest = train.latest_checkpoint(Path(second).parent)
    # After the last rename the new checkpoint is complete, whatever fails then.
    if latest != expected:
        assert step == "fsync" and call == 5
        value = 3
    checkpoint.restore(latest).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), np.full(1000, value))
    assert not list(Path(second).parent.glob("*.unfinished"))


@pytest.mark.parametrize("call", range(4))
def test_an_error_while_a_checkpoint_is_overwritten_leaves_the_old_one(tmp_path, monkeypatch, call):
    weight = Variable(np.ones(10))
    checkpoint = train.Checkpoint(weight=weight)
    path = checkpoint.write(tmp_path / "same")
    weight.assign(np.full(10, 5.0))
    real, counted = os.fsync, 0

    def failing(descriptor):
        nonlocal counted
        counted += 1
        if counted == call + 1:
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.write(path)
    monkeypatch.undo()
    checkpoint.read(path).assert_consumed()
    # The last fsync is that of the directory, after the new index was put in place.
    np.testing.assert_array_equal(weight.numpy(), np.full(10, 5.0 if call == 3 else 1.0))


def test_overwriting_leaves_one_data_file(tmp_path):
    weight = Variable(np.ones(10))
    checkpoint = train.Checkpoint(weight=weight)
    for value in (1.0, 2.0, 2.0, 3.0):
        weight.assign(np.full(10, value))
        path = checkpoint.write(tmp_path / "same")
        weight.assign(np.zeros(10))
        checkpoint.read(path).assert_consumed()
        np.testing.assert_array_equal(weight.numpy(), np.full(10, value))
        assert len(list(tmp_path.glob("*.safetensors"))) == 1


KILLED = """
import os, signal, sys
import numpy as np
from pycollective import train
from pycollective.tensor import Variable

directory, step, call = sys.argv[1], sys.argv[2], int(sys.argv[3])
weight = Variable(np.zeros(5000))
checkpoint = train.Checkpoint(weight=weight)
for value in (1, 2):
    weight.assign(np.full(5000, float(value)))
    checkpoint.save(directory + "/ckpt")
real, counted = getattr(os, step), 0

def killing(*args):
    global counted
    counted += 1
    if counted == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

setattr(os, step, killing)
weight.assign(np.full(5000, 3.0))
checkpoint.save(directory + "/ckpt")
"""


@pytest.mark.parametrize(
    ("step", "call", "value"),
    [
        ("fsync", 1, 2),  # The data is written, but not on the disk.
        ("replace", 1, 2),  # The data has its temporary name.
        ("replace", 2, 2),  # The data file exists, the index does not.
        ("replace", 3, 2),  # The checkpoint exists, but is not recorded.
        ("fsync", 6, 3),  # The checkpoint is recorded.
    ],
)
def test_killed_process_leaves_a_checkpoint_to_continue_from(tmp_path, step, call, value):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), step, str(call)],
        cwd=tmp_path,  # so that the tests' package is imported, not the sources in the present folder
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    weight = Variable(np.zeros(5000))
    checkpoint = train.Checkpoint(weight=weight)
    checkpoint.restore(train.latest_checkpoint(tmp_path)).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), np.full(5000, float(value)))
    # Training continues, and writes the interrupted checkpoint's number again.
    weight.assign(np.full(5000, 9.0))
    path = checkpoint.save(tmp_path / "ckpt")
    assert path == str(tmp_path / f"ckpt-{value + 1}")
    weight.assign(np.zeros(5000))
    checkpoint.restore(train.latest_checkpoint(tmp_path)).assert_consumed()
    np.testing.assert_array_equal(weight.numpy(), np.full(5000, 9.0))
    assert len(list(tmp_path.glob("*.safetensors"))) == value + 1


def test_data_of_a_killed_overwrite_is_removed_by_the_next_one(tmp_path):
    weight = Variable(np.ones(10))
    checkpoint = train.Checkpoint(weight=weight)
    path = checkpoint.write(tmp_path / "same")
    orphan, other = tmp_path / "same.0123456789abcdef.safetensors", tmp_path / "same.x.safetensors"
    for file in (orphan, other):
        file.write_bytes(b"data without an index")
    checkpoint.write(path)
    assert not orphan.exists() and other.exists()
    checkpoint.read(path).assert_consumed()


def test_damaged_state_file_beside_a_damaged_checkpoint_names_the_checkpoint(two):
    checkpoint, _, _, second = two
    truncate(f"{second}.safetensors")
    (Path(second).parent / "checkpoint").write_text("{")
    with pytest.raises(
        CheckpointError,
        match=r"its index says.*No other intact checkpoint of this name is recorded",
    ):
        checkpoint.restore(second)


def run_together(code, folder, *names):
    """Run a program once for each name, all at the same time."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), name],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in names
    ]
    try:
        for process in started:
            assert process.stdout.readline() == b"ready\n"
        for process in started:
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in started:
            assert process.wait(60) == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_concurrent_writers_of_one_folder_lose_no_entry(tmp_path):
    code = """
import sys
from pycollective import train
from pycollective.tensor import Variable

checkpoint = train.Checkpoint(v=Variable(0.0))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(15):
    checkpoint.save(sys.argv[1] + "/" + sys.argv[2])
"""
    run_together(code, tmp_path, "a", "b")
    paths = train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    assert sorted(paths) == sorted(str(tmp_path / f"{n}-{i}") for n in "ab" for i in range(1, 16))


def test_concurrent_managers_with_the_same_names_leave_whole_checkpoints(tmp_path):
    code = """
import sys
import numpy as np
from pycollective import train
from pycollective.tensor import Variable

weight = Variable(np.full(1000, float(sys.argv[2])))
manager = train.CheckpointManager(train.Checkpoint(weight=weight), sys.argv[1], 2)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(15):
    manager.save()
"""
    run_together(code, tmp_path, "1", "2")
    paths = train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    assert len(paths) == 2
    weight = Variable(np.zeros(1000))
    for path in paths:
        train.Checkpoint(weight=weight).restore(path).assert_consumed()
        assert weight.numpy()[0] in (1, 2) and len(set(weight.numpy())) == 1
    assert len(list(tmp_path.iterdir())) == 5


# CheckpointManager --------------------------------------------------------------------------------


def test_manager_keeps_the_last_checkpoints(tmp_path):
    weight = Variable(0.0)
    manager = train.CheckpointManager(train.Checkpoint(w=weight), tmp_path, max_to_keep=2)
    assert manager.latest_checkpoint is None and manager.checkpoints == []
    assert manager.restore_or_initialize() is None
    for value in range(4):
        weight.assign(float(value))
        manager.save()
    assert manager.checkpoints == [str(tmp_path / "ckpt-3"), str(tmp_path / "ckpt-4")]
    state = train.get_checkpoint_state(tmp_path)
    assert state.all_model_checkpoint_paths == manager.checkpoints
    assert manager.latest_checkpoint == train.latest_checkpoint(tmp_path) == manager.checkpoints[1]
    assert len(list(tmp_path.iterdir())) == 5
    weight.assign(-1.0)
    assert manager.restore_or_initialize() == manager.checkpoints[1]
    assert float(weight) == 3


def test_manager_takes_over_a_directory_and_its_numbers(tmp_path):
    weight = Variable(1.0)
    train.CheckpointManager(train.Checkpoint(w=weight), tmp_path, 3, "model").save()
    checkpoint = train.Checkpoint(w=Variable(0.0))
    manager = train.CheckpointManager(checkpoint, tmp_path, 3, checkpoint_name="model")
    assert manager.restore_or_initialize() == str(tmp_path / "model-1")
    assert manager.save() == str(tmp_path / "model-2")
    assert manager.save(checkpoint_number=10) == str(tmp_path / "model-10")
    assert len(manager.checkpoints) == 3


@pytest.mark.parametrize("name", ["sub/ckpt", "../ckpt", ""])
def test_manager_rejects_names_outside_its_directory(tmp_path, name):
    with pytest.raises(ValueError, match="must be the beginning of a file name"):
        train.CheckpointManager(train.Checkpoint(v=Variable(1.0)), tmp_path, 1, name)


@pytest.mark.parametrize("count", [0, -1])
def test_manager_rejects_keeping_none(tmp_path, count):
    with pytest.raises(ValueError, match=f"got {count}"):
        train.CheckpointManager(train.Checkpoint(v=Variable(1.0)), tmp_path, count)


def test_manager_without_a_limit_keeps_all_checkpoints(tmp_path):
    manager = train.CheckpointManager(train.Checkpoint(v=Variable(1.0)), tmp_path, None)
    for _ in range(5):
        manager.save()
    assert len(manager.checkpoints) == 5
    state = train.get_checkpoint_state(tmp_path)
    assert state.model_checkpoint_path == manager.checkpoints[-1]
    assert state.all_model_checkpoint_paths == manager.checkpoints


def test_manager_leaves_checkpoints_of_other_names(tmp_path, caplog):
    variable = Variable(1.0)
    best = train.Checkpoint(v=variable).save(tmp_path / "best")
    manager = train.CheckpointManager(train.Checkpoint(v=variable), tmp_path, 2)
    assert manager.restore_or_initialize() is None and "it has 'best-1'" in caplog.text
    for _ in range(4):
        manager.save()
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-3", "ckpt-4"]
    train.Checkpoint(v=variable).restore(best).assert_consumed()
    assert best in train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths


def test_checkpoint_of_a_newer_version_is_not_skipped(two):
    _, weight, first, second = two
    index = Path(f"{second}.index.json")
    body = json.loads(index.read_text())
    body["version"] = 2
    del body["index_sha256"]
    body["index_sha256"] = files._index_digest(body)
    index.write_text(json.dumps(body))
    folder = Path(second).parent
    manager = train.CheckpointManager(train.Checkpoint(weight=weight), folder, 1)
    for call in (manager.restore_or_initialize, lambda: train.latest_checkpoint(folder)):
        with pytest.raises(CheckpointError, match="has version 2 of the format"):
            call()
    manager.save(checkpoint_number=5)
    assert index.exists() and not files.has_files(first)


@pytest.mark.parametrize("kept", [[files.DATA_SUFFIX], [files.DATA_SUFFIX, files.INDEX_SUFFIX]])
def test_manager_deletes_what_an_interrupted_call_has_left(two, kept):
    """The interruption is in the deletion of the first checkpoint."""
    _, weight, first, second = two
    folder = Path(second).parent
    for suffix in {files.DATA_SUFFIX, files.INDEX_SUFFIX} - set(kept):
        os.unlink(first + suffix)
    manager = train.CheckpointManager(train.Checkpoint(weight=weight), folder, 1)
    manager.save(checkpoint_number=3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint",
        "ckpt-3.index.json",
        "ckpt-3.safetensors",
    ]


def test_save_replaces_a_damaged_record(two, caplog):
    checkpoint, _, first, second = two
    folder = Path(second).parent
    (folder / "checkpoint").write_text("{")
    third = checkpoint.save(folder / "ckpt")
    assert "is damaged" in caplog.text
    assert train.get_checkpoint_state(folder).all_model_checkpoint_paths == [third]
    assert files.is_complete(first) and files.is_complete(second)


def test_record_of_tensorflow_is_not_replaced(two):
    checkpoint, *_, second = two
    record = Path(second).parent / "checkpoint"
    text = 'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n'
    record.write_text(text)
    with pytest.raises(CheckpointError, match="use another folder"):
        checkpoint.save(record.parent / "ckpt")
    assert record.read_text() == text


def test_names_that_could_not_be_read_back(tmp_path):
    checkpoint = train.Checkpoint(**{"__metadata__": Variable(3.0)})
    path = checkpoint.save(tmp_path / "c")
    checkpoint.restore(path).assert_consumed()
    with pytest.raises(ValueError, match="cannot be the name"):
        checkpoint.save(tmp_path / "a\\b")


def test_data_file_that_is_a_pipe_raises(two):
    checkpoint, *_, second = two
    os.unlink(f"{second}.safetensors")
    os.mkfifo(f"{second}.safetensors")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        checkpoint.restore(second)
