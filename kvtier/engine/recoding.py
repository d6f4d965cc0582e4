"""Moves blocks between memory tiers that keep them in different codecs: coded on the way down, decoded on the way up.

Owns: page-aligned scratch memory for each direction, taken at start, in which blocks lie side by side between the two
tiers. Always: bytes enter and leave a tier by its own verbs only; a block is DONE when the target tier says so; what
does not decode is CORRUPT. One batch at a time in each direction.
Units:  bytes.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.blocks.coding import NONE, Coding, Codings
from kvtier.errors import UsageError
from kvtier.kernels.block_coder import BlockCoder
from kvtier.tiers.base import Tier
from kvtier.tiers.slots import address_of
from kvtier.types import Outcome, ReadItem, Status, Transfer, WriteBatch, WriteItem, page_aligned

SCRATCH_BYTES = 4 << 20  # of raw blocks at once: more gains nothing, and less makes small copies

UNDECODABLE = Outcome(Status.CORRUPT, detail="its coded form cannot be decoded")
NO_GROUP = Outcome(Status.FAILED, detail="the model has no such group of layers")


class _Lane:
    """One direction: scratch memory and a coder, for one batch at a time."""

    def __init__(self, raw_bytes_max: int, room_bytes_max: int) -> None:
        self.lock = threading.Lock()
        self.coder = BlockCoder()
        blocks = max(1, SCRATCH_BYTES // page_aligned(raw_bytes_max))
        self._raw = memoryview(mmap.mmap(-1, blocks * page_aligned(raw_bytes_max)))
        self._coded = memoryview(mmap.mmap(-1, blocks * page_aligned(room_bytes_max)))
        self.memories = (self._raw, self._coded)

    def blocks_max(self, raw_bytes: int, room_bytes: int) -> int:
        return min(len(self._raw) // page_aligned(raw_bytes), len(self._coded) // page_aligned(room_bytes))

    def raw(self, blocks: int, raw_bytes: int) -> tuple[list[memoryview], NDArray[np.uint8]]:
        """Slots for so many blocks, and the same as an array [blocks, stride]."""
        return _slots(self._raw, blocks, page_aligned(raw_bytes))

    def coded(self, blocks: int, room_bytes: int) -> tuple[list[memoryview], NDArray[np.uint8]]:
        return _slots(self._coded, blocks, page_aligned(room_bytes))


class Recoding:
    """Between tiers whose slots hold blocks as attention reads them, and one whose slots hold them in `codings`."""

    def __init__(self, codings: Codings, length_bytes_max: int, *, tier_codes: bool = False) -> None:
        """length_bytes_max: of a block as attention reads it. tier_codes: the upper tier does it, and nothing is to be
        done here."""
        self._codings = codings
        self.tier_codes = tier_codes
        self._lanes: tuple[_Lane, ...] = ()
        if not tier_codes:
            room_bytes_max = codings.room_bytes(length_bytes_max)
            self._lanes = tuple(_Lane(length_bytes_max, room_bytes_max) for _ in range(2))

    def memories(self) -> list[tuple[int, int]]:
        """Address and length of what tiers copy to and from, for a device to register."""
        return [(address_of(view), len(view)) for lane in self._lanes for view in lane.memories]

    def coded_bytes(self, transfer: Transfer) -> int:
        """How long the transfer's block is in the coded tier. Raises UsageError for a block of no group."""
        coding = self._codings.coding(transfer.key)
        if coding is None:
            raise UsageError(NO_GROUP.detail)
        return coding.room_bytes(transfer.length_bytes)

    def move(self, source: Tier, target: Tier, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Carry out transfers between the tiers: one outcome per transfer, in order."""
        down, up = self._lanes
        step, lane = (self._encoded, down) if source.traits.codec == NONE else (self._decoded, up)
        outcomes: list[Outcome] = []
        with lane.lock:
            for some, coding in self._alike(lane, transfers):
                made = [NO_GROUP] * len(some) if coding is None else step(lane, source, target, some, coding)
                outcomes += made
        return outcomes

    def _alike(self, lane: _Lane, transfers: Sequence[Transfer]) -> Iterator[tuple[list[Transfer], Coding | None]]:
        """Transfers in their order, in runs of blocks that are coded alike and fit into the scratch memory."""
        some: list[Transfer] = []
        for transfer in transfers:
            if some and not self._joins(lane, some, transfer):
                yield some, self._codings.coding(some[0].key)
                some = []
            some.append(transfer)
        if some:
            yield some, self._codings.coding(some[0].key)

    def _joins(self, lane: _Lane, some: Sequence[Transfer], transfer: Transfer) -> bool:
        first, length_bytes = some[0], transfer.length_bytes
        alike = self._codings.coding(first.key) == self._codings.coding(transfer.key)
        same = first.length_bytes == length_bytes and alike
        return same and len(some) < lane.blocks_max(length_bytes, self._codings.room_bytes(length_bytes))

    def _encoded(
        self, lane: _Lane, source: Tier, target: Tier, some: Sequence[Transfer], coding: Coding
    ) -> list[Outcome]:
        raw_bytes, room_bytes = some[0].length_bytes, coding.room_bytes(some[0].length_bytes)
        views, raw = lane.raw(len(some), raw_bytes)
        slots, coded = lane.coded(len(some), room_bytes)
        read = source.read(
            [
                ReadItem(t.key, t.source_place, t.source_generation, raw_bytes, view)
                for t, view in zip(some, views, strict=True)
            ]
        )
        lengths = lane.coder.encode(coding, raw[:, :raw_bytes], coded[:, :room_bytes])
        items = [
            WriteItem(t.key, length_bytes, slot, t.target_place, coding.codec)
            for t, length_bytes, slot, outcome in zip(some, lengths, slots, read, strict=True)
            if outcome.done
        ]
        return _joined(read, target.write(WriteBatch(items)))

    def _decoded(
        self, lane: _Lane, source: Tier, target: Tier, some: Sequence[Transfer], coding: Coding
    ) -> list[Outcome]:
        raw_bytes, room_bytes = some[0].length_bytes, coding.room_bytes(some[0].length_bytes)
        slots, coded = lane.coded(len(some), room_bytes)
        views, raw = lane.raw(len(some), raw_bytes)
        read = source.read(
            [
                ReadItem(t.key, t.source_place, t.source_generation, room_bytes, slot, coding.codec)
                for t, slot in zip(some, slots, strict=True)
            ]
        )
        sound = lane.coder.decode(coding, list(coded[:, :room_bytes]), raw[:, :raw_bytes])
        read = [UNDECODABLE if o.done and not is_sound else o for o, is_sound in zip(read, sound, strict=True)]
        items = [
            WriteItem(t.key, raw_bytes, view, t.target_place)
            for t, view, outcome in zip(some, views, read, strict=True)
            if outcome.done
        ]
        return _joined(read, target.write(WriteBatch(items)))


def _slots(memory: memoryview, blocks: int, stride_bytes: int) -> tuple[list[memoryview], NDArray[np.uint8]]:
    views = [memory[at * stride_bytes : (at + 1) * stride_bytes] for at in range(blocks)]
    return views, np.frombuffer(memory, np.uint8, blocks * stride_bytes).reshape(blocks, stride_bytes)


def _joined(read: Sequence[Outcome], written: Sequence[Outcome]) -> list[Outcome]:
    """How each block ended: as it was written, or why it was not read."""
    ends = iter(written)
    return [next(ends) if outcome.done else outcome for outcome in read]
