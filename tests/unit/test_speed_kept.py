"""The speed of a disk outlives the process that measured it: the first request of the next one is decided, too."""

import cbor2
import pytest

from kvtier.engine.sidecar import SPEED_KEY
from kvtier.testing.dict_tier import DictTier
from tests.engine_bench import BLOCK_BYTES, fill_and_push_down, make_engine, prompt, serve

BLOCKS = 8


def read_at(engine, bytes_per_s):
    """Let the disk bring one block of something else at this speed."""
    rates = engine.core.planner.flight.rates
    rates.departed((2, 1), BLOCK_BYTES, engine.clock.now())
    engine.clock.advance(BLOCK_BYTES / bytes_per_s)
    rates.arrived((2, 1), BLOCK_BYTES, engine.clock.now(), done=True)


def note(engine):
    """Have something written."""
    serve(engine, prompt(9, 2))
    engine.core.submit_flush()
    engine.run()


def restarted(disk):
    engine = make_engine(disk=disk)
    engine.core.prefilled(0, 1000, 1.0)
    return engine


@pytest.mark.parametrize(("bytes_per_s", "why", "tokens"), [(64 << 10, "slower", 0), (1e9, "faster", 4 * BLOCKS)])
def test_the_first_request_after_a_restart_knows_how_slow_the_disk_is(bytes_per_s, why, tokens):
    """Every restart begins with a request that waits for a slow disk until its deadline."""
    engine, keys = fill_and_push_down(blocks=BLOCKS)
    read_at(engine, bytes_per_s)
    note(engine)
    row = cbor2.loads(dict(engine.tiers[2].sidecar())[SPEED_KEY])
    assert row == {"read_bytes_per_s": pytest.approx(bytes_per_s, rel=1e-6)}
    later = restarted(engine.tiers[2])
    ticket = later.submit_reserve(later.match(keys), BLOCKS, 1.0)
    later.run()
    decision = later.answers.pop(ticket).decision
    assert (decision.why, decision.tokens_chosen) == (why, tokens)


def test_what_is_measured_now_counts_more_than_what_was_kept():
    """A disk that was slow once, or a store that was moved to another one, is slow for ever."""
    engine, _ = fill_and_push_down(blocks=BLOCKS)
    read_at(engine, 1000)
    note(engine)
    later = restarted(engine.tiers[2])
    rates = later.core.planner.flight.rates
    assert rates.read_from(2) == pytest.approx(1 / 1000)
    read_at(later, 1e6)
    assert rates.read_from(2) == pytest.approx(1e-6)


def test_a_disk_declined_on_what_was_kept_is_measured_again():
    """A disk that was slow when the last process ended is never read again."""
    engine, keys = fill_and_push_down(blocks=BLOCKS)
    read_at(engine, 1000)
    note(engine)
    later = restarted(engine.tiers[2])
    later.submit_reserve(later.match(keys), BLOCKS, 1.0)
    loads = [batch for batch in later.plan() if (batch.source, batch.target) == (2, 1)]
    assert sum(len(batch.transfers) for batch in loads) == 1


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"\xff",
        cbor2.dumps(5),
        cbor2.dumps({}),
        *(cbor2.dumps({"read_bytes_per_s": speed}) for speed in (0, -1, 1.5, "fast", None, True, 1 << 70)),
    ],
)
def test_a_row_that_says_nothing_is_no_speed(row):
    """A damaged row keeps a store from opening, or divides by zero."""
    disk = DictTier()
    engine = make_engine(disk=disk)
    engine.core._sidecars.found(2, {SPEED_KEY: row})
    assert engine.core.planner.flight.rates.read_from(2) is None
