"""A persistent tier driven by block numbers, for tests: it remembers where each block went.

Owns: the tier while it is open, and a dict from block number to (length, outcome) of what was acknowledged.
Units: bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.blocks.namespace import NamespaceTable
from kvtier.testing.tiers import key_of, payload_of, slot_buffer
from kvtier.tiers.lmdb.store import LmdbTier
from kvtier.types import EvictItem, Outcome, ReadItem, Status, WriteBatch, WriteItem, page_aligned

FINGERPRINT = b"f" * 32
SMALL: dict[str, Any] = {
    "name": "disk",
    "capacity_bytes": 4 << 20,
    "length_bytes_max": 16_384,
    "min_free_bytes": 0,
    "durability": "none",
    "io_threads": 2,
}


@dataclass(frozen=True, slots=True)
class Told:
    """A batch by block numbers: those to write, all of one length, and those to evict; with sidecar rows by name."""

    numbers: Sequence[int] = ()
    length_bytes: int = 5000
    evict: Sequence[int] = ()
    sidecar: Mapping[str, bytes] = field(default_factory=dict)


class StoreDriver:
    """One store, one namespace. `options` override those of `SMALL` for `LmdbTier.open`."""

    def __init__(self, path: Path, fingerprint: bytes = FINGERPRINT, **options: Any) -> None:
        self.path = path
        self.options = SMALL | options
        self.fingerprint = fingerprint
        self.namespaces = NamespaceTable()
        self.namespace = self.namespaces.id_of(fingerprint, b"")
        self.kept: dict[int, tuple[int, Outcome]] = {}
        self.tier = self._open()

    def _open(self) -> LmdbTier:
        return LmdbTier.open(self.path, namespaces=self.namespaces, **self.options)

    def reopen(self, **options: Any) -> None:
        """Close and open; `kept` is what the scan says, by the numbers known so far."""
        self.tier.close()
        self.options |= options
        self.tier = self._open()
        self.rescan(self.kept)

    def rescan(self, numbers: Iterable[int]) -> None:
        """Learn from the tier which of these blocks it has."""
        found = {block.key: block for block in self.tier.scan()}
        self.kept = {}
        for number in numbers:
            if block := found.get(key_of(number, self.namespace)):
                self.kept[number] = block.length_bytes, Outcome(Status.DONE, block.place, block.generation)

    def item(self, number: int, length_bytes: int) -> WriteItem:
        source = slot_buffer(page_aligned(length_bytes), payload_of(number, length_bytes))
        return WriteItem(key_of(number, self.namespace), length_bytes, source)

    def evict_item(self, number: int) -> EvictItem:
        _, stored = self.kept[number]
        return EvictItem(key_of(number, self.namespace), stored.place, stored.generation)

    def write(
        self, numbers: Sequence[int], length_bytes: int = 5000, evict: Sequence[int] = (), **sidecar: bytes
    ) -> list[Status]:
        """Write and evict blocks in one batch; statuses of the items, evictions and, with rows, sidecar."""
        told = Told(numbers, length_bytes, evict, sidecar)
        return self._learn(told, self.tier.write(self.batch(told)))

    def write_together(self, *batches: Told) -> list[list[Status]]:
        """The same for several batches at once."""
        ends = self.tier.write_together([self.batch(told) for told in batches])
        return [self._learn(told, outcomes) for told, outcomes in zip(batches, ends, strict=True)]

    def batch(self, told: Told) -> WriteBatch:
        rows = {name.encode(): row for name, row in told.sidecar.items()}
        items = [self.item(number, told.length_bytes) for number in told.numbers]
        return WriteBatch(items, [self.evict_item(number) for number in told.evict], rows)

    def _learn(self, told: Told, outcomes: Sequence[Outcome]) -> list[Status]:
        items = len(told.numbers)
        for number, outcome in zip(told.evict, outcomes[items : items + len(told.evict)], strict=True):
            if outcome.done:
                self.kept.pop(number)
        for number, outcome in zip(told.numbers, outcomes, strict=False):
            if outcome.done:
                self.kept[number] = told.length_bytes, outcome
        return [outcome.status for outcome in outcomes]

    def read(self, numbers: Sequence[int]) -> list[Status]:
        """Read blocks that are kept, in one batch. Fails the test if one is DONE with other bytes than its own."""
        items = []
        for number in numbers:
            length_bytes, stored = self.kept[number]
            into = slot_buffer(page_aligned(length_bytes))
            key = key_of(number, self.namespace)
            items.append(ReadItem(key, stored.place, stored.generation, length_bytes, into))
        outcomes = self.tier.read(items)
        for number, item, outcome in zip(numbers, items, outcomes, strict=True):
            if outcome.done:
                right = payload_of(number, item.length_bytes)
                assert bytes(item.into[: item.length_bytes]) == right, f"wrong bytes for block {number}"
        return [outcome.status for outcome in outcomes]

    def offset_of(self, number: int) -> int:
        """Where the block lies in the slab file."""
        return self.kept[number][1].place * 4096

    def close(self) -> None:
        self.tier.close()
