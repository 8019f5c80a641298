"""Draw the pictures of the documentation: ``python docs/images/draw.py`` (needs the extra plot)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from pycollective import algorithms
from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send

FOLDER = Path(__file__).parent
matplotlib.rcParams["svg.hashsalt"] = "pycollective"  # the same identifiers in each run


@algorithm(num_chunks=2)
def line(rank, size):
    """Send two chunks up the line, one after the other, and send the sums down."""
    for c in range(2):
        if rank == 0:
            sum_so_far = input[c]
        else:
            yield recv_reduce(rank - 1, input[c], output[c])
            sum_so_far = output[c]
        if rank + 1 < size:
            yield send(rank + 1, sum_so_far)
    for c in range(2):
        if rank + 1 < size:
            yield recv(rank + 1, output[c])
        elif rank == 0:
            yield copy(input[c], output[c])
        if rank > 0:
            yield send(rank - 1, output[c])


if __name__ == "__main__":
    for what, ranks, name in ((line, 3, "line"), ("ring", 4, "ring"), ("double_tree", 4, "tree")):
        figure = algorithms.draw(what, ranks)
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
