"""The heat equation on a square, divided among the ranks of a grid.

    pycollective run -n 4 examples/heat.py [--side 240] [--steps 400]

Each rank has a rectangle of the square, with a border for its neighbours' edges. The square's left
side is hot, and the other sides are cold. heat_mpi4py.py is the same program for mpi4py.
"""

import argparse

import numpy as np

import pycollective as pc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--side", type=int, default=240, help="points along a side (240)")
parser.add_argument("--steps", type=int, default=400, help="steps in time (400)")
args = parser.parse_args()

with pc.init() as comm:
    grid = comm.cart([0, 0])
    rows, columns = (
        args.side * (c + 1) // n - args.side * c // n
        for c, n in zip(grid.coords(), grid.dims, strict=True)
    )
    u = np.zeros((rows + 2, columns + 2))
    if grid.coords()[1] == 0:
        u[:, 0] = 1.0
    edges = [u[1, 1:-1], u[-2, 1:-1], u[1:-1, 1], u[1:-1, -2]]
    borders = [u[0, 1:-1], u[-1, 1:-1], u[1:-1, 0], u[1:-1, -1]]
    for _ in range(args.steps):
        grid.neighbor_all_to_all(edges, out=borders)
        inner = u[1:-1, 1:-1]
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
        change = 0.25 * around - inner
        inner += change
    heat = comm.all_reduce(np.array(inner.sum()))
    most = comm.all_reduce(np.array(np.abs(change).max()), "max")
    if comm.rank == 0:
        print(f"heat {heat:.6f}, greatest change in the last step {most:.3e}")
