"""Files that appear whole or not at all; only the files of killed writers are deleted."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from pycollective import atomic_files, keras, train
from pycollective.atomic_files import locked, replacing, write_atomically
from pycollective.tensor import Variable

KILLED = """
import os, signal, sys
from pycollective import keras, train
from pycollective.tensor import Variable

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "checkpoint":
    train.Checkpoint(v=Variable(1.0)).save("ckpt")
else:
    getattr(model, sys.argv[1])("m.keras" if sys.argv[1] == "save" else "m.weights.h5")
"""


@pytest.mark.parametrize("call", ["save", "save_weights", "checkpoint"])
def test_next_save_deletes_the_unfinished_file_of_a_killed_save(tmp_path, call):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, call],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert len(list(tmp_path.glob("*.unfinished"))) == 1
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if call == "save":
        model.save(tmp_path / "m.keras")
    elif call == "save_weights":
        model.save_weights(tmp_path / "m.weights.h5")
    else:
        train.Checkpoint(v=Variable(1.0)).save(tmp_path / "ckpt")
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_writer_leaves_the_temporary_files_of_live_writers_alone(tmp_path):
    with replacing(str(tmp_path / "slow")) as file:
        file.write(b"first half")
        write_atomically(str(tmp_path / "quick"), b"whole")
        write_atomically(str(tmp_path / "slow"), b"of another writer")
        assert len(list(tmp_path.glob("*.unfinished"))) == 1
        file.write(b", second half")
    assert (tmp_path / "slow").read_bytes() == b"first half, second half"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["quick", "slow"]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    for name in ("a" * 255, "a" * 228, "ä" * 127 + "b"):
        write_atomically(str(tmp_path / name), b"whole")
        assert (tmp_path / name).read_bytes() == b"whole"
    with pytest.raises(OSError, match="File name too long: .*aaaa'$"):
        write_atomically(str(tmp_path / ("a" * 256)), b"")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_writer_leaves_files_of_other_programs_alone(tmp_path):
    names = ["novel.unfinished", "a.0123.unfinished", "a.0123456789abcdef.unfinished.txt"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "x.0123456789abcdef.unfinished").mkdir()
    os.symlink(tmp_path / names[0], tmp_path / "y.0123456789abcdef.unfinished")
    write_atomically(str(tmp_path / "z"), b"")
    assert len(list(tmp_path.iterdir())) == 6


def test_without_locks_only_old_temporary_files_are_deleted(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    old, fresh = (tmp_path / f"{n}.0123456789abcdef.unfinished" for n in "ab")
    for path in (old, fresh):
        path.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    train.Checkpoint(v=Variable(1.0)).save(tmp_path / "c")
    assert not old.exists() and fresh.exists()


def test_a_temporary_file_taken_for_an_abandoned_one_is_made_anew(tmp_path, monkeypatch):
    real, names = fcntl.flock, []

    def late(descriptor, operation):
        if not names:
            names.extend(tmp_path.glob("*.unfinished"))
            atomic_files._remove_if_abandoned(str(names[0]))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write_atomically(str(tmp_path / "x"), b"whole")
    assert names and (tmp_path / "x").read_bytes() == b"whole"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_in_the_block_leaves_the_old_file(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="meanwhile"), replacing(str(tmp_path / "x")) as file:
        file.write(b"new")
        raise RuntimeError("meanwhile")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


def test_locked_lets_one_thread_in_at_a_time(tmp_path):
    inside, counts = 0, []

    def enter():
        nonlocal inside
        for _ in range(20):
            with locked(str(tmp_path)):
                inside += 1
                counts.append(inside)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(counts) == 80 and max(counts) == 1


def test_locked_gives_up_at_its_deadline_and_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "_LOCK_SECONDS", 0.05)
    with locked(str(tmp_path)):
        text = f"another process has been writing in {str(tmp_path)!r}"
        with pytest.raises(TimeoutError, match=re.escape(text)):
            train.Checkpoint(v=Variable(1.0)).save(tmp_path / "c")
    train.Checkpoint(v=Variable(1.0)).save(tmp_path / "c")


def test_locked_is_free_again_although_a_forked_child_lives(tmp_path):
    with locked(str(tmp_path)):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with locked(str(tmp_path)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_pipe_is_written_and_not_replaced(tmp_path):
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_atomically(str(pipe), b"data")
    reader.join(20)
    assert received == [b"data"]
    assert pipe.is_fifo()


def test_link_stays_and_its_target_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(str(link), b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_replaced_file_keeps_its_mode(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write_atomically(str(path), b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
