"""Arrival: the copies of one batch into a device's slots, on their way, and who may wait for which of them.

Owns: one event behind each part of the batch, until all of it is over. Always: a stream that was made to wait comes
after the copies, however early the events are given back; who asks when all is over waits for nothing.
Units:   layers by the model's number.
"""

import threading
from typing import Any

from kvtier.allocator.streams import Event, Stream, Streams
from kvtier.errors import DeviceLost, KvtierError
from kvtier.tiers.fences import stream_key


class Arrival:
    """`kvtier.cache.leases.Arrival` on a device. Any thread may call `wait`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._parts: list[tuple[tuple[int, ...], Event]] = []  # layers, in the order of the copies
        self._lost: KvtierError | None = None
        self._gate = threading.Lock()  # an event that was given back may be another's a moment later

    def mark(self, layers: tuple[int, ...], stream: Stream) -> None:
        """What the stream was given so far has brought these layers of all blocks of a group."""
        event = self._streams.make_event()
        self._parts.append((layers, event))
        self._streams.record(event, stream)

    def wait(self, stream: Any, layer: int | None) -> None:
        """See `kvtier.cache.leases.Arrival.wait`."""
        theirs = Stream(stream_key(stream))
        with self._gate:
            if self._lost is not None:
                raise DeviceLost(f"the copies that were on their way are lost with the device: {self._lost}")
            needed = [event for layers, event in self._parts if layer is None or layer in layers]
            if needed:
                self._streams.bind_thread()
                self._streams.wait(theirs, needed[-1])  # one stream has made all copies: the last is behind the others

    def settle(self) -> None:
        """Block until all of it is over, and give the events back. Raises DeviceLost if it did not end well."""
        try:
            if self._parts:
                self._streams.synchronize(self._parts[-1][1])
        except KvtierError as error:
            self._lost = error
            raise DeviceLost(f"copies that a stream had taken did not end well: {error}") from error
        finally:
            with self._gate:
                for _, event in self._parts:
                    self._streams.drop_event(event)
                self._parts.clear()
