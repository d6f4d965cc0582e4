"""KernelKit: what copying by kernels needs on a device, for all caches of one engine.

Owns: the loaded kernels, device memory for tables, numbers and staged blocks, and pinned sheets; all of it goes with
the `ExitStack` that it was opened on. Always: what cannot be had is said in `notes`, and only the methods that do
without it exist. Units: bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from kvtier.allocator.driver_cuda import CudaDriver
from kvtier.allocator.lending import lent_memory, lent_pinned
from kvtier.allocator.streams import Addresses, Stream
from kvtier.errors import DeviceLost, KvtierError, UsageError
from kvtier.kernels.launch_device import DeviceLauncher, Images, images_for
from kvtier.kernels.source import variant_of
from kvtier.tiers.foreign.cache import ForeignCache
from kvtier.tiers.foreign.desk import SHEET_BYTES, SHEETS, Desk, Sheets, one_piece
from kvtier.tiers.foreign.methods import Direct, KernelTables, Method, Staged, expect_direct, staged_stride
from kvtier.tiers.foreign.places import HostPlaces

SCRATCH_BYTES = 16 << 20  # of a stream; a larger block has as much as it needs
RECORD_BYTES = 24
ALIGNMENT_BYTES = 256


class KernelKit:
    """Made by `opened`. `tables` by cache; None where its fragments are not aligned for kernels."""

    def __init__(
        self, driver: CudaDriver, sheets: Sheets, desks: Sequence[Desk], tables: list[KernelTables | None]
    ) -> None:
        self.sheets = sheets
        self._streams, self._desks, self._tables = driver.streams, desks, tables
        self._scratch: list[int] = []
        self._scratch_bytes = 0

    @classmethod
    def opened(
        cls,
        driver: CudaDriver,
        caches: Sequence[ForeignCache],
        stream: Stream,
        images: Images | None,
        undo: ExitStack,
        notes: list[str],
    ) -> "KernelKit | None":
        """None if kernels cannot be had: then `notes` says why, and nothing is left. Raises DeviceLost.

        stream: in which tables are brought to the device. images: the kernels' machine code; by default compiled.
        """
        try:
            with ExitStack() as opening:
                launcher = DeviceLauncher(driver.calls, images or images_for(driver.architecture))
                opening.callback(launcher.close)
                launcher.prepare(variant_of("fragments"))
                pinned = opening.enter_context(lent_pinned(driver, SHEETS * SHEET_BYTES))
                records_bytes = sum(len(cache.fragments) * RECORD_BYTES + ALIGNMENT_BYTES for cache in caches)
                memory = opening.enter_context(lent_memory(driver, 2 * SHEET_BYTES + records_bytes))
                desks = [Desk(driver.streams, memory + number * SHEET_BYTES) for number in range(2)]
                put = _putter(driver, stream, memory + 2 * SHEET_BYTES)
                tables = [_tables(cache, put, launcher, notes) for cache in caches]
                kit = cls(driver, Sheets(pinned), desks, tables)
                kit._take_scratch(driver, caches, opening, notes)
                undo.push(opening.pop_all())
                return kit
        except DeviceLost:
            raise
        except KvtierError as error:
            notes.append(f"blocks are copied in pieces, for there are no kernels: {error}")
            return None

    def methods(self, number: int, cache: ForeignCache, direction: int, host: HostPlaces) -> Iterator[Method]:
        """Those for a cache, by its number, and one of the two streams."""
        tables = self._tables[number]
        if tables is None:
            return
        desk = self._desks[direction]
        try:
            expect_direct(host)
            yield Direct(tables, desk)
        except UsageError:
            pass  # it was said when the memory was registered, or is a matter of its strides
        if self._scratch:
            scratch, length_bytes = self._scratch[direction], self._scratch_bytes
            yield Staged(self._streams, tables, desk, cache.block_bytes, scratch, length_bytes)

    def _take_scratch(
        self, driver: CudaDriver, caches: Sequence[ForeignCache], undo: ExitStack, notes: list[str]
    ) -> None:
        self._scratch_bytes = max(SCRATCH_BYTES, *(staged_stride(cache.block_bytes) for cache in caches))
        try:
            memory = undo.enter_context(lent_memory(driver, 2 * self._scratch_bytes))
        except DeviceLost:
            raise
        except KvtierError as error:
            notes.append(f"blocks are not staged on the device: {error}")
            return
        self._scratch = [memory, memory + self._scratch_bytes]


def _putter(driver: CudaDriver, stream: Stream, address: int) -> Callable[[Addresses], int]:
    """Copies arrays to the device, one behind the other from `address` on."""
    following = [address]

    def put(array: Addresses) -> int:
        place = following[0]
        driver.streams.copy(*one_piece(place, array.ctypes.data, array.nbytes), stream)
        driver.streams.finish(stream)
        following[0] += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return place

    return put


def _tables(
    cache: ForeignCache, put: Callable[[Addresses], int], launcher: DeviceLauncher, notes: list[str]
) -> KernelTables | None:
    try:
        return KernelTables(cache, put, launcher.launch)
    except UsageError as error:
        notes.append(f"fragments of {cache.fragment_bytes} bytes are copied in pieces: {error}")
        return None
