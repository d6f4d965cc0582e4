"""Whose place on a disk a block may take: what can be emptied is found, and found under the size that lies there."""

from kvtier.cache.staying import NotEvictable
from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import make_engine, prompt, serve

DISK = 2


class InExtents(DictTier):
    """Three places make an extent."""

    def neighbours(self, place):
        return place // 3


def stored(disk, *prompts):
    """An engine of a later process over a disk that has these."""
    engine = make_engine(disk=disk)
    for keys in prompts:
        serve(engine, keys)
        engine.core.submit_flush()
        engine.run()
    engine.close()
    return make_engine(disk=disk)


def test_an_extent_that_can_be_emptied_is_found_among_any_number_of_blocks():
    """A flush fails, or a full file system gets nothing back, though an extent could make room: only the coldest half
    of the blocks was looked at."""
    first, second, third = prompt(1, 3), prompt(2, 3), prompt(3, 1)
    engine = stored(InExtents(), first, second, third)
    for keys in (first, second):
        engine.match(keys, tokens_max=4)  # one block of each extent has to stay
    demotions, directory = engine.core.planner.demotions, engine.core.residency.directory
    emptied = demotions.whole_extent(DISK, NotEvictable(directory, DISK, demotions.flushes))
    assert [directory.place(handle, DISK) // 3 for handle in emptied] == [2]


def test_a_block_in_a_place_that_had_another_size_is_found_under_its_own():
    """After a restart the order has it under the size of its forerunner: who needs its room never finds it."""
    disk = DictTier()
    stored(disk, prompt(1, 2)).close()
    [first, second] = sorted(disk.rows)
    key, generation, _ = disk.rows[first]
    disk.rows[first] = key, generation, bytes(6144)
    engine = make_engine(disk=disk)
    order, directory = engine.core.residency.levels[DISK].policy, engine.core.residency.directory
    assert [directory.place(handle, DISK) for handle in order.candidates(1, (), 8192)] == [first]
    assert [directory.place(handle, DISK) for handle in order.candidates(1, (), 4096)] == [second]
    assert order.candidates(2, (), 4096) == []
    engine.check()
