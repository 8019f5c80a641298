"""Parameters of tests of which only some are fast."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_fast(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the cases (values, or tuples of values), and mark all but the fast ones as slow."""
    return [
        pytest.param(
            *(values := case if isinstance(case, tuple) else (case,)),
            id="-".join(map(str, values)),
            marks=[] if case in fast else pytest.mark.slow,
        )
        for case in cases
    ]
