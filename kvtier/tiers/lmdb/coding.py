"""What a store's codec makes of blocks on their way in, and of records' blocks on their way out.

Owns: scratch memory, whole pages, that grows to what a batch needs and is used again; and coders with their work
memory. Always: a block is decoded by what its record says, whatever the tier's codec is now; one that its codec does
not shorten by a page is kept as it came. Any number of threads; each borrows what it uses.
Units:  bytes.
"""

import mmap
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvtier.blocks.coding import NONE, UNCODED, Codings
from kvtier.errors import CorruptBlock
from kvtier.kernels.arrays import item_bytes
from kvtier.kernels.block_coder import BlockCoder, check_head
from kvtier.kernels.coded import CodedHead
from kvtier.tiers.lmdb.layout import Coded, Record
from kvtier.types import PAGE_BYTES, StoreKey, WriteItem, page_aligned

PIECE_BYTES = 1 << 20  # of raw blocks that are laid side by side to be coded at once
KEPT_MAX = 8  # pieces of scratch memory that wait for the next batch


class Payload(NamedTuple):
    """What is written of one block: the first `length_bytes` of `view`, into a slot of `stride_bytes`."""

    view: memoryview
    length_bytes: int
    stride_bytes: int
    coded: Coded | None = None


class BlockCoding:
    """The codec of one open store."""

    def __init__(self, codings: Codings = UNCODED) -> None:
        self.codings = codings
        self._coders: list[BlockCoder] = []
        self._scratch: list[mmap.mmap] = []  # by size
        self._lock = threading.Lock()

    @contextmanager
    def scratch(self, length_bytes: int) -> Iterator[memoryview]:
        """Page-aligned memory, whose content is what somebody left there; it is others' behind the `with`."""
        with self._lock:
            at = bisect_left(self._scratch, length_bytes, key=len)
            memory = self._scratch.pop(at) if at < len(self._scratch) else None
        if memory is None:
            memory = mmap.mmap(-1, max(page_aligned(length_bytes), PAGE_BYTES))
        try:
            yield memoryview(memory)
        finally:
            with self._lock:
                insort(self._scratch, memory, key=len)
                del self._scratch[: len(self._scratch) - KEPT_MAX]

    # ------------------------------------------------------------ in

    def scratch_bytes(self, items: Sequence[WriteItem]) -> int:
        """How much scratch memory `encode` needs for these."""
        if self.codings.codec == NONE:
            return 0
        return sum(self.codings.slot_bytes(item.length_bytes) for item in items if self._encodes(item))

    def encode(self, items: Sequence[WriteItem], scratch: memoryview) -> list[Payload | str]:
        """What to write of each, or what is wrong with it. What was coded lies in `scratch`."""
        payloads: list[Payload | str] = [self._as_it_is(item) for item in items]
        if self.codings.codec == NONE:
            return payloads
        at = 0
        for start, stop in self._alike(items):
            stride_bytes = self.codings.slot_bytes(items[start].length_bytes)
            memory = scratch[at : at + (stop - start) * stride_bytes]
            at += len(memory)
            payloads[start:stop] = self._encoded(items[start:stop], memory, payloads[start:stop])
        return payloads

    def _encodes(self, item: WriteItem) -> bool:
        coding = self.codings.coding(item.key)
        return item.codec == NONE and coding is not None and coding.codec != NONE and coding.codes(item.length_bytes)

    def _alike(self, items: Sequence[WriteItem]) -> Iterator[tuple[int, int]]:
        """Runs of items that are coded alike, of about PIECE_BYTES."""
        start = 0
        for stop in range(1, len(items) + 1):
            first = items[start]
            together_max = max(1, PIECE_BYTES // max(1, first.length_bytes))
            goes_on = (
                stop < len(items)
                and stop - start < together_max
                and items[stop].length_bytes == first.length_bytes
                and items[stop].codec == first.codec
                and self.codings.coding(items[stop].key) == self.codings.coding(first.key)
            )
            if not goes_on:
                if self._encodes(first):
                    yield start, stop
                start = stop

    def _encoded(
        self, items: Sequence[WriteItem], memory: memoryview, otherwise: Sequence[Payload | str]
    ) -> list[Payload | str]:
        raw_bytes, coding = items[0].length_bytes, self.codings.coding(items[0].key)
        assert coding is not None, "it was asked for"
        rows = np.frombuffer(memory, np.uint8).reshape(len(items), -1)
        sources = [np.frombuffer(item.source, np.uint8, raw_bytes) for item in items]
        raw = sources[0][None] if len(items) == 1 else np.stack(sources)
        with self._coder() as coder:
            lengths = coder.encode(coding, raw, rows[:, : coding.room_bytes(raw_bytes)])
        stride_bytes = rows.shape[1]
        rows_of = [memory[at : at + stride_bytes] for at in range(0, len(memory), stride_bytes)]
        made: list[Payload | str] = []
        for row, length_bytes, kept in zip(rows_of, lengths, otherwise, strict=True):
            if not length_bytes:
                made.append(kept)
                continue
            row[length_bytes:] = bytes(stride_bytes - length_bytes)
            coded = Coded(coding.codec, raw_bytes, stride_bytes)
            made.append(Payload(row, length_bytes, stride_bytes, coded))
        return made

    def _as_it_is(self, item: WriteItem) -> Payload | str:
        if item.codec == NONE:
            return Payload(item.source, item.length_bytes, page_aligned(item.length_bytes))
        try:
            head = CodedHead.of(np.frombuffer(item.source, np.uint8, item.length_bytes))
        except CorruptBlock as error:
            return str(error)
        raw_bytes = head.values * item_bytes(head.dtype)
        stride_bytes = max(page_aligned(item.length_bytes), self.codings.slot_bytes(raw_bytes))
        return Payload(item.source, item.length_bytes, stride_bytes, Coded(item.codec, raw_bytes, stride_bytes))

    # ------------------------------------------------------------ out

    def decode(self, blocks: Sequence[tuple[StoreKey, Coded, memoryview, memoryview]]) -> list[bool]:
        """Decode (key, how it is coded, its coded bytes, where to) each; False for what is no such block."""
        with self._coder() as coder:
            return [self._decoded(coder, *block) for block in blocks]

    def _decoded(self, coder: BlockCoder, key: StoreKey, coded: Coded, block: memoryview, into: memoryview) -> bool:
        coding = self.codings.coding(key, coded.codec)
        if coding is None or not coding.decodes(coded.raw_bytes):
            return False
        raw = np.frombuffer(into, np.uint8)
        raw[coded.raw_bytes :] = 0
        return coder.decode(coding, [np.frombuffer(block, np.uint8)], raw[None, : coded.raw_bytes])[0]

    @contextmanager
    def _coder(self) -> Iterator[BlockCoder]:
        try:
            coder = self._coders.pop()
        except IndexError:
            coder = BlockCoder()
        yield coder
        self._coders.append(coder)


def head_problem(record: Record, payload: memoryview) -> str:
    """Why a block's bytes are not what its record says of their coded form; empty if they are, or are not coded."""
    if record.coded is None:
        return ""
    block = np.frombuffer(payload, np.uint8, record.length_bytes)
    return check_head(block, record.coded.codec, record.coded.raw_bytes, record.length_bytes)
