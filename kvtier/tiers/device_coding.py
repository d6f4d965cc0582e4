"""DeviceCoding: codes blocks in slots on a device as int8 or fp8 on their way to host memory, and decodes them on the
way back, with the kernels of src/quantize.cu: fewer bytes cross the link, and the CPU has nothing to do.

Owns: scratch memory on the device and page-locked host memory for each direction, and the kernels' modules.
Always: what one batch does is given to one stream in order (places, kernel, copy), and is over when its verb returns
        or raises; the bytes are those of the CPU's coder.
Units:   bytes, blocks, rows; addresses are integers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.lending import lent_memory, lent_pinned
from kvtier.allocator.streams import Stream, whole
from kvtier.blocks.coding import FLOATS, Coding, Codings
from kvtier.errors import InvariantError, KvtierError
from kvtier.kernels import launch_blocks
from kvtier.kernels.launch import ALIGNMENT_BYTES, DeviceFragments, DevicePool, fragment_records
from kvtier.kernels.launch_device import DeviceLauncher, Images, images_for
from kvtier.kernels.source import variant_of
from kvtier.tiers.slots import address_of
from kvtier.types import DONE, Outcome, ReadItem, Status, WriteItem, block_key_of, group_of

SCRATCH_BYTES = 4 << 20  # of coded blocks at once, for each direction
BLOCKS_MAX = 1024  # in one launch
FRAGMENT_ROWS = 16  # a thread block has four warps, and each takes some rows
LINE_BYTES = 256
_INDEX_BYTES = 4
_TABLES_BYTES = 3 * BLOCKS_MAX * _INDEX_BYTES  # slots, places among the coded, status

UNDECODABLE = Outcome(Status.CORRUPT, detail="its coded form cannot be decoded")

Piece = tuple[int, int, int]  # target, source, length in bytes
Item = TypeVar("Item", ReadItem, WriteItem)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Blocks of one group, as kernels see them: cut into fragments, so that several thread blocks share one."""

    coding: Coding
    raw_bytes: int
    fragments: DeviceFragments

    @property
    def room_bytes(self) -> int:
        return self.coding.room_bytes(self.raw_bytes)


class _Lane:
    """One direction: a stream, tables and coded blocks on the device, and the host's side of the tables."""

    def __init__(self, address: int, stream: Stream, pinned: NDArray[np.uint8]) -> None:
        self.stream = stream
        self.tables, self.coded = address, address + _TABLES_BYTES
        self.host = pinned.view(np.uint32).reshape(3, BLOCKS_MAX)
        self.host[1] = np.arange(BLOCKS_MAX)

    def table(self, row: int) -> int:
        return self.tables + row * BLOCKS_MAX * _INDEX_BYTES

    def places(self, slots: Sequence[int]) -> list[Piece]:
        """What tells the kernel where blocks lie: in the pool, and one after the other among the coded ones."""
        self.host[0, : len(slots)] = slots
        used_bytes, at = len(slots) * _INDEX_BYTES, self.host.ctypes.data
        step = BLOCKS_MAX * _INDEX_BYTES
        return [(self.table(row), at + row * step, used_bytes) for row in range(2)]


class DeviceCoding:
    """For slots of a pool on the device. One batch at a time in each direction."""

    def __init__(self, driver: CudaDriver, pool: DevicePool, codings: Codings, images: Images | None = None) -> None:
        """images: the kernels' machine code, compiled for the device unless given.

        Raises UsageError for blocks that kernels cannot code, ConfigError without a compiler, DriverError or
        OutOfMemory if the device does not give what it needs.
        """
        self._streams = driver.streams
        self._launcher = DeviceLauncher(driver.calls, images or images_for(driver.architecture))
        shapes = [
            (coding, raw_bytes, _Cut.of(coding, raw_bytes, pool))
            for coding, raw_bytes in zip(codings.each, codings.lengths_bytes, strict=True)
        ]
        coded_bytes = max(SCRATCH_BYTES, *(_aligned(c.room_bytes(raw_bytes)) for c, raw_bytes, _ in shapes))
        records_bytes = sum(_aligned(cut.records.nbytes) for _, _, cut in shapes)
        lane_bytes = _aligned(_TABLES_BYTES + coded_bytes)
        self._coded_bytes = coded_bytes
        with ExitStack() as undo:
            undo.callback(self._launcher.close)
            for dtype in {coding.dtype for coding, _, _ in shapes}:
                self._launcher.prepare(variant_of("quantize", dtype))
            address = undo.enter_context(lent_memory(driver, records_bytes + 2 * lane_bytes))
            self._lanes = []
            for number in range(2):
                stream = self._streams.make_stream()
                undo.callback(self._drop, stream)
                pinned = undo.enter_context(lent_pinned(driver, _TABLES_BYTES))
                undo.callback(self._settle, stream)
                self._lanes.append(_Lane(address + records_bytes + number * lane_bytes, stream, pinned))
            self._shapes = dict(enumerate(self._uploaded(address, shapes)))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Give all of it back. Nothing of it may be running."""
        self._undo.close()

    # ------------------------------------------------------------ verbs

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Code the blocks of slots into the items' views. What lies in the slots is complete."""
        lane = self._lanes[0]
        for item in items:
            self._expect(item, item.into)
        for shape, some in self._alike(items):
            stride_bytes = _aligned(shape.room_bytes)
            with whole(self._streams, lane.stream):
                self._copy(lane.places([item.place for item in some]), lane, settled=True)
                launch = launch_blocks.quantize(
                    DevicePool(lane.coded, stride_bytes),
                    lane.table(1),
                    shape.fragments,
                    lane.table(0),
                    len(some),
                    codec=shape.coding.codec,
                    dtype=shape.coding.dtype,
                    row_values=shape.coding.row_values,
                )
                self._launcher.launch(launch, lane.stream.key)
                coded = [lane.coded + at * stride_bytes for at in range(len(some))]
                pieces = zip((address_of(item.into) for item in some), coded, strict=True)
                self._copy([(into, at, shape.room_bytes) for into, at in pieces], lane, settled=False)
                self._streams.finish(lane.stream)
            for item in some:
                item.into[shape.room_bytes :] = bytes(len(item.into) - shape.room_bytes)
        return [DONE] * len(items)

    def write(self, items: Sequence[WriteItem]) -> list[Outcome]:
        """Decode the items into their slots; CORRUPT for one that is no such block, whose slot keeps what it had."""
        lane, outcomes = self._lanes[1], list[Outcome]()
        for item in items:
            self._expect(item, item.source)
        for shape, some in self._alike(items):
            stride_bytes = _aligned(shape.room_bytes)
            coded = [lane.coded + at * stride_bytes for at in range(len(some))]
            pieces = zip(coded, (address_of(item.source) for item in some), strict=True)
            moves = [(at, source, shape.room_bytes) for at, source in pieces]
            with whole(self._streams, lane.stream):
                self._copy(lane.places([item.place for item in some]) + moves, lane, settled=True)
                launch = launch_blocks.dequantize(
                    lane.table(2),
                    DevicePool(lane.coded, stride_bytes),
                    lane.table(1),
                    shape.fragments,
                    lane.table(0),
                    len(some),
                    codec=shape.coding.codec,
                    dtype=shape.coding.dtype,
                    row_values=shape.coding.row_values,
                )
                self._launcher.launch(launch, lane.stream.key)
                self._copy([(lane.host[2].ctypes.data, lane.table(2), len(some) * _INDEX_BYTES)], lane, settled=False)
                self._streams.finish(lane.stream)
            wrong = lane.host[2, : len(some)].tolist()
            outcomes += [
                UNDECODABLE if bad else Outcome(Status.DONE, item.place) for item, bad in zip(some, wrong, strict=True)
            ]
        return outcomes

    # ------------------------------------------------------------ inside

    def _alike(self, items: Sequence[Item]) -> Iterator[tuple[_Shape, list[Item]]]:
        """Items in their order, in runs of one group that fit into the scratch memory."""
        some: list[Item] = []
        for item in items:
            group = group_of(block_key_of(item.key))
            if some and (group != group_of(block_key_of(some[0].key)) or len(some) == self._together(some[0])):
                yield self._shape_of(some[0]), some
                some = []
            some.append(item)
        if some:
            yield self._shape_of(some[0]), some

    def _together(self, item: ReadItem | WriteItem) -> int:
        return min(BLOCKS_MAX, self._coded_bytes // _aligned(self._shape_of(item).room_bytes))

    def _expect(self, item: ReadItem | WriteItem, view: memoryview) -> None:
        """Raises InvariantError, before anything is copied."""
        self._shape_of(item)
        if view.nbytes < item.length_bytes:
            raise InvariantError(f"{item.length_bytes} bytes in a view of {view.nbytes}")

    def _shape_of(self, item: ReadItem | WriteItem) -> _Shape:
        """Raises InvariantError for a block that is none of the model's, or not in the codec of these."""
        shape = self._shapes.get(group_of(block_key_of(item.key)))
        if shape is None or (item.codec, item.length_bytes) != (shape.coding.codec, shape.room_bytes):
            raise InvariantError(f"{item.length_bytes} bytes in codec {item.codec} are no block of the model")
        return shape

    def _copy(self, pieces: Sequence[Piece], lane: _Lane, *, settled: bool) -> None:
        targets, sources, lengths = (np.array(column, np.uint64) for column in zip(*pieces, strict=True))
        self._streams.copy(targets, sources, lengths, lane.stream, settled=settled)

    def _settle(self, stream: Stream) -> None:
        """What cannot be waited for costs nothing but that: the rest is still given back."""
        with suppress(KvtierError):
            self._streams.finish(stream)

    def _drop(self, stream: Stream) -> None:
        with suppress(KvtierError):
            self._streams.drop_stream(stream)

    def _uploaded(self, address: int, shapes: Sequence[tuple[Coding, int, "_Cut"]]) -> Iterator[_Shape]:
        """The shapes, once their tables of fragments lie on the device."""
        for coding, raw_bytes, cut in shapes:
            records, lane = cut.records, self._lanes[0]
            self._copy([(address, records.ctypes.data, records.nbytes)], lane, settled=True)
            self._streams.finish(lane.stream)
            yield _Shape(coding, raw_bytes, DeviceFragments(address, len(records), cut.fragment_bytes, raw_bytes))
            address += _aligned(records.nbytes)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A block of the pool as fragments of equal length, one after the other: the table that kernels read."""

    records: NDArray[np.uint64]
    fragment_bytes: int

    @classmethod
    def of(cls, coding: Coding, raw_bytes: int, pool: DevicePool) -> "_Cut":
        """Raises UsageError if no cut suits the kernels."""
        row_bytes = coding.row_values * FLOATS[coding.dtype][0]
        rows = raw_bytes // row_bytes
        suits = [
            count
            for count in range(1, rows // FRAGMENT_ROWS + 1)
            if rows % count == 0 and rows // count * row_bytes % ALIGNMENT_BYTES == 0
        ]
        count = max(suits, default=1)
        fragment_bytes = raw_bytes // count
        offsets = [at * fragment_bytes for at in range(count)]
        addresses = [pool.address + offset for offset in offsets]
        return cls(fragment_records(addresses, [pool.stride_bytes] * count, offsets), fragment_bytes)


def _aligned(length_bytes: int) -> int:
    """Whole lines of the device's memory."""
    return -(-length_bytes // LINE_BYTES) * LINE_BYTES
