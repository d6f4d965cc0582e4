"""Whose place on a disk a block may take: what can be emptied is found, and found under the size that lies there."""

from dataclasses import replace

import pytest

from kvtier.cache.staying import NotEvictable
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES
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
    emptied = demotions.victims.whole_extent(DISK, NotEvictable(directory, DISK, demotions.flushes))
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


# ---------------------------------------------------------------- ranks


class Ranked:
    """Six blocks on a disk, in two extents, coldest first; all is told by place. pages: what each block takes."""

    def __init__(self, ranks, pages=(1,) * 6, held=()):
        disk = InExtents(blocks_max=24)
        stored(disk, *(prompt(number, 1) for number in range(6))).close()
        for place, (key, generation, _) in [*disk.rows.items()]:
            disk.rows[place] = key, generation, bytes(pages[place] * PAGE_BYTES)
        disk.notes.clear()  # so that those that changed their size keep their turn
        self.engine = make_engine(disk=disk)
        self.residency = self.engine.core.residency
        self.demotions = self.engine.core.planner.demotions
        directory = self.residency.directory
        self.handles = {directory.place(handle, DISK): handle for handle in directory.handles()}
        for place, rank in ranks.items():
            self.residency.ranks.claim(directory.key(self.handles[place]), rank)
        for place in held:
            self.engine.match(prompt(place, 1), tokens_max=4)

    def places(self, handles):
        return [self.residency.directory.place(handle, DISK) for handle in handles]

    def victims(self, count):
        """Who makes room for blocks of one page."""
        return self.places(self.demotions._victims(DISK, count, PAGE_BYTES, incoming=0))

    def emptied(self):
        staying = NotEvictable(self.residency.directory, DISK, self.demotions.flushes)
        return self.places(self.demotions.victims.whole_extent(DISK, staying))


def test_a_pinned_block_of_another_size_costs_no_extent():
    """Every store empties a whole extent, because the oldest block there is pinned and of another size."""
    assert Ranked({}, pages=(2, 1, 1, 1, 1, 1)).victims(2) == [0, 1, 2]
    assert Ranked({0: 2}, pages=(2, 1, 1, 1, 1, 1)).victims(2) == [1, 2]


def test_where_no_extent_can_be_emptied_ranks_hold_within_the_size():
    """Batch work stays on disk, or nothing is found to leave, where each extent has a block that is being read."""
    ranked = Ranked({0: -1, 4: -1, 1: 2}, pages=(2, 1, 1, 1, 1, 1), held=(2, 5))
    assert ranked.emptied() == []
    assert ranked.victims(1) == [4]


@pytest.mark.parametrize(
    ("ranks", "emptied"),
    [({}, [0, 1, 2]), ({4: -1}, [3, 4, 5]), ({2: 1}, [3, 4, 5]), ({1: 2, 2: 2, 3: 1}, [0, 1, 2]), ({5: 1}, [0, 1, 2])],
)
def test_an_extent_of_what_leaves_first_and_without_pins_is_emptied(ranks, emptied):
    """A full disk takes the extent with a pinned block though another could go, or none where each has one."""
    ranked = Ranked(ranks)
    assert ranked.emptied() == emptied
    ranked.engine.check()


def test_ranked_blocks_are_found_under_the_size_that_they_take():
    """A disk that codes blocks never finds those that are to leave first, for their length says another size."""
    ranked = Ranked({3: -1, 4: -1, 5: 1})
    level = ranked.residency.levels[DISK]
    level.room = replace(level.room, stride_bytes_at=lambda place: PAGE_BYTES * (1 + place % 2))
    up_to, directory = ranked.residency.ranks.up_to, ranked.residency.directory
    others = {ranked.handles[place] for place in (0, 1, 2)}
    assert directory.length_bytes(ranked.handles[3]) == PAGE_BYTES
    for pages, place in ((2, 3), (1, 4)):
        assert ranked.places(up_to(level.policy, DISK, 1, others, pages * PAGE_BYTES)) == [place]
