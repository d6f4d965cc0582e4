"""How fast a lane and the engine are, as learned from what happened."""

import pytest

from kvtier.engine.prefill import PrefillSpeed
from kvtier.engine.rates import Rates

LANE = (2, 1)


def test_nothing_is_known_at_first():
    """The governor takes a guess for a measurement."""
    rates = Rates()
    assert rates.seconds_per_byte(LANE, 0.0) is None
    rates.departed(LANE, 100, 0.0)
    assert rates.seconds_per_byte(LANE, 50.0) is None
    assert rates.measured_at_s(LANE) is None
    assert rates.underway_bytes(LANE) == 100


def test_batches_side_by_side_count_with_what_they_achieve_together():
    """A disk with four readers looks four times as slow, or the last of them infinitely fast."""
    rates = Rates()
    for _ in range(4):
        rates.departed(LANE, 100, 10.0)
    for end_s in (11.0, 11.0, 11.0, 11.0):
        rates.arrived(LANE, 100, end_s, done=True)
    assert rates.seconds_per_byte(LANE, 11.0) == pytest.approx(1 / 400)
    assert rates.underway_bytes(LANE) == 0


def test_idle_time_is_not_slowness():
    """A tier that is seldom asked looks slow."""
    rates = Rates()
    for start_s in (0.0, 7.0):
        rates.departed(LANE, 100, start_s)
        rates.arrived(LANE, 100, start_s + 1.0, done=True)
    assert rates.seconds_per_byte(LANE, 9.0) == pytest.approx(1 / 100)


def test_a_lane_that_hangs_gets_slower_by_the_second():
    """Requests queue behind a disk that has just stopped answering, for it was fast before."""
    rates = Rates()
    rates.departed(LANE, 100, 0.0)
    rates.arrived(LANE, 100, 1.0, done=True)
    rates.departed(LANE, 100, 1.0)
    assert rates.seconds_per_byte(LANE, 1.5) == pytest.approx(1 / 100)
    assert rates.seconds_per_byte(LANE, 11.0) == pytest.approx(10 / 100)


def test_failures_say_nothing_about_speed():
    """A device that refuses at once looks like a fast one."""
    rates = Rates()
    rates.departed(LANE, 100, 0.0)
    rates.arrived(LANE, 100, 0.001, done=False)
    assert rates.seconds_per_byte(LANE, 1.0) is None


def test_old_samples_do_not_outvote_new_ones():
    """A tier that was slow an hour ago stays slow in our eyes."""
    rates = Rates()
    for start_s in range(0, 80, 10):
        rates.departed(LANE, 100, start_s)
        rates.arrived(LANE, 100, start_s + 10, done=True)
    rates.departed(LANE, 100, 3600.0)
    rates.arrived(LANE, 100, 3600.1, done=True)
    assert rates.seconds_per_byte(LANE, 3600.1) == pytest.approx(0.001)


# ---------------------------------------------------------------- prefill


def test_the_configured_speed_counts_until_the_first_report():
    """A configuration is ignored, or a wrong one never corrected."""
    assert not PrefillSpeed().known
    speed = PrefillSpeed(100.0)
    assert speed.known
    assert speed.seconds(50) == pytest.approx(0.5)
    speed.observe(0, 50, 5.0)
    assert speed.seconds(50) == pytest.approx(5.0)


def test_long_prompts_cost_more_per_token():
    """Attention's share is missed: a long prefix is recomputed although it loads faster."""
    speed = PrefillSpeed()
    for tokens in (256, 1024, 2048):
        speed.observe(0, tokens, 0.004 * tokens + 1e-6 * tokens * tokens / 2)
    assert speed.seconds(4096) == pytest.approx(0.004 * 4096 + 1e-6 * 4096 * 4096 / 2)
    later = PrefillSpeed()
    later.observe(0, 512, 0.004 * 512 + 1e-6 * 512 * 256)
    later.observe(3584, 512, 0.004 * 512 + 1e-6 * 512 * (3584 + 256))
    assert later.seconds(4096) == pytest.approx(speed.seconds(4096))


@pytest.mark.parametrize("reports", [[(0, 64, 1.0)] * 5, [(0, 16, 1.0), (0, 64, 1.1)], [(0, 16, 0.1), (0, 64, 30.0)]])
def test_no_report_makes_time_run_backwards(reports):
    """Noise makes one factor negative, and somewhere a longer prompt cheaper than a shorter one."""
    speed = PrefillSpeed()
    for report in reports:
        speed.observe(*report)
    times = [speed.seconds(tokens) for tokens in range(0, 100_000, 97)]
    assert times == sorted(times)
    assert times[1] > 0


def test_a_faster_machine_is_noticed():
    """The first reports, of a cold machine, count for ever."""
    speed = PrefillSpeed()
    for _ in range(3):
        speed.observe(0, 1000, 10.0)
    for _ in range(40):
        speed.observe(0, 1000, 1.0)
    assert speed.seconds(1000) == pytest.approx(1.0, rel=0.1)


def test_what_is_computed_behind_a_prefix_may_cost_more_each():
    """A short restored prefix makes the rest slower than all would have been, and is loaded all the same."""
    speed = PrefillSpeed()
    speed.observe(0, 1000, 1.0)
    assert speed.saved(1000, 1000) == pytest.approx(1.0)
    assert speed.saved(100, 1000) == pytest.approx(1.0 - 1.25 * 0.9)  # a careful guess
    speed.observe(100, 900, 0.9 * 1.5)
    assert speed.saved(100, 1000) < speed.saved(300, 1000) < speed.saved(1000, 1000)
    assert speed.saved(100, 1000) < 0


def test_an_engine_that_computes_in_pieces_learns_that_they_cost_no_more():
    """What only some kinds of attention do keeps kvtier from loading for all of them."""
    speed = PrefillSpeed()
    for _ in range(5):
        for start in range(0, 1024, 256):
            speed.observe(start, 256, 0.256)
    assert speed.saved(100, 1000) == pytest.approx(0.1, rel=0.02)


def test_one_wild_report_is_not_believed():
    """A single slow minute keeps kvtier from loading for long."""
    speed = PrefillSpeed()
    for seconds in (0.5, 50.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5):
        speed.observe(0, 500, 0.5)
        speed.observe(500, 500, seconds)
    assert speed.saved(500, 1000) > 0
