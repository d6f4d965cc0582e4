"""exp4 over many blocks at once, on the CPU: the same bytes as `exponents`, in pieces that stay in the cache.

Owns: work memory of a piece; so one caller at a time. Always: the bytes of a coded block are those of `exponents`. It
knows float32 and bfloat16; float16, whose residue is no whole byte, is coded by `exponents` itself, block by block.
Units:  values, groups of 64 values, bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.coding import HEAD_BYTES
from kvtier.kernels import exponents
from kvtier.kernels.arrays import FORMATS, Bytes, item_bytes
from kvtier.kernels.coded import EXP4, CodedHead
from kvtier.kernels.exponents import ESCAPE, ESCAPE_BYTES, GROUP_VALUES, HALF, Layout

PIECE_GROUPS = 512

_TOP_NIBBLE = 4  # in each byte of a word, for no nibble has more than four bits
_HALF_WORDS = HALF // 8


class BatchExponents:
    """Codes blocks of `values` values of a dtype."""

    def __init__(self, dtype: str, values: int) -> None:
        """Raises ValueError for blocks that exp4 always keeps as they are: there is nothing to code."""
        layout = Layout.of(dtype, values)
        if layout is None:
            raise ValueError(f"exp4 does not code {values} values of {dtype}")
        self._layout, self._dtype, self._values = layout, dtype, values
        self._kind = np.dtype(FORMATS[dtype][1])
        self._groups = values // GROUP_VALUES
        self._planes = item_bytes(dtype) - 1  # bytes of sign and mantissa
        shape = (PIECE_GROUPS, GROUP_VALUES)
        self._wide, self._other = np.empty(shape, self._kind), np.empty(shape, self._kind)
        self._exponents, self._nibbles = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
        self._escapes = np.empty(shape, np.bool_)
        self._starts = np.arange(0, PIECE_GROUPS * GROUP_VALUES, GROUP_VALUES)
        self._upper = np.empty((PIECE_GROUPS, _HALF_WORDS), np.uint64)

    # ------------------------------------------------------------ encode

    def encode(self, block: NDArray[Any], coded: Bytes) -> int:
        """Code the values [values] (uint16, uint32) into `coded`; returns the length, 0 if that has no room for it."""
        if self._dtype == "float16":
            return self._encode_float16(block, coded)
        layout, groups = self._layout, block.reshape(self._groups, GROUP_VALUES)
        if len(coded) < layout.escapes:
            return 0
        places, found = [], 0
        escapes_max = min(layout.escapes_max, (len(coded) - layout.escapes) // ESCAPE_BYTES)
        for start in range(0, self._groups, PIECE_GROUPS):
            part = self._encode_piece(groups[start : start + PIECE_GROUPS], start, coded)
            found += len(part)
            if found > escapes_max:
                return 0
            places.append(part)
        coded[layout.bases + self._groups : layout.escapes] = 0
        length_bytes = layout.escapes + ESCAPE_BYTES * found
        if found:
            coded[layout.escapes : length_bytes] = np.concatenate(places).astype("<u4").view(np.uint8)
        head = CodedHead(EXP4, self._dtype, 0, self._values, found, length_bytes)
        coded[:HEAD_BYTES] = np.frombuffer(head.pack(), np.uint8)
        return length_bytes

    def _encode_piece(self, groups: NDArray[Any], start: int, coded: Bytes) -> NDArray[np.uint32]:
        """Write what the groups from `start` on have in every part; returns their escapes."""
        count, layout = len(groups), self._layout
        wide, other = self._wide[:count], self._other[:count]
        exponents_, nibbles, escapes = self._exponents[:count], self._nibbles[:count], self._escapes[:count]
        mantissa_bits = FORMATS[self._dtype][3]
        np.right_shift(groups, mantissa_bits, out=wide)
        np.copyto(exponents_, wide, casting="unsafe")  # the sign, above 8 bits, falls off
        bases = np.maximum.reduceat(exponents_.reshape(-1), self._starts[:count])  # twice as fast as `max` by rows
        np.subtract(bases[:, None], exponents_, out=nibbles)
        np.greater_equal(nibbles, ESCAPE, out=escapes)
        positions = np.flatnonzero(escapes)
        if len(positions):
            nibbles.reshape(-1)[positions] = ESCAPE
        words, upper = nibbles.view(np.uint64), self._upper[:count]
        np.left_shift(words[:, _HALF_WORDS:], _TOP_NIBBLE, out=upper)
        at = layout.nibbles + start * HALF
        target = coded[at : at + count * HALF].view(np.uint64).reshape(count, _HALF_WORDS)
        np.bitwise_or(words[:, :_HALF_WORDS], upper, out=target)
        coded[layout.bases + start : layout.bases + start + count] = bases
        for plane in range(self._planes - 1):
            np.right_shift(groups, 8 * plane, out=wide)
            np.copyto(self._plane(coded, plane, start, count), wide, casting="unsafe")
        np.right_shift(groups, mantissa_bits + 1, out=other)  # bit 8 of the sign and the exponent is the sign
        np.bitwise_and(other, 0x80, out=other)
        np.right_shift(groups, mantissa_bits - 7, out=wide)
        np.bitwise_and(wide, 0x7F, out=wide)
        np.bitwise_or(wide, other, out=wide)
        np.copyto(self._plane(coded, self._planes - 1, start, count), wide, casting="unsafe")
        values = exponents_.reshape(-1)[positions].astype(np.uint32)
        places = positions.astype(np.uint32) + np.uint32(start * GROUP_VALUES)
        return np.asarray(places << np.uint32(8) | values)

    def _plane(self, coded: Bytes, plane: int, start: int, count: int) -> Bytes:
        """Where the bytes of some groups lie in a plane, [groups, 64]."""
        at = self._layout.bytes + plane * self._values + start * GROUP_VALUES
        return coded[at : at + count * GROUP_VALUES].reshape(count, GROUP_VALUES)

    def _encode_float16(self, block: NDArray[Any], coded: Bytes) -> int:
        made = exponents.encode(block, self._dtype)
        if made[0] != EXP4 or len(made) > len(coded):
            return 0
        coded[: len(made)] = made
        return len(made)

    # ------------------------------------------------------------ decode

    def decode(self, coded: Bytes, block: NDArray[Any]) -> None:
        """The way back; bytes after the coded form are ignored. Raises CorruptBlock if it is no such block."""
        if self._dtype == "float16":
            block[:] = exponents.decode(coded, self._dtype, self._values)
            return
        groups = block.reshape(self._groups, GROUP_VALUES)
        places, values = exponents.escapes_of(coded, self._dtype, self._values)
        for start in range(0, self._groups, PIECE_GROUPS):
            self._decode_piece(coded, start, groups[start : start + PIECE_GROUPS])
        if len(places):
            mantissa_bits = FORMATS[self._dtype][3]
            exponents_mask = 0xFF << mantissa_bits
            kept = block[places] & self._kind.type(~exponents_mask & (1 << 8 * self._kind.itemsize) - 1)
            block[places] = kept | (values << np.uint32(mantissa_bits)).astype(self._kind)

    def _decode_piece(self, coded: Bytes, start: int, groups: NDArray[Any]) -> None:
        count, layout = len(groups), self._layout
        wide, other, nibbles = self._wide[:count], self._other[:count], self._nibbles[:count]
        mantissa_bits = FORMATS[self._dtype][3]
        at = layout.nibbles + start * HALF
        halves = coded[at : at + count * HALF].reshape(count, HALF)
        np.bitwise_and(halves, 15, out=nibbles[:, :HALF])
        np.right_shift(halves, _TOP_NIBBLE, out=nibbles[:, HALF:])
        bases = coded[layout.bases + start : layout.bases + start + count]
        np.subtract(bases[:, None], nibbles, out=nibbles)
        np.copyto(wide, self._plane(coded, self._planes - 1, start, count))
        np.bitwise_and(wide, 0x80, out=other)
        np.left_shift(other, mantissa_bits + 1, out=other)
        np.bitwise_and(wide, 0x7F, out=wide)
        np.left_shift(wide, mantissa_bits - 7, out=wide)
        np.bitwise_or(other, wide, out=groups)
        np.copyto(wide, nibbles)
        np.left_shift(wide, mantissa_bits, out=wide)
        np.bitwise_or(groups, wide, out=groups)
        for plane in range(self._planes - 1):
            np.copyto(wide, self._plane(coded, plane, start, count))
            np.left_shift(wide, 8 * plane, out=wide)
            np.bitwise_or(groups, wide, out=groups)
