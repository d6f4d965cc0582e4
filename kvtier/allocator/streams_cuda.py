"""CudaStreams: copies on a CUDA device, and what orders them.

Owns: the streams and events that were made here, and events that wait to be used again. All threads use the device's
primary context, which the engine's own CUDA code uses too: handles of either side serve the other.
Always:  a stream made here is independent of the default stream; events take no times; a batch of copies is one call
         where the driver has one (CUDA 12.8), a call for each piece otherwise.
Units:   bytes; addresses of the device, or of registered host memory (other host memory is copied synchronously).
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvtier.allocator.cuda_calls import CudaCalls
from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.streams import Addresses, Event, Stream, expect_pieces

NON_BLOCKING = 1
WITHOUT_TIME = 2
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3  # of reading the sources
BATCH_SINCE = 12080
_MEMORY, _COUNT = ctypes.c_void_p, ctypes.c_size_t
_BATCH_TYPES = (_MEMORY, _MEMORY, _MEMORY, _COUNT, _MEMORY, _MEMORY, _COUNT, _MEMORY, _MEMORY)


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: the order, two locations (hints for managed memory only), flags."""

    _fields_ = (("order", ctypes.c_uint), ("hints", ctypes.c_uint * 4), ("flags", ctypes.c_uint))


class CudaStreams:
    """`Streams` on the device whose primary context is given."""

    def __init__(self, calls: CudaCalls, context: Any, lifetime: Lifetime) -> None:
        """`lifetime`: that of the driver, which ends these streams when it ends."""
        self._calls = calls
        self._context = context
        self._lifetime = lifetime
        self._streams: set[int] = set()
        self._events: set[int] = set()
        self._events_idle: list[int] = []
        self._batch = calls.pointer("cuMemcpyBatchAsync", BATCH_SINCE, *_BATCH_TYPES)

    @property
    def has_batches(self) -> bool:
        """Whether the driver takes a batch in one call."""
        return self._batch is not None

    def bind_thread(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def make_stream(self) -> Stream:
        key = int(self._call("cuStreamCreate", NON_BLOCKING))
        self._streams.add(key)
        return Stream(key)

    def drop_stream(self, stream: Stream) -> None:
        self._call("cuStreamDestroy", stream.key)
        self._streams.discard(stream.key)

    def finish(self, stream: Stream) -> None:
        self._call("cuStreamSynchronize", stream.key)

    def finish_all(self) -> None:
        """Block until the device has done all that this process has given it, through whatever stream."""
        self.bind_thread()
        self._call("cuCtxSynchronize")

    def make_event(self) -> Event:
        self._lifetime.expect()
        try:
            return Event(self._events_idle.pop())  # asked first, another thread could take the last one in between
        except IndexError:
            key = int(self._calls("cuEventCreate", WITHOUT_TIME))
        self._events.add(key)
        return Event(key)

    def drop_event(self, event: Event) -> None:
        self._lifetime.expect()
        self._events_idle.append(event.key)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cuEventRecord", event.key, stream.key)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("cuStreamWaitEvent", stream.key, event.key, 0)

    def is_done(self, event: Event) -> bool:
        self._lifetime.expect()
        return self._calls.is_ready("cuEventQuery", event.key)

    def synchronize(self, event: Event) -> None:
        self._call("cuEventSynchronize", event.key)

    def copy(
        self, targets: Addresses, sources: Addresses, lengths_bytes: Addresses, stream: Stream, *, settled: bool = False
    ) -> None:
        self._lifetime.expect()
        expect_pieces(targets, sources, lengths_bytes)
        if self._batch is None:
            self._copy_each(targets, sources, lengths_bytes, stream)
        elif len(targets):
            self._copy_batch(targets, sources, lengths_bytes, stream, IN_ANY_ORDER if settled else IN_STREAM_ORDER)

    def undoings(self) -> Iterator[Callable[[], object]]:
        """How to wait for all streams and then drop them and all events: for the driver's end."""
        for key in self._streams:
            yield partial(self._calls, "cuStreamSynchronize", key)
            yield partial(self._calls, "cuStreamDestroy", key)
        for key in self._events:
            yield partial(self._calls, "cuEventDestroy", key)

    def _copy_batch(
        self, targets: Addresses, sources: Addresses, lengths: Addresses, stream: Stream, order: int
    ) -> None:
        assert self._batch is not None
        attributes, first = CopyAttributes(order=order), _COUNT(0)  # one kind of copy, from piece 0 on
        failed_at = _COUNT(0)
        code = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed_at),
            stream.key,
        )
        self._calls.expect_success("cuMemcpyBatchAsync", code)

    def _copy_each(self, targets: Addresses, sources: Addresses, lengths: Addresses, stream: Stream) -> None:
        for target, source, length in zip(*(np.asarray(a).tolist() for a in (targets, sources, lengths)), strict=True):
            self._calls("cuMemcpyAsync", target, source, length, stream.key)

    def _call(self, function: str, *arguments: Any) -> Any:
        self._lifetime.expect()
        return self._calls(function, *arguments)
