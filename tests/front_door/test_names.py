"""The names of the package: `dir`, and the suggestions for a misspelt name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import pycollective as pc


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Comunicator", "Communicator"),
        ("localgroup", "local_group"),
        ("reduce_sums", "reduce_sum"),
        ("Allreduce", "Communicator.all_reduce"),
        ("all_redcue", "Communicator.all_reduce"),
        ("Broadcast", "Communicator.broadcast"),
    ],
)
def test_getattr_misspelt_name_suggests_the_public_one(name, meant):
    text = f"^module 'pycollective' has no attribute '{name}'; did you mean '{meant}'[?]$"
    with pytest.raises(AttributeError, match=text):
        getattr(pc, name)


def test_getattr_name_like_no_other_suggests_nothing():
    with pytest.raises(AttributeError, match="^module 'pycollective' has no attribute 'zzzz'$"):
        pc.zzzz  # noqa: B018


def test_getattr_of_probes_is_an_attribute_error():
    for name in ("__wrapped__", "_repr_html_", "Allreduce"):
        assert not hasattr(pc, name)
        assert getattr(pc, name, 1) == 1


def test_dir_has_every_public_name_and_each_exists():
    assert {"init", "spawn", "Communicator", "distribute", "keras", "TensorSpec"} <= {*dir(pc)}
    assert [name for name in dir(pc) if not hasattr(pc, name)] == []


@pytest.mark.parametrize("name", ["Allreduce", "all_redcue"])
def test_misspelt_method_of_a_communicator_is_suggested_by_python(name, tmp_path):
    # Communicator has no __getattr__, which would slow every call down: CPython 3.11 caches the
    # lookup of a method only in classes without it.
    script = f"import pycollective as pc; pc.local_group(1)[0].{name}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Did you mean: 'all_reduce'?" in done.stderr
