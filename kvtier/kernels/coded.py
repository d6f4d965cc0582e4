"""A coded block: the head that says how a block was coded, and the sizes that follow from it.

Layout (little-endian), the same from the CPU and from the device (src/coded.cuh):

    0  1  codec: 1 raw, 2 int8, 3 fp8, 4 exp4      1  1  dtype: 1 float32, 2 float16, 3 bfloat16
    2  2  values per row (int8, fp8), else 0       4  4  values in the block
    8  4  escapes (exp4), else 0                  12  4  length in bytes, this head included
   16     what the codec writes

Always: codec 0 does not exist, so that zeroed memory is no coded block. Lengths are below 4 GiB.
Units:  values, bytes.
"""

import struct
from dataclasses import dataclass

from kvtier.blocks.coding import HEAD_BYTES, SCALE_BYTES
from kvtier.errors import CorruptBlock, UsageError
from kvtier.kernels.arrays import NAMES, NUMBERS, Bytes, item_bytes

RAW, INT8, FP8, EXP4 = 1, 2, 3, 4
CODECS = {"int8": INT8, "fp8": FP8, "exp4": EXP4}

_HEAD = struct.Struct("<BBHIII")
_U32_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class CodedHead:
    """What the first 16 bytes of a coded block say. `dtype` is that of the block before coding."""

    codec: int
    dtype: str
    row_values: int
    values: int
    escapes: int
    length_bytes: int

    def pack(self) -> bytes:
        """The 16 bytes. Raises UsageError if the block is too long for them."""
        if self.length_bytes > _U32_MAX:
            raise UsageError(f"a coded block of {self.length_bytes} bytes; use blocks of fewer tokens")
        return _HEAD.pack(
            self.codec, NUMBERS[self.dtype], self.row_values, self.values, self.escapes, self.length_bytes
        )

    @classmethod
    def of(cls, coded: Bytes) -> "CodedHead":
        """Read the head of a coded block. Raises CorruptBlock if it cannot be one."""
        if len(coded) < HEAD_BYTES:
            raise CorruptBlock(f"{len(coded)} bytes are too few for a coded block")
        codec, number, row_values, values, escapes, length_bytes = _HEAD.unpack(coded[:HEAD_BYTES].tobytes())
        if codec not in (RAW, INT8, FP8, EXP4) or number not in NAMES:
            raise CorruptBlock(f"no coded block: codec {codec}, dtype {number}")
        if length_bytes > len(coded):
            raise CorruptBlock(f"a coded block of {length_bytes} bytes, of which {len(coded)} are there")
        return cls(codec, NAMES[number], row_values, values, escapes, length_bytes)


def raw_head(dtype: str, values: int) -> CodedHead:
    """The head of a block that is kept as it was."""
    return CodedHead(RAW, dtype, 0, values, 0, HEAD_BYTES + values * item_bytes(dtype))


def quantized_head(codec: int, dtype: str, rows: int, row_values: int) -> CodedHead:
    """The head of a block in int8 or fp8: a code per value, and a scale per row.

    Raises UsageError for rows of an odd number of values (scales would not be aligned) or of more than 65535.
    """
    if row_values % 2 or not 0 < row_values < 1 << 16:
        raise UsageError(f"rows of {row_values} values; int8 and fp8 need an even head_dim below 65536")
    values = rows * row_values
    return CodedHead(codec, dtype, row_values, values, 0, HEAD_BYTES + values + SCALE_BYTES * rows)


def coded_bytes_max(codec: str, dtype: str, values: int, row_values: int) -> int:
    """Bytes that a coded block may take at most: the room to set aside for it. `codec` as in CODECS."""
    if codec == "exp4":
        return raw_head(dtype, values).length_bytes
    return quantized_head(CODECS[codec], dtype, values // row_values, row_values).length_bytes
