"""BlockCoder: whole blocks into their coded form and back, as tiers keep them, on the CPU.

Owns: one coder per codec, dtype and shape that it has met, with its work memory; so one caller at a time.
Always: decode(encode(x)) is x with exp4, and what `quantize` gives with int8 and fp8, to the bit; damaged bytes end in
        a False for their block, never in an access outside the arrays.
Units:  bytes, blocks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.coding import FLOATS, HEAD_BYTES, LOSSY, Coding
from kvtier.errors import CorruptBlock
from kvtier.kernels.arrays import FORMATS, Bytes
from kvtier.kernels.batch_exponents import BatchExponents
from kvtier.kernels.batch_quantize import BatchQuantizer
from kvtier.kernels.coded import CODECS, CodedHead, quantized_head

_NUMPY = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}

Slots = NDArray[np.uint8]  # [blocks, bytes]; each row is contiguous


class BlockCoder:
    """Codes batches of blocks of one length. Raises UsageError for what `Coding.obstacle` names."""

    def __init__(self) -> None:
        self._quantizers: dict[Coding, BatchQuantizer] = {}
        self._exponents: dict[tuple[str, int], BatchExponents] = {}

    def encode(self, coding: Coding, raw: Slots, coded: Slots) -> list[int]:
        """Code each raw block [blocks, raw bytes] into its row of `coded`, which is `coding.room_bytes` long or more.

        Returns their lengths; 0 for one that finds no room there, as exp4 has it, and whose row is undefined then.
        """
        if coding.codec in LOSSY:
            return self._quantize(coding, raw, coded)
        bits = FORMATS[coding.dtype][1]
        exponents = self._exponents_of(coding, raw.shape[1])
        return [exponents.encode(block.view(bits), row) for block, row in zip(raw, coded, strict=True)]

    def decode(self, coding: Coding, coded: Sequence[Bytes], raw: Slots) -> list[bool]:
        """Decode blocks, each as long as it says, into rows of `raw` [blocks, raw bytes]. False: it was none."""
        if coding.codec in LOSSY:
            return [self._dequantize(coding, block, row) for block, row in zip(coded, raw, strict=True)]
        bits = FORMATS[coding.dtype][1]
        exponents = self._exponents_of(coding, raw.shape[1])
        sound = []
        for block, row in zip(coded, raw, strict=True):
            try:
                exponents.decode(block, row.view(bits))
            except CorruptBlock:
                sound.append(False)
            else:
                sound.append(True)
        return sound

    # ------------------------------------------------------------ int8, fp8

    def _quantize(self, coding: Coding, raw: Slots, coded: Slots) -> list[int]:
        head, quantizer = _head(coding, raw.shape[1]), self._quantizer(coding)
        scales_at = HEAD_BYTES + head.values
        coded[:, :HEAD_BYTES] = np.frombuffer(head.pack(), np.uint8)
        together = max(1, quantizer.rows_max * coding.row_values // head.values)  # small blocks share a piece
        for start in range(0, len(raw), together):
            some = slice(start, start + together)
            rows = np.ascontiguousarray(raw[some]).view(_NUMPY[coding.dtype]).reshape(-1, coding.row_values)
            codes, scales = coded[some, HEAD_BYTES:scales_at], coded[some, scales_at : head.length_bytes]
            if together == 1:
                quantizer.encode(rows, codes[0].reshape(rows.shape), scales[0].view("<u2"))
                continue
            rows_codes, rows_scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), "<u2")
            quantizer.encode(rows, rows_codes, rows_scales)
            codes[...] = rows_codes.reshape(codes.shape)
            scales[...] = rows_scales.view(np.uint8).reshape(scales.shape)
        return [head.length_bytes] * len(raw)

    def _dequantize(self, coding: Coding, block: Bytes, row: Bytes) -> bool:
        try:
            head, expected = CodedHead.of(block), _head(coding, len(row))
        except CorruptBlock:
            return False
        if head != expected:
            return False
        scales_at = HEAD_BYTES + head.values
        codes = block[HEAD_BYTES:scales_at].reshape(-1, coding.row_values)
        scales = block[scales_at : head.length_bytes].view("<u2")
        rows = row.view(_NUMPY[coding.dtype]).reshape(-1, coding.row_values)
        self._quantizer(coding).decode(codes, scales, rows)
        return True

    # ------------------------------------------------------------ coders

    def _quantizer(self, coding: Coding) -> BatchQuantizer:
        quantizer = self._quantizers.get(coding)
        if quantizer is None:
            quantizer = BatchQuantizer(coding.codec, coding.dtype, coding.row_values)
            self._quantizers[coding] = quantizer
        return quantizer

    def _exponents_of(self, coding: Coding, raw_bytes: int) -> BatchExponents:
        values = raw_bytes // FLOATS[coding.dtype][0]
        exponents = self._exponents.get((coding.dtype, values))
        if exponents is None:
            exponents = self._exponents[coding.dtype, values] = BatchExponents(coding.dtype, values)
        return exponents


def check_head(coded: Bytes, codec: str, raw_bytes: int, length_bytes: int) -> str:
    """What is wrong with the head of a coded block that is to become `raw_bytes` long; empty if nothing."""
    try:
        head = CodedHead.of(coded)
    except CorruptBlock as error:
        return str(error)
    fits = head.values * FLOATS[head.dtype][0] == raw_bytes and head.length_bytes == length_bytes
    return "" if head.codec == CODECS[codec] and fits else f"a coded block with the head {head}"


def _head(coding: Coding, raw_bytes: int) -> CodedHead:
    values = raw_bytes // FLOATS[coding.dtype][0]
    return quantized_head(CODECS[coding.codec], coding.dtype, values // coding.row_values, coding.row_values)
