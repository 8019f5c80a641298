"""The heat equation on a square, divided among the ranks of a grid: heat.py, with mpi4py.

mpiexec -n 4 python examples/heat_mpi4py.py [--side 240] [--steps 400]
"""

import argparse

import numpy as np
from mpi4py import MPI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--side", type=int, default=240, help="points along a side (240)")
parser.add_argument("--steps", type=int, default=400, help="steps in time (400)")
args = parser.parse_args()

comm = MPI.COMM_WORLD
grid = comm.Create_cart(MPI.Compute_dims(comm.size, [0, 0]), periods=[False, False])
rows, columns = (
    args.side * (c + 1) // n - args.side * c // n
    for c, n in zip(grid.coords, grid.dims, strict=True)
)
u = np.zeros((rows + 2, columns + 2))
if grid.coords[1] == 0:
    u[:, 0] = 1.0
edges = [u[1, 1:-1], u[-2, 1:-1], u[1:-1, 1], u[1:-1, -2]]
borders = [u[0, 1:-1], u[-1, 1:-1], u[1:-1, 0], u[1:-1, -1]]
for _ in range(args.steps):
    for axis in (0, 1):
        before, after = grid.Shift(axis, 1)
        for i, (dest, source) in enumerate([(before, after), (after, before)]):
            sent = np.ascontiguousarray(edges[2 * axis + i])
            received = np.array(borders[2 * axis + 1 - i])
            grid.Sendrecv(sent, dest, recvbuf=received, source=source)
            borders[2 * axis + 1 - i][:] = received
    inner = u[1:-1, 1:-1]
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    change = 0.25 * around - inner
    inner += change
heat, most = np.array(inner.sum()), np.array(np.abs(change).max())
comm.Allreduce(MPI.IN_PLACE, heat)
comm.Allreduce(MPI.IN_PLACE, most, op=MPI.MAX)
if comm.rank == 0:
    print(f"heat {heat:.6f}, greatest change in the last step {most:.3e}")
