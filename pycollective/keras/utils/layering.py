"""Layered drawing of a graph: boxes in rows, and lines that cross no box.

Each box is in a row below its inputs. A line that crosses a row passes between its boxes, through a
lane: a place of fixed width. Lines turn only in the gaps between rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_LANE = 12.0  # pixels: the width of a lane
_SWEEPS = 12
#: Weights in means of positions. Neighbours of the same type (box or lane) have the large weight. In
#: a row, boxes have the large weight, so that lanes move out of their way.
_STRONG, _WEAK = 1.0, 0.01

Point = tuple[float, float]
#: The key of a box, the number of a row, and "box", or "down" or "up" for a lane of the box's lines.
_Node = tuple[int, int, str]


class Layout(NamedTuple):
    """The corner of each box by key, the points of each arrow's line, and the size of the drawing.

    The first coordinate is along the rows.
    """

    corners: dict[int, Point]
    lines: list[list[Point]]
    size: Point


def layout(sizes: Mapping[int, Point], arrows: Sequence[tuple[int, int]], gap: float) -> Layout:
    """Arrange boxes in rows with ``gap`` pixels between them.

    ``sizes`` holds each box's extent along and across the rows, by key. The keys are sorted so that
    each box follows its inputs, except in loops. ``arrows`` holds pairs of keys.
    """
    row_of = _rows_of(sizes, arrows)
    routes = [_route(source, target, row_of) for source, target in arrows]
    rows: list[list[_Node]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    for key, number in row_of.items():
        rows[number].append((key, number, "box"))
    for lane in dict.fromkeys(node for route in routes for node in route[1:-1]):
        rows[lane[1]].append(lane)
    links = _links(routes)
    _order(rows, links)
    widths = {p: sizes[p[0]][0] if p[2] == "box" else _LANE for row in rows for p in row}
    centers = _centers(rows, links, widths, gap)

    tops, bottoms, begin = [], [], gap
    for row in rows:
        tops.append(begin)
        bottoms.append(begin + max(sizes[p[0]][1] for p in row if p[2] == "box"))
        begin = bottoms[-1] + gap
    corners = {
        key: (centers[key, row, "box"] - sizes[key][0] / 2, tops[row])
        for key, row in row_of.items()
    }
    lines = [_line(route, centers, tops, bottoms, corners, sizes, gap) for route in routes]
    right = max((centers[p] + widths[p] / 2 for row in rows for p in row), default=0.0)
    return Layout(corners, lines, (right + gap, begin))


def _rows_of(keys: Iterable[int], arrows: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the row of each box: one more than the largest row of its inputs."""
    rows: dict[int, int] = {}
    before: dict[int, list[int]] = {}
    for source, target in arrows:
        before.setdefault(target, []).append(source)
    for key in keys:
        rows[key] = max((rows[b] + 1 for b in before.get(key, ()) if b in rows), default=0)
    return rows


def _route(source: int, target: int, row_of: Mapping[int, int]) -> list[_Node]:
    """Return the nodes of a line; a line to the same or an earlier row runs upward."""
    first, last = row_of[source], row_of[target]
    if first < last:
        lanes = [(source, row, "down") for row in range(first + 1, last)]
    else:
        lanes = [(source, row, "up") for row in range(first, last - 1, -1)]
    return [(source, first, "box"), *lanes, (target, last, "box")]


def _links(routes: Iterable[Sequence[_Node]]) -> dict[_Node, list[_Node]]:
    """Return the neighbours of each node."""
    links: dict[_Node, dict[_Node, None]] = {}
    for route in routes:
        for one, other in itertools.pairwise(route):
            links.setdefault(one, {})[other] = None
            links.setdefault(other, {})[one] = None
    return {node: list(others) for node, others in links.items()}


def _order(rows: list[list[_Node]], links: Mapping[_Node, Sequence[_Node]]) -> None:
    """Sort each row by the mean position of the nodes' neighbours, so that few lines cross."""
    position = {node: float(n) for row in rows for n, node in enumerate(row)}
    for sweep in range(_SWEEPS):
        step = 1 if sweep % 2 == 0 else -1
        for row in rows[::step]:

            def target_position(node: _Node, step: int = step) -> float:
                near = [position[o] for o in links.get(node, ()) if o[1] == node[1] - step]
                return sum(near) / len(near) if near else position[node]

            row.sort(key=target_position)
            position.update((node, float(n)) for n, node in enumerate(row))


def _centers(
    rows: Sequence[Sequence[_Node]],
    links: Mapping[_Node, Sequence[_Node]],
    widths: Mapping[_Node, float],
    gap: float,
) -> dict[_Node, float]:
    """Return the center of each node along its row, close to the centers of its neighbours."""
    centers = {node: 0.0 for row in rows for node in row}
    for sweep in range(_SWEEPS):
        step = 1 if sweep % 2 == 0 else -1
        for row in rows[::step]:
            wanted = []
            for node in row:
                near = [o for o in links.get(node, ()) if o[1] != node[1]]
                # In the first sweep, which goes down, the rows below have no positions yet.
                near = [o for o in near if sweep or o[1] < node[1]]
                weights = [
                    _STRONG if (o[2] == "box") == (node[2] == "box") else _WEAK for o in near
                ]
                total = sum(w * centers[o] for w, o in zip(weights, near, strict=True))
                wanted.append(total / sum(weights) if near else centers[node])
            distances = [
                (widths[one] + widths[other]) / 2 + gap / 2
                for one, other in itertools.pairwise(row)
            ]
            stiffness = [_STRONG if node[2] == "box" else _WEAK for node in row]
            centers.update(zip(row, _spread(wanted, stiffness, distances), strict=True))
    left = min((centers[p] - widths[p] / 2 for row in rows for p in row), default=0.0)
    return {node: center - left + gap for node, center in centers.items()}


def _spread(
    wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]
) -> list[float]:
    """Return numbers close to ``wanted``, each at least its distance after the previous number.

    The method is isotonic regression of the numbers minus their offsets: neighbours in the wrong
    order get their weighted mean.
    """
    offsets = [0.0]
    for distance in distances:
        offsets.append(offsets[-1] + distance)
    blocks: list[tuple[float, float, int]] = []  # mean, weight and count of merged numbers
    for value, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, count = value - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, other_weight, more = blocks.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + more
        blocks.append((mean, weight, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _line(
    route: Sequence[_Node],
    centers: Mapping[_Node, float],
    tops: Sequence[float],
    bottoms: Sequence[float],
    corners: Mapping[int, Point],
    sizes: Mapping[int, Point],
    gap: float,
) -> list[Point]:
    """Return the points of a line, which turns only between rows."""
    (source, first, _), *lanes, (_, last, _) = route
    x, y = centers[route[0]], corners[source][1] + sizes[source][1]
    points = [(x, y), (x, bottoms[first])]
    upward = bool(lanes) and lanes[0][2] == "up"
    margin = gap / 3 if upward else 0.0
    for lane in lanes:
        ends = [(centers[lane], tops[lane[1]] - margin), (centers[lane], bottoms[lane[1]] + margin)]
        points += ends[::-1] if upward else ends
    points.append((centers[route[-1]], tops[last]))
    return points
