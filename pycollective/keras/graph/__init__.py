"""Graphs of layers: what is recorded when layers are called on tensors that have no values yet.

`symbols` has those tensors and the record of a call; `operators` what operators of them are;
`order` which calls lie between inputs and outputs, in which order; `graph` runs them.
"""

from __future__ import annotations

from pycollective.keras.graph import operators as operators  # symbolic tensors find them by name
from pycollective.keras.graph.symbols import KerasTensor

__all__ = ["KerasTensor"]
