"""Desk: on which kernels of one stream find what they read beside the blocks: which blocks, which slots.

Owns: a stretch of device memory for the numbers of one launch, and pinned sheets on which the host writes them. The
device's stretch is written in the stream's own order, so the launch before has read it; a sheet is the caller's until
the stream is past the copy, and goes back by `give_back`.
Units: counts of numbers (int32).
"""

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.streams import Addresses, Stream, Streams
from kvtier.tiers.foreign.places import Numbers

NUMBER_BYTES = 4
BLOCKS_MAX = 4096  # of one launch
SHEET_BYTES = 2 * BLOCKS_MAX * NUMBER_BYTES
SHEETS = 32  # launches under way; more of them copy without kernels

Sheet = NDArray[np.uint8]


class Sheets:
    """Pinned memory, cut into sheets."""

    def __init__(self, pinned: NDArray[np.uint8]) -> None:
        self._free = list(pinned.reshape(-1, SHEET_BYTES))

    def take(self) -> Sheet | None:
        """One that nobody uses, if there is one."""
        return self._free.pop() if self._free else None

    def give_back(self, sheet: Sheet) -> None:
        """The device has read it."""
        self._free.append(sheet)


class Desk:
    """For launches of up to BLOCKS_MAX blocks each, in one stream. `address`: SHEET_BYTES on the device."""

    def __init__(self, streams: Streams, address: int) -> None:
        self._streams, self._address = streams, address

    def put(self, sheet: Sheet | None, blocks: Numbers, slots: Numbers, stream: Stream) -> tuple[int, int]:
        """The device's addresses of both, for what the stream is given next."""
        assert sheet is not None, "no sheet was lent"
        count = len(blocks)
        numbers = sheet[: 2 * count * NUMBER_BYTES].view(np.int32)
        numbers[:count], numbers[count:] = blocks, slots
        self._streams.copy(*one_piece(self._address, sheet.ctypes.data, numbers.nbytes), stream, settled=True)
        return self._address, self._address + count * NUMBER_BYTES


def one_piece(target: int, source: int, length_bytes: int) -> tuple[Addresses, Addresses, Addresses]:
    """A single piece, as `Streams.copy` takes it."""
    return np.array([target], np.uint64), np.array([source], np.uint64), np.array([length_bytes], np.uint64)
