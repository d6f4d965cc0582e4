"""The throttle: how long each batch waits, and that nothing waits after it was lifted."""

import pytest

from kvtier.clock import ManualClock
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.throttled import Throttle
from kvtier.types import ReadItem, Status, WriteBatch, WriteItem, store_key


def throttled(bytes_per_s):
    tier, clock, waits = DictTier(), ManualClock(), []

    def wait(seconds):
        waits.append(seconds)
        clock.advance(seconds)

    return tier, clock, waits, Throttle(tier, bytes_per_s, clock.now, wait)


def item(number, size):
    return WriteItem(store_key(0, bytes([number] * 16) + bytes(4)), size, memoryview(bytearray(size)))


def test_a_batch_takes_as_long_as_its_bytes_say():
    """A disk that is called slow is fast, and a sweep of speeds measures one and the same disk."""
    tier, clock, waits, _ = throttled(1000)
    first, second = tier.write(WriteBatch([item(1, 500), item(2, 1500)], [], {}))
    assert waits == [2.0]
    into = memoryview(bytearray(500))
    (read,) = tier.read([ReadItem(item(1, 500).key, first.place, first.generation, 500, into)])
    assert waits == [2.0, 0.5]
    assert [first.status, second.status, read.status] == [Status.DONE] * 3
    clock.advance(60.0)
    tier.read([ReadItem(item(2, 1500).key, second.place, second.generation, 1500, memoryview(bytearray(1500)))])
    assert waits[-1] == 1.5  # a pause is not saved up


def test_batches_side_by_side_share_the_speed():
    """Four threads make four disks of one."""
    tier, waits = DictTier(), []
    Throttle(tier, 1000, ManualClock().now, waits.append)  # nobody lets time pass
    for number in range(3):
        tier.write(WriteBatch([item(number, 1000)], [], {}))
    assert waits == [1.0, 2.0, 3.0]


def test_nothing_waits_after_it_was_lifted():
    """A cache over a slow disk can never be closed."""
    tier, _, waits, throttle = throttled(1)
    throttle.lift()
    tier.write(WriteBatch([item(1, 1000)], [], {}))
    assert waits == []


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_speed_that_never_ends_is_refused(speed):
    """A division by zero far away from who wrote the zero."""
    with pytest.raises(ValueError, match="speed"):
        throttled(speed)
