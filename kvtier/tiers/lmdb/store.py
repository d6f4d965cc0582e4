"""The persistent tier: blocks in a slab file, LMDB as their transactional index. One writer per path.

Owns: the open store. Always: a second writer is refused; after a fork or `close` every verb raises ClosedError;
what a write reported DONE is there after a restart, as its durability says:

    none    survives a crash of the process; a crash of the machine empties the store
    batch   survives both, but a crash of the machine may undo the last batch
    strict  survives both

With `verify=False` blocks are served unread-checked: use it with `strict` only, for after a machine crash in mode
`batch` an undone batch may leave records whose slots were written again.
Units: bytes; a place is a page number (offset in the slab / 4096).
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import lmdb

from kvtier.blocks.coding import UNCODED, Codings
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.stored import StoredBlocks
from kvtier.errors import ClosedError, ConfigError
from kvtier.policies.wear import Written
from kvtier.tiers.base import TierTraits
from kvtier.tiers.lmdb.blockfile import BlockFile
from kvtier.tiers.lmdb.coding import BlockCoding
from kvtier.tiers.lmdb.loading import Blocks, list_blocks
from kvtier.tiers.lmdb.opened import OpenStore
from kvtier.tiers.lmdb.opening import open_store
from kvtier.tiers.lmdb.reader import BlockReader
from kvtier.tiers.lmdb.recount import recount
from kvtier.tiers.lmdb.room import Room
from kvtier.tiers.lmdb.scrubber import Scrubber
from kvtier.tiers.lmdb.settings import Settings
from kvtier.tiers.lmdb.writer import BatchWriter
from kvtier.types import PAGE_BYTES, Outcome, ReadItem, Status, StoredBlock, WriteBatch

_log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20  # below 8 MiB the transaction costs more than the payload; above 32 nothing is gained
READERS = 4


class LmdbTier:
    """Implements Tier, SupportsScan, SupportsGroups, SupportsStrides, SupportsCapacity, SupportsScrub and SupportsDrop.

    Open with `LmdbTier.open`.
    """

    def __init__(
        self, name: str, store: OpenStore, settings: Settings, verify: bool, codings: Codings = UNCODED
    ) -> None:
        self.name = name
        self._store = store
        self._pid = os.getpid()
        self._closed = False
        self._codec = codings.codec
        coding = BlockCoding(codings)
        self._reader = BlockReader(store, verify or settings.payload == "inline", coding)
        self._room = Room(store, settings.min_free_bytes, settings.length_bytes_max, codings.slot_bytes)
        self._writer = BatchWriter(store, self._room, coding)
        self._scrubber = Scrubber(store, coding)
        self._settings = settings
        self._scanned: StoredBlocks | None = store.stock.blocks.stored()
        store.stock.blocks = Blocks()  # whoever scans has them; kept here they would cost 50 bytes each for good

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str,
        namespaces: NamespaceTable,
        capacity_bytes: int,
        length_bytes_max: int,
        min_free_bytes: int,
        durability: str = "batch",
        verify: bool = True,
        payload: str = "slab",
        io_threads: int = 4,
        codings: Codings = UNCODED,
        open_file: Callable[[Path], BlockFile] = BlockFile.open,
    ) -> "LmdbTier":
        """Open the store in the folder `path`, create it if there is none.

        capacity_bytes: what the folder may take of the disk, index included. length_bytes_max: the largest block
        that will be written. min_free_bytes: what the filesystem must keep free. durability: none, batch or strict.
        payload: where the blocks' bytes lie: in a slab file, or (inline) in values of LMDB.
        codings: how blocks that come uncoded are coded, and what those of each group are made of; without that, coded
        blocks cannot be read.
        An existing store keeps its extent size; if it holds more than the capacity, whole extents leave, those
        first whose newest block is oldest. On a full disk it opens for reading, and stores again when it can.
        Raises ConfigError, StoreLocked, StoreFormatError or StoreError.
        """
        where = f"tier {name}"
        settings = Settings(where, capacity_bytes, length_bytes_max, min_free_bytes, durability, io_threads, payload)
        return cls(name, open_store(Path(path), namespaces, settings, open_file), settings, verify, codings)

    @property
    def traits(self) -> TierTraits:
        payload_bytes = self._store.allocator.extents_max * self._store.header.extent_bytes
        return TierTraits(
            capacity_bytes=payload_bytes,
            slots=0,
            persistent=True,
            host_addressable=False,
            batch_bytes=BATCH_BYTES,
            readers=READERS,
            codec=self._codec,
        )

    @property
    def findings(self) -> list[str]:
        """What was found damaged: records skipped when the store was opened, slots lost since."""
        return self._store.stock.findings

    @property
    def notes(self) -> list[str]:
        """What was had only in part, in sentences."""
        return self._store.notes

    @property
    def direct(self) -> bool:
        """Whether payload bypasses the page cache (O_DIRECT); some filesystems refuse."""
        return self._store.slab.file.direct

    def scan(self) -> Iterable[StoredBlock]:
        """Everything kept, oldest write first, with engine-local namespace ids."""
        self._check_usable()
        blocks, self._scanned = self._scanned, None
        if blocks is None:
            store = self._store
            blocks = list_blocks(store.index, store.names, store.allocator, store.slab.file.length_bytes())
        return blocks

    def sidecar(self) -> Iterator[tuple[bytes, bytes]]:
        """The sidecar rows that batches left, in key order."""
        self._check_usable()
        return self._store.index.rows("sidecar")

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """One outcome per item, in order. Any thread; waits for the disk."""
        self._check_usable()
        return self._reader.read(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """One outcome per item, then one per eviction. One thread at a time; waits for the disk."""
        return self._write([batch])[0]

    def write_together(self, batches: Sequence[WriteBatch]) -> list[list[Outcome]]:
        """As `write` of each, in order, with one sync and one transaction where they can share them."""
        return self._write(batches)

    def _write(self, batches: Sequence[WriteBatch]) -> list[list[Outcome]]:
        self._check_usable()
        self._scanned = None
        return self._writer.write(batches)

    def scrub(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        """Check blocks where they lie, whether or not reads verify. Any thread; waits for the disk."""
        self._check_usable()
        return self._scrubber.scrub(blocks)

    def drop(self, namespace: int) -> Outcome:
        """Forget the namespace (engine-local id). DONE also if nothing of it was kept. The writer's thread."""
        self._check_usable()
        self._scanned = None
        return self._writer.drop(namespace)

    @property
    def capacity_bytes(self) -> int:
        """What the folder may take of its disk now, index included."""
        return self._store.header.capacity_bytes

    def change_capacity(self, capacity_bytes: int) -> Outcome:
        """Take so much from now on: DONE; or nothing changed, and a warning says why. The writer's thread.

        Blocks that it has no room for any more stay until they are evicted: see `excess_bytes`.
        """
        self._check_usable()
        store = self._store
        settings = replace(self._settings, capacity_bytes=capacity_bytes)
        header, lent = store.header, store.allocator.lent_extents
        try:
            budget = settings.budget_beside(header.extent_bytes, store.index, lent, header.capacity_bytes)
        except (ConfigError, lmdb.Error) as error:
            _log.warning("%s: its capacity stays: %s", store.folder, error)
            return Outcome(Status.FAILED, detail=str(error))
        header = replace(header, capacity_bytes=capacity_bytes)
        return self._writer.change_capacity(header, budget, settings.payload_bytes)

    def room(self, length_bytes: int) -> int:
        """How many more blocks of this length a write would take now. Any thread, no I/O."""
        self._check_usable()
        return self._room.left(length_bytes)

    def fitting(self, strides_bytes: Sequence[int]) -> list[bool]:
        """Of blocks with slots of these strides (whole pages), in this order, which ones writes would take now without
        evicting."""
        self._check_usable()
        return self._room.fitting([stride // PAGE_BYTES for stride in strides_bytes])

    def excess_bytes(self) -> int:
        """How many bytes the filesystem lacks for `min_free`, or the capacity for what is stored, that this tier could
        give: evict whole extents.

        As of the last batch; an empty one asks the filesystem anew. Any thread, no I/O.
        """
        self._check_usable()
        return self._room.excess_bytes()

    def neighbours(self, place: int) -> int:
        """The extent of a place. Pure."""
        return self._store.allocator.extent_of(place)

    def stride_bytes_at(self, place: int) -> int:
        """What the block at a place takes. Any thread, no I/O."""
        allocator = self._store.allocator
        return (allocator.stride_of(allocator.extent_of(place)) or 0) * PAGE_BYTES

    def used_bytes(self) -> int:
        """Bytes of the slots that hold blocks. Any thread, no I/O."""
        return self._store.allocator.used_pages * PAGE_BYTES

    def written(self) -> Written:
        """What the disk was given since the store was opened. Any thread, no I/O."""
        return self._writer.meter.written()

    def check(self) -> list[str]:
        """Recount slots and compare them with the index; an empty list means that all is well. Reads the index."""
        self._check_usable()
        return recount(self._store)

    def close(self) -> None:
        """Sync, mark the store as closed, release the lock. Idempotent; does nothing in a forked child."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            self._writer.meter.close()
            self._store.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} was closed")
        if self._pid != os.getpid():
            raise ClosedError(f"tier {self.name} was opened before a fork; open it in this process, or use spawn")
