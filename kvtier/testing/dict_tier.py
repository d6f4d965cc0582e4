"""`DictTier`: a persistent tier that is a dict, as a model of what a store must do.

It shares no code with the real ones. Places are numbers that are never used twice at the same time; a block's
bytes are copied in and out. Faults are set by the test: `fail_write`, `fail_read`, `corrupt`.
Units: bytes, blocks.
"""

from collections.abc import Iterator, Sequence

from kvtier.tiers.base import TierTraits
from kvtier.types import (
    DONE,
    Outcome,
    ReadItem,
    Status,
    StoredBlock,
    StoreKey,
    WriteBatch,
    WriteItem,
    namespace_of,
)


class DictTier:
    """Holds up to `blocks_max` blocks of any size. Survives as an object: open a new engine over it to restart."""

    def __init__(self, name: str = "lmdb", blocks_max: int = 1000, batch_bytes: int = 1 << 16) -> None:
        self.name = name
        self.blocks_max = blocks_max
        self.rows: dict[int, tuple[StoreKey, int, bytes]] = {}  # place -> key, generation, payload
        self.traits = TierTraits(blocks_max << 20, 0, True, False, batch_bytes)
        self.notes: dict[bytes, bytes] = {}  # the sidecar
        self.fail_write: Status | None = None
        self.fail_read: Status | None = None
        self.corrupt: set[int] = set()
        self.allowed_bytes: int | None = None  # what others leave of the disk; None: enough
        self.reads = 0
        self.scrubbed = 0  # blocks
        self.generation = 0  # of the latest row

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        return [self._read(item) for item in items]

    def _read(self, item: ReadItem) -> Outcome:
        self.reads += 1
        if self.fail_read is not None:
            item.into[:1] = b"\xee"  # a failed read leaves anything behind
            return Outcome(self.fail_read)
        row = self.rows.get(item.place)
        if row is None or row[:2] != (item.key, item.generation):
            return Outcome(Status.MISSING)
        if item.place in self.corrupt:
            item.into[: len(row[2])] = bytes(len(row[2]))
            return Outcome(Status.CORRUPT)
        item.into[: len(row[2])] = row[2]
        return DONE

    def write(self, batch: WriteBatch) -> list[Outcome]:
        if self.fail_write is Status.FAILED:
            return [Outcome(Status.FAILED)] * (len(batch.items) + len(batch.evict) + bool(batch.sidecar))
        written = [self._write(item) for item in batch.items]  # before the evictions: their places are not free yet
        evicted = []
        for eviction in batch.evict:
            row = self.rows.get(eviction.place)
            known = row is not None and row[1] == eviction.generation
            if known:
                del self.rows[eviction.place]
            evicted.append(DONE if known else Outcome(Status.MISSING))
        for name, note in batch.sidecar.items():
            self.notes.pop(name, None)
            if note is not None:
                self.notes[name] = note
        return written + evicted + [DONE] * bool(batch.sidecar)

    def _write(self, item: WriteItem) -> Outcome:
        if self.fail_write is not None or self.room(len(item.source)) == 0:
            return Outcome(self.fail_write or Status.NO_ROOM)
        self.generation += 1
        place = next(p for p in range(self.blocks_max) if p not in self.rows)
        self.rows[place] = (item.key, self.generation, bytes(item.source[: item.length_bytes]))
        return Outcome(Status.DONE, place, self.generation)

    def scrub(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        self.scrubbed += len(blocks)
        if self.fail_read is not None:
            return [Outcome(self.fail_read)] * len(blocks)
        return [self._scrubbed(block) for block in blocks]

    def _scrubbed(self, block: StoredBlock) -> Outcome:
        row = self.rows.get(block.place)
        if row is None or row[:2] != (block.key, block.generation):
            return Outcome(Status.MISSING)
        return Outcome(Status.CORRUPT, detail="wrong") if block.place in self.corrupt else DONE

    def drop(self, namespace: int) -> Outcome:
        if self.fail_write is not None:
            return Outcome(Status.FAILED)
        self.rows = {p: row for p, row in self.rows.items() if namespace_of(row[0]) != namespace}
        return DONE

    def scan(self) -> Iterator[StoredBlock]:
        newest = {key: place for place, (key, _, _) in sorted(self.rows.items(), key=lambda item: item[1][1])}
        self.rows = {place: row for place, row in self.rows.items() if newest[row[0]] == place}
        for place, (key, generation, payload) in sorted(self.rows.items(), key=lambda item: item[1][1]):
            yield StoredBlock(key, place, generation, len(payload))

    def room(self, length_bytes: int) -> int:
        room = self.blocks_max - len(self.rows)
        if self.allowed_bytes is None:
            return room
        return min(room, max(0, self.allowed_bytes - self.used_bytes()) // length_bytes)

    def excess_bytes(self) -> int:
        return 0 if self.allowed_bytes is None else max(0, self.used_bytes() - self.allowed_bytes)

    def neighbours(self, place: int) -> int:
        return place

    def sidecar(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(self.notes.items()))

    def used_bytes(self) -> int:
        return sum(len(payload) for _, _, payload in self.rows.values())

    def close(self) -> None:
        pass
