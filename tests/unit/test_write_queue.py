"""Who goes to a tier's writer together."""

import pytest

from kvtier.engine import write_queue
from kvtier.engine.write_queue import GROUP_BATCHES_MAX, WriteQueue
from kvtier.types import Transfer, TransferBatch, store_key


def batch(number: int, size_bytes: int = 0, **more: object) -> TransferBatch:
    transfers = (Transfer(0, store_key(0, bytes(20)), 0, 0, 0, size_bytes),) if size_bytes else ()
    return TransferBatch(number, 0, 1, transfers, **more)


def taken(*batches: TransferBatch) -> list[list[int]]:
    """The numbers of what is taken at each turn, until nothing is left."""
    queue = WriteQueue()
    for one in batches:
        queue.put(one)
    turns = []
    while turn := queue.take():
        turns.append([one.batch_id for one in turn])
    return turns


def test_what_waits_goes_together_in_order() -> None:
    """Group commit never happens, or batches overtake each other."""
    assert taken(batch(1), batch(2), batch(3)) == [[1, 2, 3]]


def test_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the first of many batches waits for all of them."""
    many = [batch(number) for number in range(2 * GROUP_BATCHES_MAX + 1)]
    assert [len(turn) for turn in taken(*many)] == [GROUP_BATCHES_MAX, GROUP_BATCHES_MAX, 1]
    monkeypatch.setattr(write_queue, "GROUP_BYTES_MAX", 100)
    assert taken(*(batch(n, 50) for n in range(3)), batch(3, 200), batch(4, 1)) == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize("more", [{"drop": 0}, {"capacity_bytes": 1}, {"scrub": (None,)}, {"remap": object()}])
def test_another_verb_goes_alone(more: dict[str, object]) -> None:
    """A namespace is dropped before the blocks that were written into it earlier, or its verb is lost in a write."""
    assert taken(batch(1), batch(2), batch(3, **more), batch(4), batch(5)) == [[1, 2], [3], [4, 5]]
    assert taken(batch(3, **more), batch(4), batch(5)) == [[3], [4, 5]]


def test_a_batch_is_taken_back_or_it_was_taken() -> None:
    """A batch that nothing will run is reported, or one that runs is called refused."""
    queue = WriteQueue()
    first, second = batch(1), batch(2)
    queue.put(first)
    queue.put(second)
    assert not queue.take_back(first), "not the last"
    assert queue.take_back(second)
    assert not queue.take_back(second)
    assert queue.take() == [first]
    assert not queue.take_back(first)
