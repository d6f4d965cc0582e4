"""What every driver's streams must do, as tests.

Enrol a driver: subclass `StreamContract` in a test module and give it the fixture `driver` of `DriverContract`.
"""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.errors import ClosedError, DriverError
from kvtier.testing.drivers import CopyingDriver, mapped, peek, pieces


class StreamContract:
    """Each test's first line says what would be broken if it failed."""

    def test_each_piece_goes_where_it_should(self, driver: CopyingDriver) -> None:
        """Pieces of a batch are swapped, cut, left out, or spill over."""
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        mapped(driver, addresses, 0)
        driver.zero(addresses, 0, size)
        source = np.arange(1, 256, dtype=np.uint8)
        here, there = source.ctypes.data, addresses.address
        stream = driver.streams.make_stream()
        targets, sources = pieces(there + 100, there, there + 1000), pieces(here, here + 50, here + 254)
        driver.streams.copy(targets, sources, pieces(50, 20, 1), stream)
        driver.streams.finish(stream)
        expected = np.zeros(size, np.uint8)
        expected[100:150], expected[:20], expected[1000] = source[:50], source[50:70], source[254]
        assert (peek(driver, there, size) == expected).all()

    def test_settled_pieces_arrive_too(self, driver: CopyingDriver) -> None:
        """The other way of reading sources loses bytes, or an empty batch is an error."""
        addresses = driver.reserve(driver.granule_bytes)
        mapped(driver, addresses, 0)
        source = np.full(64, 7, np.uint8)
        stream = driver.streams.make_stream()
        driver.streams.copy(pieces(addresses.address), pieces(source.ctypes.data), pieces(64), stream, settled=True)
        driver.streams.copy(pieces(), pieces(), pieces(), stream)
        driver.streams.finish(stream)
        assert (peek(driver, addresses.address, 64) == source).all()

    def test_a_stream_waits_for_an_event(self, driver: CopyingDriver) -> None:
        """A stream that must come second does not see what the first one wrote."""
        size = driver.granule_bytes
        addresses = driver.reserve(size)
        mapped(driver, addresses, 0)
        driver.zero(addresses, 0, size)
        source = np.full(64, 9, np.uint8)
        first, second = driver.streams.make_stream(), driver.streams.make_stream()
        event = driver.streams.make_event()
        assert driver.streams.is_done(event)  # as long as nobody has recorded it
        driver.streams.copy(pieces(addresses.address), pieces(source.ctypes.data), pieces(64), first)
        driver.streams.record(event, first)
        driver.streams.wait(second, event)
        driver.streams.copy(pieces(addresses.address + 64), pieces(addresses.address), pieces(64), second)
        driver.streams.finish(second)
        assert driver.streams.is_done(event)
        driver.streams.synchronize(event)
        assert (peek(driver, addresses.address + 64, 64) == source).all()

    def test_what_was_dropped_can_be_made_again(self, driver: CopyingDriver) -> None:
        """Every batch leaks an event, or one that is used again stands for its former life."""
        streams = driver.streams
        stream, event = streams.make_stream(), streams.make_event()
        streams.record(event, stream)
        streams.synchronize(event)
        streams.drop_event(event)
        again = streams.make_event()
        streams.record(again, stream)
        streams.synchronize(again)
        assert streams.is_done(again)
        streams.drop_stream(stream)
        assert streams.make_stream() != streams.make_stream()

    def test_wrong_arrays_are_refused(self, driver: CopyingDriver) -> None:
        """Arrays are read as memory: another type or length would copy from and to anywhere."""
        stream = driver.streams.make_stream()
        good = pieces(0, 0)
        all_wrong: list[Any] = [pieces(0), good.astype(np.int64), pieces(0, 0, 0, 0)[::2], pieces(0, 0).reshape(2, 1)]
        for wrong in all_wrong:
            for targets, sources, lengths in ((wrong, good, good), (good, wrong, good), (good, good, wrong)):
                with pytest.raises(DriverError, match="uint64"):
                    driver.streams.copy(targets, sources, lengths, stream)

    def test_a_worker_thread_copies_once_it_is_bound(self, driver: CopyingDriver) -> None:
        """Transfers work in the thread that made the driver only."""
        addresses = driver.reserve(driver.granule_bytes)
        mapped(driver, addresses, 0)
        driver.zero(addresses, 0, 64)
        found: list[int] = []

        def work() -> None:
            driver.streams.bind_thread()
            found.extend(peek(driver, addresses.address, 64).tolist())

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert found == [0] * 64

    def test_threads_do_not_disturb_each_other(self, driver: CopyingDriver) -> None:
        """Batches of two workers are mixed up, or one of them waits for an event of the other's."""
        size, workers = driver.granule_bytes, 3
        addresses = driver.reserve(workers * size)
        for granule in range(workers):
            mapped(driver, addresses, granule)
        wrong: list[int] = []

        def work(number: int) -> None:
            streams, there = driver.streams, addresses.address + number * size
            streams.bind_thread()
            up, down = streams.make_stream(), streams.make_stream()
            for turn in range(20):
                sent, got = np.full(64, number * 20 + turn, np.uint8), np.zeros(64, np.uint8)
                event = streams.make_event()
                streams.copy(pieces(there, there + 32), pieces(*halves(sent)), pieces(32, 32), up)
                streams.record(event, up)
                streams.wait(down, event)
                streams.copy(pieces(*halves(got)), pieces(there, there + 32), pieces(32, 32), down)
                streams.finish(down)
                streams.drop_event(event)
                if (sent != got).any():
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_they_end_with_their_driver(self, driver: CopyingDriver) -> None:
        """A closed driver copies into memory that is somebody else's by now."""
        streams = driver.streams
        stream, event = streams.make_stream(), streams.make_event()
        driver.close()
        for call in (
            lambda: streams.bind_thread(),
            lambda: streams.make_stream(),
            lambda: streams.drop_stream(stream),
            lambda: streams.finish(stream),
            lambda: streams.make_event(),
            lambda: streams.drop_event(event),
            lambda: streams.record(event, stream),
            lambda: streams.wait(stream, event),
            lambda: streams.is_done(event),
            lambda: streams.synchronize(event),
            lambda: streams.copy(pieces(), pieces(), pieces(), stream),
        ):
            with pytest.raises(ClosedError):
                call()


def halves(array: NDArray[np.uint8]) -> tuple[int, int]:
    """The addresses of both."""
    start = int(array.ctypes.data)
    return start, start + array.nbytes // 2
