"""Blocks that a tier does not want, event by event: clean, counted, and asked about again only for a reason."""

import random

import cbor2
import pytest

from kvtier.engine.answers import Flushed, Resized
from kvtier.engine.sidecar import WEAR_KEY
from kvtier.engine.wear import read_row
from kvtier.events import Reason
from kvtier.policies.admission import ADMISSIONS
from kvtier.policies.gate import Gate
from kvtier.policies.wear import DAY_S, WearBudget
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, Status
from tests.engine_bench import BLOCK_BYTES, make_engine, prompt, serve, tiers_of

BURST = 40 * PAGE_BYTES
PER_DAY = 400 * PAGE_BYTES


def ruled(name="second_access", blocks=100):
    return Gate(ADMISSIONS.get(name)(blocks), blocks)


def budgeted(per_day=PER_DAY, burst=BURST, rule="always", blocks=100):
    return Gate(ADMISSIONS.get(rule)(blocks), blocks, WearBudget(per_day, burst))


def emptied(**kw):
    gate = budgeted(**kw)
    gate.budget.spend(gate.budget.burst_bytes, 0.0)
    return gate


def disk_stats(engine, tier="lmdb"):
    return engine.core.stats()["tiers"][tier]


def written(disk):
    """Blocks that ever came to the disk."""
    return disk.generation


@pytest.mark.parametrize("host", [None, 16])
def test_what_is_refused_leaves_without_io_and_is_not_asked_about_again(host):
    """Refused blocks are offered for ever, or stay dirty: nobody gets a slot without a `dropped_dirty`."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=host, disk=disk, gate=ruled())
    for number in range(12):
        serve(engine, prompt(number, 4))
        engine.run()
        engine.check()
    above = "gpu" if host is None else "host"
    told = disk_stats(engine)["not_admitted"]
    assert written(disk) == 0 < told
    assert disk_stats(engine, above)["not_kept"] > 0
    assert [disk_stats(engine, tier)["dropped_dirty"] for tier in ("gpu", above)] == [0, 0]
    assert {entry.reason for entry in engine.core.residency.journal.entries()} == {Reason.NOT_KEPT}
    for _ in range(50):
        assert engine.plan() == []
        engine.clock.advance(0.01)
    assert disk_stats(engine)["not_admitted"] == told


def test_no_more_is_refused_than_has_to_leave():
    """What could stay is judged before it has had a second use."""
    engine = make_engine(gpu=8, host=None, disk=DictTier(), gate=ruled())
    serve(engine, prompt(1, 7))
    engine.run()
    # One of 8 is free, under the 2 of the low watermark; 4 can be had once three are refused.
    assert disk_stats(engine)["not_admitted"] == 3
    assert disk_stats(engine, "gpu")["blocks_idle_clean"] == 3


def test_one_turn_refuses_until_enough_can_be_had():
    """The next request finds no slot, for the blocks of one batch only were asked about."""
    engine = make_engine(gpu=32, host=None, disk=DictTier(), gate=ruled())
    serve(engine, prompt(1, 31))
    assert engine.plan() == []
    assert disk_stats(engine)["not_admitted"] == 15  # batches have 4 blocks; one slot is free, 16 are to be had


def test_a_use_is_a_reason_to_ask_again():
    """A block that becomes hot after it was refused is never written."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=ruled())
    keys = prompt(1, 7)
    serve(engine, keys)
    engine.run()
    assert written(disk) == 0
    serve(engine, keys)
    assert disk_stats(engine, "gpu")["blocks_idle_clean"] == 0, "it counts as clean although it was used"
    engine.run()
    assert written(disk) == 3
    engine.check()


def test_what_comes_back_after_it_left_is_a_second_use():
    """Who was refused once is a stranger each time, and is never let in."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=ruled())
    for number in (1, 2, 3, 1):
        serve(engine, prompt(number, 7))
        engine.run()
        engine.check()
    assert {row[0][4:] for row in disk.rows.values()} <= {*prompt(1, 7).groups[0]}
    assert written(disk) == 3


def test_with_nothing_left_only_a_flush_writes_and_says_so():
    """A flush loses blocks for the sake of wear, or exceeds the budget in silence."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=8, disk=disk, gate=emptied())
    for number in range(4):
        serve(engine, prompt(number, 6))
        engine.run()
    assert written(disk) == 0
    assert disk_stats(engine)["wear_left_bytes"] <= 0
    owed = engine.core.unsaved()
    ticket = engine.core.submit_flush()
    engine.run()
    assert engine.answers[ticket] == Flushed(owed, 0, owed * PAGE_BYTES)
    assert disk_stats(engine)["over_budget_bytes"] == owed * PAGE_BYTES
    assert written(disk) == owed
    engine.clock.advance(DAY_S * owed * BLOCK_BYTES / PER_DAY * 0.99)
    serve(engine, prompt(9, 6))
    engine.run()
    assert written(disk) == owed, "the debt is not paid back yet"
    engine.check()


def test_a_flush_within_the_budget_exceeds_nothing():
    """A flush is said to wear the disk too much although it does not."""
    engine = make_engine(gpu=8, host=8, disk=DictTier(), gate=budgeted())
    serve(engine, prompt(1, 6))
    ticket = engine.core.submit_flush()
    engine.run()
    assert engine.answers[ticket] == Flushed(6, 0, 0)
    assert disk_stats(engine)["over_budget_bytes"] == 0


def test_a_recovered_budget_asks_again_about_what_is_still_there():
    """What was refused in a busy hour is lost in the quiet one after it, though there is budget to keep it."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=emptied())
    serve(engine, prompt(1, 7))
    engine.run()
    assert (written(disk), disk_stats(engine, "gpu")["blocks_idle_clean"]) == (0, 3)
    engine.clock.advance(DAY_S * 0.8 * BURST / PER_DAY)
    engine.run()
    assert written(disk) == 3
    engine.check()


def test_a_budget_that_was_short_for_one_batch_only_asks_again():
    """Whoever was refused behind others of his batch is refused for good: when they are written enough is left."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=budgeted(burst=4 * PAGE_BYTES))
    serve(engine, prompt(1, 8))
    engine.run()
    assert written(disk) > 0
    assert disk_stats(engine)["not_admitted"] > 0
    engine.clock.advance(DAY_S)
    engine.run()
    assert engine.core.residency.directory.refused_by(1) == []


def test_names_are_given_up_though_nothing_is_refused():
    """Memory grows with every block that was ever seen, as long as there is budget."""
    engine = make_engine(
        gpu=8, host=None, disk=DictTier(blocks_max=10), gate=budgeted(PER_DAY * 1000, BURST * 1000, blocks=10)
    )
    for number in range(20):
        serve(engine, prompt(number, 7))
        engine.run()
    assert disk_stats(engine)["not_admitted"] == 0
    assert engine.core.stats()["ghosts"] <= 40


def test_what_moves_above_a_disk_is_none_of_its_wear():
    """A budget is held back by blocks on their way into memory."""
    engine = make_engine(gpu=8, host=16, disk=DictTier(), gate=budgeted())
    serve(engine, prompt(1, 7))
    assert engine.plan()
    assert (disk_stats(engine)["writing_bytes"], disk_stats(engine)["wear_left_bytes"]) == (0, BURST)
    assert disk_stats(engine, "host")["writing_bytes"] > 0


def test_a_batch_takes_no_more_than_is_left():
    """All blocks of a batch are let in because there was room for one."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=None, disk=disk, gate=budgeted(1.0, PAGE_BYTES))
    serve(engine, prompt(1, 15))
    engine.run()
    assert written(disk) == 1
    assert disk_stats(engine)["not_admitted"] == 6


def test_the_account_of_a_long_life_stays_short():
    """A row that goes out with each batch grows with the age of the store."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=budgeted(PER_DAY * 1000, BURST * 1000))
    for number in range(12):
        serve(engine, prompt(number, 7))
        engine.run()
        engine.clock.advance(DAY_S)
    days = cbor2.loads(disk.notes[WEAR_KEY])["days"]
    assert [day for day, _ in days] == [*range(3, 11)]  # what the last batch takes goes out with the next


def test_what_the_disk_refuses_does_not_go_round_in_memory():
    """A host tier full of refused blocks takes one from above in the place of another, which comes again, for ever."""
    engine = make_engine(gpu=12, host=3, disk=DictTier(), gate=ruled())
    for number in range(4):
        serve(engine, prompt(number, 6))
        engine.run()
        engine.check()
    assert disk_stats(engine, "host")["written_blocks"] < 40


@pytest.mark.parametrize("host", [None, 24])
def test_days_of_traffic_stay_within_the_budget(host):
    """A disk is worn out faster than was allowed, or the budget is not used."""
    disk, chance = DictTier(blocks_max=200), random.Random(host or 0)
    per_day, days = 150 * PAGE_BYTES, 2
    engine = make_engine(gpu=16, host=host, disk=disk, gate=budgeted(per_day, blocks=200))
    while engine.clock.now() < days * DAY_S:
        serve(engine, prompt(int(60 * chance.random() ** 2), 5))
        engine.run()
        engine.clock.advance(chance.expovariate(1 / 300))
        allowed = BURST + engine.clock.now() / DAY_S * per_day
        assert written(disk) * BLOCK_BYTES <= allowed + PAGE_BYTES
    assert disk_stats(engine)["not_admitted"] > 0
    assert written(disk) * BLOCK_BYTES >= 0.8 * (BURST + days * per_day)
    assert disk_stats(engine)["hit_tokens"] > 0
    engine.check()


def test_a_restart_goes_on_with_what_was_left():
    """Restarting gives back the budget: who restarts often wears out the disk."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=budgeted())
    for number in range(5):
        serve(engine, prompt(number, 7))
        engine.run()
    left = disk_stats(engine)["wear_left_bytes"]
    assert left < BURST
    engine.core.submit_flush()  # so that the last row is as new as the last write
    engine.run()
    left = disk_stats(engine)["wear_left_bytes"]
    again = make_engine(gpu=8, host=None, disk=disk, gate=budgeted())
    assert disk_stats(again)["wear_left_bytes"] == pytest.approx(left, abs=2)
    assert read_row(disk.notes[WEAR_KEY])["payload"] <= written(disk) * BLOCK_BYTES


def test_a_crash_gives_nothing_back_of_what_was_under_way():
    """A process that dies with each batch writes for ever."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=budgeted())
    serve(engine, prompt(1, 7))
    first, second = engine.plan()
    engine.finish(second)
    row = read_row(disk.notes[WEAR_KEY])
    assert row["saved"] == BURST - BLOCK_BYTES * len(first.transfers + second.transfers)
    assert (row["per_day"], row["burst"]) == (PER_DAY, BURST)


@pytest.mark.parametrize("row", [b"", b"\xff", b"\xa0", b"\x01", b"\xa1\x64days\x01"])
def test_an_account_that_cannot_be_read_is_as_good_as_none(row):
    """A damaged row keeps a cache from opening."""
    disk = DictTier()
    disk.notes[WEAR_KEY] = row
    engine = make_engine(gpu=8, host=None, disk=disk, gate=budgeted())
    assert disk_stats(engine)["wear_left_bytes"] == BURST


def test_a_resize_writes_nothing_that_the_budget_forbids():
    """Giving memory back wears a disk that has no budget left, or the blocks in the way keep the memory."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=None, disk=disk, gate=emptied(), gpu_max=16)
    serve(engine, prompt(1, 12))
    ticket = engine.core.submit_resize("gpu", 6 * PAGE_BYTES)
    engine.run()
    assert engine.answers[ticket] == Resized(6 * PAGE_BYTES)
    assert written(disk) == 0
    engine.check()


def test_what_is_in_the_way_of_a_resize_is_asked_as_well():
    """Blocks in the way are written whatever the budget says."""
    disk = DictTier()
    engine = make_engine(gpu=16, host=None, disk=disk, gate=emptied())
    serve(engine, prompt(1, 4))
    engine.core.planner.demotions.evacuate(0, engine.core.residency.directory.ready_in(0))
    assert engine.plan() == []
    assert disk_stats(engine)["not_admitted"] == 4


def test_memory_can_refuse_as_well():
    """`admission` of a host tier is accepted and does nothing."""
    engine = make_engine(gpu=8, host=16, gate=ruled())
    keys = prompt(1, 7)
    serve(engine, keys)
    engine.run()
    assert (disk_stats(engine, "host")["not_admitted"], disk_stats(engine, "host")["blocks"]) == (3, 0)
    serve(engine, keys)
    engine.run()
    assert disk_stats(engine, "host")["blocks"] == 3
    engine.check()


def test_tinylfu_compares_with_who_would_leave():
    """A full disk takes blocks that are worth less than those that leave for them."""
    disk = DictTier(blocks_max=6)
    engine = make_engine(gpu=8, host=None, disk=disk, gate=ruled("tinylfu", 6))
    hot = prompt(1, 6)
    for _ in range(3):
        serve(engine, hot)
    engine.core.submit_flush()
    engine.run()
    full = written(disk)
    assert full == 6
    for number in range(2, 5):  # more would be more than it remembers
        serve(engine, prompt(number, 6))
        engine.run()
    assert written(disk) == full
    assert tiers_of(make_engine(disk=disk), hot)["lmdb"] == 24
    engine.check()


def test_a_dropped_block_leaves_no_history():
    """Its handle, given to another block, would be let in at its first use; or never be given again."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=None, disk=disk, gate=ruled())
    serve(engine, prompt(1, 7))
    engine.run()
    engine.core.submit_drop()
    engine.run()
    serve(engine, prompt(2, 7))
    engine.run()
    engine.check()
    assert written(disk) == 0
    assert engine.core.stats()["ghosts"] == 0


def test_names_of_the_refused_are_kept_as_long_as_they_count():
    """Memory grows with every block that was ever seen."""
    engine = make_engine(gpu=8, host=None, disk=DictTier(), gate=ruled(blocks=2))
    for number in range(20):
        serve(engine, prompt(number, 7))
        engine.run()
        engine.check()
    assert engine.core.stats()["ghosts"] == 1  # eight are remembered, seven of them are here


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_books_agree(seed):
    """Clean copies are miscounted: slots are promised that do not exist, or a dirty block is dropped as clean."""
    chance = random.Random(seed)
    disk = DictTier(blocks_max=40)
    host = chance.choice([None, 12])
    gate = budgeted(per_day=PER_DAY, burst=6 * PAGE_BYTES, rule=chance.choice([*ADMISSIONS]), blocks=20)
    engine = make_engine(gpu=20, host=host, disk=disk, gate=gate)
    held = []
    for _ in range(150):
        move = chance.random()
        if move < 0.5 and len(held) < 2:
            held.append(serve(engine, prompt(chance.randrange(9), chance.randint(1, 6)), keep=True))
        elif held and move < 0.7:
            engine.release(held.pop(chance.randrange(len(held))))
        elif move < 0.75:
            engine.core.submit_flush()
        elif move < 0.77:
            engine.core.submit_drop()
        elif move < 0.80:
            disk.fail_write = chance.choice([None, Status.FAILED, Status.NO_ROOM])
        elif move < 0.9:
            engine.clock.advance(chance.choice([0.5, 100.0, DAY_S / 40]))
        if engine.held and chance.random() < 0.6:
            engine.finish(chance.choice(engine.held))
        engine.plan()
        engine.check()
    disk.fail_write = None
    engine.clock.advance(60.0)
    engine.run()
    engine.check()
