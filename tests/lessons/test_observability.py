"""Numbers that look right and are not: rates without a denominator, counters that stay, gauges that are overwritten."""

import json
import random

import pytest
from typer.testing import CliRunner

import kvtier
from kvtier.cache.manager import KVCacheManager
from kvtier.cache.specs import FullAttention, Group
from kvtier.cli.main import app
from kvtier.testing.dict_tier import DictTier
from kvtier.types import Status
from tests.cache_bench import config_for
from tests.cache_bench import prompt as real_prompt
from tests.cache_bench import serve as real_serve
from tests.engine_bench import BLOCK_BYTES, make_engine, prompt, serve
from tests.lessons.places import TIERS, at_rest, empty_gpu, prefix_in, store_alone, unreadable


def moved(before, after):
    """What a step added to every counter, by `tier.name` or `name`; zeroes are left out."""
    flat = {}
    for stats, sign in ((before, -1), (after, 1)):
        for name, value in stats.items():
            if name != "tiers":
                flat[name] = flat.get(name, 0) + sign * value
        for tier, numbers in stats["tiers"].items():
            for name, value in numbers.items():
                if isinstance(value, str | None):  # a state, or not known yet
                    continue
                flat[f"{tier}.{name}"] = flat.get(f"{tier}.{name}", 0) + sign * value
    return {name: value for name, value in flat.items() if value}


STORY = ("lookups", "lookup_tokens", "hit_tokens", "restored_tokens", "committed_blocks", "reserves", "no_room")
STORY += ("failed_cuts", "deadline_cuts", "matches_expired", "stale_commits")
TIER_STORY = ("hit_tokens", "restored_tokens", "read_blocks", "read_bytes", "written_blocks", "written_bytes")
TIER_STORY += ("reclaimed", "dropped_dirty", "evicted", "corrupt", "missing", "read_failed", "write_failed", "no_room")


def told(before, after):
    """The same, of the counters that this script is about."""
    known = {*STORY, *(f"{tier}.{name}" for tier in TIERS for name in TIER_STORY)}
    return {name: value for name, value in moved(before, after).items() if name in known}


def test_a_script_moves_every_counter_by_what_it_did():
    """A hit rate is always 1 (LMCache#1260); a counter stays at 0 (LMCache#2574, dynamo#4549); hits have no number of
    questions beside them (dynamo#4840)."""
    disk = DictTier()
    engine = make_engine(gpu=8, host=16, disk=disk)
    core, keys = engine.core, prompt(1, 4)
    steps = []

    def step(action):
        before = core.stats()
        action()
        steps.append(told(before, core.stats()))
        return steps[-1]

    asked = {"lookups": 1, "lookup_tokens": 16}
    assert step(lambda: serve(engine, keys)) == asked | {"reserves": 1, "committed_blocks": 4}

    hit = {"hit_tokens": 16, "restored_tokens": 16, "gpu.hit_tokens": 16, "gpu.restored_tokens": 16}
    assert step(lambda: serve(engine, keys)) == asked | hit | {"reserves": 1}

    half = {"hit_tokens": 16, "restored_tokens": 16, "gpu.hit_tokens": 16, "gpu.restored_tokens": 16}
    longer = {"lookups": 1, "lookup_tokens": 32, "reserves": 1, "committed_blocks": 4}
    assert step(lambda: serve(engine, prompt(1, 8))) == longer | half  # 16 of 32 tokens: one half

    def flush():
        core.submit_flush()
        engine.run()

    def moves(source, target, blocks):
        return {
            f"{source}.read_blocks": blocks,
            f"{source}.read_bytes": blocks * BLOCK_BYTES,
            f"{target}.written_blocks": blocks,
            f"{target}.written_bytes": blocks * BLOCK_BYTES,
        }

    assert step(flush) == moves("gpu", "host", 8) | moves("host", "lmdb", 8)

    def push_out():
        core.release_match(engine.match(prompt(1, 8)))
        empty_gpu(engine, 8)

    out = {"lookups": 2, "lookup_tokens": 64, "hit_tokens": 32, "gpu.hit_tokens": 32, "reserves": 1}
    assert step(push_out) == out | {"gpu.reclaimed": 8}

    back = {"hit_tokens": 16, "restored_tokens": 16, "host.hit_tokens": 16, "host.restored_tokens": 16}
    assert step(lambda: serve(engine, keys)) == asked | back | {"reserves": 1} | moves("host", "gpu", 4)

    def refused():
        match = engine.match(prompt(7, 4))
        engine.reserve_now(match, 9)
        core.release_match(match)

    assert step(refused) == asked | {"reserves": 1, "no_room": 1}

    def expired():
        engine.match(keys, ttl_s=1.0)
        engine.clock.advance(2.0)
        engine.run()

    assert step(expired) == asked | {"hit_tokens": 16, "gpu.hit_tokens": 16, "matches_expired": 1}
    engine.check()


@pytest.mark.parametrize(
    ("status", "name"), [(Status.CORRUPT, "corrupt"), (Status.MISSING, "missing"), (Status.FAILED, "read_failed")]
)
def test_a_bad_load_moves_its_counter_and_no_other(status, name):
    """A failed onboarding counts as one, or is not counted at all (dynamo#4549)."""
    engine, keys = prefix_in("lmdb", host=None)
    unreadable(engine.tiers[-1], [keys.groups[0][1]], status)
    before = engine.core.stats()
    lease = engine.reserve(engine.match(keys), 4)
    found = told(before, engine.core.stats())
    engine.release(lease)
    assert found[f"lmdb.{name}"] == 1
    assert not {"lmdb.corrupt", "lmdb.missing", "lmdb.read_failed"} - {f"lmdb.{name}"} & set(found)
    assert (found["lmdb.read_blocks"], found["gpu.written_blocks"]) == (3, 3)
    assert (found["lmdb.hit_tokens"], found["lmdb.restored_tokens"], found["failed_cuts"]) == (16, 4, 1)


def test_counters_only_grow_and_every_hit_has_its_question():
    """A gauge is overwritten by each batch (sglang#26608), or a numerator passes its denominator (LMCache#1260)."""
    chance = random.Random(5)
    disk = DictTier(blocks_max=20)
    engine = make_engine(gpu=8, host=6, disk=disk, watermarks=(0.4, 0.8))
    sizes = {"blocks", "ghosts", "leases", "matches", "batches_in_flight"}
    before = engine.core.stats()
    for _ in range(150):
        serve(engine, prompt(chance.randrange(8), chance.randint(1, 4)))
        disk.fail_read = chance.choice([None, None, None, Status.FAILED])
        engine.clock.advance(0.3)
        engine.run()
        after = engine.core.stats()
        grown = moved({k: v for k, v in before.items() if k != "tiers"} | {"tiers": {}}, after | {"tiers": {}})
        assert all(change > 0 for name, change in grown.items() if name not in sizes)
        for tier, numbers in after["tiers"].items():
            fell = [name for name in TIER_STORY if numbers[name] < before["tiers"][tier][name]]
            assert not fell
        assert after["restored_tokens"] <= after["hit_tokens"] <= after["lookup_tokens"]
        assert sum(numbers["hit_tokens"] for numbers in after["tiers"].values()) == after["hit_tokens"]
        assert sum(numbers["restored_tokens"] for numbers in after["tiers"].values()) == after["restored_tokens"]
        before = after
    assert 0 < before["hit_tokens"] < before["lookup_tokens"]
    assert all(before["tiers"][tier]["hit_tokens"] for tier in TIERS)


def test_what_is_shown_outside_is_what_was_counted_inside(tmp_path):
    """The tool shows other numbers than the engine has, or those of its last batch (sglang#26608)."""
    config = config_for(tmp_path / "store")
    with kvtier.open_sync(config) as cache:
        for number in (1, 2, 1):
            real_serve(cache, real_prompt(config, number, 4))
        assert cache.flush().failed == 0
        stats = cache.stats()
    shown = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"]).stdout)["counters"]
    for name in ("lookups", "lookup_tokens", "hit_tokens", "committed_blocks"):
        assert shown[name] == stats[name] > 0, name
    for name in ("gpu.hit_tokens", "gpu.restored_tokens"):
        assert shown[name] == stats["tiers"]["gpu"][name.partition(".")[2]] == 16, name


def test_an_announced_block_can_be_had():
    """Events advertise hashes that nobody can retrieve (vllm#57159): whoever follows them knows at each moment what a
    lookup would find."""
    attention = FullAttention(block_tokens=4, kv_heads=1, head_dim=8, dtype="float32")
    manager = KVCacheManager([Group(attention)], 9, tokens_max=64, events=True)
    chance, announced, known = random.Random(3), set(), {}
    for turn in range(60):
        tokens = [chance.randrange(3)] * 4 + [chance.randrange(3)] * 4 + [turn % 5] * 5
        request = manager.request(f"r{turn}", tokens)
        hit = manager.get_computed_blocks(request)
        known[tuple(tokens)] = request.hashes
        assert manager.allocate_slots(request, len(tokens) - hit.tokens, hit) is not None
        request.computed_tokens = len(tokens)
        manager.free(request)
        for event in manager.take_events():
            if hasattr(event, "hashes"):
                announced |= set(event.hashes)
            else:
                announced.discard(event.hash)
        for prompt_tokens, hashes in known.items():
            asking = manager.request("asks", list(prompt_tokens))
            expected = next((i for i, name in enumerate(hashes) if name not in announced), len(hashes))
            assert manager.get_computed_blocks(asking).tokens == expected * 4


def test_stored_and_found_again_is_seen_in_one_place(tmp_path):
    """Offloading is counted where it is done and loading nowhere (dynamo#4549, dynamo#4840)."""
    disk = DictTier()
    store_alone(disk, [prompt(1, 4)])
    engine = make_engine(gpu=8, host=16, disk=disk)
    serve(engine, prompt(1, 4))
    tier = at_rest(engine)["tiers"]["lmdb"]
    assert (tier["hit_tokens"], tier["restored_tokens"]) == (16, 16)
    assert (tier["read_blocks"], tier["read_bytes"]) == (4, 4 * BLOCK_BYTES)
