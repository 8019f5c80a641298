"""Distributed datasets give each replica the elements that TensorFlow 2.21 has given it."""

from __future__ import annotations

import json

import pytest
from input_cases import FILE, elements, some_cases
from strategies import mirrored

import pycollective as tf

CASES = json.loads(FILE.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['source']} {case['policy']}")
def test_the_replicas_get_what_tensorflow_gives_them(case):
    assert elements(tf, mirrored(case["replicas"]), case) == case["elements"]


def test_the_record_is_of_these_cases():
    recorded = [{k: v for k, v in case.items() if k != "elements"} for case in CASES]
    assert recorded == some_cases(len(CASES))
