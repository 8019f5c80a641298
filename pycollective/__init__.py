"""Collective communication for NumPy and CuPy arrays, and data-parallel training on it."""

from __future__ import annotations
