"""The table of environment variables is complete, and finds a misspelt name."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from pycollective import environment
from pycollective.environment import VARIABLES

ROOT = Path(__file__).parents[2]


def test_table_has_every_variable_that_the_package_names():
    named = {"PYCOLLECTIVE_ARENA"}  # read in environment.py
    for file in (ROOT / "pycollective").rglob("*.py"):
        if file.name != "environment.py":
            found = re.findall(r"[\"'](PYCOLLECTIVE_[A-Z_]*[A-Z])[\"']", file.read_text("utf-8"))
            named.update(found)
    for file in (ROOT / "csrc").rglob("*.c*"):
        named.update(re.findall(r"getenv\(\"(PYCOLLECTIVE_[A-Z_]+)", file.read_text("utf-8")))
    assert named == set(VARIABLES)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PYCOLLECTIVE_ADRESS", "PYCOLLECTIVE_ADDRESS"),
        ("PYCOLLECTIVE_RANKS", "PYCOLLECTIVE_RANK"),
        ("PYCOLLECTIVE_SIZ", "PYCOLLECTIVE_SIZE"),
        ("PYCOLLECTIVE_SECRETS", "PYCOLLECTIVE_SECRET"),
        ("PYCOLLECTIVE_TLS_CERTS", "PYCOLLECTIVE_TLS_CERT"),
        ("PYCOLLECTIVE_TRANSPROT", "PYCOLLECTIVE_TRANSPORT"),
        ("PYCOLLECTIVE_SOCKET_IFNAMES", "PYCOLLECTIVE_SOCKET_IFNAME"),
    ],
)
def test_misspelt_name_is_an_error_with_the_right_one(name, meant):
    with pytest.raises(ValueError, match=rf"{name} is set, .* did you mean {meant}\?"):
        environment.check({name: "1"})


def test_unknown_name_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(environment, "_warned", set())
    caplog.set_level(logging.WARNING, "pycollective")
    known = {**dict.fromkeys(VARIABLES, ""), "PYCOLLECTIVE_TEST_RAY_MACHINES": "1"}
    environment.check({**known, "OTHERS_RANKS": "1"})
    assert not caplog.messages
    for _ in range(2):
        environment.check({**known, "PYCOLLECTIVE_WEATHER": "1"})
    assert caplog.messages == [
        "PYCOLLECTIVE_WEATHER is set, but pycollective reads no such variable"
    ]


@pytest.mark.parametrize("text", ["", "x", "-1", "4", "1.0", "²", "１", "9" * 5000, "0x1"])
def test_number_out_of_range_is_named(text):
    with pytest.raises(ValueError, match=r"\AA='.{,101}'?…? is not a number from 1 to 3\Z"):
        environment.number({"A": text}, "A", 1, 3)
    assert environment.number({"A": " 3 "}, "A", 1, 3) == 3


def test_enumerated_names_make_a_subject_and_its_verb():
    texts = [environment.enumerated(names) for names in (["A"], ["A", "B"], "ABC")]
    assert texts == ["A is", "A and B are", "A, B and C are"]
