"""Schedules as text."""

from __future__ import annotations

from pycollective._core import Schedule


def title_of(name: str, made: Schedule) -> str:
    """Return a line with an algorithm's name and the size of its schedule."""
    return f"{name} {made.collective.name}: {len(made.steps)} ranks, {made.chunks} chunks"


def text_of(name: str, made: Schedule) -> str:
    """Return the steps of every rank as text, one step a line."""
    lines = [title_of(name, made)]
    for rank, steps in enumerate(made.steps):
        lines += [f"rank {rank}:"] + [f"  {k:3d}  {step}" for k, step in enumerate(steps)]
    return "\n".join(lines)
