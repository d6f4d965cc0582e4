"""What a tier must do besides that chooses its places and outlives the process, as tests.

    class TestMine(PersistentTierContract):
        @pytest.fixture
        def tier(self):
            self.namespaces = NamespaceTable()
            tier = MyTier(self.namespaces, ...)      # takes at least 24 blocks of `length_bytes_max`
            yield tier
            tier.close()

        def reopen(self, tier):                      # close it, and open its store again
            ...

        def engine_namespace(self, tier):            # an id from that table
            return self.namespaces.id_of(fingerprint, description)

Units: bytes.
"""

from typing import TypeVar

import pytest

from kvtier.testing.tiers import TierContract, key_of
from kvtier.tiers.base import SupportsDrop, SupportsScan, SupportsSidecar, Tier
from kvtier.types import EvictItem, Outcome, Status, WriteBatch, WriteItem

AnyTier = TypeVar("AnyTier", bound=Tier)


class PersistentTierContract(TierContract):
    """Holds for tiers that choose places, know generations and survive the process."""

    def reopen(self, tier: AnyTier) -> AnyTier:
        """Close the tier and open its store again, in the same engine."""
        raise NotImplementedError

    def evict_item(self, tier: Tier, number: int, stored: Outcome) -> EvictItem:
        return EvictItem(key_of(number, self.engine_namespace(tier)), stored.place, stored.generation)

    def test_missing_place(self, tier: Tier) -> None:
        """A place where nothing is would be an exception, or worse, a block."""
        stored = self.put(tier, [0], 5000)
        for place in (stored[0].place + 1, 2**40, -1):
            nowhere = Outcome(Status.DONE, place, stored[0].generation)
            assert tier.read([self.reading(tier, 0, 5000, nowhere)])[0].status is Status.MISSING

    def test_stale_generation(self, tier: Tier) -> None:
        """A reader with an old ticket would be served."""
        [stored] = self.put(tier, [0], 5000)
        stale = Outcome(Status.DONE, stored.place, stored.generation + 1)
        assert tier.read([self.reading(tier, 0, 5000, stale)])[0].status is Status.MISSING
        assert tier.read([self.reading(tier, 1, 5000, stored)])[0].status is Status.MISSING

    def test_new_occupant_bounces_the_old_generation(self, tier: Tier) -> None:
        """After a slot was reused, its former block would be served with the new block's bytes (Mooncake#4153)."""
        old = self.put(tier, range(4), 5000)
        gone = tier.write(WriteBatch(evict=[self.evict_item(tier, n, old[n]) for n in range(4)]))
        assert [outcome.status for outcome in gone] == [Status.DONE] * 4
        new = self.put(tier, range(4, 8), 5000)
        assert {at.place for at in new} & {at.place for at in old}
        assert not {at.generation for at in new} & {at.generation for at in old}
        outcomes = tier.read([self.reading(tier, n, 5000, old[n]) for n in range(4)])
        assert {outcome.status for outcome in outcomes} == {Status.MISSING}
        late = tier.write(WriteBatch(evict=[self.evict_item(tier, n, old[n]) for n in range(4)]))
        assert {outcome.status for outcome in late} == {Status.MISSING}
        self.expect(tier, range(4, 8), 5000, new)

    def test_half_of_a_batch_fails(self, tier: Tier) -> None:
        """One bad item would take its neighbours with it."""
        items = [self.item(tier, number, 5000) for number in range(3)]
        too_long = WriteItem(items[1].key, len(items[1].source) + 1, items[1].source)
        outcomes = tier.write(WriteBatch([items[0], too_long, items[2]]))
        assert [outcome.done for outcome in outcomes] == [True, False, True]
        self.expect(tier, [0, 2], 5000, [outcomes[0], outcomes[2]])
        nowhere = Outcome(Status.DONE, 2**40, 1)
        readings = [self.reading(tier, n, 5000, at) for n, at in ((0, outcomes[0]), (1, nowhere), (2, outcomes[2]))]
        assert [outcome.done for outcome in tier.read(readings)] == [True, False, True]

    def test_items_and_evictions_of_one_batch(self, tier: Tier) -> None:
        """A block would be written over one that its own batch lets go: if the batch fails, both are lost."""
        old = self.put(tier, range(4), 5000)
        items = [self.item(tier, number, 5000) for number in range(4, 8)]
        outcomes = tier.write(WriteBatch(items, [self.evict_item(tier, n, old[n]) for n in (3, 0)]))
        assert [outcome.status for outcome in outcomes] == [Status.DONE] * 6
        new = outcomes[:4]
        assert not {at.place for at in new} & {at.place for at in old}
        self.expect(tier, [1, 2, 4, 5, 6, 7], 5000, [old[1], old[2], *new])
        assert tier.read([self.reading(tier, 3, 5000, old[3])])[0].status is Status.MISSING

    def test_the_sidecar_goes_with_its_batch(self, tier: Tier) -> None:
        """The order of blocks would be older than the blocks, or a row of it come back from the dead."""
        if not isinstance(tier, SupportsSidecar):
            pytest.skip("it keeps no sidecar")
        [outcome] = tier.write(WriteBatch(sidecar={b"b": b"2", b"a": b"1", b"c": b"3"}))
        assert outcome.status is Status.DONE
        rows: dict[bytes, bytes | None] = {b"a": b"4", b"b": None, b"never": None}
        outcomes = tier.write(WriteBatch([self.item(tier, 0, 5000)], sidecar=rows))
        assert [outcome.status for outcome in outcomes] == [Status.DONE] * 2
        assert list(tier.sidecar()) == [(b"a", b"4"), (b"c", b"3")]
        again = self.reopen(tier)
        try:
            assert list(again.sidecar()) == [(b"a", b"4"), (b"c", b"3")]
        finally:
            again.close()

    def test_a_dropped_namespace_is_gone(self, tier: Tier) -> None:
        """After new weights the old blocks would be served, now or after a restart, or keep their room for good."""
        if not isinstance(tier, SupportsDrop):
            pytest.skip("it drops nothing at once")
        assert isinstance(tier, SupportsScan)
        namespace = self.engine_namespace(tier)
        room = tier.room(5000)
        old = self.put(tier, range(4), 5000)
        assert tier.drop(namespace).done
        outcomes = tier.read([self.reading(tier, n, 5000, old[n]) for n in range(4)])
        assert {outcome.status for outcome in outcomes} == {Status.MISSING}
        assert tier.used_bytes() == 0
        assert tier.room(5000) == room
        assert tier.drop(namespace).done, "it is gone already"
        new = self.put(tier, [9], 5000)
        again = self.reopen(tier)
        try:
            assert isinstance(again, SupportsScan)
            assert [block.key for block in again.scan()] == [key_of(9, namespace)]
            self.expect(again, [9], 5000, new)
        finally:
            again.close()

    def test_reopening_keeps_everything(self, tier: Tier) -> None:
        """A restart would forget blocks, or serve others (LMCache#562, #2273)."""
        stored = self.put(tier, range(6), 5000)
        tier.write(WriteBatch(evict=[self.evict_item(tier, 2, stored[2])]))
        again = self.reopen(tier)
        try:
            assert isinstance(again, SupportsScan)
            kept = [0, 1, 3, 4, 5]
            found = {block.key: block for block in again.scan()}
            namespace = self.engine_namespace(again)
            assert list(found) == [key_of(number, namespace) for number in kept]
            places = [Outcome(Status.DONE, block.place, block.generation) for block in found.values()]
            assert places == [Outcome(Status.DONE, stored[n].place, stored[n].generation) for n in kept]
            assert {block.length_bytes for block in found.values()} == {5000}
            self.expect(again, kept, 5000, places)
        finally:
            again.close()

    def test_room_is_true(self, tier: Tier) -> None:
        """The planner would write into a full tier, or evict from one with room."""
        assert isinstance(tier, SupportsScan)
        length_bytes = self.length_bytes_max
        room = tier.room(length_bytes)
        assert room >= 24
        items = [self.item(tier, number, length_bytes) for number in range(room + 1)]
        outcomes = tier.write(WriteBatch(items))
        assert [outcome.status for outcome in outcomes] == [Status.DONE] * room + [Status.NO_ROOM]
        assert tier.room(length_bytes) == 0
        assert tier.used_bytes() == room * self.room_bytes(length_bytes)
        extent = tier.neighbours(outcomes[0].place)
        leaving = [n for n in range(room) if tier.neighbours(outcomes[n].place) == extent]
        tier.write(WriteBatch(evict=[self.evict_item(tier, n, outcomes[n]) for n in leaving]))
        assert tier.room(length_bytes) == len(leaving)
        assert tier.room(1) > len(leaving), "any size fits into an emptied extent"
