"""Leaf pages of an LMDB file, looked at hundreds at a time.

Owns nothing. Always: a page is plain only if the walk in `pages` would pass it too, all its keys have 8 bytes, and all
its values lie in the page itself; whoever asked looks at the others one by one, and says what is wrong with them.
Units: bytes; pages as rows of an array of u8.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 8
_PAGE_HEAD = 16  # u64 number, u16 pad, u16 flags, u16 lower, u16 upper; then the nodes' offsets
_NODE_HEAD = 8  # u16 low and high half of the value's length, u16 flags, u16 length of the key
_LEAF = 0x02
_END = 1 << 17  # beyond the end of any page

Ints = NDArray[np.int64]


class Nodes(NamedTuple):
    """The nodes of plain pages, in order: where each one's key begins in the flat pages, and its value's length."""

    plain: NDArray[np.bool_]  # by page
    starts: Ints
    lengths: Ints


def plain_nodes(
    pages: NDArray[np.uint8], numbers: NDArray[np.uint64], lows: NDArray[np.uint64], highs: NDArray[np.uint64]
) -> Nodes:
    """The nodes of those pages that are plain. Page i should be number numbers[i], with lows[i] <= key <= highs[i]."""
    halves = pages.view("<u2")
    lower, upper = halves[:, 6].astype(np.int64), halves[:, 7].astype(np.int64)
    plain = (pages[:, :8].copy().view("<u8")[:, 0] == numbers) & (halves[:, 5] == _LEAF)
    plain &= (lower > _PAGE_HEAD) & (lower <= upper) & (upper <= pages.shape[1]) & (lower % 2 == 0)
    while True:
        which = np.flatnonzero(plain)
        starts, lengths, bad = _nodes_of(pages, which, lower[which], upper[which], lows[which], highs[which])
        if not len(bad):
            return Nodes(plain, starts, lengths)
        plain[which[bad]] = False  # and once more without them


def _nodes_of(
    pages: NDArray[np.uint8],
    which: Ints,
    lower: Ints,
    upper: Ints,
    lows: NDArray[np.uint64],
    highs: NDArray[np.uint64],
) -> tuple[Ints, Ints, Ints]:
    """Starts and lengths of the nodes of these pages, and the positions in `which` of pages that are not plain.

    The first check that fails ends the search: what follows could not rely on it.
    """
    page_bytes = pages.shape[1]
    nodes = (lower - _PAGE_HEAD) // 2
    ends = np.cumsum(nodes)
    page = np.repeat(np.arange(len(which)), nodes)
    nth = np.arange(len(page)) - np.repeat(ends - nodes, nodes)
    base = which[page] * page_bytes
    halves = pages.reshape(-1).view("<u2")
    offset = halves[(base + _PAGE_HEAD) // 2 + nth].astype(np.int64)
    wrong = (offset > page_bytes - _NODE_HEAD - KEY_BYTES) | (offset % 2 == 1)
    if wrong.any():
        return nth, nth, np.unique(page[wrong])
    node = (base + offset) // 2
    length = halves[node].astype(np.int64)
    end = offset + _NODE_HEAD + KEY_BYTES + length
    wrong = (halves[node + 1] != 0) | (halves[node + 2] != 0) | (halves[node + 3] != KEY_BYTES) | (end > page_bytes)
    if wrong.any():
        return nth, nth, np.unique(page[wrong])
    # Nodes fill the page from `upper` to its end: then each one, and `upper`, begins where another ends.
    begins = np.sort(np.concatenate([page * _END + offset, np.arange(len(which)) * _END + page_bytes]))
    finishes = np.sort(np.concatenate([page * _END + end + length % 2, np.arange(len(which)) * _END + upper]))
    if len(bad := np.flatnonzero(begins != finishes)):
        return nth, nth, np.unique(begins[bad] // _END)
    key = _keys_at(pages.reshape(-1), node + _NODE_HEAD // 2)
    first, last = ends - nodes, ends - 1
    wrong = np.zeros(len(page), np.bool_)
    wrong[1:] = (key[1:] <= key[:-1]) & (page[1:] == page[:-1])
    wrong[first[key[first] < lows]] = True
    wrong[last[key[last] > highs]] = True
    return base + offset + _NODE_HEAD, length, np.unique(page[wrong])


def _keys_at(flat: NDArray[np.uint8], half: Ints) -> NDArray[np.uint64]:
    """The keys of 8 bytes at these places, counted in u16, as numbers that compare as LMDB compares the bytes."""
    big_endian = flat.view(">u2")
    key = big_endian[half].astype(np.uint64)
    for step in (1, 2, 3):
        key = key << np.uint64(16) | big_endian[half + step].astype(np.uint64)
    return key
