"""Fences: when work that a caller has given to its own streams is over.

Owns: a stream that waits for the caller's events, and our own events behind it. A caller may record its event again, or
throw it away, as soon as `fence` has returned: what counts is the work of that moment.
Always:  `fence` never waits; fences pass in the order in which they were made.
"""

from typing import Any

from kvtier.allocator.streams import Event, Stream, Streams
from kvtier.errors import UsageError


class Fences:
    """Any thread may make fences and wait for them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._joining = streams.make_stream()

    def fence(self, after: Any) -> Event:
        """The work before an event that torch, CuPy or the bindings recorded. Raises UsageError for what is none."""
        theirs = Event(event_key(after))
        self._streams.bind_thread()
        ours = self._streams.make_event()
        self._streams.wait(self._joining, theirs)
        self._streams.record(ours, self._joining)
        return ours

    def passed(self, fence: Event) -> None:
        """Block until it has. Once for each fence. Raises DeviceLost if the device fails."""
        self._streams.bind_thread()
        self._streams.synchronize(fence)
        self._streams.drop_event(fence)

    def close(self) -> None:
        self._streams.finish(self._joining)
        self._streams.drop_stream(self._joining)


def event_key(after: Any) -> int:
    """The CUevent of an event object, as an integer.

    Takes what torch (`cuda_event`), CuPy (`ptr`), the CUDA bindings (an int by itself) and kvtier call one. Raises
    UsageError for anything else, and for None.
    """
    if after is None:
        raise UsageError(
            "on a device `after` is needed: pass the event that you have recorded behind the last kernel that uses "
            "the slots"
        )
    for name in () if _is_stream(after) else ("cuda_event", "ptr", "key"):
        key = getattr(after, name, None)
        if isinstance(key, int):
            break
    else:
        try:
            key = 0 if _is_stream(after) else int(after)
        except Exception:  # noqa: BLE001  it is the value's own code that runs
            key = 0
    if isinstance(after, bool | str | bytes | float) or not key:
        raise UsageError(
            f"after is {after!r:.80}; pass the event that you have recorded behind the last kernel that uses the slots"
        )
    return key


def stream_key(stream: Any) -> int:
    """The CUstream of a stream object, as an integer; 0 is the default stream.

    Takes what torch (`cuda_stream`), CuPy (`ptr`), the CUDA bindings (an int by itself) and kvtier call one.
    """
    for name in () if _is_event(stream) else ("cuda_stream", "ptr", "key"):
        key = getattr(stream, name, None)
        if isinstance(key, int):
            return key
    try:
        key = None if _is_event(stream) or isinstance(stream, bool | str | bytes | float) else int(stream)
    except Exception:  # noqa: BLE001  it is the value's own code that runs
        key = None
    if key is None:
        raise UsageError(f"stream is {stream!r:.80}; pass a stream of torch, CuPy or the CUDA bindings")
    return key


def _is_stream(value: Any) -> bool:
    """Whether it would pass for an event by its number alone: kvtier's, the bindings', or one that can wait."""
    return isinstance(value, Stream) or type(value).__name__ == "CUstream" or hasattr(value, "wait_event")


def _is_event(value: Any) -> bool:
    """Likewise. Only events know the time between two of them, or of themselves that they are done and cannot wait."""
    named = isinstance(value, Event) or type(value).__name__ == "CUevent" or hasattr(value, "cuda_event")
    return named or (hasattr(value, "done") and not hasattr(value, "wait_event"))
