"""Every counter after a short trace, worked out by hand: numerators and denominators, per tier."""

from kvtier.cache.leases import Lease
from kvtier.metrics import ENGINE_COUNTERS, TIER_COUNTERS
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Outcome, Status
from tests.engine_bench import BLOCK_BYTES, fill, make_engine, prompt, serve

A, B, C, D = (prompt(number, 4) for number in range(4))


def counters(engine):
    """What is not 0, over all and by tier."""
    stats = engine.core.stats()
    found = {name: stats[name] for name in ENGINE_COUNTERS}
    for tier, values in stats["tiers"].items():
        found |= {f"{tier}.{name}": values[name] for name in TIER_COUNTERS}
    return {name: count for name, count in found.items() if count}


def added(engine, before):
    """What has changed since; a counter never falls."""
    now = counters(engine)
    assert all(now[name] >= count for name, count in before.items())
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}


def moved(tier, verb, blocks):
    return {f"{tier}.{verb}_blocks": blocks, f"{tier}.{verb}_bytes": blocks * BLOCK_BYTES}


def test_a_trace_by_hand():
    """A hit rate is always 1, a counter stays 0, or has no denominator (LMCache#1260, #2574, dynamo#4549, #4840)."""
    engine = make_engine(gpu=4, host=8, disk=DictTier(), watermarks=(0.01, 0.02))
    engine.core.prefilled(0, 1000, 1.0)

    before = counters(engine)
    assert before == {}
    serve(engine, A)  # a miss in every tier
    asked = {"lookups": 1, "lookup_tokens": 16, "reserves": 1, "gpu.query_tokens": 16}
    deeper = {"host.query_tokens": 16, "lmdb.query_tokens": 16}
    assert added(engine, before) == asked | deeper | {"committed_blocks": 4}

    before = counters(engine)
    engine.core.submit_flush()
    engine.run()
    down = (
        moved("gpu", "read", 4) | moved("host", "written", 4) | moved("host", "read", 4) | moved("lmdb", "written", 4)
    )
    assert added(engine, before) == down | {"host.demoted_blocks": 4, "lmdb.demoted_blocks": 4}

    before = counters(engine)
    serve(engine, B)  # takes the slots of A, which is clean, and stays dirty itself
    assert added(engine, before) == asked | deeper | {"committed_blocks": 4, "gpu.reclaimed": 4}

    before = counters(engine)
    lease = serve(engine, A)  # from host memory; B had not been copied down in time
    assert lease.tokens_ready == 16
    up = moved("host", "read", 4) | moved("gpu", "written", 4) | {"gpu.promoted_blocks": 4, "gpu.dropped_dirty": 4}
    found = {"hit_tokens": 16, "restored_tokens": 16, "prefill_saved_ms": 16}
    in_host = {f"host.{name}": count for name, count in found.items()}
    assert added(engine, before) == asked | {"host.query_tokens": 16} | up | found | in_host

    before = counters(engine)
    lease = serve(engine, A, keep=True)  # where it is
    in_gpu = {f"gpu.{name}": count for name, count in found.items()}
    assert added(engine, before) == asked | found | in_gpu

    before = counters(engine)
    refused = engine.reserve(engine.match(C), 4)
    assert not isinstance(refused, Lease)
    assert added(engine, before) == asked | deeper | {"no_room": 1}
    engine.release(lease)


def test_a_trace_of_failures_by_hand():
    """What failed, came late or was cut is counted twice, at the wrong tier, or not at all."""
    engine = make_engine(gpu=4, host=8, disk=DictTier(), watermarks=(0.01, 0.02))
    for keys in (A, B, C):
        serve(engine, keys)
        engine.core.submit_flush()
        engine.run()
    engine = make_engine(gpu=4, host=8, disk=engine.tiers[2], watermarks=(0.01, 0.02))

    before = counters(engine)
    ticket = engine.submit_reserve(engine.match(A), 4)
    [load] = engine.plan()
    statuses = [Status.DONE, Status.CORRUPT, Status.MISSING, Status.FAILED]
    engine.tiers[1].slot(load.transfers[0].target_place)[:BLOCK_BYTES] = engine.tiers[2].rows[
        load.transfers[0].source_place
    ][2]
    engine.finish(load, [Outcome(status) for status in statuses])
    engine.run()
    engine.release(engine.answers.pop(ticket))
    expected = {"lookups": 1, "lookup_tokens": 16, "reserves": 1, "hit_tokens": 16, "restored_tokens": 4}
    expected |= {f"{tier}.query_tokens": 16 for tier in ("gpu", "host", "lmdb")}
    expected |= {"lmdb.hit_tokens": 16, "lmdb.restored_tokens": 4, "failed_cuts": 1}
    expected |= {"lmdb.corrupt": 1, "lmdb.missing": 1, "lmdb.read_failed": 1}
    expected |= moved("lmdb", "read", 1) | moved("host", "written", 1) | moved("host", "read", 1)
    expected |= moved("gpu", "written", 1) | {"host.promoted_blocks": 1, "gpu.promoted_blocks": 1}
    assert added(engine, before) == expected

    before = counters(engine)
    ticket = engine.submit_reserve(engine.match(B), 4, deadline_s=0.5)
    engine.plan()
    engine.clock.advance(0.5)
    engine.plan()
    lease = engine.answers.pop(ticket)
    fill(engine, lease, B)
    engine.core.submit_drop()
    engine.run()
    engine.release(lease)
    changed = added(engine, before)
    assert changed["deadline_cuts"] == 1
    assert changed["committed_blocks"] == 4
    assert "host.quarantined" in changed
    assert changed["late_results"] == changed["host.late"] == 4, "the four loads, overtaken by the drop"
    assert "restored_tokens" not in changed
    engine.check()


def test_what_is_declined_or_duplicate_or_stale_is_counted_as_such():
    """A decision of the governor, or work done twice, is not to be seen (sglang#26608)."""
    engine = make_engine(gpu=8, host=None, disk=DictTier())
    leases = [engine.reserve(engine.match(D), 4) for _ in range(2)]
    before = counters(engine)
    for lease in leases:
        fill(engine, lease, D)
    assert added(engine, before) == {"committed_blocks": 8, "duplicate_blocks": 4}
    for lease in leases:
        engine.release(lease)
    before = counters(engine)
    lease = engine.reserve(engine.match(C), 4)
    engine.core.set_weights_epoch("v2")
    fill(engine, lease, C)
    assert added(engine, before)["stale_commits"] == 4
    engine.release(lease)
    engine.check()
