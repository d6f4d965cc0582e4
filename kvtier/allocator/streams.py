"""What orders copies: streams, and the events by which they and the caller wait for each other.

A stream carries out what it is given one by one; two streams know nothing of each other until one waits for an event
that the other has recorded. On host memory everything is over when the call returns (`HostStreams`).
Always: nothing here blocks but `finish` and `synchronize`.
Units:  bytes; addresses are integers, of the device or of pinned host memory alike.
"""

import ctypes
import errno
import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.allocator.lifetime import Lifetime
from kvtier.errors import DeviceLost, DriverError, KvtierError

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Stream:
    """`key` is the driver's own name for it (a CUstream as an integer). One made elsewhere serves as well."""

    key: int


@dataclass(frozen=True, slots=True)
class Event:
    """A point in a stream. `key` is the driver's own name for it (a CUevent as an integer)."""

    key: int


class Streams(Protocol):
    """The verbs. Any thread may call them, once it has called `bind_thread`."""

    def bind_thread(self) -> None:
        """Make the device's context current in this thread. Every worker calls it first; again does no harm."""
        ...

    def make_stream(self) -> Stream:
        """An independent stream. The caller drops it."""
        ...

    def drop_stream(self, stream: Stream) -> None:
        """Give a stream up; what it was given already is still done."""
        ...

    def finish(self, stream: Stream) -> None:
        """Block until the stream has nothing left to do. Raises DeviceLost if something of it failed."""
        ...

    def make_event(self) -> Event:
        """An event that is done until it is recorded. The caller drops it."""
        ...

    def drop_event(self, event: Event) -> None:
        """Give an event up, which nobody will ask about any more; who waits for it already is not disturbed."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event will be done when all that the stream has been given so far is."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on comes after the event. The caller does not wait."""
        ...

    def is_done(self, event: Event) -> bool:
        """Whether it has come to pass. Raises DeviceLost if something before it failed."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block until the event is done."""
        ...

    def copy(
        self, targets: Addresses, sources: Addresses, lengths_bytes: Addresses, stream: Stream, *, settled: bool = False
    ) -> None:
        """Copy n pieces, each `lengths_bytes[i]` from `sources[i]` to `targets[i]`: uint64 arrays [n], contiguous.

        The pieces may come in any order, so none may overlap another's target. `settled` says that the sources are
        complete already, so that they may be read ahead of what the stream is still doing. Memory must stay until an
        event after it is done; the three arrays need not. Raises DriverError if their lengths differ.
        """
        ...


class HostStreams:
    """`Streams` of a machine without a device: whatever is asked has been done when the call returns."""

    def __init__(self, lifetime: Lifetime) -> None:
        """`lifetime`: that of the driver whose memory is copied."""
        self._lifetime = lifetime
        self._keys = itertools.count(1)

    def bind_thread(self) -> None:
        self._lifetime.expect()

    def make_stream(self) -> Stream:
        return Stream(self._next_key())

    def drop_stream(self, stream: Stream) -> None:
        self._lifetime.expect()

    def finish(self, stream: Stream) -> None:
        self._lifetime.expect()

    def make_event(self) -> Event:
        return Event(self._next_key())

    def drop_event(self, event: Event) -> None:
        self._lifetime.expect()

    def record(self, event: Event, stream: Stream) -> None:
        self._lifetime.expect()

    def wait(self, stream: Stream, event: Event) -> None:
        self._lifetime.expect()

    def is_done(self, event: Event) -> bool:
        self._lifetime.expect()
        return True

    def synchronize(self, event: Event) -> None:
        self._lifetime.expect()

    def copy(
        self, targets: Addresses, sources: Addresses, lengths_bytes: Addresses, stream: Stream, *, settled: bool = False
    ) -> None:
        self._lifetime.expect()
        expect_pieces(targets, sources, lengths_bytes)
        for target, source, length in zip(targets.tolist(), sources.tolist(), lengths_bytes.tolist(), strict=True):
            ctypes.memmove(target, source, length)

    def _next_key(self) -> int:
        self._lifetime.expect()
        return next(self._keys)


@contextmanager
def whole(streams: Streams, stream: Stream) -> Iterator[None]:
    """If a call of the driver fails, those before it are over before that is told: what they use is used again then.

    Raises DeviceLost where nobody can say when they will be.
    """
    try:
        yield
    except KvtierError as failure:
        try:
            streams.finish(stream)
        except DeviceLost:
            raise
        except KvtierError as error:
            raise DeviceLost(f"a stream that failed ({failure}) cannot be waited for: {error}") from error
        raise


def drop_streams(streams: Streams, several: Iterable[Stream]) -> None:
    """Wait for each of several streams and drop it, also when the driver fails: what another still does uses memory.

    Raises the last failure, with those before it as its context.
    """
    with ExitStack() as ending:
        for stream in several:
            ending.callback(streams.drop_stream, stream)
            ending.callback(streams.finish, stream)


def expect_pieces(targets: Addresses, sources: Addresses, lengths_bytes: Addresses) -> None:
    """Raises DriverError unless these are contiguous uint64 arrays of one length: they are passed on as memory."""
    for array in (targets, sources, lengths_bytes):
        if array.dtype != np.uint64 or not array.flags.c_contiguous or array.shape != (len(targets),):
            raise DriverError("copy", errno.EINVAL, f"{array.dtype} array of shape {array.shape}, not uint64 [n]")
