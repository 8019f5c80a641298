"""Digests of scheduled functions: equal for the same program, different for different programs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

import pycollective as tf
from pycollective.distribute.function_digests import digest_of, globals_of, take_digests

PROGRAM = """
import functools
import types
import numpy as np
import pycollective as tf
import helpers

RATE = 0.5
SETTINGS = {"size": (3, "a"), "kinds": {"x", "y", "z"}}
NUMBER = np.float32(2.5)
data = list(range(2000))
missing = object()

def times(x):
    return x * SCALE

SCALE = 2

def again(x):
    return again(x - 1) if x > 0 else times(x)

def decorated(inner):
    @functools.wraps(inner)
    def outer(*args):
        return inner(*args)
    return outer

@decorated
def wrapped(x):
    return x + 10

@functools.lru_cache
def cached(x):
    return x + 20

@tf.function
def inside(x):
    return x + 30

class Base:
    width = 5
    def base(self):
        return 40

class Layer(Base):
    def __call__(self, x):
        return x + self.part
    @property
    def part(self):
        return 50
    @staticmethod
    def still(x):
        return x + 60
    @tf.function
    def decorated(self, x):
        return x * 1.5

layer = Layer()
part = functools.partial(times, 70)
TABLE = [times, {"plus": lambda x: x + 80}]

def made(bound):
    @tf.function
    def step(x, factor=90, *, other=100):
        class Local:
            first = 1
            def method(self):
                return 110
        def local(x):
            return x in {"p", "q", "r"} and RATE
        y = again(x) + wrapped(x) + cached(x) + inside(x) + layer(x) + part() + bound
        return y + TABLE[0](x) + SETTINGS["size"][0] + NUMBER + len(data) + helpers.plus(x)
    return step

step = made(120)
"""
HELPERS = """
OFFSET = 130

def plus(x):
    return x + OFFSET

def unused(x):
    return x + 140
"""


@pytest.fixture
def step_of(tmp_path, monkeypatch):
    """Return a function that imports a program with its helpers, and returns the program's `step`."""
    folders = (tmp_path / f"program{number}" for number in range(100))

    def load(program=PROGRAM, helpers=HELPERS):
        folder = next(folders)
        folder.mkdir()
        for name, text in (("helpers", helpers), ("program", program)):
            (folder / f"{name}.py").write_text(text)
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return module.step

    return load


CHANGES = [
    ("RATE = 0.5", "RATE = 0.25"),
    ('(3, "a")', '(4, "a")'),
    ('"y", "z"}', '"y", "w"}'),
    ("float32(2.5)", "float32(3.5)"),
    ("range(2000)", "range(2001)"),
    ("x * SCALE", "x / SCALE"),
    ("SCALE = 2", "SCALE = 3"),
    ("if x > 0", "if x > 1"),
    ("inner(*args)", "inner(*args) + 1"),
    ("width = 5", "width = 6"),
    ("x * 1.5", "x * 2.5"),
    ("layer = Layer()", "layer = Base()"),
    ('{"p", "q", "r"}', '{"p", "q", "s"}'),
    ("*, other", "other"),
    *[(f"{number}", f"{number + 1}") for number in range(10, 140, 10)],
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=[before for before, _ in CHANGES])
def test_digests_of_different_programs_differ(step_of, before, after):
    program, helpers = (text.replace(before, after) for text in (PROGRAM, HELPERS))
    assert (program, helpers) != (PROGRAM, HELPERS)
    assert digest_of(step_of(program, helpers)) != digest_of(step_of())


def test_digest_of_the_same_program_at_another_place_is_equal(step_of):
    program = "# a comment\n\n" + PROGRAM.replace("        class Local", "\n        class Local")
    program = program.replace("missing = object()", "missing = object(), 1")
    helpers = HELPERS.replace("x + 140", "x + 141")  # a function that the step does not use
    assert digest_of(step_of(program, helpers)) == digest_of(step_of())


def test_digest_is_equal_in_processes_with_other_orders_of_sets(tmp_path):
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "program.py").write_text(
        PROGRAM
        + "from pycollective.distribute.function_digests import digest_of\nprint(digest_of(step))\n"
    )
    found = set()
    for seed in ("1", "2", "3"):
        path = os.pathsep.join(sys.path)
        ended = subprocess.run(
            [sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        found.add(ended.stdout)
    assert len(found) == 1


def test_globals_of_a_function_are_those_of_the_program_that_it_uses(step_of):
    names = ["NUMBER", "RATE", "SCALE", "SETTINGS", "TABLE", "cached", "data", "layer", "part"]
    assert globals_of(step_of()) == ["helpers.OFFSET", *(f"program.{name}" for name in names)]


def test_digests_that_were_taken_do_not_change_with_globals(step_of):
    step = step_of()
    take_digests()
    digest = digest_of(step)
    step.python_function.__globals__["RATE"] = 0.75
    assert digest_of(step) == digest != digest_of(tf.function(step.python_function))


def test_digest_of_an_unassigned_variable_and_a_large_number_works():
    @tf.function
    def step():
        return later, 10**5000, LARGE

    digest = digest_of(step)
    later = 1
    assert digest != digest_of(tf.function(step.python_function))


LARGE = 10**5000
