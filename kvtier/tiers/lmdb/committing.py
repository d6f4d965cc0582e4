"""Makes what was written one index transaction, and follows it in memory.

Owns: the generation counter, and the strides of extents as the index has them, which only commits change. Always: what
the memory says of a slot is changed after the commit that says the same, or not at all; nothing that follows a commit
raises. A full index first gives up a batch's sidecar, for blocks
are worth more than their order; and while the disk that evictions will need is not claimed, no sidecar is kept: records
are bounded by their slots, rows are not. The writer's thread only.
Units: bytes, milliseconds since 1970; strides and places in pages of 4096 bytes.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import lmdb

from kvtier.tiers.lmdb.index import Change, IndexFull, Rows
from kvtier.tiers.lmdb.layout import (
    GENERATION_KEY,
    ID_KEY,
    NAMESPACE_KEY,
    PLACE_KEY,
    Record,
    decode_extent,
    encode_extent,
    encode_limit,
    encode_namespace,
    encode_record,
)
from kvtier.tiers.lmdb.meter import Meter
from kvtier.tiers.lmdb.opened import GENERATION_STEP, OpenStore
from kvtier.tiers.lmdb.room import Room
from kvtier.tiers.lmdb.staging import Writing
from kvtier.types import DONE, PAGE_BYTES, Outcome, Status

_log = logging.getLogger(__name__)

_NO_SIDECAR = Outcome(Status.NO_ROOM, detail="the index has no room for the sidecar")


class Committer:
    """Commits to the index of one open store."""

    def __init__(self, store: OpenStore, room: Room, meter: Meter) -> None:
        self._store = store
        self._room = room
        self._meter = meter
        self._recorded = dict(store.stock.strides)  # extent -> stride, as the index has it
        self.broken = ""  # why nothing can be committed any more

    def commit(
        self, moving: Sequence[Writing], leaving: Mapping[int, bytes], sidecar: Rows, alone: bool = True
    ) -> tuple[Outcome | None, Outcome]:
        """One transaction for what comes, leaves and is noted: why it did not happen, and how the sidecar ended.

        leaving: places, with the keys of their records.
        alone: give up the sidecar for the blocks if both do not fit; else it is for whoever tries again to say whose.
        """
        dropped = self._room.reserve_used and any(row is not None for row in sidecar.values())
        if dropped and not alone:
            return _NO_SIDECAR, _NO_SIDECAR
        change = Change(sidecar={} if dropped else sidecar)
        change.blocks.update(dict.fromkeys(leaving.values()))
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
        failure = self.apply(change, evicting=not moving, alone=alone)
        if failure is not None:
            return failure, failure
        for local, tier_id in new_names.items():
            self._store.names.add(tier_id, local)
        for tier_id in left:
            self._store.names.remove(tier_id)
        self._store.allocator.own(owners)
        self._store.generation_limit = limit
        self._room.give_back(leaving)
        return None, DONE if len(change.sidecar) == len(sidecar) else _NO_SIDECAR

    def forget(self, tier_id: int) -> Outcome | None:
        """A namespace's row goes, and its slots are free; its records stay, and mean nothing. Why it did not happen."""
        places = self._store.allocator.owned_by(tier_id)
        change = Change(namespaces={ID_KEY.pack(tier_id): None})
        self._forget_extents(change, places)
        failure = self.apply(change, evicting=True)
        if failure is None:
            self._store.names.remove(tier_id)
            self._room.give_back(places)
        return failure

    def apply(self, change: Change, evicting: bool, alone: bool = True) -> Outcome | None:
        """Commit, letting the index grow within the capacity if it must. Returns why it did not happen."""
        while not self.broken:
            try:
                with self._meter.commit():
                    self._store.index.commit(change)
            except IndexFull:
                if self._room.grow_index(evicting and not change.sidecar):  # the reserve is for blocks
                    continue
                if not change.sidecar or not alone:
                    return Outcome(Status.NO_ROOM, detail="the index is full")
                change.sidecar = {}
            except lmdb.Error as error:
                if not self._store.index.is_writable():
                    self._break(error)
                    continue
                if self._store.is_full(error):
                    return Outcome(Status.NO_ROOM, detail=f"index: {error}")
                return Outcome(Status.FAILED, detail=f"index: {error}")
            else:
                self._note_extents(change)
                return None
        return Outcome(Status.FAILED, detail=self.broken)

    def keep_promise(self) -> Outcome | None:
        """In mode `batch` a crash may undo one batch: after a transaction of several its head must be durable, too.

        Returns why that is unknown: a crash may undo all of them, and nothing is written after them.
        """
        if self._store.header.durability == "batch":
            try:
                self._store.index.sync()
            except lmdb.Error as error:
                self._break(error)
                return Outcome(Status.FAILED, detail=self.broken)
        return None

    def _note_extents(self, change: Change) -> None:
        for key, row in change.extents.items():
            if row is None:
                self._recorded.pop(ID_KEY.unpack(key)[0], None)
            else:
                extent, stride_pages = decode_extent(key, row)
                self._recorded[extent] = stride_pages

    def _break(self, error: lmdb.Error) -> None:
        self.broken = f"the index stopped after an error: {error}"
        self._room.closed = True
        _log.error("%s: %s", self._store.folder, self.broken)

    # ------------------------------------------------------------ rows

    def _name(self, change: Change, moving: Sequence[Writing]) -> dict[int, int]:
        """Tier ids for namespaces that the store meets for the first time."""
        names = self._store.names
        met = dict.fromkeys([writing.local for writing in moving])
        new = [local for local in met if names.to_tier(local) is None]
        ids = {local: names.limit + position for position, local in enumerate(new)}
        for local, tier_id in ids.items():
            change.namespaces[ID_KEY.pack(tier_id)] = encode_namespace(tier_id, *names.identity(local))
        if ids:
            change.meta[NAMESPACE_KEY] = encode_limit(NAMESPACE_KEY, names.limit + len(ids))
        return ids

    def _record(self, change: Change, moving: Sequence[Writing], new_names: dict[int, int]) -> dict[int, int]:
        """Records and extent rows for the items; returns each place's owner."""
        store = self._store
        now_ms = time.time_ns() // 10**6
        names = {local: store.names.to_tier(local) or new_names[local] for local in {w.local for w in moving}}
        slots = store.allocator.slots_of([writing.place for writing in moving])
        owners, strides = {}, {}
        for generation, (writing, slot) in enumerate(zip(moving, slots, strict=True), store.generation_next):
            io = writing.io
            assert slot is not None, "the place was taken"
            assert io is not None, "and written"
            writing.generation = generation
            owners[writing.place] = owner = names[writing.local]
            strides[slot[0]] = io.stride_bytes // PAGE_BYTES
            key = PLACE_KEY.pack(*slot)
            coded = writing.payload.coded
            record = Record(owner, io.key, io.length_bytes, generation, io.checksum, now_ms, coded)
            change.blocks[key] = encode_record(key, record)
        store.generation_next += len(moving)
        for extent, stride_pages in strides.items():
            if self._recorded.get(extent) != stride_pages:
                change.extents[ID_KEY.pack(extent)] = encode_extent(extent, stride_pages)
        return owners

    def _forget_extents(self, change: Change, places: Iterable[int]) -> None:
        for extent in self._store.allocator.emptied_by(places):
            change.extents[ID_KEY.pack(extent)] = None
