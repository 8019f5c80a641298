"""Graphs of layers, recorded by layer calls on symbolic tensors.

`symbols` has symbolic tensors and recorded calls, `operators` the operations of symbolic tensors.
`order` finds and sorts the calls between inputs and outputs, and `graph` runs them.
"""

from __future__ import annotations

from pycollective.keras.graph import operators as operators  # symbolic tensors find them by name
from pycollective.keras.graph.symbols import KerasTensor

__all__ = ["KerasTensor"]
