"""Measurements of collectives for ``pycollective bench``."""

from __future__ import annotations

from pycollective.benchmark.cases import COLLECTIVES, Case
from pycollective.benchmark.measure import Row, measure, memory_rate

__all__ = ["COLLECTIVES", "Case", "Row", "measure", "memory_rate"]
