"""Looks through LMDB's pages before LMDB maps them, because LMDB believes what they say.

A truncated or overwritten `data.mdb` makes LMDB follow a wild pointer: SIGBUS or SIGSEGV, which would take the
host engine with it. So the tree is walked here once, at open, with reads that cannot fault; the format is that of
LMDB 0.9 (data version 1). Damage inside a value is not seen here: rows carry their own checks. A million records lie
in 30,000 leaves: these are looked at together (`leaves`), and their records taken along, so that the index is read
once.

Owns nothing. Units: bytes, LMDB page numbers.
"""

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CorruptBlock
from kvtier.tiers.lmdb.leaves import KEY_BYTES, Nodes, plain_nodes
from kvtier.tiers.lmdb.records import Records

_META = struct.Struct("<QHHHH IIQQ")  # page header; magic, version, address, map size
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction
_PAGE = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # low half, high half, flags, key length
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_BIG, _SUBTREE = 0x01, 0x02
_DEPTH_MAX = 32
_PAGES_AT_ONCE = 512


def check_index(path: Path, table: str | None = None) -> Records:
    """Raises CorruptBlock if `path` is not an LMDB data file whose every reachable page makes sense.

    Returns the records of a table, if one is named.
    """
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        walk = _Walk(fd, size, None if table is None else table.encode())
        walk.run()
    finally:
        os.close(fd)
    return walk.records


class _Child(NamedTuple):
    """A page, and the keys between which all of its own lie: low <= key < high (None: no bound)."""

    page: int
    low: Any
    high: Any


class _Walk:
    """One walk over one file. Every page is met at most once, so a cycle ends as damage."""

    def __init__(self, fd: int, size: int, table: bytes | None) -> None:
        self.records = Records()  # of that table
        self._fd = fd
        self._size = size
        self._table = table
        self._met: set[int] = {0, 1}
        self._page_bytes = 0
        self._last = 0
        self._free: set[int] = set()
        self._in_free_list = False

    def run(self) -> None:
        roots = self._newest_meta()
        if (self._last + 1) * self._page_bytes > self._size:
            raise CorruptBlock(f"{self._size} bytes, {(self._last + 1) * self._page_bytes} expected: it was cut off")
        for self._in_free_list, (root, depth) in zip((True, False), roots, strict=True):
            self._tree(root, depth)
        if not self._met.isdisjoint(self._free):
            raise CorruptBlock("a page is both free and in use")

    def _newest_meta(self) -> list[tuple[int, int]]:
        """(root, depth) of the free list and of the table of tables."""
        metas = []
        head = os.pread(self._fd, _META.size + 2 * _TREE.size + _TAIL.size, 0)
        self._page_bytes = self._meta(head)[0]
        for page in (0, 1):
            meta = os.pread(self._fd, len(head), page * self._page_bytes)
            page_bytes, roots, last, transaction = self._meta(meta)
            if page_bytes != self._page_bytes:
                raise CorruptBlock("its two meta pages disagree")
            metas.append((transaction, last, roots))
        _, self._last, roots = max(metas, key=lambda meta: meta[0])
        return roots

    def _meta(self, meta: bytes) -> tuple[int, list[tuple[int, int]], int, int]:
        if len(meta) < _META.size + 2 * _TREE.size + _TAIL.size:
            raise CorruptBlock(f"{self._size} bytes are too few for an index")
        magic, version = _META.unpack_from(meta)[5:7]
        if magic != _MAGIC:
            raise CorruptBlock("it is not an LMDB file")
        if version != _VERSION:
            raise CorruptBlock(f"it has LMDB's data version {version}, and this reads version {_VERSION}")
        trees = [_TREE.unpack_from(meta, _META.size + i * _TREE.size) for i in (0, 1)]
        last, transaction = _TAIL.unpack_from(meta, _META.size + 2 * _TREE.size)
        page_bytes = trees[0][0]  # LMDB keeps its page size in the free list's pad
        if page_bytes not in (4096, 8192, 16384, 32768, 65536):
            raise CorruptBlock(f"pages of {page_bytes} bytes")
        return page_bytes, [(tree[7], tree[2]) for tree in trees], last, transaction

    def _tree(self, root: int, depth: int, table: bytes = b"") -> None:
        if root == _NO_PAGE:
            return
        if not 1 <= depth <= _DEPTH_MAX:
            raise CorruptBlock(f"a tree {depth} levels deep")
        level = [_Child(root, None, None)]
        for _ in range(depth - 1):
            level = [below for child in level for below in self._branch(child)]
        for first in range(0, len(level), _PAGES_AT_ONCE):
            self._leaves(level[first : first + _PAGES_AT_ONCE], table)

    def _branch(self, child: "_Child") -> list["_Child"]:
        """Check a page; returns its children."""
        keys, numbers = self._nodes(child.page, self._read(child.page), _BRANCH)
        self._ordered(child, keys[1:])  # the first key of a branch is not looked at
        return [_Child(*below) for below in zip(numbers, [child.low, *keys[1:]], [*keys[1:], child.high], strict=True)]

    def _leaves(self, level: list["_Child"], table: bytes) -> None:
        """Check pages and what hangs from them: many at once, then those that are not plain."""
        pages = np.empty((len(level), self._page_bytes), np.uint8)
        for child, page in zip(level, pages, strict=True):
            self._read_into(child.page, page)
        wanted = not self._in_free_list and table == self._table
        plain = np.zeros(len(level), np.bool_)
        if wanted and (bounds := _bounds(level)) is not None:
            nodes = plain_nodes(pages, np.array([child.page for child in level], np.uint64), *bounds)
            plain = nodes.plain
            _collect(pages, nodes, self.records)
        for at in np.flatnonzero(~plain).tolist():
            keys, _ = self._nodes(level[at].page, pages[at].tobytes(), _LEAF)
            self._ordered(level[at], keys)
            if wanted:
                self.records.doubtful += keys

    def _nodes(self, number: int, page: bytes, wanted: int) -> tuple[list[Any], list[int]]:
        """Check one page and, for a leaf, what hangs from it; returns the keys, and for a branch the pages below."""
        stored, _, flags, lower, upper = _PAGE.unpack_from(page)
        if stored != number or flags & (_BRANCH | _LEAF | _OVERFLOW) != wanted or flags & ~0x7:
            raise CorruptBlock(f"page {number} is not what it should be")
        if not (_PAGE.size <= lower <= upper <= len(page)) or lower % 2:
            raise CorruptBlock(f"page {number} has impossible bounds")
        offsets = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size)
        if not offsets or not all(upper <= offset <= len(page) - _NODE.size for offset in offsets):
            raise CorruptBlock(f"page {number} has no nodes, or one out of bounds")
        keys: list[Any] = []
        numbers: list[int] = []
        spans: list[tuple[int, int]] = []
        for offset in offsets:
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, offset)
            data = offset + _NODE.size + key_bytes
            self._bounded(number, data, 0, len(page))
            keys.append(self._key(page[data - key_bytes : data]))
            held = 0
            if wanted == _BRANCH:
                numbers.append(low | high << 16 | node_flags << 32)
            else:
                held = self._leaf_node(number, page, data, low | high << 16, node_flags, keys[-1])
            spans.append((offset, data + held + (data + held - offset) % 2))
        self._tiled(number, sorted(spans), upper, len(page))
        return keys, numbers

    def _tiled(self, number: int, spans: list[tuple[int, int]], upper: int, page_bytes: int) -> None:
        """Nodes fill the page from `upper` to its end: a wrong length would shift its neighbours on deletion."""
        starts = [start for start, _ in spans] + [page_bytes]
        ends = [upper] + [end for _, end in spans]
        if starts != ends:
            raise CorruptBlock(f"page {number} has nodes that overlap")

    def _key(self, key: bytes) -> Any:
        """A key as LMDB compares it: numbers in the free list, bytes elsewhere."""
        return int.from_bytes(key, "little") if self._in_free_list else key

    def _ordered(self, child: "_Child", keys: list[Any]) -> None:
        """Keys out of order make a search go round in circles."""
        bounds = [key for key in (child.low,) if key is not None] + keys
        rising = all(before < after for before, after in pairwise(keys))
        if not rising or (keys and bounds[0] > keys[0]) or (child.high is not None and bounds[-1:] >= [child.high]):
            raise CorruptBlock(f"page {child.page} has keys out of order")

    def _leaf_node(self, number: int, page: bytes, data: int, data_bytes: int, flags: int, key: Any) -> int:
        """Check what hangs from a leaf's node; returns the bytes that it holds in the page itself."""
        if flags == 0:
            self._bounded(number, data, data_bytes, len(page))
            if self._in_free_list:
                self._free_pages(page[data : data + data_bytes])
            return data_bytes
        if flags == _BIG:
            self._bounded(number, data, 8, len(page))
            first = int.from_bytes(page[data : data + 8], "little")
            self._overflow(first, data_bytes)
            if self._in_free_list:
                self._free_pages(os.pread(self._fd, data_bytes, first * self._page_bytes + _PAGE.size))
            return 8
        if flags == _SUBTREE and data_bytes == _TREE.size:
            self._bounded(number, data, data_bytes, len(page))
            tree = _TREE.unpack_from(page, data)
            self._tree(tree[7], tree[2], key)
            return data_bytes
        raise CorruptBlock(f"page {number} has a node of an unknown kind")

    def _free_pages(self, row: bytes) -> None:
        """A row of the free list: a count, then as many page numbers."""
        if len(row) < 8 or len(row) % 8:
            raise CorruptBlock("the free list has a misshapen row")
        count, *pages = struct.unpack(f"<{len(row) // 8}Q", row)
        if count != len(pages) or any(not 2 <= page <= self._last for page in pages):
            raise CorruptBlock("the free list names pages that cannot be")
        self._free.update(pages)

    def _bounded(self, number: int, start: int, length: int, page_bytes: int) -> None:
        if start + length > page_bytes:
            raise CorruptBlock(f"page {number} has a node that leaves it")

    def _overflow(self, number: int, data_bytes: int) -> None:
        page = self._read(number)
        stored, _, flags, low, high = _PAGE.unpack_from(page)
        pages = low | high << 16
        if stored != number or flags != _OVERFLOW or pages * self._page_bytes < _PAGE.size + data_bytes:
            raise CorruptBlock(f"page {number} is not the overflow it should be")
        self._meet(number + 1, pages - 1)

    def _read(self, number: int) -> bytes:
        self._meet(number, 1)
        return os.pread(self._fd, self._page_bytes, number * self._page_bytes)

    def _read_into(self, number: int, page: NDArray[np.uint8]) -> None:
        self._meet(number, 1)
        if os.preadv(self._fd, [page.data], number * self._page_bytes) != len(page):
            raise CorruptBlock(f"page {number} was cut off")

    def _meet(self, first: int, pages: int) -> None:
        if first + pages > self._last + 1:
            raise CorruptBlock(f"page {first + pages - 1} lies outside the file")
        numbers = range(first, first + pages)
        if not self._met.isdisjoint(numbers):
            raise CorruptBlock(f"page {first} is used twice")
        self._met.update(numbers)


def _bounds(level: list[_Child]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]] | None:
    """The least and the greatest key that each page may have, None if there are keys of another length."""
    least, greatest = bytes(KEY_BYTES), b"\xff" * KEY_BYTES
    lows = [least if child.low is None else child.low for child in level]
    highs = [child.high for child in level]
    given = [high for high in highs if high is not None]
    if any(len(key) != KEY_BYTES for key in (*lows, *given)) or least in given:
        return None
    low = np.frombuffer(b"".join(lows), ">u8").astype(np.uint64)
    high = np.frombuffer(b"".join(greatest if key is None else key for key in highs), ">u8").astype(np.uint64)
    return low, high - np.array([key is not None for key in highs], np.uint64)


def _collect(pages: NDArray[np.uint8], nodes: Nodes, records: Records) -> None:
    """Pass on the rows of plain pages, those of one length together: a node's key lies right before its value."""
    flat = pages.reshape(-1)
    for length in np.unique(nodes.lengths).tolist():
        starts = nodes.starts[nodes.lengths == length]
        row_bytes = KEY_BYTES + length
        windows: NDArray[np.void] = np.ndarray((flat.size - row_bytes + 1,), f"V{row_bytes}", flat, strides=(1,))
        records.add(windows[starts])
