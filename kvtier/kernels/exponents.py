"""exp4: the lossless codec. A group of 64 values shares a base exponent; each keeps a 4-bit distance to it.

Neighbouring KV values have exponents close together. bfloat16 shrinks to 97/128 (1.32x), float32 to 225/256 (1.14x),
float16, whose exponents have 5 bits only, to 121/128 (1.06x); an escape costs 4 bytes more.

What follows the head, for `groups` groups (little-endian; group g has the values 64 g to 64 g + 63):

    nibbles   32 per group   byte i: distances of the values i (low half) and i + 32; 15: see the escapes
    bytes     64 per group   the low 8 bits of sign and mantissa; float32: three such planes, low bits first
    planes    24 per group   float16 only: the upper 3 of its 11 bits, one u64 each, bit i of value i
    bases      1 per group   the largest exponent, then zeroes to a multiple of 4
    escapes    4 each        u32, ascending: position in the block << 8 | exponent

Sign and mantissa are one number, the sign on top. A block that would not get shorter, whose number of values is no
multiple of 64, or that has 2^24 or more, is kept raw, and its head says so.

Always: decode(encode(x)) has the bits of x, NaN payloads and -0 included. The rate is fixed but for the escapes, so
        that every value's place is known and a device decodes all groups at once.
Units:  values, bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.coding import HEAD_BYTES
from kvtier.errors import CorruptBlock
from kvtier.kernels.arrays import FORMATS, Bits, Bytes, item_bytes
from kvtier.kernels.coded import EXP4, RAW, CodedHead, raw_head

GROUP_VALUES = 64
HALF = GROUP_VALUES // 2
ESCAPE = 15
ESCAPE_BYTES = 4
VALUES_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a coded block begin, in bytes from its head."""

    nibbles: int
    bytes: int
    planes: int
    bases: int
    escapes: int
    escapes_max: int  # with one more the block would not be shorter than raw

    @classmethod
    def of(cls, dtype: str, values: int) -> "Layout | None":
        """None if a block of so many values is always raw."""
        if values % GROUP_VALUES or not 0 < values < VALUES_MAX:
            return None
        groups, residue_bits = values // GROUP_VALUES, FORMATS[dtype][3] + 1
        nibbles = HEAD_BYTES
        plain = nibbles + groups * HALF
        planes = plain + values * (residue_bits // 8)
        bases = planes + groups * (residue_bits % 8) * 8
        escapes = bases + -(-groups // 4) * 4
        raw_bytes = HEAD_BYTES + values * item_bytes(dtype)
        return cls(nibbles, plain, planes, bases, escapes, (raw_bytes - escapes - 1) // ESCAPE_BYTES)


def encode(bits: Bits, dtype: str) -> Bytes:
    """The coded form of one block. bits: [values], of float32 (uint32), float16 or bfloat16 (uint16)."""
    layout = Layout.of(dtype, bits.size)
    if layout is not None:
        exponents, residues = _split(bits, dtype)
        groups = exponents.reshape(-1, GROUP_VALUES)
        bases = groups.max(axis=1)
        distances = np.minimum(bases[:, None] - groups, ESCAPE).astype(np.uint8)
        positions = np.flatnonzero(distances.reshape(-1) == ESCAPE)
        if len(positions) <= layout.escapes_max:
            length_bytes = layout.escapes + ESCAPE_BYTES * len(positions)
            out = np.zeros(length_bytes, np.uint8)
            head = CodedHead(EXP4, dtype, 0, bits.size, len(positions), length_bytes)
            out[:HEAD_BYTES] = np.frombuffer(head.pack(), np.uint8)
            out[layout.nibbles : layout.bytes] = (distances[:, :HALF] | distances[:, HALF:] << 4).reshape(-1)
            out[layout.bytes : layout.bases] = _residue_planes(residues, dtype)
            out[layout.bases : layout.bases + len(bases)] = bases
            escapes = positions.astype(np.uint32) << np.uint32(8) | exponents[positions]
            out[layout.escapes :] = escapes.astype("<u4").view(np.uint8)
            return out
    head = raw_head(dtype, bits.size)
    return np.concatenate([np.frombuffer(head.pack(), np.uint8), np.ascontiguousarray(bits).view(np.uint8)])


def decode(coded: Bytes, dtype: str, values: int) -> Bits:
    """The bits of a block, [values], from its coded form; bytes after it are ignored.

    Raises CorruptBlock if the head does not belong to such a block, or an escape lies outside of it.
    """
    coded = np.ascontiguousarray(coded)
    head, layout, kind = CodedHead.of(coded), Layout.of(dtype, values), FORMATS[dtype][1]
    if head == raw_head(dtype, values):
        raw: Bits = coded[HEAD_BYTES : head.length_bytes].view(kind).copy()
        return raw
    positions, escaped = escapes_of(coded, dtype, values)
    assert layout is not None, "its head was that of a coded block"
    groups = values // GROUP_VALUES
    nibbles = coded[layout.nibbles : layout.bytes].reshape(groups, HALF)
    bases = coded[layout.bases : layout.bases + groups, None].astype(np.uint32)
    exponents = (bases - np.concatenate([nibbles & 15, nibbles >> 4], axis=1)).reshape(-1)
    exponents[positions] = escaped
    return _join(exponents, _residues(coded[layout.bytes : layout.bases], values, dtype), dtype)


def escapes_of(coded: Bytes, dtype: str, values: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Positions and exponents of the escapes of a block that is kept coded.

    Raises CorruptBlock if the head does not belong to such a block, or an escape lies outside of it.
    """
    head, layout = CodedHead.of(coded), Layout.of(dtype, values)
    if head.codec == RAW or layout is None or head != _head_of(layout, dtype, values, head.escapes):
        raise CorruptBlock(f"a coded block with the head {head}, where {values} values of {dtype} are expected")
    escapes = coded[layout.escapes : head.length_bytes].view("<u4").astype(np.uint32)
    positions = escapes >> np.uint32(8)
    if len(positions) and int(positions.max()) >= values:
        raise CorruptBlock(f"a coded block with an escape at {int(positions.max())} of {values} values")
    return positions, escapes & np.uint32(0xFF)


def _head_of(layout: Layout, dtype: str, values: int, escapes: int) -> CodedHead:
    if escapes > layout.escapes_max:
        raise CorruptBlock(f"a coded block with {escapes} escapes, where {layout.escapes_max} would be too many")
    return CodedHead(EXP4, dtype, 0, values, escapes, layout.escapes + ESCAPE_BYTES * escapes)


def _split(bits: Bits, dtype: str) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], ...]:
    """Exponents, and signs with mantissas."""
    _, _, exponent_bits, mantissa_bits = FORMATS[dtype]
    wide = bits.reshape(-1).astype(np.uint32)
    exponents = wide >> np.uint32(mantissa_bits) & np.uint32((1 << exponent_bits) - 1)
    signs = wide >> np.uint32(exponent_bits + mantissa_bits)
    return exponents, signs << np.uint32(mantissa_bits) | wide & np.uint32((1 << mantissa_bits) - 1)


def _join(exponents: Bits, residues: Bits, dtype: str) -> Bits:
    _, kind, exponent_bits, mantissa_bits = FORMATS[dtype]
    signs = residues >> np.uint32(mantissa_bits)
    tops = signs << np.uint32(exponent_bits) | exponents
    joined: Bits = (tops << np.uint32(mantissa_bits) | residues & np.uint32((1 << mantissa_bits) - 1)).astype(kind)
    return joined


def _residue_planes(residues: Bits, dtype: str) -> Bytes:
    """Signs with mantissas as planes of bytes, then planes of bits."""
    residue_bits = FORMATS[dtype][3] + 1
    byte_planes = [(residues >> np.uint32(shift)).astype(np.uint8) for shift in range(0, residue_bits - 7, 8)]
    shifts = np.arange(residue_bits // 8 * 8, residue_bits, dtype=np.uint32)
    bits = residues.reshape(-1, 1, GROUP_VALUES) >> shifts[:, None] & np.uint32(1)
    return np.concatenate([*byte_planes, np.packbits(bits.astype(np.uint8), axis=-1, bitorder="little").reshape(-1)])


def _residues(planes: Bytes, values: int, dtype: str) -> Bits:
    residue_bits = FORMATS[dtype][3] + 1
    byte_planes = residue_bits // 8
    residues = np.zeros(values, np.uint32)
    for plane, part in enumerate(planes[: values * byte_planes].reshape(byte_planes, values)):
        residues |= part.astype(np.uint32) << np.uint32(8 * plane)
    packed = planes[values * byte_planes :].reshape(values // GROUP_VALUES, residue_bits % 8, 8)
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    for plane in range(residue_bits % 8):
        residues |= bits[:, plane].reshape(-1).astype(np.uint32) << np.uint32(8 * byte_planes + plane)
    return residues
