"""The token ids of blocks as canonical CBOR (RFC 8949, 4.2.1), packed by hand: the bytes of a general encoder, sooner.

An id takes 1, 2, 3 or 5 bytes: a lead byte that says how many follow, then the id, big-endian; ids below 24 are their
own lead. Few blocks are packed one by one with `struct` and `bytes.replace`, many at once with numpy, which is
imported when the first such prompt comes.

Always: the bytes are those of `cbor2.dumps(..., canonical=True)`, or a UsageError tells the first bad id.
Units: tokens (ids 0 .. 2**32-1), bytes.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any

import cbor2

from kvtier.errors import UsageError

TOKENS_MAX = 2**32  # ids are below
TOKENS_AT_ONCE = 512  # from here on numpy's fixed cost (some 20 us) is less than what it saves

BYTES, ARRAY = 2, 4  # major types
NULL = b"\xf6"

# What `struct` raises for values that are none, and what their own conversion may (torch's raises RuntimeError)
_NO_INTEGERS = (struct.error, TypeError, ValueError, RuntimeError)


def head(kind: int, count: int) -> bytes:
    """The first bytes of a CBOR item of major type `kind` (0-7) with argument `count` (below 2**32)."""
    lead = kind << 5
    if count < 24:
        return bytes([lead | count])
    if count < 1 << 8:
        return bytes([lead | 24, count])
    if count < 1 << 16:
        return struct.pack(">BH", lead | 25, count)
    return struct.pack(">BI", lead | 26, count)


def check_tokens(tokens: Sequence[object], start: int, stop: int) -> None:
    """Raises UsageError for the first of tokens [start, stop) that is no token id, with its position and value."""
    for at in range(start, stop):
        token = tokens[at]
        if not _is_token(token):
            told = f"token {at} is {token!r}, not an integer from 0 to 2**32-1; pass a flat list of token ids"
            raise UsageError(told)


def plain_ints(tokens: Sequence[int]) -> tuple[int, ...]:
    """The ids as Python's own integers (numpy's would be pickled, and encoded, as something else)."""
    return tuple(map(index, tokens))


def _is_token(token: Any) -> bool:
    if isinstance(token, bool) or "bool" in str(getattr(token, "dtype", "")):
        return False
    try:  # whatever else has an integer's value counts as one
        return 0 <= index(token) < TOKENS_MAX
    except _NO_INTEGERS:
        return False


class BlockPacker:
    """Packs the ids of blocks of one size. Stateless; `block_packer` keeps one per size."""

    __slots__ = ("_cells", "_head", "_zeroes", "block_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._head = head(ARRAY, block_tokens)
        self._cells = struct.Struct(">" + "xI" * block_tokens)
        self._zeroes = bytes(block_tokens)

    def one(self, tokens: Sequence[int], start: int) -> bytes:
        """The block that begins with token `start`, as a CBOR array. Raises UsageError for what is no token id.

        Cells of five bytes (a zero, then the id, big-endian), whose runs of zeroes become leads. A run can be told
        from an id's own zeroes where no id ends in a zero byte and none needs its top byte. It is then the beginning
        of its cell, and as long as the item is short: two for an item of five bytes, three for one of three, four for
        an id below 256.
        """
        try:
            cells = self._cells.pack(*tokens[start : start + self.block_tokens])
        except _NO_INTEGERS as error:
            raise _refusal(tokens, start, start + self.block_tokens) from error
        if 0 in cells[4::5] or cells[1::5] != self._zeroes:
            return self._any(tokens, start)
        if 0 in cells[3::5]:
            first, *others = cells.split(b"\0\0\0\0")
            if any(rest[0] == 1 for rest in others):
                check_tokens(tokens, start, start + self.block_tokens)  # it may be a truth value
            cells = first + b"".join([rest if rest[0] < 24 else b"\x18" + rest for rest in others])
        return self._head + cells.replace(b"\0\0\0", b"\x19").replace(b"\0\0", b"\x1a\0")

    def _any(self, tokens: Sequence[int], start: int) -> bytes:
        block = tokens[start : start + self.block_tokens]
        if 0 in block or 1 in block:
            check_tokens(tokens, start, start + self.block_tokens)  # they may be truth values
        return cbor2.dumps(plain_ints(block))

    def many(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Every block of tokens [start, stop), a whole number of blocks. Raises as `one` does."""
        if stop - start < TOKENS_AT_ONCE:
            return [self.one(tokens, at) for at in range(start, stop, self.block_tokens)]
        import numpy as np

        try:
            packed = struct.pack(f"={stop - start}I", *tokens[start:stop])
        except _NO_INTEGERS as error:
            raise _refusal(tokens, start, stop) from error
        ids = np.frombuffer(packed, np.uint32)
        for at in np.flatnonzero(ids < 2).tolist():
            check_tokens(tokens, start + at, start + at + 1)  # it may be a truth value
        # Each id right-aligned in eight bytes, its lead before it; then the unused bytes are left out.
        leads, widths, masks = _item_tables()
        kinds = (ids > 23).view(np.uint8) + (ids > 0xFF) + (ids > 0xFFFF)
        items = (leads.take(kinds) + ids).astype(">u8").view(np.uint8)
        data = items.compress(masks.take(kinds).view(bool)).tobytes()
        ends = widths.take(kinds).reshape(-1, self.block_tokens).sum(1, dtype=np.int64).cumsum().tolist()
        return [self._head + data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


block_packer = lru_cache(maxsize=64)(BlockPacker)


@lru_cache(maxsize=1)
def _item_tables() -> tuple[Any, Any, Any]:
    """By kind of item (1, 2, 3 or 5 bytes): lead byte in its place, width, and which of eight bytes are used."""
    import numpy as np

    widths = np.array([1, 2, 3, 5], np.uint8)
    leads = np.array([0, 0x18 << 8, 0x19 << 16, 0x1A << 32], np.uint64)
    used = np.arange(8) >= 8 - widths[:, None]
    return leads, widths, used.view(np.uint64).ravel()


def _refusal(tokens: Sequence[object], start: int, stop: int) -> UsageError:
    try:
        check_tokens(tokens, start, stop)
    except UsageError as error:
        return error
    return UsageError(f"tokens {start} to {stop} changed while they were hashed; pass a list that nobody else writes")
