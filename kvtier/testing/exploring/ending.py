"""The end of a run: faults are mended, everything ends, everybody leaves; then nothing may be left over.

Owns nothing. Always: time moves only to the moment at which the core says that it has something to do, as the
engine's thread would sleep, so that a wake-up that is forgotten shows as a ticket without an answer.

Units: seconds of simulated time, rounds.
"""

from kvtier.allocator.slot_pool import NULL_SLOT
from kvtier.testing.exploring.places import WatchedFlushes
from kvtier.testing.exploring.sleep_ops import send_away
from kvtier.testing.exploring.store import GlassDisk
from kvtier.testing.exploring.world import World

ROUNDS_MAX = 400  # a disk is asked once a second, a reservation waits a minute at most, a failing tier ten seconds
LONG_S = 60.0  # longer than anything is kept for nobody, but for hints
LONG_ROUNDS = 7
DAY_S = 86_400.0


def wind_up(world: World) -> None:
    """Raises AssertionError for what is left."""
    world.mend()
    if isinstance(world.medium, GlassDisk):
        world.medium.squeeze(None)
    world.engine.underway.hurry()
    world.deaf = 0  # else answers wait, and what they tell has changed when they are heard
    world.listen()
    _answer_all(world)
    send_away(world)
    if world.setup.shape[0] == "gpu":
        world.questions.wake(restore=True)
        _answer_all(world)
    for match in world.requests.matches:
        world.engine.core.release_match(match)
    for _ in range(LONG_ROUNDS):
        world.clock.advance(LONG_S)
        world.run()
        world.check()
    if world.engine.disk is not None:
        _save_up(world)
        _flush(world)
    _expect_all_slots(world)
    _drop_all(world)
    if world.setup.shape[0] == "gpu":
        _resize(world)
    _expect_nothing_left(world)


def _answer_all(world: World) -> None:
    """Every ticket is answered, though nothing but time happens."""
    for _ in range(ROUNDS_MAX):
        world.run()
        world.listen()
        world.check()
        if not world.asked:
            return
        now_s = world.clock.now()
        wake_s = world.engine.core.wake_at_s(now_s)
        assert wake_s is not None, f"tickets {sorted(world.asked)} wait, and the core waits for nothing"
        world.clock.advance(max(0.0, wake_s - now_s))
    raise AssertionError(f"tickets {sorted(world.asked)} are never answered")


def _save_up(world: World) -> None:
    """Whatever was overdrawn is paid back, and the disk has been looked through."""
    world.clock.advance(DAY_S)
    world.plan()
    if world.setup.admissions[-1] == "always":
        world.requests.admitted.expect_asked_again()
    world.run()
    world.check()


def _flush(world: World) -> None:
    """A flush of a working disk gives up no block that it had a place for."""
    world.engine.core.planner.demotions.flushes = WatchedFlushes(world.engine)
    world.questions.flush()
    _answer_all(world)
    assert world.engine.core.stats()["batches_in_flight"] == 0


def _drop_all(world: World) -> None:
    """Of a namespace that is dropped nothing is left anywhere, ghosts included."""
    for number in range(len(world.engine.namespaces)):
        world.questions.drop(world.engine.namespaces.fingerprint_of(number))
    _answer_all(world)
    world.clock.advance(LONG_S)
    world.run()
    world.listen()
    assert world.checks.rows() == [], "what was dropped lies on the disk"
    assert len(world.engine.directory) == 0, "what was dropped has a name"


def _resize(world: World) -> None:
    """Nothing is in the way any more, so that every size can be had."""
    for slots in (2, world.setup.gpu_slots):
        world.questions.resize(slots)
        _answer_all(world)
        level = world.engine.core.residency.levels[0]
        assert level.slots_usable == slots, f"{level.slots_usable} slots instead of {slots}"


def _expect_all_slots(world: World) -> None:
    """Nobody holds a slot: each is free, or its block can go."""
    stats = world.engine.core.stats()
    for tier, level in enumerate(world.engine.core.residency.levels):
        if level.pool is None:
            continue
        sizes = stats["tiers"][level.name]
        usable = level.slots_usable if world.setup.shape[tier] == "gpu" else level.pool.slots_total
        there = sizes["slots_free"] + sizes["blocks_idle"]
        assert there == usable, f"{level.name}: {there} of {usable} slots can be had"
        assert sizes["slots_quarantined"] == 0


def _expect_nothing_left(world: World) -> None:
    stats = world.engine.core.stats()
    left = {name: stats[name] for name in ("leases", "matches", "batches_in_flight") if stats[name]}
    assert not left, f"left over: {left}"
    assert not world.engine.core.busy, "something still waits for its turn"
    _expect_all_slots(world)
    for tier, level in enumerate(world.engine.core.residency.levels):
        if level.pool is not None:
            everything = level.pool.slots_free
            taken = world.engine.core.residency.take(tier, everything, drop_dirty=True)
            assert taken is not None
            assert len({*taken}) == everything
            assert world.setup.shape[tier] != "gpu" or NULL_SLOT not in taken, "the null slot was given away"
    counters = world.engine.core.counters.engine()
    settled = sum(counters[f"prefetch_{how}"] for how in ("useful", "late", "wasted"))
    assert settled == counters["prefetched_blocks"], "a block that was brought up was never counted"
