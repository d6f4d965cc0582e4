"""The ways of copying blocks between a foreign cache and places on the host. All leave the same bytes.

    pieces   a batch of copies, a piece for each fragment: the copy engine's work alone
    direct   a kernel that reads or writes the host's memory itself, which must be registered
    staged   a kernel between the cache and blocks in one piece on the device, and a copy for each block

Nothing waits here: what is given to a stream is under way when `copy` returns. Blocks and places of a call are distinct
and exist. Units: bytes, blocks (foreign index), places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtier.allocator.streams import Addresses, Stream, Streams
from kvtier.errors import UsageError
from kvtier.kernels import launch_blocks
from kvtier.kernels.launch import ALIGNMENT_BYTES, DeviceFragments, DevicePool, Launch, expect_aligned, fragment_records
from kvtier.tiers.foreign.cache import ForeignCache, ForeignFragment
from kvtier.tiers.foreign.desk import BLOCKS_MAX, NUMBER_BYTES, Desk, Sheet
from kvtier.tiers.foreign.places import HostPlaces, Numbers

STORE, LOAD = "store", "load"
PIECES, DIRECT, STAGED = "pieces", "direct", "staged"

PIECES_MAX = 1 << 16  # of one call: 1.5 MiB of addresses and lengths

Launching = Callable[[Launch, int], None]  # to a stream, by its key


@dataclass(frozen=True, slots=True)
class Copying:
    """Copies for a stream: blocks[i] to (`store`) or from places[i]. sheet: lent to a method that needs one."""

    way: str
    blocks: Numbers
    places: Numbers
    host: HostPlaces
    stream: Stream
    sheet: Sheet | None = None


class Method(Protocol):
    """One way, for one stream. `blocks_max`: of a call. needs_sheet: whether it must be lent a sheet."""

    name: str
    blocks_max: int
    needs_sheet: bool

    def copy(self, given: Copying) -> None:
        """Give the copies to the stream. Raises DriverError or DeviceLost: some may be under way then."""
        ...


class Pieces:
    """`Method` by the copy engine. Memory of any alignment, registered or not."""

    name, needs_sheet = PIECES, False

    def __init__(self, streams: Streams, cache: ForeignCache) -> None:
        self.blocks_max = max(1, PIECES_MAX // len(cache.fragments))
        self._streams = streams
        self._addresses, self._strides, self._lengths, self._offsets = (
            np.array([getattr(fragment, name) for fragment in cache.fragments], np.uint64)
            for name in ("address", "stride_bytes", "length_bytes", "offset_bytes")
        )

    def copy(self, given: Copying) -> None:
        blocks = given.blocks.astype(np.uint64)[:, None]
        foreign: Addresses = (self._addresses + blocks * self._strides).reshape(-1)
        here: Addresses = (given.host.addresses(given.places)[:, None] + self._offsets).reshape(-1)
        lengths = np.tile(self._lengths, len(blocks))
        # What is stored may be what the stream waits for; what is loaded was there before it was asked for.
        if given.way == STORE:
            self._streams.copy(here, foreign, lengths, given.stream)
        else:
            self._streams.copy(foreign, here, lengths, given.stream, settled=True)


class KernelTables:
    """The fragments of a cache as kernels read them, one table for each length. On the device for as long as it lives.

    Raises UsageError if addresses, strides or lengths are not aligned for kernels.
    """

    def __init__(self, cache: ForeignCache, put: Callable[[Addresses], int], launch: Launching) -> None:
        """put: copies an array to the device and returns its address there."""
        self.tables = [_table(same, length_bytes, put) for length_bytes, same in cache.by_length.items()]
        self._launch = launch

    def launch(self, given: Copying, pool: DevicePool, slots: int, blocks: int, count: int) -> None:
        """Copy `count` blocks to (`store`) or from slots of the pool. slots, blocks: addresses of their numbers."""
        build = launch_blocks.gather if given.way == STORE else launch_blocks.scatter
        for table in self.tables:
            self._launch(build(pool, slots, table, blocks, count), given.stream.key)


class Direct:
    """`Method` by a kernel on the host's memory."""

    name, blocks_max, needs_sheet = DIRECT, BLOCKS_MAX, True

    def __init__(self, tables: KernelTables, desk: Desk) -> None:
        self._tables, self._desk = tables, desk

    def copy(self, given: Copying) -> None:
        host = given.host
        assert host.seen_at is not None, "the memory is not registered"
        slots, parts = np.divmod(given.places, host.parts)
        order = np.argsort(parts, kind="stable")  # a launch for each part, as slots are what has a constant stride
        at_blocks, at_slots = self._desk.put(given.sheet, given.blocks[order], slots[order], given.stream)
        done = 0
        for part, count in zip(*(found.tolist() for found in np.unique(parts, return_counts=True)), strict=True):
            start = host.seen_at + host.offset_bytes + part * host.part_bytes
            pool, skip_bytes = DevicePool(start, host.stride_bytes), done * NUMBER_BYTES
            self._tables.launch(given, pool, at_slots + skip_bytes, at_blocks + skip_bytes, count)
            done += count


class Staged:
    """`Method` by a kernel and the copy engine. scratch: `scratch_bytes` of device memory, of this stream alone."""

    name, needs_sheet = STAGED, True

    def __init__(
        self, streams: Streams, tables: KernelTables, desk: Desk, block_bytes: int, scratch: int, scratch_bytes: int
    ) -> None:
        """scratch_bytes: at least one block, rounded up to the kernels' alignment."""
        self._streams, self._tables, self._desk = streams, tables, desk
        self._block_bytes = block_bytes
        self._pool = DevicePool(scratch, staged_stride(block_bytes))
        self.blocks_max = min(BLOCKS_MAX, scratch_bytes // self._pool.stride_bytes)

    def copy(self, given: Copying) -> None:
        count, stream = len(given.blocks), given.stream
        rows = np.arange(count)
        here = given.host.addresses(given.places)
        there: Addresses = (self._pool.address + rows * self._pool.stride_bytes).astype(np.uint64)
        lengths = np.full(count, self._block_bytes, np.uint64)
        at_blocks, at_rows = self._desk.put(given.sheet, given.blocks, rows, stream)
        if given.way == LOAD:
            self._streams.copy(there, here, lengths, stream, settled=True)
        self._tables.launch(given, self._pool, at_rows, at_blocks, count)
        if given.way == STORE:
            self._streams.copy(here, there, lengths, stream)


def expect_direct(host: HostPlaces) -> None:
    """Raises UsageError if kernels cannot reach these places."""
    if host.seen_at is None:
        raise UsageError("the host's memory is not registered with the device")
    expect_aligned(
        address=host.seen_at,
        stride_bytes=host.stride_bytes,
        offset_bytes=host.offset_bytes,
        part_bytes=host.part_bytes if host.parts > 1 else 0,
    )


def staged_stride(block_bytes: int) -> int:
    """Bytes of scratch memory for a block."""
    return -(-block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _table(fragments: Sequence[ForeignFragment], length_bytes: int, put: Callable[[Addresses], int]) -> DeviceFragments:
    expect_aligned(fragment_bytes=length_bytes)
    records = fragment_records(
        [fragment.address for fragment in fragments],
        [fragment.stride_bytes for fragment in fragments],
        [fragment.offset_bytes for fragment in fragments],
    )
    slot_bytes = max(fragment.offset_bytes for fragment in fragments) + length_bytes
    return DeviceFragments(put(records), len(fragments), length_bytes, slot_bytes)
