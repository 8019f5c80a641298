"""Data sets of small images, each with a function ``load_data()``."""

from __future__ import annotations

from . import cifar10, digits, fashion_mnist, handwritten, mnist

__all__ = ["cifar10", "digits", "fashion_mnist", "handwritten", "mnist"]
