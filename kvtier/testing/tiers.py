"""What every tier must do, as tests: subclass, provide a fixture, and the tier is enrolled.

    class TestMine(SlotTierContract):        # a memory tier; `persistent_tiers` has the suite for the others
        @pytest.fixture
        def tier(self):
            tier = MyTier(...)               # takes at least 24 blocks of `length_bytes_max`
            yield tier
            tier.close()

Units: bytes.
"""

import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from kvtier.errors import KvtierError
from kvtier.tiers.base import SupportsScan, SupportsSlots, Tier
from kvtier.types import (
    Outcome,
    ReadItem,
    Status,
    StoreKey,
    WriteBatch,
    WriteItem,
    block_key,
    page_aligned,
    store_key,
)


def slot_buffer(stride_bytes: int, payload: bytes = b"") -> memoryview:
    """A page-aligned slot of memory that begins with `payload`; the rest is zero."""
    view = memoryview(mmap.mmap(-1, stride_bytes))
    view[: len(payload)] = payload
    return view


def key_of(number: int, namespace: int = 0, hash_bytes: int = 32) -> StoreKey:
    """The key of test block `number`."""
    return store_key(namespace, block_key(random.Random(number).randbytes(hash_bytes), 0))


def payload_of(number: int, length_bytes: int) -> bytes:
    """The content of test block `number`: no two are alike, none is zero at its end."""
    return random.Random(~number).randbytes(length_bytes - 1) + b"\xa5"


class TierContract:
    """Holds for every tier. Set `length_bytes_max` to the largest block the tier of the fixture takes."""

    length_bytes_max: ClassVar[int] = 20_000
    first_place: ClassVar[int] = 1  # a GPU tier's slot 0 is the null block

    def engine_namespace(self, tier: Tier) -> int:
        """The engine-local namespace id that test blocks belong to."""
        return 0

    # ------------------------------------------------------------ helpers

    def stride_of(self, tier: Tier, length_bytes: int) -> int:
        return tier.stride_bytes if isinstance(tier, SupportsSlots) else page_aligned(length_bytes)

    def written(self, number: int, length_bytes: int) -> bytes:
        """The content of test block `number`, as it is written."""
        return payload_of(number, length_bytes)

    def returned(self, number: int, length_bytes: int) -> bytes:
        """The same as it is read: other than it was written from a tier that codes with a loss."""
        return self.written(number, length_bytes)

    def room_bytes(self, length_bytes: int) -> int:
        """What a persistent tier takes for a block, padding included."""
        return page_aligned(length_bytes)

    def item(self, tier: Tier, number: int, length_bytes: int, place: int | None = None) -> WriteItem:
        """A write of test block `number`, at slot `number` of a memory tier unless told otherwise."""
        source = slot_buffer(self.stride_of(tier, length_bytes), self.written(number, length_bytes))
        told = self.first_place + number if place is None else place
        key = key_of(number, self.engine_namespace(tier))
        return WriteItem(key, length_bytes, source, told if isinstance(tier, SupportsSlots) else 0)

    def put(self, tier: Tier, numbers: Sequence[int], length_bytes: int) -> list[Outcome]:
        """Write test blocks; all must be DONE."""
        outcomes = tier.write(WriteBatch([self.item(tier, number, length_bytes) for number in numbers]))
        assert [outcome.status for outcome in outcomes] == [Status.DONE] * len(numbers)
        return outcomes

    def reading(self, tier: Tier, number: int, length_bytes: int, stored: Outcome) -> ReadItem:
        into = slot_buffer(self.stride_of(tier, length_bytes), b"\xff" * length_bytes)
        return ReadItem(
            key_of(number, self.engine_namespace(tier)), stored.place, stored.generation, length_bytes, into
        )

    def expect(self, tier: Tier, numbers: Sequence[int], length_bytes: int, stored: Sequence[Outcome]) -> None:
        """The blocks are there, byte for byte."""
        items = [self.reading(tier, number, length_bytes, at) for number, at in zip(numbers, stored, strict=True)]
        outcomes = tier.read(items)
        assert [outcome.status for outcome in outcomes] == [Status.DONE] * len(items)
        for number, item in zip(numbers, items, strict=True):
            assert bytes(item.into[:length_bytes]) == self.returned(number, length_bytes), f"block {number}"

    # ------------------------------------------------------------ tests

    def lengths(self) -> list[int]:
        """Lengths around a page and around the largest."""
        tried = (1, 511, 4095, 4096, 4097, self.length_bytes_max - 1, self.length_bytes_max)
        return sorted({length for length in tried if 1 <= length <= self.length_bytes_max})

    def test_bytes_survive(self, tier: Tier) -> None:
        """A block would come back changed, or with its neighbour's bytes, or only at whole pages."""
        for length_bytes in self.lengths():
            numbers = list(range(5))
            stored = self.put(tier, numbers, length_bytes)
            self.expect(tier, numbers, length_bytes, stored)

    def test_padding_is_zero(self, tier: Tier) -> None:
        """Old bytes behind a short block would leak into a slot that is promised to be zero there."""
        stored = self.put(tier, [0], 100)
        item = self.reading(tier, 0, 100, stored[0])
        item.into[:] = b"\xee" * len(item.into)
        assert tier.read([item])[0].done
        assert not any(item.into[100:])

    def test_outcomes_follow_the_items(self, tier: Tier) -> None:
        """A block would be looked for at another block's place."""
        numbers = [3, 0, 4, 1, 2]
        stored = self.put(tier, numbers, 5000)
        self.expect(tier, numbers, 5000, stored)
        self.expect(tier, numbers[::-1], 5000, stored[::-1])

    def test_empty_batches(self, tier: Tier) -> None:
        """An executor with nothing left to move would fail."""
        assert tier.read([]) == []
        assert tier.write(WriteBatch()) == []

    def test_concurrent_reads(self, tier: Tier) -> None:
        """Readers on several threads would get each other's blocks."""
        numbers = list(range(16))
        stored = self.put(tier, numbers, 6000)
        orders = [random.Random(seed).sample(numbers, len(numbers)) for seed in range(8)]
        with ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(self.expect, tier, order, 6000, [stored[n] for n in order]) for order in orders]
            for read in reads:
                read.result()

    def test_close_is_idempotent(self, tier: Tier) -> None:
        """Closing twice would fail, or a closed tier would still answer."""
        stored = self.put(tier, [0], 100)
        item = self.reading(tier, 0, 100, stored[0])
        tier.close()
        tier.close()
        with pytest.raises(KvtierError):
            tier.read([item])
        with pytest.raises(KvtierError):
            tier.write(WriteBatch([self.item(tier, 0, 100)]))

    def test_traits_are_sane(self, tier: Tier) -> None:
        """A planner would size its batches by nonsense."""
        traits = tier.traits
        assert traits.capacity_bytes > 0
        assert traits.batch_bytes > 0
        assert traits.readers >= 1
        assert (traits.slots > 0) == isinstance(tier, SupportsSlots)
        assert traits.persistent == isinstance(tier, SupportsScan)


class SlotTierContract(TierContract):
    """Holds for memory tiers, whose slots the caller chooses and may address."""

    def test_overwriting_a_place(self, tier: Tier) -> None:
        """A reused slot would still give its old bytes."""
        self.put(tier, [0], 9000)
        [stored] = tier.write(WriteBatch([self.item(tier, 7, 9000, place=self.first_place)]))
        self.expect(tier, [7], 9000, [stored])

    def test_slots_are_memory(self, tier: Tier) -> None:
        """A zero-copy view of a slot would not show what was written there."""
        [stored] = self.put(tier, [2], 5000)
        assert isinstance(tier, SupportsSlots)
        view = tier.slot(stored.place)
        assert len(view) == tier.stride_bytes
        assert bytes(view[:5000]) == self.written(2, 5000)
