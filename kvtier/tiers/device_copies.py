"""DeviceCopies: batches between slots on a device and views of host memory, on a stream for each direction.

Owns: the two streams. Always: a batch is over when its verb returns or raises, and nothing waits for the other
direction; nothing is copied before the whole batch is checked; what a host view has beyond a block's payload is zeroed.
The padding of a slot on the device keeps what it had: nobody reads it.
Units:   slots (index), bytes.

Host memory that is not registered with the device is copied through the driver's own buffers, at a fraction of the
speed and in the calling thread.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from kvtier.allocator.streams import Addresses, Stream, Streams, drop_streams, whole
from kvtier.errors import InvariantError, KvtierError
from kvtier.tiers.arrivals import Arrival
from kvtier.tiers.slots import address_of, zero
from kvtier.types import DONE, LayerPart, Outcome, ReadItem, Status, WriteBatch, block_key_of, group_of


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
        return _written(batch)

    def write_streamed(
        self, batch: WriteBatch, parts: Sequence[LayerPart], enqueued: Callable[[Arrival], None]
    ) -> list[Outcome]:
        """The same, part by part over all blocks; `enqueued` is called once the stream has taken all of it.

        Blocks that the parts do not cover are copied as `write` does, and nobody hears ahead.
        """
        pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)  # group -> slot's address, source's
        for item in batch.items:
            address = self._expect(item.place, item.length_bytes, item.source)
            pieces[group_of(block_key_of(item.key))].append((address, address_of(item.source)))
        lengths_bytes = {(group_of(block_key_of(item.key)), item.length_bytes) for item in batch.items}
        covered = {(group, sum(p.length_bytes for p in parts if p.group == group)) for group in pieces}
        if lengths_bytes != covered:
            return self.write(batch)
        arrival = self._enqueued(pieces, parts)
        enqueued(arrival)
        arrival.settle()
        return _written(batch)

    def _enqueued(self, pieces: Mapping[int, Sequence[tuple[int, int]]], parts: Sequence[LayerPart]) -> Arrival:
        arrival = Arrival(self._streams)
        try:
            with whole(self._streams, self._up):
                self._streams.bind_thread()
                for part in (part for part in parts if part.group in pieces):
                    self._enqueue(part, pieces[part.group])
                    arrival.mark(part.layers, self._up)
        except KvtierError:
            arrival.settle()
            raise
        return arrival

    def _enqueue(self, part: LayerPart, pieces: Sequence[tuple[int, int]]) -> None:
        ends = addresses(pieces).reshape(-1, 2) + np.uint64(part.offset_bytes)
        targets, sources = (np.ascontiguousarray(column) for column in ends.T)
        self._streams.copy(targets, sources, np.full(len(ends), part.length_bytes, np.uint64), self._up, settled=True)

    def close(self) -> None:
        """Wait for both streams and drop them."""
        drop_streams(self._streams, (self._down, self._up))

    def _copy(self, targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int], stream: Stream) -> None:
        """Copy, and wait for that in this thread. Other threads may use the same stream meanwhile."""
        streams = self._streams
        with whole(streams, stream):
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


def _written(batch: WriteBatch) -> list[Outcome]:
    others = len(batch.evict) + bool(batch.sidecar)
    return [Outcome(Status.DONE, item.place) for item in batch.items] + [DONE] * others


def addresses(numbers: Sequence[int] | Sequence[tuple[int, int]]) -> Addresses:
    """As the driver wants them."""
    return np.array(numbers, np.uint64)
