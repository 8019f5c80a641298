"""The names of the package: `dir`, and the suggestions for a misspelt name."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

import pycollective as pc
from pycollective import other_names

MIGRATION = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "migration.md"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Comunicator", "Communicator"),
        ("localgroup", "local_group"),
        ("reduce_sums", "reduce_sum"),
        ("Allreduce", "Communicator.all_reduce"),
        ("all_redcue", "Communicator.all_reduce"),
        ("Broadcast", "Communicator.broadcast"),
        ("Bcast", "Communicator.broadcast"),
        ("Gather", "Communicator.gather"),
        ("Iallgatherv", "Communicator.all_gather"),
        ("isend", "Communicator.send"),
        ("Get_rank", "Communicator.rank"),
        ("Bcast_init", "Persistent"),
        ("all_gather_into_tensor", "Communicator.all_gather"),
        ("new_group", "Communicator.split"),
        ("init_process_group", "init"),
        ("grouped_allreduce", "Communicator.all_reduce_many"),
        ("allreduce_async", "Communicator.all_reduce"),
    ],
)
def test_getattr_misspelt_name_suggests_the_public_one(name, meant):
    text = f"^module 'pycollective' has no attribute '{name}'; did you mean '{meant}'[?]"
    text += r" pycollective.init\(\) returns a Communicator$" if "." in meant else "$"
    with pytest.raises(AttributeError, match=text):
        getattr(pc, name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Allreduce", "; did you mean 'all_reduce'[?]"),
        ("bcast", "; did you mean 'broadcast_object'[?]"),
        ("all_redcue", "; did you mean 'all_reduce'[?]"),
        ("zzzz", ""),
        ("_zzzz", ""),
    ],
)
def test_attribute_that_a_communicator_lacks_suggests_the_public_one(name, hint):
    (comm,) = pc.local_group(1)
    text = f"^'Communicator' object has no attribute '{name}'{hint}$"
    with pytest.raises(AttributeError, match=text):
        getattr(comm, name)


def test_getattr_name_like_no_other_suggests_nothing():
    with pytest.raises(AttributeError, match="^module 'pycollective' has no attribute 'zzzz'$"):
        pc.zzzz  # noqa: B018


def rows():
    """Return the rows of the tables of mpi4py, Horovod and torch.distributed: both columns."""
    tables = MIGRATION.read_text().partition("## cupyx.distributed")[0]
    return [line.split("|")[1:3] for line in tables.splitlines() if line.startswith("| `")]


def test_names_of_other_packages_are_in_a_row_of_the_migration_tables_with_ours():
    comm = pc.local_group(1)[0]
    for theirs, ours in other_names.OURS.items():
        name = ours.removeprefix("Communicator.")
        assert hasattr(comm if name != ours else pc, name)
        assert any(
            re.search(rf"\b{theirs}\b", left) and re.search(rf"\b{name}\b", right)
            for left, right in rows()
        ), theirs


#: Functions of the tables that have no function here, or belong to other objects.
WITHOUT = {*"Create Get_coords Get_cart_rank Shift Test Wait Start wait synchronize".split()}


def test_functions_of_the_migration_tables_have_a_suggestion():
    calls = {name for left, _ in rows() for name in re.findall(r"(?:`|\.)([A-Za-z_]+)\(", left)}
    known = {name for name in calls if hasattr(pc.Communicator, name) or hasattr(pc, name)}
    assert {name for name in calls - known if other_names.ours(name) is None} == WITHOUT


def test_scripts_name_tests_that_exist():
    tests = pathlib.Path(__file__).parents[1]
    scripts = tests.rglob("*.sh")
    named = {name for path in scripts for name in re.findall(r"::(test_\w+)", path.read_text())}
    exist = {
        name
        for path in tests.rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 4 and named <= exist


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


def test_packages_of_tensorflow_without_a_counterpart_are_named():
    for name in other_names.ABSENT:
        with pytest.raises(
            AttributeError, match=f"no counterpart of TensorFlow's package tf.{name}"
        ):
            getattr(pc, name)
    with pytest.raises(AttributeError, match="tf.keras.callbacks.TensorBoard writes summaries"):
        pc.summary  # noqa: B018
