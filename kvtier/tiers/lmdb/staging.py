"""What a batch becomes before any of it is written: the blocks that leave, those that come, and where each one goes.

Owns: what is known of a batch between its arrival and its outcomes. Always: a place is taken for an item, or the item
has its outcome; no place that the batch frees is among those taken. The writer's thread only.
Units: bytes; strides and places in pages of 4096 bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import lmdb

from kvtier.tiers.lmdb.coding import BlockCoding, Payload
from kvtier.tiers.lmdb.layout import names_block
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.reader import MISSING, judged, rows_at
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

NOTHING = Payload(memoryview(b""), 0, 0)  # of an item that was refused


@dataclass(slots=True)
class Writing:
    """One item on its way, as it is stored. `place` is -1 until a slot is taken, `outcome` is None while it may still
    succeed."""

    item: WriteItem
    payload: Payload
    local: int  # the namespace, as the engine counts
    place: int = -1
    io: SlotIO | None = None
    generation: int = 0
    outcome: Outcome | None = None

    @property
    def has_no_room(self) -> bool:
        return self.outcome is not None and self.outcome.status is Status.NO_ROOM


@dataclass(slots=True)
class Staged:
    """A batch, its items, the places that leave with the keys of their records, and one outcome per eviction (DONE if
    the commit succeeds)."""

    batch: WriteBatch
    writings: list[Writing]
    leaving: dict[int, bytes]
    evictions: list[Outcome]
    noted: Outcome | None = None  # of the sidecar; None until the batch has ended

    @property
    def moving(self) -> list[Writing]:
        """The items that may still succeed."""
        return [writing for writing in self.writings if writing.outcome is None]

    @property
    def is_due(self) -> bool:
        """Whether there is anything to commit that has not failed."""
        return self.noted is None and bool(self.leaving or self.batch.sidecar or self.moving)

    def waits_for(self, earlier: "Staged") -> bool:
        """Whether it would end otherwise if an earlier batch were committed first: it wants the room that one frees, or
        names a place of it."""
        if earlier.leaving and any(writing.has_no_room for writing in self.writings):
            return True
        touched = {writing.place for writing in earlier.writings} | earlier.leaving.keys()
        return any(item.place in touched for item in self.batch.evict)

    def keep(self, why: Outcome) -> None:
        """Nothing leaves, for this reason."""
        self.leaving = {}
        self.evictions = [why if outcome.done else outcome for outcome in self.evictions]

    def end(self, failure: Outcome | None, noted: Outcome = DONE) -> None:
        """It was committed, its sidecar as `noted` says, or nothing of it was."""
        for writing in self.moving:
            writing.outcome = failure or Outcome(Status.DONE, writing.place, writing.generation)
        if failure is not None:
            self.keep(failure)
        self.noted = failure or noted

    def outcomes(self) -> list[Outcome]:
        """One per item, one per eviction, one for a sidecar with rows; when all have ended."""
        ends = [writing.outcome for writing in self.writings if writing.outcome is not None] + self.evictions
        return [*ends, self.noted or DONE] if self.batch.sidecar else ends


class Staging:
    """Stages batches for one open store."""

    def __init__(self, store: OpenStore, room: Room, coding: BlockCoding) -> None:
        self._store = store
        self._room = room
        self._coding = coding

    def stage(self, batch: WriteBatch, scratch: memoryview) -> Staged:
        """Look up what leaves, encode what comes, into `scratch`, and take places."""
        leaving, evictions = self._due(batch.evict)
        staged = Staged(batch, self._accepted(batch.items, scratch), leaving, evictions)
        self._place(staged.moving)
        return staged

    def _due(self, evict: Sequence[EvictItem]) -> tuple[dict[int, bytes], list[Outcome]]:
        """The places whose block is still there, and one outcome per eviction (DONE if the commit succeeds)."""
        leaving: dict[int, bytes] = {}
        outcomes = []
        slots = self._store.allocator.slots_of([item.place for item in evict])
        try:
            rows = rows_at(self._store, slots)
        except lmdb.Error as error:
            return {}, [Outcome(Status.FAILED, detail=f"index: {error}")] * len(evict)
        owners = self._store.allocator.owners_of(slots)
        namespaces = self._store.names.to_tier_by_prefix(item.key for item in evict)
        for item, (key, row), owner in zip(evict, rows, owners, strict=True):
            namespace = namespaces[item.key[:NAMESPACE_BYTES]]
            if item.place in leaving:
                end = Outcome(Status.MISSING, detail="evicted twice in one batch")
            elif row is None:
                end = MISSING
            else:
                end = _end_of(item, key, row, owner, namespace)
            if end is DONE:
                leaving[item.place] = key
            outcomes.append(end)
        return leaving, outcomes

    def _accepted(self, items: Sequence[WriteItem], scratch: memoryview) -> list[Writing]:
        """The items as they are stored, those refused at once that can never be kept."""
        names = self._store.names
        locals_ = [namespace_of(item.key) for item in items]
        unknown = {local for local in set(locals_) if not names.knows(local)}
        problems = [self._problem(item, local, unknown) for item, local in zip(items, locals_, strict=True)]
        payloads = iter(
            self._coding.encode([i for i, problem in zip(items, problems, strict=True) if not problem], scratch)
        )
        writings = []
        for item, local, problem in zip(items, locals_, problems, strict=True):
            payload = problem or next(payloads)
            if isinstance(payload, str):
                writings.append(Writing(item, NOTHING, local, outcome=Outcome(Status.FAILED, detail=payload)))
            else:
                writings.append(Writing(item, payload, local))
        return writings

    def _problem(self, item: WriteItem, local: int, unknown: set[int]) -> str:
        hash_bytes = len(item.key) - NAMESPACE_BYTES - GROUP_BYTES
        if not 1 <= hash_bytes <= HASH_BYTES_MAX:
            return f"a hash of {hash_bytes} bytes"
        if not 1 <= item.length_bytes <= min(len(item.source), self._room.length_bytes_max):
            return f"a length of {item.length_bytes} bytes"
        return f"namespace {local} is not in the table" if local in unknown else ""

    def _place(self, writings: Iterable[Writing]) -> None:
        """Take a slot for each, or end it with NO_ROOM. Neighbours in the batch become neighbours in the slab."""
        by_stride: dict[int, list[Writing]] = {}
        fingerprints: dict[int, bytes] = {}
        for writing in writings:
            by_stride.setdefault(writing.payload.stride_bytes, []).append(writing)
            if writing.local not in fingerprints:
                fingerprints[writing.local], _ = self._store.names.identity(writing.local)
        for stride, group in by_stride.items():
            places = self._room.take(stride // PAGE_BYTES, len(group))
            for writing, place in zip(group, places, strict=False):
                view, length_bytes, _, _ = writing.payload
                key = block_key_of(writing.item.key)
                writing.place = place
                writing.io = SlotIO(key, place * PAGE_BYTES, stride, length_bytes, view)
                writing.io.fingerprint = fingerprints[writing.local]
            for writing in group[len(places) :]:
                writing.outcome = Outcome(Status.NO_ROOM, detail=self._room.refusal)


def _end_of(item: EvictItem, place_key: bytes, row: bytes, owner: int, namespace: int | None) -> Outcome:
    """What becomes of an eviction whose place has a record, and is owned by a namespace or (0) by none; `namespace` is
    the item's."""
    if owner == namespace and names_block(row, item.generation, block_key_of(item.key)):
        return DONE
    entry = judged(place_key, row, item, namespace)
    if not isinstance(entry, Outcome):
        return DONE
    # A record that nobody can read any more may be evicted by whoever names its place.
    return DONE if entry.status is Status.CORRUPT and owner else entry
