"""ManagedTop when copies fail, come late or find nothing, and when requests go while their blocks still move."""

import pytest

from kvtier.engine.page_stores import PAUSE_STEPS
from kvtier.errors import KvtierError
from kvtier.types import DONE, BatchDone, Outcome, Status
from tests.fakecuda.fake import fake_cuda
from tests.managed_device import on_device
from tests.managed_prompt import PROMPT, SIZES, world_with_prompt_below
from tests.managed_world import FULL, MLA, World
from tests.manager_state import remembered

__all__ = ["fake_cuda"]


@pytest.fixture(autouse=True, params=["host", "cuda"])
def _pages(request, monkeypatch):
    """Each of these with pages in host memory, and on a device."""
    if request.param == "host":
        yield
        return
    close = on_device(monkeypatch, request.getfixturevalue("fake_cuda"))
    yield
    close()


def loading(groups=(FULL,), blocks=30, on_disk=False, **more):
    """A world, and its request whose load the tiers have been asked for."""
    world = world_with_prompt_below(groups, blocks=blocks, **more)
    if on_disk:
        world.below.forget_host()
    request = world.request(PROMPT)
    assert world.admit(request)
    return world, request


def moving(*arguments, **more):
    """As `loading`, and the copy is under way."""
    world, request = loading(*arguments, **more)
    world.below.run()
    assert world.step() == []
    assert [move.kind for move in world.pages.moves] == ["load"]
    return world, request


def finish(world, request, computed):
    """The request came back with so much; the rest is computed, and nothing is left behind."""
    assert request.computed_tokens == computed
    assert world.returned[request.request_id] == 1
    assert world.proceed(request)
    world.check_content()
    world.check()
    world.drain()
    assert world.serve(PROMPT) == 24
    world.drain()


# ---------------------------------------------------------------- a load that does not bring everything


@pytest.mark.parametrize("groups", [(FULL,), (MLA,)])
@pytest.mark.parametrize("fails", [[0], [2], [3, 4], [5], [1, 5], "all"])
def test_a_load_that_fails_is_computed_from_where_it_stopped(groups, fails):
    """A block that was not copied is served, or all that was is computed again."""
    world, request = moving(groups)
    world.pages.end(fails=fails)
    assert world.step() == [request]
    finish(world, request, 0 if fails == "all" else min(fails) * 4)


@pytest.mark.parametrize(("fails", "computed"), [([5], 16), ([3], 8), ([6], 0), ([7], 8), ([8], 16), ([], 24)])
def test_with_two_groups_it_stops_where_both_have_blocks(fails, computed):
    """One group's block is missing, and the other's is used all the same. (Six blocks of 4, then three of 8.)"""
    world, request = moving(SIZES)
    world.pages.end(fails=fails)
    assert world.step() == [request]
    finish(world, request, computed)


def test_what_came_is_found_and_what_did_not_is_not():
    """Half a load is named as a whole."""
    world, request = moving()
    world.pages.end(fails=[3])
    world.step()
    assert world.top.get_computed_blocks(world.request(PROMPT)).hit.tokens == 12
    assert (world.top.counters.loaded, world.top.counters.failed) == (5, 1)
    finish(world, request, 12)


@pytest.mark.parametrize("status", [Status.FAILED, Status.MISSING, Status.CORRUPT])
def test_a_disk_that_reads_nothing_costs_the_load_only(status):
    """A broken disk stops requests, or its garbage is served."""
    world, request = loading(on_disk=True)
    world.below.disk.fail_read = status
    world.end_loads()
    world.below.disk.fail_read = None
    assert request.computed_tokens == 0
    assert world.proceed(request)
    world.check_content()
    world.drain()


def test_a_damaged_block_on_disk_ends_the_load_before_it():
    """A block with a wrong checksum is served, or those before it are thrown away."""
    world, request = loading(on_disk=True)
    third = next(place for place, row in world.below.disk.rows.items() if row[0][4:-4] == request.hashes[2])
    world.below.disk.corrupt.add(third)
    world.end_loads()
    finish(world, request, 8)


def test_a_load_that_finds_nothing_any_more_is_computed():
    """A prefix that was evicted between lookup and load leaves a request waiting for ever."""
    world = world_with_prompt_below(blocks=30)
    request = world.request(PROMPT)
    lookup = world.top.get_computed_blocks(request)
    world.below.forget_all()
    new = world.top.allocate_slots(request, len(PROMPT), lookup)
    assert len(new[0]) == 7
    assert not world.top.is_loading(request)
    assert world.below.core.stats()["matches"] == 0
    world.top.free(request)
    world.drain()


def test_a_load_whose_blocks_are_forgotten_under_way_comes_back_with_nothing():
    """A drop while a load is queued leaves the request waiting, or brings blocks of the old weights."""
    world, request = loading(on_disk=True)
    world.below.forget_all()
    world.end_loads()
    assert request.computed_tokens % 4 == 0
    assert world.proceed(request)
    world.check_content()
    world.drain()


def test_a_load_that_is_late_is_cut():
    """A slow disk holds a request up for ever."""
    world, request = loading(on_disk=True)
    world.below.plan()
    assert world.below.held
    world.below.now_s = 1.0
    world.below.plan()  # nothing that is under way ends
    assert world.step() == []
    world.pages.end()
    assert world.step() == [request]
    world.below.run()
    finish(world, request, 0)


def test_a_load_without_room_below_is_computed():
    """A host tier full of others' blocks stops requests."""
    world = world_with_prompt_below(blocks=30)
    world.below.forget_host()
    others = world.below.occupy(world.below.host.traits.slots)
    request = world.request(PROMPT)
    assert world.admit(request)
    assert world.step() == [request]
    world.below.give_up(others)
    finish(world, request, 0)


def test_a_load_without_room_leaves_nothing_pinned():
    """Each refused load pins its blocks below for half a minute, so that there is less and less room."""
    world = world_with_prompt_below(blocks=30)
    world.below.forget_host()
    world.below.occupy(world.below.host.traits.slots)
    world.admit(world.request(PROMPT))
    world.step()
    assert world.below.core.stats()["matches"] == 0


def test_a_load_that_ends_with_nothing_can_be_tried_again():
    """A request that was refused once is never loaded."""
    world, request = moving()
    world.pages.end(fails="all")
    world.step()
    world.preempt(request)
    assert world.serve(PROMPT) == 24
    world.drain()


# ---------------------------------------------------------------- requests that go while they load

STAGES = {"asked": loading, "moving": moving}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("verb", ["free", "preempt"])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, ("full", 8))])
def test_blocks_of_a_load_are_not_reused_before_it_ended(stage, verb, groups):
    """Late bytes overwrite the blocks of somebody else."""
    world, request = STAGES[stage](groups, blocks=20)
    blocks = {block for row in world.manager.block_ids(request) for block in row}
    getattr(world, verb)(request)
    assert not world.manager.holds(request)
    assert not world.top.is_loading(request)
    assert not blocks & set(world.pool.free_blocks())
    other = world.request([5] * 4 * (world.pool.blocks_free // len(groups)))
    assert world.admit(other)
    assert not blocks & {block for row in world.manager.block_ids(other) for block in row}
    world.below.run()
    world.step()
    while world.pages.moves:
        world.pages.end()
    assert world.step() == []
    world.check_content()
    assert blocks <= {*world.pool.free_blocks(), *(b for move in world.pages.moves for b in move.blocks)}
    world.drain()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fails", [[], [0], "all"])
def test_a_request_may_begin_again_while_its_old_load_is_under_way(stage, fails):
    """The old load's end counts for the new one, whose bytes are not there yet."""
    world, request = STAGES[stage]()
    world.preempt(request)
    assert world.admit(request)
    assert world.top.is_loading(request)
    world.below.run()
    world.step()
    old, new = sorted(world.pages.moves, key=lambda move: move.move_id)
    assert not set(old.blocks) & set(new.blocks)
    world.pages.end(world.pages.moves.index(old), fails)
    assert world.step() == []
    assert world.top.is_loading(request)
    world.pages.end()
    assert world.step() == [request]
    finish(world, request, 24)


def test_the_new_load_may_end_before_the_old_one():
    """The blocks of the old load are given back twice."""
    world, request = moving()
    world.preempt(request)
    assert world.admit(request)
    world.below.run()
    world.step()
    world.pages.end(1)
    assert world.step() == [request]
    assert world.proceed(request)
    world.pages.end()
    assert world.step() == []
    world.check_content()
    finish_again = world.request(PROMPT)
    assert world.top.get_computed_blocks(finish_again).hit.tokens == 24
    world.drain()


def test_another_request_may_take_the_name_of_one_that_loads_no_more():
    """A request gets what another one was loading."""
    world, request = moving()
    world.free(request)
    namesake = world.request([7] * 9, name=request.request_id)
    assert world.admit(namesake)
    world.pages.end()
    assert world.step() == []
    assert namesake.computed_tokens == 9
    world.check_content()
    world.drain()


def test_a_request_that_loads_is_freed_once():
    """A second free takes the references of the load."""
    world, request = moving()
    world.free(request)
    before = remembered(world.manager)
    with pytest.raises(KvtierError, match="holds no blocks"):
        world.top.free(request)
    assert remembered(world.manager) == before
    world.drain()


# ---------------------------------------------------------------- stores that are refused or fail


def full_host(**more):
    """A world whose host tier is full of others' blocks; the ticket that holds them."""
    world = World(**more)
    return world, world.below.occupy(world.below.host.traits.slots)


def test_without_room_below_dirty_blocks_are_dropped_and_counted():
    """An engine stops because its tiers are full, or loses prefixes without saying so."""
    world, _ = full_host(blocks=12)
    for number in range(8):
        assert world.serve([number] * 20) == 0
        world.settle()
    assert world.top.counters.refused > 0
    assert world.top.counters.stored == 0
    assert world.pool.dropped_dirty == 8 * 5 - sum(name is not None for name in world.pool.names.first)
    world.drain()


def test_a_refused_store_is_tried_again_later():
    """One refusal ends all storing, or it is tried in every step."""
    world, others = full_host(blocks=12)
    world.serve(PROMPT)
    world.step()
    world.step()
    assert (refused := world.top.counters.refused) > 0
    assert world.top.is_idle
    world.below.give_up(others)
    for _ in range(PAUSE_STEPS - 1):
        world.turn()
    assert world.top.counters.stored == 0
    world.settle_stores()
    assert world.top.counters.stored == 6
    assert world.top.counters.refused == refused
    assert world.pool.dirty(12) == []
    world.drain()


def test_a_refused_store_leaves_everything_as_it_was():
    """Each refusal changes which blocks are reused next."""
    world, _ = full_host(blocks=12)
    world.serve(PROMPT)
    before = world.pool.free_blocks()
    world.step()
    world.step()
    assert world.top.counters.refused > 0
    assert world.pool.free_blocks() == before


def test_flush_tries_at_once_what_was_refused_before():
    """A shutdown right after a refusal keeps nothing."""
    world, others = full_host(blocks=12)
    world.serve(PROMPT)
    world.step()
    world.step()
    world.below.give_up(others)
    world.flush()
    assert world.pool.dirty(12) == []
    world.drain()


@pytest.mark.parametrize("fails", [[0], [1], "all"])
def test_a_block_whose_copy_failed_stays_dirty_and_is_tried_again(fails):
    """A block that lies nowhere below counts as copied, and is lost."""
    world = World(blocks=12)
    world.serve(PROMPT)
    world.step()
    world.below.plan()
    world.step()
    (move,) = world.pages.moves
    world.pages.end(fails=fails)
    world.step()
    failed = [block for i, block in enumerate(move.blocks) if fails == "all" or i in fails]
    assert [block for block in move.blocks if not world.pool.is_clean(block)] == failed
    assert world.top.counters.failed == len(failed)
    for _ in range(2 * PAUSE_STEPS):
        world.turn()
    world.settle()
    assert world.pool.dirty(12) == []
    world.manager.reset()
    assert world.serve(PROMPT) == 24
    world.drain()


def test_a_hit_on_a_block_whose_copy_is_refused_keeps_it():
    """A refusal frees a block that a request has found meanwhile."""
    world, _ = full_host(blocks=12)
    world.serve(PROMPT)
    world.step()
    request = world.request(PROMPT)
    assert world.admit(request)
    world.step()
    assert world.top.counters.refused > 0
    world.check_content()
    world.check()
    world.drain()


def test_a_broken_disk_stops_nobody():
    """An engine stops with its disk."""
    world = World(blocks=12, host_slots=8)
    world.below.disk.fail_write = Status.FAILED
    for number in range(10):
        world.serve([number] * 20)
        world.turn()
        world.below.now_s += 1.0
    assert world.below.disk.rows == {}
    world.drain()


# ---------------------------------------------------------------- movers that answer wrongly


@pytest.mark.parametrize("outcomes", [(), (DONE,) * 5, (DONE,) * 7])
def test_a_mover_that_answers_for_other_blocks_is_told_so(outcomes):
    """A count of outcomes stands for success, or the blocks of the move are lost."""
    world, request = moving()
    move = world.pages.moves[0]
    world.pages.answer(BatchDone(move.move_id, outcomes))
    with pytest.raises(KvtierError, match="outcomes"):
        world.top.step()
    world.pages.end()
    assert world.step() == [request]
    finish(world, request, 24)


def test_a_second_answer_for_a_move_changes_nothing():
    """An answer that is given twice stops the engine, or gives its blocks back twice."""
    world, request = moving()
    move = world.pages.moves[0]
    world.pages.end()
    assert world.step() == [request]
    world.pages.answer(BatchDone(move.move_id, (Outcome(Status.FAILED),) * 6))
    assert world.step() == []
    finish(world, request, 24)
