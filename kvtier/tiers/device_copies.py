"""DeviceCopies: batches between slots on a device and views of host memory, on a stream for each direction.

Owns: the two streams. Always: a batch is over when its verb returns, and nothing waits for the other direction; nothing
is copied before the whole batch is checked; what a host view has beyond a block's payload is zeroed. The padding of a
slot on the device keeps what it had: nobody reads it.
Units:   slots (index), bytes.

Host memory that is not registered with the device is copied through the driver's own buffers, at a fraction of the
speed and in the calling thread.
"""

from collections.abc import Container, Sequence

import numpy as np

from kvtier.allocator.streams import Addresses, Stream, Streams
from kvtier.errors import InvariantError
from kvtier.tiers.slots import address_of, zero
from kvtier.types import DONE, Outcome, ReadItem, Status, WriteBatch


class DeviceCopies:
    """Read and write for slots of `stride_bytes` from `address` on, of which `usable` ones hold blocks.

    Reads may run side by side in several threads. Raises DeviceLost when the device has failed.
    """

    def __init__(self, name: str, streams: Streams, address: int, stride_bytes: int, usable: Container[int]) -> None:
        self._name = name
        self._streams = streams
        self._address = address
        self._stride_bytes = stride_bytes
        self._usable = usable
        self._down, self._up = streams.make_stream(), streams.make_stream()

    def read(self, items: Sequence[ReadItem]) -> list[Outcome]:
        """Copy slots into the items' views. What lies in them is complete: their blocks have been published."""
        places = [self._expect(item.place, item.length_bytes, item.into) for item in items]
        targets = [address_of(item.into) for item in items]
        self._copy(targets, places, [item.length_bytes for item in items], self._down)
        zero(
            (target + item.length_bytes, item.into.nbytes - item.length_bytes)
            for target, item in zip(targets, items, strict=True)
        )
        return [DONE] * len(items)

    def write(self, batch: WriteBatch) -> list[Outcome]:
        """Copy the items into their slots; evictions and sidecar need no work, as in every memory tier."""
        items = batch.items
        places = [self._expect(item.place, item.length_bytes, item.source) for item in items]
        self._copy(places, [address_of(item.source) for item in items], [i.length_bytes for i in items], self._up)
        others = len(batch.evict) + bool(batch.sidecar)
        return [Outcome(Status.DONE, item.place) for item in items] + [DONE] * others

    def close(self) -> None:
        """Wait for both streams and drop them."""
        for stream in (self._down, self._up):
            self._streams.finish(stream)
            self._streams.drop_stream(stream)

    def _copy(self, targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int], stream: Stream) -> None:
        """Copy, and wait for that in this thread. Other threads may use the same stream meanwhile."""
        streams = self._streams
        streams.bind_thread()
        event = streams.make_event()
        streams.copy(addresses(targets), addresses(sources), addresses(lengths), stream, settled=True)
        streams.record(event, stream)
        streams.synchronize(event)
        streams.drop_event(event)

    def _expect(self, place: int, length_bytes: int, view: memoryview) -> int:
        """The slot's address."""
        if place not in self._usable:
            raise InvariantError(f"tier {self._name}: slot {place} is none that holds blocks")
        if not 0 <= length_bytes <= min(self._stride_bytes, view.nbytes):
            raise InvariantError(
                f"tier {self._name}: {length_bytes} bytes in a slot of {self._stride_bytes} and a view of {view.nbytes}"
            )
        return self._address + place * self._stride_bytes


def addresses(numbers: Sequence[int]) -> Addresses:
    """As the driver wants them."""
    return np.array(numbers, np.uint64)
