"""Places for the boxes of a graph, in rows, and lines between them that pass no box.

Each box stands in a row below the boxes that it reads. A line that passes rows runs through lanes:
places in those rows that are kept free for it. Between rows nothing stands, so that lines may cross
from side to side there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_LANE = 12.0  # pixels, the width of a place for a line
_SWEEPS = 12
#: How much a place wants to stand below another (boxes below boxes, and lanes straight), and how firm
#: it stands: lanes make way for boxes.
_LIKE, _UNLIKE = 1.0, 0.01

Point = tuple[float, float]
#: A box, or the lane of a box's lines through a row: key of the box, number of the row, upward or not.
_Place = tuple[int, int, str]


class Layout(NamedTuple):
    """The corner of each box, by key, the points of each arrow's line, and the size of the picture.

    The first of two coordinates is across the rows.
    """

    corners: dict[int, Point]
    lines: list[list[Point]]
    size: Point


def layout(sizes: Mapping[int, Point], arrows: Sequence[tuple[int, int]], gap: float) -> Layout:
    """Arrange boxes in rows, ``gap`` apart.

    ``sizes`` has the extent of each box across and along the direction of the arrows, by key. Boxes come
    after those that they read, as far as that is possible; ``arrows`` has pairs of keys.
    """
    row_of = _rows_of(sizes, arrows)
    routes = [_route(source, target, row_of) for source, target in arrows]
    rows: list[list[_Place]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    for key, number in row_of.items():
        rows[number].append((key, number, "box"))
    for lane in dict.fromkeys(place for route in routes for place in route[1:-1]):
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
    """Return the number of each box's row: one more than those of the boxes that it reads."""
    rows: dict[int, int] = {}
    before: dict[int, list[int]] = {}
    for source, target in arrows:
        before.setdefault(target, []).append(source)
    for key in keys:
        rows[key] = max((rows[b] + 1 for b in before.get(key, ()) if b in rows), default=0)
    return rows


def _route(source: int, target: int, row_of: Mapping[int, int]) -> list[_Place]:
    """Return the places that a line goes through; one back, or to its own box, goes up."""
    first, last = row_of[source], row_of[target]
    if first < last:
        lanes = [(source, row, "down") for row in range(first + 1, last)]
    else:
        lanes = [(source, row, "up") for row in range(first, last - 1, -1)]
    return [(source, first, "box"), *lanes, (target, last, "box")]


def _links(routes: Iterable[Sequence[_Place]]) -> dict[_Place, list[_Place]]:
    """Return the places that each place is joined to."""
    links: dict[_Place, dict[_Place, None]] = {}
    for route in routes:
        for one, other in itertools.pairwise(route):
            links.setdefault(one, {})[other] = None
            links.setdefault(other, {})[one] = None
    return {place: list(others) for place, others in links.items()}


def _order(rows: list[list[_Place]], links: Mapping[_Place, Sequence[_Place]]) -> None:
    """Sort each row by where its places are joined to, so that few lines cross."""
    position = {place: float(n) for row in rows for n, place in enumerate(row)}
    for sweep in range(_SWEEPS):
        step = 1 if sweep % 2 == 0 else -1
        for row in rows[::step]:

            def wish(place: _Place, step: int = step) -> float:
                near = [position[o] for o in links.get(place, ()) if o[1] == place[1] - step]
                return sum(near) / len(near) if near else position[place]

            row.sort(key=wish)
            position.update((place, float(n)) for n, place in enumerate(row))


def _centers(
    rows: Sequence[Sequence[_Place]],
    links: Mapping[_Place, Sequence[_Place]],
    widths: Mapping[_Place, float],
    gap: float,
) -> dict[_Place, float]:
    """Return the middle of each place, across: near those that it is joined to."""
    centers = {place: 0.0 for row in rows for place in row}
    for sweep in range(_SWEEPS):
        step = 1 if sweep % 2 == 0 else -1
        for row in rows[::step]:
            wishes = []
            for place in row:
                near = [o for o in links.get(place, ()) if o[1] != place[1]]
                # On the way down the first time, nothing below has a place yet.
                near = [o for o in near if sweep or o[1] < place[1]]
                weights = [
                    _LIKE if (o[2] == "box") == (place[2] == "box") else _UNLIKE for o in near
                ]
                wish = sum(w * centers[o] for w, o in zip(weights, near, strict=True))
                wishes.append(wish / sum(weights) if near else centers[place])
            apart = [
                (widths[one] + widths[other]) / 2 + gap / 2
                for one, other in itertools.pairwise(row)
            ]
            firm = [_LIKE if place[2] == "box" else _UNLIKE for place in row]
            centers.update(zip(row, _spread(wishes, firm, apart), strict=True))
    left = min((centers[p] - widths[p] / 2 for row in rows for p in row), default=0.0)
    return {place: center - left + gap for place, center in centers.items()}


def _spread(
    wishes: Sequence[float], weights: Sequence[float], apart: Sequence[float]
) -> list[float]:
    """Return numbers near the wishes, each at least so far from the one before it.

    Without the distances this is isotonic regression: neighbours in the wrong order share their mean.
    """
    offsets = [0.0]
    for distance in apart:
        offsets.append(offsets[-1] + distance)
    blocks: list[tuple[float, float, int]] = []  # mean, weight and count of wishes that are one now
    for wish, weight, offset in zip(wishes, weights, offsets, strict=True):
        mean, count = wish - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, heavy, more = blocks.pop()
            mean = (mean * weight + other * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + more
        blocks.append((mean, weight, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _line(
    route: Sequence[_Place],
    centers: Mapping[_Place, float],
    tops: Sequence[float],
    bottoms: Sequence[float],
    corners: Mapping[int, Point],
    sizes: Mapping[int, Point],
    gap: float,
) -> list[Point]:
    """Return the points of a line; it turns only between rows."""
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
