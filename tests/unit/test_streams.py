"""drop_streams: streams go together, and none while another still works."""

import pytest

from kvtier.allocator.lifetime import Lifetime
from kvtier.allocator.streams import HostStreams, Stream, drop_streams
from kvtier.errors import DeviceLost, DriverError, KvtierError


class Failing(HostStreams):
    """Streams that note what is asked of them, and that fail in some calls."""

    def __init__(self, **failures: KvtierError) -> None:
        super().__init__(Lifetime("streams"))
        self._failures = failures
        self.asked: list[tuple[str, int]] = []

    def finish(self, stream: Stream) -> None:
        self._note("finish", stream)

    def drop_stream(self, stream: Stream) -> None:
        self._note("drop", stream)

    def _note(self, call: str, stream: Stream) -> None:
        self.asked.append((call, stream.key))
        if call in self._failures:
            raise self._failures[call]


def waits(streams: Failing) -> set[int]:
    return {key for call, key in streams.asked if call == "finish"}


def test_each_is_waited_for_before_it_is_dropped() -> None:
    """A stream is dropped under its work, or stays behind."""
    streams = Failing()
    drop_streams(streams, [Stream(1), Stream(2)])
    for key in (1, 2):
        assert [call for call, of in streams.asked if of == key] == ["finish", "drop"]


@pytest.mark.parametrize("call", ["finish", "drop"])
def test_one_that_fails_leaves_none_unwaited(call: str) -> None:
    """The first stream of a lost device fails; the second one's kernel goes on in memory that is given back next."""
    streams = Failing(**{call: DeviceLost("gone")})
    with pytest.raises(DeviceLost):
        drop_streams(streams, [Stream(1), Stream(2), Stream(3)])
    assert waits(streams) == {1, 2, 3}


def test_a_failure_is_told() -> None:
    """A driver that cannot drop a stream is silent about it."""
    with pytest.raises(DriverError):
        drop_streams(Failing(drop=DriverError("cuStreamDestroy", 1, "CUDA_ERROR_INVALID_VALUE")), [Stream(1)])
