"""Brings the blocks of a bundle into a store.

Owns: the plan. Always: the whole bundle is read and believed before the store gets a block of it, and it gets no block
but those that were believed, byte for byte, whatever the bundle is by then; one that is there already stays as it is;
of those that do not fit the oldest of a size are left out, and nothing in the store leaves for them; blocks are written
from the oldest to the newest, so that the store's order of writing is the bundle's; each batch goes to the store's
account of wear with itself.
Memory: 28 bytes a block, the keys of the store, and a batch. Units: bytes.
"""

import asyncio
import hashlib
import mmap
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from kvtier.blocks.coding import NONE, Codings
from kvtier.blocks.namespace import NamespaceTable
from kvtier.engine.sidecar import WEAR_KEY
from kvtier.engine.wear import charged
from kvtier.errors import BundleError
from kvtier.kernels.block_coder import check_head
from kvtier.policies.wear import Written
from kvtier.tiers.bundle.entry import UNCODED, encode_entry
from kvtier.tiers.bundle.manifest import Manifest
from kvtier.tiers.bundle.reading import read_part
from kvtier.tiers.bundle.scan import Incoming
from kvtier.tiers.lmdb.layout import CODEC_NAMES
from kvtier.tiers.lmdb.store import BATCH_BYTES, LmdbTier
from kvtier.types import PAGE_BYTES, Status, StoreKey, WriteBatch, WriteItem, page_aligned, store_key

SEAL_BYTES = 16
Advance = Callable[[int, int, int], None]  # blocks done, blocks in all, bytes done


@dataclass(slots=True)
class Contents:
    """What a bundle holds, block by block in its order: strides in pages, digests of their names, and `seals`."""

    strides_pages: "array[int]" = field(default_factory=lambda: array("I"))
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    seals: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Imported:
    """What became of the bundle's blocks."""

    imported: int = 0
    present: int = 0  # the store had them
    repeated: int = 0  # the bundle has them again, and newer
    left_out: int = 0  # the oldest: there was no room
    no_room: int = 0  # refused while writing, against the plan
    failed: int = 0


class BundledSlots(Codings):
    """The slots that coded blocks had in the store that they come from: they get the same ones again. No block is
    coded on the way in, nor decoded."""

    def __init__(self) -> None:
        super().__init__(NONE)
        self._strides: dict[int, int] = {}  # by the length of the block once it is decoded

    def note(self, block: Incoming) -> None:
        raw_bytes = block.entry.raw_bytes
        self._strides[raw_bytes] = max(stride_of(block), self._strides.get(raw_bytes, 0))

    def slot_bytes(self, raw_bytes: int) -> int:
        return self._strides.get(raw_bytes, page_aligned(raw_bytes))


def stride_of(block: Incoming) -> int:
    """The length of a block's slot."""
    return max(page_aligned(len(block.frame.payload)), block.entry.stride_pages * PAGE_BYTES)


async def believed(folder: Path, manifest: Manifest, slots: BundledSlots, advance: Advance) -> Contents:
    """Read the whole bundle, and note in `slots` how its blocks lay. Raises BundleError if it is not to be believed."""
    contents = Contents()
    done_bytes = 0
    for part in manifest.parts:
        async for incoming in read_part(folder, manifest, part):
            for block in incoming:
                if problem := _coded_problem(block):
                    raise BundleError(str(folder / part.name), problem, "Use the kvtier that exported it")
                slots.note(block)
                contents.strides_pages.append(stride_of(block) // PAGE_BYTES)
                contents.digests.append(_digest(block.frame.fingerprint + block.frame.key))
                done_bytes += len(block.frame.payload)
            contents.seals += await asyncio.to_thread(_seals, incoming)
            advance(len(contents.digests), manifest.blocks, done_bytes)
    return contents


class Importer:
    """One bundle on its way into one open store."""

    def __init__(self, folder: Path, manifest: Manifest, tier: LmdbTier, names: NamespaceTable) -> None:
        """names: the tier's own table."""
        self.found = Imported()
        self._folder = folder
        self._manifest = manifest
        self._tier = tier
        self._ids = {one.fingerprint: names.id_of(one.fingerprint, one.description) for one in manifest.namespaces}
        self._names = names
        self._buffer = mmap.mmap(-1, max(BATCH_BYTES, page_aligned(manifest.block_bytes_max)))

    async def run(self, contents: Contents, advance: Advance) -> Imported:
        """Write what is missing and fits. A cancellation leaves whole blocks; another run goes on behind them."""
        wanted = await asyncio.to_thread(self._plan, contents)
        done = done_bytes = 0
        account = next((row for key, row in self._tier.sidecar() if key == WEAR_KEY), b"")
        async for batch in self._batches(wanted, contents):
            items = await asyncio.to_thread(self._items, batch)
            noted = {WEAR_KEY: self._charged(account, items)}
            outcomes = await asyncio.to_thread(self._tier.write, WriteBatch(items, sidecar=noted))
            for outcome in outcomes[: len(items)]:
                self._count(outcome.status)
            done += len(items)
            done_bytes += sum(item.length_bytes for item in items)
            advance(done, int(wanted.sum()), done_bytes)
        if done:
            await asyncio.to_thread(self._tier.write, WriteBatch(sidecar={WEAR_KEY: self._charged(account, [])}))
        return self.found

    def _charged(self, account: bytes, items: Sequence[WriteItem]) -> bytes:
        """The store's account of wear with all that was imported, and with `items` as written."""
        told = self._tier.written()
        payload_bytes = told.payload_bytes + sum(item.length_bytes for item in items)
        slot_bytes = told.slot_bytes + sum(len(item.source) for item in items)
        written = Written(payload_bytes, slot_bytes, told.index_bytes)
        return charged(account, written, time.time_ns() // 10**6)

    def _plan(self, contents: Contents) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which blocks to write, by their position in the bundle."""
        there = {
            _digest(self._names.fingerprint_of(int.from_bytes(block.key[:4], "big")) + block.key[4:])
            for block in self._tier.scan()
        }
        digests = np.frombuffer(contents.digests, np.uint64)
        _, from_the_end = np.unique(digests[::-1], return_index=True)
        newest = np.zeros(len(digests), bool)  # of those of one name: an export that went on has what was stored anew
        newest[len(digests) - 1 - from_the_end] = True
        self.found.repeated = len(digests) - len(from_the_end)
        wanted = newest & ~np.isin(digests, np.fromiter(there, np.uint64, len(there)))
        self.found.present = int(newest.sum()) - int(wanted.sum())
        newest_first = np.flatnonzero(wanted)[::-1]
        strides = np.frombuffer(contents.strides_pages, np.uint32)[newest_first].astype(np.int64) * PAGE_BYTES
        fits = np.array(self._tier.fitting(strides.tolist()), bool)
        wanted[newest_first[~fits]] = False
        self.found.left_out = int((~fits).sum())
        return wanted

    async def _batches(
        self, wanted: "np.ndarray[tuple[int], np.dtype[np.bool_]]", contents: Contents
    ) -> AsyncIterator[list[Incoming]]:
        """Those that are wanted, as many at once as the buffer takes. Raises BundleError for others than before."""
        batch: list[Incoming] = []
        position = batch_bytes = 0
        for part in self._manifest.parts:
            if not wanted[position : position + part.blocks].any():
                position += part.blocks
                continue
            async for incoming in read_part(self._folder, self._manifest, part):
                seals = await asyncio.to_thread(_seals, incoming)
                if seals != contents.seals[position * SEAL_BYTES : position * SEAL_BYTES + len(seals)]:
                    raise BundleError(
                        str(self._folder / part.name), "it has changed since it was checked", "Let nobody write into it"
                    )
                for block in incoming:
                    position += 1
                    if not wanted[position - 1]:
                        continue
                    stride_bytes = stride_of(block)
                    if batch_bytes + stride_bytes > len(self._buffer):
                        yield batch
                        batch, batch_bytes = [], 0
                    batch.append(block)
                    batch_bytes += stride_bytes
        if batch:
            yield batch

    def _items(self, batch: list[Incoming]) -> list[WriteItem]:
        """The blocks in the buffer, each a whole slot with zeroes behind its payload."""
        view, at = memoryview(self._buffer), 0
        items = []
        for block in batch:
            payload = block.frame.payload
            slot = view[at : at + stride_of(block)]
            slot[: len(payload)] = payload
            slot[len(payload) :] = bytes(len(slot) - len(payload))
            key: StoreKey = store_key(self._ids[block.frame.fingerprint], block.frame.key)
            codec = CODEC_NAMES.get(block.entry.codec, NONE)
            items.append(WriteItem(key, len(payload), slot, codec=codec))
            at += len(slot)
        return items

    def _count(self, status: Status) -> None:
        if status is Status.DONE:
            self.found.imported += 1
        elif status is Status.NO_ROOM:
            self.found.no_room += 1
        else:
            self.found.failed += 1


def _coded_problem(block: Incoming) -> str:
    """Why a coded block is none that this version stores; empty if it is, or is not coded."""
    entry = block.entry
    if entry.codec == UNCODED:
        return ""
    if entry.codec not in CODEC_NAMES:
        return f"it has a block in codec {entry.codec}, and this kvtier knows {sorted(CODEC_NAMES)}"
    payload = block.frame.payload
    return check_head(np.frombuffer(payload, np.uint8), CODEC_NAMES[entry.codec], entry.raw_bytes, len(payload))


def _seals(blocks: Sequence[Incoming]) -> bytes:
    """What nobody can give another block: SEAL_BYTES each, over all that the store will hear of it."""
    seals = []
    for entry, frame in blocks:
        seal = hashlib.blake2b(encode_entry(entry) + frame.fingerprint + frame.key, digest_size=SEAL_BYTES)
        seal.update(frame.payload)
        seals.append(seal.digest())
    return b"".join(seals)


def _digest(name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name)
