"""A gpu tier that grows and shrinks under use: what comes, what leaves first, and what must not move."""

import os
from itertools import pairwise

import pytest

from kvtier.allocator import host_memory
from kvtier.engine.answers import Resized
from kvtier.errors import UsageError
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, Status
from tests.engine_bench import check_prefix, make_engine, prompt, serve, tiers_of


def resize(engine, slots):
    """Ask for so many usable slots and run; returns how many there are then."""
    ticket = ask(engine, slots)
    engine.run()
    return answer(engine, ticket)


def ask(engine, slots):
    return engine.core.submit_resize("gpu", (slots + 1) * PAGE_BYTES)


def answer(engine, ticket):
    answer = engine.answers.pop(ticket)
    assert isinstance(answer, Resized)
    slots = answer.bytes // PAGE_BYTES - 1
    engine.check()
    tier = engine.tiers[0]
    assert tier.check() == []
    assert os.fstat(tier._driver.fd).st_blocks * 512 == answer.bytes, "memory did not come or go"
    assert engine.core.stats()["tiers"]["gpu"]["slots"] == slots + 1
    return slots


def test_growing_gives_slots_and_moves_nothing():
    """A growing tier changes its address, or leaves new slots out of use."""
    engine = make_engine(gpu=4, host=8, gpu_max=12)
    address = engine.tiers[0].array().ctypes.data
    lease = serve(engine, prompt(1, 4), keep=True)
    assert resize(engine, 12) == 12
    assert engine.tiers[0].array().ctypes.data == address
    check_prefix(engine, lease, prompt(1, 4))
    more = serve(engine, prompt(2, 8), keep=True)
    assert len(set(lease.slots()) | set(more.slots())) == 12


def test_a_tier_grows_no_further_than_reserved():
    """More is promised than there are addresses."""
    engine = make_engine(gpu=4, host=8, gpu_max=6)
    assert resize(engine, 100) == 6


def test_shrinking_copies_down_what_is_dirty_and_gives_memory_back():
    """Blocks that only the gpu tier has are lost, or its memory does not go back to the system."""
    disk = DictTier()
    engine = make_engine(gpu=12, host=16, disk=disk, watermarks=(0.01, 0.02))
    prompts = [prompt(number, 4) for number in range(3)]
    for keys in prompts:
        serve(engine, keys)
    assert [tiers_of(engine, keys)["gpu"] for keys in prompts] == [16, 16, 16]
    assert resize(engine, 4) == 4
    assert all(engine.core.peek(keys).tokens == 16 for keys in prompts)
    assert engine.core.stats()["tiers"]["gpu"]["dropped_dirty"] == 0
    for keys in prompts:
        assert serve(engine, keys).tokens_ready == 16
        engine.run()
    assert resize(engine, 12) == 12
    serve(engine, prompt(9, 12))
    engine.check()


def test_nothing_that_is_leased_moves():
    """A running request loses its memory."""
    engine = make_engine(gpu=8, host=8)
    first = serve(engine, prompt(1, 4), keep=True)
    second = serve(engine, prompt(2, 4), keep=True)
    low, high = sorted((first, second), key=lambda lease: max(lease.slots()))
    assert resize(engine, 4) == 8  # every slot is leased
    check_prefix(engine, high, prompt(1 if high is first else 2, 4))
    lower = low.slots()
    engine.release(low)
    assert resize(engine, 4) == 4  # the lower slots went, for the higher ones are leased
    assert min(high.slots()) > max(lower)
    check_prefix(engine, high, prompt(1 if high is first else 2, 4))
    engine.release(high)
    assert resize(engine, 2) == 2
    assert resize(engine, 8) == 8


def test_where_all_is_leased_the_answer_does_not_wait():
    """A scheduler that asks for memory back waits for stores that cannot free any."""
    engine = make_engine(gpu=8, host=16, disk=DictTier(), watermarks=(0.9, 0.99))
    serve(engine, prompt(1, 8))
    while not any(batch.source == 1 for batch in engine.held):
        engine.plan()
        for batch in [batch for batch in engine.held if batch.source == 0]:
            engine.finish(batch)
    leases = [serve(engine, prompt(number, 4), keep=True) for number in (2, 3)]
    ticket = ask(engine, 4)
    engine.plan()
    assert any(batch.source == 1 for batch in engine.held), "nothing is on its way from host memory to disk"
    assert engine.answers.pop(ticket).bytes == 9 * PAGE_BYTES
    for lease, number in zip(leases, (2, 3), strict=True):
        check_prefix(engine, lease, prompt(number, 4))


def test_slots_that_a_lease_has_not_committed_stay():
    """A slot that is being written goes."""
    engine = make_engine(gpu=8, host=8)
    lease = engine.reserve(engine.match(prompt(1, 3)), 3)
    assert resize(engine, 1) == 3
    assert all(engine.tiers[0].slot(slot) for slot in lease.slots())
    engine.release(lease)
    assert resize(engine, 1) == 1


def test_a_block_on_its_way_up_is_waited_for():
    """A promotion lands in memory that is gone."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk)
    serve(engine, prompt(1, 8))
    engine.core.submit_flush()
    engine.run()
    fresh = make_engine(gpu=8, host=None, disk=disk)
    fresh.core.prefetch(prompt(1, 8), 0.0)
    ticket = fresh.submit_reserve(fresh.match(prompt(1, 8)), 8)
    fresh.plan()
    asked = ask(fresh, 1)
    fresh.plan()
    fresh.core.give_up(ticket)
    fresh.run()
    assert answer(fresh, asked) in range(1, 9)
    fresh.clock.advance(60)
    assert resize(fresh, 1) == 1
    assert fresh.core.peek(prompt(1, 8)).tokens == 32


def test_without_a_tier_below_blocks_are_evicted():
    """A single tier can't shrink."""
    engine = make_engine(gpu=8, host=None)
    serve(engine, prompt(1, 8))
    assert resize(engine, 3) == 3
    assert engine.core.stats()["tiers"]["gpu"]["evicted"] == 5


@pytest.mark.parametrize("status", [Status.FAILED, Status.NO_ROOM])
def test_what_cannot_be_copied_down_is_not_lost(status):
    """Shrinking over a broken disk throws away blocks, or never ends."""
    disk = DictTier()
    disk.fail_write = status
    engine = make_engine(gpu=8, host=None, disk=disk)
    serve(engine, prompt(1, 8))
    asked = ask(engine, 2)
    for _ in range(50):
        engine.run()
        engine.clock.advance(1.0)
    assert answer(engine, asked) == 8
    assert engine.core.peek(prompt(1, 8)).tokens == 32
    disk.fail_write = None
    engine.clock.advance(60.0)
    engine.run()
    assert resize(engine, 2) == 2
    assert engine.core.peek(prompt(1, 8)).tokens == 32


def test_a_later_resize_ends_the_earlier_one():
    """Two resizes fight, or the first is never answered."""
    engine = make_engine(gpu=8, host=8, gpu_max=8)
    first, second = ask(engine, 2), ask(engine, 6)
    engine.run()
    assert engine.answers.pop(first).bytes == 9 * PAGE_BYTES
    assert answer(engine, second) == 6
    third = ask(engine, 2)
    engine.plan()  # its remap is under way
    fourth = ask(engine, 8)
    engine.run()
    assert engine.answers.pop(third).bytes == 7 * PAGE_BYTES
    assert answer(engine, fourth) == 8


def test_memory_that_the_machine_does_not_have_is_not_taken(monkeypatch):
    """Growing kills the process, or gives back what was there."""
    engine = make_engine(gpu=4, host=8, gpu_max=12)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: 2 * PAGE_BYTES)
        assert resize(engine, 12) == 6
    assert engine.core.stats()["tiers"]["gpu"]["no_memory"] == 1
    assert resize(engine, 12) == 12


def test_a_driver_that_refuses_changes_nothing(monkeypatch):
    """Slots are withdrawn for memory that stays."""
    from kvtier.errors import DriverError

    engine = make_engine(gpu=8, host=8)

    def refuse(*_):
        raise DriverError("unmap", 5, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(engine.tiers[0]._driver, "unmap", refuse)
        assert resize(engine, 2) == 8
    serve(engine, prompt(1, 8))
    assert resize(engine, 2) == 2


@pytest.mark.parametrize(
    ("name", "size_bytes", "told"),
    [
        ("gpux", 1 << 20, "gpu"),
        ("host", 1 << 20, "cannot be resized"),
        ("gpu", 0, f"at least {2 * PAGE_BYTES}"),
        ("gpu", 2 * PAGE_BYTES - 1, f"at least {2 * PAGE_BYTES}"),
    ],
)
def test_sizes_and_tiers_that_make_no_sense(name, size_bytes, told):
    """A mistake looks like a bug of ours, or leaves a tier without a slot."""
    engine = make_engine(gpu=8, host=8)
    with pytest.raises(UsageError, match=told):
        engine.core.submit_resize(name, size_bytes)


def test_shrinking_is_done_in_portions(monkeypatch):
    """Nobody is answered while a large tier shrinks."""
    monkeypatch.setattr("kvtier.engine.resizing.SLOTS_AT_ONCE", 3)
    engine = make_engine(gpu=16, host=20)
    for number in range(4):
        serve(engine, prompt(number, 4))
    ticket = ask(engine, 2)
    withdrawn = [0]
    while ticket not in engine.answers:
        engine.plan()
        withdrawn.append(engine.core.residency.levels[0].slots.slots_withdrawn)
        if engine.held:
            engine.finish(engine.held[0])
    assert answer(engine, ticket) == 2
    assert max(after - before for before, after in pairwise(withdrawn)) <= 3


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_what_is_in_the_way_may_have_a_longer_way_than_one_tier(one_at_a_time):
    """A host tier full of dirty blocks ends a shrink that only has to wait until they are on disk."""
    engine = make_engine(gpu=24, host=4, disk=DictTier(), watermarks=(0.01, 0.02))
    prompts = [prompt(number, 4) for number in range(6)]
    for keys in prompts:
        serve(engine, keys)
    ticket = ask(engine, 4)
    while ticket not in engine.answers:
        batches = engine.plan()
        assert engine.held, "it waits for nothing"
        for batch in list(engine.held[:1] if one_at_a_time else batches):
            engine.finish(batch)
    assert answer(engine, ticket) == 4
    assert all(engine.core.peek(keys).tokens == 16 for keys in prompts)


def test_a_disk_that_takes_nothing_ends_a_shrink_beside_other_traffic():
    """`resize` never returns while requests load and nothing can be saved."""
    disk = DictTier()
    engine = make_engine(gpu=12, host=None, disk=disk, watermarks=(0.01, 0.02))
    saved, dirty = prompt(0, 4), [prompt(number, 4) for number in (1, 2)]
    serve(engine, saved)
    engine.core.submit_flush()
    engine.run()
    for keys in dirty:
        serve(engine, keys)
    disk.fail_write = Status.FAILED
    engine.core.submit_resize("gpu", 3 * PAGE_BYTES)
    serve(engine, saved)
    ticket = ask(engine, 4)
    engine.run()
    assert answer(engine, ticket) >= 8
    assert all(engine.core.peek(keys).tokens == 16 for keys in dirty)
