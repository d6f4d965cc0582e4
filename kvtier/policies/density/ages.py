"""Buckets of ages: geometric, so that a few of them reach from one access to all that will ever be.

Units: accesses.
"""

_RATIO = 1.5
_AGE_MAX = 2**40


def _edges() -> list[int]:
    edges, edge = [1], 1.0
    while edges[-1] < _AGE_MAX:
        edge *= _RATIO
        if round(edge) > edges[-1]:
            edges.append(round(edge))
    return edges


# Bucket b holds the ages from EDGES[b - 1] to EDGES[b] - 1: `bisect_right(EDGES, age)` finds it.
EDGES = _edges()
BUCKETS = len(EDGES) + 1
