"""Data sets of small images, each with a function ``load_data()``."""

from __future__ import annotations

from . import digits, fashion_mnist, mnist

__all__ = ["digits", "fashion_mnist", "mnist"]
