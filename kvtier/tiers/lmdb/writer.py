"""Writes batches: payload, then fdatasync, then one index transaction, and only then are evicted slots free.

Owns: the order above and the generation counter. One thread at a time.
Always: a block is DONE only when its record is committed; if the commit does not happen no item is DONE, no
eviction is applied, and the batch's slots are free again. A slot freed by a batch is never written by it.

                      disk full               payload failed   sync failed            commit failed
    that item         NO_ROOM                 FAILED           FAILED                 NO_ROOM / FAILED
    the others        go on                   go on            FAILED                 NO_ROOM / FAILED
    the slots         withheld till it isn't  free again       withheld till reopen   free again
    evictions         NO_ROOM, not applied    go on            FAILED, not applied    NO_ROOM / FAILED, not applied
    the sidecar       goes on                 goes on          FAILED, not applied    NO_ROOM / FAILED, not applied

A full index first gives up the batch's sidecar, for blocks are worth more than their order; and while the disk that
evictions will need is not claimed, no sidecar is kept: records are bounded by their slots, rows are not.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import lmdb

from kvtier.tiers.lmdb.blockfile import NO_SPACE
from kvtier.tiers.lmdb.budget import Budget
from kvtier.tiers.lmdb.coding import BlockCoding, Payload
from kvtier.tiers.lmdb.index import Change, IndexFull
from kvtier.tiers.lmdb.inline import InlineSlab
from kvtier.tiers.lmdb.layout import (
    GENERATION_KEY,
    HEADER_KEY,
    ID_KEY,
    NAMESPACE_KEY,
    PLACE_KEY,
    Header,
    Record,
    encode_extent,
    encode_header,
    encode_limit,
    encode_namespace,
    encode_record,
)
from kvtier.tiers.lmdb.meter import Meter
from kvtier.tiers.lmdb.opened import GENERATION_STEP, OpenStore
from kvtier.tiers.lmdb.reader import lookup
from kvtier.tiers.lmdb.room import Room
from kvtier.tiers.lmdb.slab import SlotIO
from kvtier.types import (
    DONE,
    GROUP_BYTES,
    HASH_BYTES_MAX,
    NAMESPACE_BYTES,
    PAGE_BYTES,
    EvictItem,
    Outcome,
    Status,
    WriteBatch,
    WriteItem,
    block_key_of,
    namespace_of,
)

_log = logging.getLogger(__name__)

NOTHING = Payload(memoryview(b""), 0, 0)  # of an item that was refused


@dataclass(slots=True)
class _Writing:
    """One item on its way, as it is stored. `place` is -1 until a slot is taken, `outcome` is None while it may still
    succeed."""

    item: WriteItem
    payload: Payload
    place: int = -1
    io: SlotIO | None = None
    generation: int = 0
    outcome: Outcome | None = None


class BatchWriter:
    """Writes to one open store."""

    def __init__(self, store: OpenStore, room: Room, coding: BlockCoding) -> None:
        self._store = store
        self._room = room
        self._coding = coding
        self.meter = Meter(store.folder)
        self._synced = store.header.durability != "none"
        self._recorded = dict(store.stock.strides)  # extent -> stride, as the index has it
        self._broken = ""  # why nothing can be committed any more
        self._sidecar_dropped = False  # of the batch in hand

    # ------------------------------------------------------------ verbs

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """One outcome per item, one per eviction, one for a sidecar with rows."""
        if (refusal := self._refusal()) is not None:
            self._room.refresh()
            return [refusal] * (len(batch.items) + len(batch.evict) + bool(batch.sidecar))
        with self._coding.scratch(self._coding.scratch_bytes(batch.items)) as scratch:
            return self._write(batch, scratch)

    def _write(self, batch: WriteBatch, scratch: memoryview) -> list[Outcome]:
        leaving, evictions = self._due(batch.evict)
        writings = self._accepted(batch.items, scratch)
        self._place([writing for writing in writings if writing.outcome is None])
        writing_now = [writing for writing in writings if writing.outcome is None]
        failure = self._write_payload(writing_now)
        if any(_has_no_room(writing) for writing in writing_now):  # nothing leaves for what could not be stored
            kept = Outcome(Status.NO_ROOM, detail="it stays: the disk was full for what should take its place")
            leaving, evictions = [], [kept if outcome.done else outcome for outcome in evictions]
        self._sidecar_dropped = False
        moving = [writing for writing in writings if writing.outcome is None]
        if failure is None and (moving or leaving or batch.sidecar):
            failure = self._commit(moving, leaving, batch)
            if failure is not None:
                self._give_back(writing.place for writing in moving)
                if failure.status is Status.NO_ROOM:
                    self._room.grow_index(evicting=False)  # before an extent is lent to what the index cannot name
        for writing in moving:
            writing.outcome = failure or Outcome(Status.DONE, writing.place, writing.generation)
        if failure is not None:
            evictions = [failure if outcome.done else outcome for outcome in evictions]
        self._room.refresh()
        ends = [writing.outcome for writing in writings if writing.outcome is not None] + evictions
        if batch.sidecar:
            dropped = Outcome(Status.NO_ROOM, detail="the index has no room for the sidecar")
            ends.append(failure or (dropped if self._sidecar_dropped else DONE))
        return ends

    def drop(self, local: int) -> Outcome:
        """Forget a namespace: its row goes, and with it the meaning of every record that names it."""
        if (refusal := self._refusal()) is not None:
            return refusal
        tier_id = self._store.names.to_tier(local)
        if tier_id is None:
            return DONE
        places = self._store.allocator.owned_by(tier_id)
        change = Change(namespaces={ID_KEY.pack(tier_id): None})
        self._forget_extents(change, places)
        failure = self._apply(change, evicting=True)
        if failure is None:
            self._store.names.remove(tier_id)
            self._give_back(places)
        self._room.refresh()
        return failure or DONE

    def change_capacity(self, header: Header, budget: Budget) -> Outcome:
        """Take over another capacity, once the store's header says it."""
        if (refusal := self._refusal()) is not None:
            return refusal
        failure = self._apply(Change(meta={HEADER_KEY: encode_header(header)}), evicting=False)
        if failure is None:
            self._store.header, self._store.budget = header, budget
            self._store.allocator.extents_max = budget.extents_max
        self._room.refresh()
        return failure or DONE

    # ------------------------------------------------------------ before the payload

    def _refusal(self) -> Outcome | None:
        """Why nothing can be written at all. A store that opened on a full disk is settled as soon as that can be."""
        if self._broken:
            return Outcome(Status.FAILED, detail=self._broken)
        if self._store.settled:
            return None
        try:
            waits = self._store.settle()
        except (OSError, lmdb.Error) as error:
            return Outcome(Status.FAILED, detail=f"the store cannot be settled: {error}")
        return Outcome(Status.NO_ROOM, detail=waits) if waits else None

    def _due(self, evict: Sequence[EvictItem]) -> tuple[list[int], list[Outcome]]:
        """The places whose block is still there, and one outcome per eviction (DONE if the commit succeeds)."""
        leaving: dict[int, None] = {}
        outcomes = []
        try:
            found = lookup(self._store, evict)
        except lmdb.Error as error:
            return [], [Outcome(Status.FAILED, detail=f"index: {error}")] * len(evict)
        for item, entry in zip(evict, found, strict=True):
            if item.place in leaving:
                outcomes.append(Outcome(Status.MISSING, detail="evicted twice in one batch"))
            elif isinstance(entry, Outcome) and not self._is_damaged(item, entry):
                outcomes.append(entry)
            else:
                leaving[item.place] = None
                outcomes.append(DONE)
        return list(leaving), outcomes

    def _is_damaged(self, item: EvictItem, entry: Outcome) -> bool:
        """A record that nobody can read any more may be evicted by whoever names its place."""
        return entry.status is Status.CORRUPT and self._store.allocator.owner_of(item.place) != 0

    def _accepted(self, items: Sequence[WriteItem], scratch: memoryview) -> list[_Writing]:
        """The items as they are stored, those refused at once that can never be kept."""
        problems = [self._problem(item) for item in items]
        payloads = iter(
            self._coding.encode([i for i, problem in zip(items, problems, strict=True) if not problem], scratch)
        )
        writings = []
        for item, problem in zip(items, problems, strict=True):
            payload = problem or next(payloads)
            if isinstance(payload, str):
                writings.append(_Writing(item, NOTHING, outcome=Outcome(Status.FAILED, detail=payload)))
            else:
                writings.append(_Writing(item, payload))
        return writings

    def _problem(self, item: WriteItem) -> str:
        hash_bytes = len(item.key) - NAMESPACE_BYTES - GROUP_BYTES
        if not 1 <= hash_bytes <= HASH_BYTES_MAX:
            return f"a hash of {hash_bytes} bytes"
        if not 1 <= item.length_bytes <= min(len(item.source), self._room.length_bytes_max):
            return f"a length of {item.length_bytes} bytes"
        if not self._store.names.knows(namespace_of(item.key)):
            return f"namespace {namespace_of(item.key)} is not in the table"
        return ""

    def _place(self, writings: Sequence[_Writing]) -> None:
        """Take a slot for each, or end it with NO_ROOM. Neighbours in the batch become neighbours in the slab."""
        by_stride: dict[int, list[_Writing]] = {}
        for writing in writings:
            by_stride.setdefault(writing.payload.stride_bytes, []).append(writing)
        for stride, group in by_stride.items():
            places = self._room.take(stride // PAGE_BYTES, len(group))
            for writing, place in zip(group, places, strict=False):
                payload = writing.payload
                key = block_key_of(writing.item.key)
                writing.place = place
                writing.io = SlotIO(key, place * PAGE_BYTES, stride, payload.length_bytes, payload.view)
                writing.io.fingerprint, _ = self._store.names.identity(namespace_of(writing.item.key))
            for writing in group[len(places) :]:
                writing.outcome = Outcome(Status.NO_ROOM, detail=self._room.refusal)

    # ------------------------------------------------------------ payload

    def _write_payload(self, writings: Sequence[_Writing]) -> Outcome | None:
        """Write and sync. Ends the items whose payload failed; returns why nothing of the batch can be kept."""
        ios = [writing.io for writing in writings if writing.io is not None]
        inline = isinstance(self._store.slab, InlineSlab)
        with self.meter.commit() if inline else nullcontext():  # there blocks are written as pages of LMDB
            self._store.slab.write(ios)
        written = [io for io in ios if io.error is None]
        slot_bytes = 0 if inline else sum(io.stride_bytes for io in written)
        self.meter.payload(sum(io.length_bytes for io in written), slot_bytes)
        for writing, io in zip(writings, ios, strict=True):
            if io.error is not None:
                status = Status.NO_ROOM if io.error.errno in NO_SPACE else Status.FAILED
                writing.outcome = Outcome(status, detail=str(io.error))
        self._room.withhold([writing.place for writing in writings if _has_no_room(writing)])
        self._give_back(w.place for w in writings if w.outcome is not None and not _has_no_room(w))
        if not self._synced or all(writing.outcome is not None for writing in writings):
            return None
        try:
            self._store.slab.file.sync()
        except OSError as error:
            # The kernel may have dropped the pages and will report success next time: these slots stay taken.
            self._store.stock.findings.append(f"sync of the slab failed: {error}; {len(ios)} slots are out of use")
            return Outcome(Status.FAILED, detail=f"sync: {error}")
        return None

    # ------------------------------------------------------------ commit

    def _commit(self, moving: Sequence[_Writing], leaving: Sequence[int], batch: WriteBatch) -> Outcome | None:
        """The batch's one transaction, and what follows from it in memory. Returns why it did not happen."""
        self._sidecar_dropped = self._room.reserve_used and any(row is not None for row in batch.sidecar.values())
        change = Change(sidecar={} if self._sidecar_dropped else batch.sidecar)
        change.blocks.update((self._place_key(place), None) for place in leaving)
        new_names = self._name(change, moving)
        owners = self._record(change, moving, new_names)
        self._forget_extents(change, leaving)
        left = self._store.allocator.owners_left_by(leaving) - set(owners.values())
        if self._store.stock.unknown:
            left = set()  # the names may belong to records that we cannot read
        change.namespaces.update((ID_KEY.pack(tier_id), None) for tier_id in left)  # epochs come and go for ever
        limit = self._store.generation_limit
        if self._store.generation_next > limit:
            limit = self._store.generation_next + GENERATION_STEP
            change.meta[GENERATION_KEY] = encode_limit(GENERATION_KEY, limit)
        failure = self._apply(change, evicting=not moving)
        if failure is not None:
            return failure
        for local, tier_id in new_names.items():
            self._store.names.add(tier_id, local)
        for tier_id in left:
            self._store.names.remove(tier_id)
        for place, owner in owners.items():
            extent = self._store.allocator.extent_of(place)
            self._recorded[extent] = self._store.allocator.stride_of(extent) or 0
            self._store.allocator.own(place, owner)
        self._store.generation_limit = limit
        self._give_back(leaving)
        return None

    def _place_key(self, place: int) -> bytes:
        slot = self._store.allocator.slot_of(place)
        assert slot is not None, "the place was taken"
        return PLACE_KEY.pack(*slot)

    def _name(self, change: Change, moving: Sequence[_Writing]) -> dict[int, int]:
        """Tier ids for namespaces that the store meets for the first time."""
        names = self._store.names
        met = dict.fromkeys(namespace_of(writing.item.key) for writing in moving)
        new = [local for local in met if names.to_tier(local) is None]
        ids = {local: names.limit + position for position, local in enumerate(new)}
        for local, tier_id in ids.items():
            change.namespaces[ID_KEY.pack(tier_id)] = encode_namespace(tier_id, *names.identity(local))
        if ids:
            change.meta[NAMESPACE_KEY] = encode_limit(NAMESPACE_KEY, names.limit + len(ids))
        return ids

    def _record(self, change: Change, moving: Sequence[_Writing], new_names: dict[int, int]) -> dict[int, int]:
        """Records and extent rows for the items; returns each place's owner."""
        store = self._store
        now_ms = time.time_ns() // 10**6
        owners = {}
        for writing in moving:
            assert writing.io is not None, "a slot was taken and written"
            local = namespace_of(writing.item.key)
            owner = store.names.to_tier(local) or new_names[local]
            writing.generation = store.generation_next
            store.generation_next += 1
            key = self._place_key(writing.place)
            io = writing.io
            coded = writing.payload.coded
            record = Record(owner, io.key, io.length_bytes, writing.generation, io.checksum, now_ms, coded)
            change.blocks[key] = encode_record(key, record)
            owners[writing.place] = owner
            extent = store.allocator.extent_of(writing.place)
            stride_pages = io.stride_bytes // PAGE_BYTES
            if self._recorded.get(extent) != stride_pages:
                change.extents[ID_KEY.pack(extent)] = encode_extent(extent, stride_pages)
        return owners

    def _forget_extents(self, change: Change, places: Sequence[int]) -> None:
        for extent in self._store.allocator.emptied_by(places):
            change.extents[ID_KEY.pack(extent)] = None

    def _apply(self, change: Change, evicting: bool) -> Outcome | None:
        """Commit, letting the index grow within the capacity if it must. Returns why it did not happen."""
        while True:
            try:
                with self.meter.commit():
                    self._store.index.commit(change)
            except IndexFull:
                if self._room.grow_index(evicting and not change.sidecar):  # the reserve is for blocks
                    continue
                if not change.sidecar:
                    return Outcome(Status.NO_ROOM, detail="the index is full")
                change.sidecar = {}
                self._sidecar_dropped = True
            except lmdb.Error as error:
                if not self._store.index.is_writable():
                    self._broken = f"the index stopped after an error: {error}"
                    self._room.closed = True
                    _log.error("%s: %s", self._store.folder, self._broken)
                elif self._store.is_full(error):
                    return Outcome(Status.NO_ROOM, detail=f"index: {error}")
                return Outcome(Status.FAILED, detail=f"index: {error}")
            else:
                return None

    def _give_back(self, places: Iterable[int]) -> None:
        for extent in self._room.give_back(places):
            self._recorded.pop(extent, None)


def _has_no_room(writing: _Writing) -> bool:
    return writing.outcome is not None and writing.outcome.status is Status.NO_ROOM
