"""k-means clustering of points that are divided among the ranks, as in kmeans_mpi4py.py.

pycollective run -n 4 examples/kmeans.py [--points 100000] [--clusters 8]
"""

import argparse

import numpy as np

import pycollective as pc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--points", type=int, default=100_000, help="points of all ranks (100,000)")
parser.add_argument("--clusters", type=int, default=8, help="number of clusters (8)")
args = parser.parse_args()

with pc.init() as comm:
    everything = np.random.default_rng(0).normal(size=(args.points, 2))
    everything += 10 * np.random.default_rng(1).integers(args.clusters, size=(args.points, 1))
    points = np.array_split(everything, comm.size)[comm.rank]
    centers = comm.broadcast(everything[: args.clusters].copy(), root=0)
    moved, rounds = np.inf, 0
    while moved > 1e-9:
        distances = ((points[:, None] - centers) ** 2).sum(2)
        nearest = distances.argmin(1)
        sums = np.zeros((args.clusters, 3))  # the points' coordinates, and their number
        np.add.at(sums, nearest, np.column_stack([points, np.ones(len(points))]))
        comm.all_reduce(sums, out=sums)
        new = sums[:, :2] / np.maximum(sums[:, 2:], 1)
        moved, centers, rounds = np.abs(new - centers).max(), new, rounds + 1
    spread = comm.all_reduce(np.array(distances.min(1).sum()))
    if comm.rank == 0:
        print(f"{rounds} rounds, mean squared distance {spread / args.points:.6f}")
