"""Slots, pins, memory and disk that are never given back, or given back twice."""

import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import kvtier
from kvtier.allocator.slot_pool import SlotPool
from kvtier.blocks.namespace import NamespaceTable
from kvtier.cache.leases import Lease, NoRoom
from kvtier.cache.level import Level, Room
from kvtier.engine.core import Core
from kvtier.errors import ConfigError
from kvtier.policies import POLICIES
from kvtier.testing.dict_tier import DictTier
from kvtier.types import PAGE_BYTES, Outcome, Status, StoredBlock, block_key, store_key
from tests.cache_bench import config_for
from tests.cache_bench import prompt as real_prompt
from tests.cache_bench import serve as real_serve
from tests.engine_bench import BLOCK_BYTES, fill, make_engine, prompt, serve, tiny_model
from tests.lessons.places import TIERS, at_rest, prefix_in

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------- every way in which a request may end


def end_released_match(engine, keys):
    engine.core.release_match(engine.match(keys))


def end_match_released_twice(engine, keys):
    match = engine.match(keys)
    engine.core.release_match(match)
    engine.core.release_match(match)


def end_expired_match(engine, keys):
    engine.match(keys, ttl_s=1.0)
    engine.clock.advance(2.0)
    engine.plan()


def end_expired_and_released(engine, keys):
    match = engine.match(keys, ttl_s=1.0)
    engine.clock.advance(2.0)
    engine.plan()
    engine.core.release_match(match)


def end_served(engine, keys):
    serve(engine, keys)


def end_released_twice(engine, keys):
    match = engine.match(keys)
    lease = engine.reserve(match, 4)
    fill(engine, lease, keys)
    engine.release(lease)
    engine.release(lease)
    engine.core.release_match(match)  # it was consumed


def end_nothing_committed(engine, keys):
    engine.release(engine.reserve(engine.match(keys), 6))


def end_no_room(engine, keys):
    match = engine.match(keys)
    assert isinstance(engine.reserve(match, 50), NoRoom)
    engine.core.release_match(match)


def end_given_up_at_once(engine, keys):
    match = engine.match(keys)
    engine.core.give_up(engine.submit_reserve(match, 4))
    engine.core.release_match(match)


def end_given_up_under_way(engine, keys):
    match = engine.match(keys)
    ticket = engine.submit_reserve(match, 4)
    engine.plan()
    engine.core.give_up(ticket)
    engine.core.give_up(ticket)
    engine.core.release_match(match)


def end_given_up_between_hops(engine, keys):
    match = engine.match(keys)
    ticket = engine.submit_reserve(match, 4)
    engine.plan()
    for batch in list(engine.held):
        engine.finish(batch)
    engine.core.give_up(ticket)
    engine.core.release_match(match)


def end_deadline(engine, keys):
    ticket = engine.submit_reserve(engine.match(keys), 4, deadline_s=0.5)
    engine.plan()
    engine.clock.advance(1.0)
    engine.plan()
    engine.release(engine.answers[ticket])


def end_failed_load(engine, keys):
    ticket = engine.submit_reserve(engine.match(keys), 4)
    for _ in range(3):
        engine.plan()
        for batch in list(engine.held):
            up = batch.target < batch.source
            engine.finish(batch, [Outcome(Status.FAILED)] * batch.outcomes if up else None)
    engine.release(engine.answers[ticket])


def end_reset_while_leased(engine, keys):
    lease = engine.reserve(engine.match(keys), 4)
    engine.core.submit_drop()
    engine.release(lease)


def end_reset_while_loading(engine, keys):
    ticket = engine.submit_reserve(engine.match(keys), 4)
    engine.plan()
    engine.core.submit_drop()
    engine.run()
    engine.release(engine.answers[ticket])


def end_prefetched_and_forgotten(engine, keys):
    engine.core.prefetch(keys, engine.clock.now())
    engine.run()
    engine.clock.advance(400.0)


ENDS = {name[4:]: end for name, end in list(globals().items()) if name.startswith("end_")}


@pytest.mark.parametrize("tier", [*TIERS, "nowhere"])
@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_request_gives_everything_back_once(end, tier):
    """A pin is never released, or twice: on abort, on time-out, or when the GPU had it all
    (LMCache#1034, LMCache#2017, LMCache PR#3884, LMCache PR#2785, LMCache#3381, vllm-ascend#16662)."""
    engine, keys = prefix_in("lmdb" if tier == "nowhere" else tier)
    if tier == "nowhere":
        keys = prompt(77, 4)
    for _ in range(3):  # a leak adds up, and a double release needs somebody else's pin
        ENDS[end](engine, keys)
        engine.check()
    stats = at_rest(engine)
    assert (stats["leases"], stats["matches"], stats["batches_in_flight"]) == (0, 0, 0)
    for name, slots in (("gpu", 8), ("host", 16)):
        numbers = stats["tiers"][name]
        assert numbers["slots_free"] + numbers["blocks_idle"] == slots, name
        assert numbers["slots_quarantined"] == 0, name
    assert isinstance(engine.reserve_now(engine.match(prompt(88, 8)), 8), Lease)  # all of the gpu tier can be had


def test_the_hit_rate_does_not_decay():
    """Each abort leaves a pin behind, until nothing can be evicted and nothing is found (LMCache#2017)."""
    disk = DictTier(blocks_max=40)
    engine = make_engine(gpu=8, host=12, disk=disk, watermarks=(0.4, 0.8))
    prompts = [prompt(number, 4) for number in range(6)]
    found = []
    for turn in range(12):
        hits = 0
        for number, keys in enumerate(prompts):
            ENDS[list(ENDS)[(turn * len(prompts) + number) % 13]](engine, keys)  # those that drop nothing
            hits += serve(engine, keys).tokens_ready
            engine.clock.advance(0.3)
            engine.run()
        found.append(hits)
    assert found[-1] == max(found) == 6 * 16
    engine.check()


# ---------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("held", range(9))
def test_a_reservation_takes_all_its_slots_or_none(held):
    """Some pages of a request are taken, the next is refused, and nobody gives the first ones back (kvcached#364)."""
    engine = make_engine(gpu=8, host=None, disk=DictTier())
    if held:
        others = engine.reserve_now(engine.match(prompt(1, held)), held)
    free = engine.core.stats()["tiers"]["gpu"]["slots_free"]
    answer = engine.reserve_now(engine.match(prompt(2, 5)), 5)
    if held <= 3:
        assert len(answer.slots()) == 5
        engine.release(answer)
    else:
        assert answer == NoRoom(5, 8 - held)
    assert engine.core.stats()["tiers"]["gpu"]["slots_free"] == free
    engine.check()
    if held:
        engine.release(others)


def test_room_that_was_there_when_asked_may_be_gone():
    """Two processes ask how much is free, both take it, and an assertion kills one (kvcached#262)."""
    engine = make_engine(gpu=8, host=None, disk=DictTier())
    first, second = engine.match(prompt(1, 6)), engine.match(prompt(2, 6))
    refused = engine.reserve_now(engine.match(prompt(3, 9)), 9)
    assert refused == NoRoom(9, 8)  # so both believe that six can be had
    lease = engine.reserve_now(first, 6)
    assert isinstance(lease, Lease)
    assert engine.reserve_now(second, 6) == NoRoom(6, 2)
    engine.release(lease)
    lease = engine.reserve_now(second, 6)
    assert isinstance(lease, Lease)
    engine.release(lease)
    engine.check()


def test_memory_is_not_unmapped_while_somebody_may_use_it():
    """Pages go while the next batch, which was prepared already, still holds their ids (kvcached#463)."""
    engine, keys = prefix_in("host", gpu=8)
    loading = engine.submit_reserve(engine.match(keys), 4)  # prepared: its load is planned and not under way
    active = engine.reserve_now(engine.match(prompt(3, 4)), 4)  # submitted: somebody writes to these
    shrink = engine.core.submit_resize("gpu", 2 * PAGE_BYTES)
    gpu, in_use = engine.tiers[0], set(active.slots())
    for _ in range(20):
        engine.plan()
        for batch in engine.held:
            in_use |= {transfer.target_place for transfer in batch.transfers if batch.target == 0}
        assert all(set(gpu.geometry.granules_of(slot)) <= set(gpu.granules_mapped) for slot in in_use)
        if not engine.held:
            break
        engine.finish(engine.held[0])
    lease = engine.answers[loading]
    for slot in (*lease.slots(), *active.slots()):
        engine.tiers[0].slot(slot)[:BLOCK_BYTES] = bytes(BLOCK_BYTES)  # would be a fault otherwise
    engine.release(lease)
    engine.release(active)
    engine.run()
    assert shrink in engine.answers
    engine.check()


# ---------------------------------------------------------------- what a process leaves behind

HOLDER = """
import sys
sys.path.insert(0, {root!r})
import kvtier
from tests.cache_bench import config_for, prompt, serve
config = config_for({path!r})
cache = kvtier.open_sync(config)
serve(cache, prompt(config, 1, 8))
cache.flush()
print("open", flush=True)
sys.stdin.read()
"""


def shared_memory_files(pid):
    """What a process maps, or holds open, that has a name in shared memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    named = [line.split(maxsplit=5)[-1] for line in maps if "/dev/shm" in line]
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        named += [str(path) for path in [fd.readlink()] if path.is_relative_to("/dev/shm")]
    return named


def test_kill_9_leaves_no_memory_behind_and_the_next_start_works(tmp_path):
    """SIGKILL leaves a region in /dev/shm, and the next start says that there is too little memory (vllm PR#51317)."""
    code = HOLDER.format(root=str(ROOT), path=str(tmp_path / "store"))
    config = config_for(tmp_path / "store")
    for _ in range(2):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as holder:
            assert holder.stdout.readline() == "open\n"
            assert (
                "memfd:" in Path(f"/proc/{holder.pid}/maps").read_text()
            )  # memory without a name goes with its holder
            assert shared_memory_files(holder.pid) == []
            holder.send_signal(signal.SIGKILL)
    with kvtier.open_sync(config) as cache:
        assert real_serve(cache, real_prompt(config, 1, 8)).tokens_ready == 32


@pytest.mark.parametrize("without", ["capacity", "path"])
def test_a_disk_without_a_bound_does_not_start(tmp_path, without):
    """A disk tier that nobody bounded fills the node, and its pods are evicted (LMCache#4664, sglang PR#26670,
    vllm#54779, vllm PR#54327)."""
    disk = {"type": "lmdb", "path": str(tmp_path / "store"), "capacity": "16MiB"}
    del disk[without]
    model = {"name": "m", "weights_epoch": "v1", "layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    with pytest.raises(ConfigError, match=rf"tiers\[1\]\.{without}"):
        kvtier.load_config({"model": model, "tiers": [{"type": "gpu", "capacity": "64KiB"}, disk]})
    assert not (tmp_path / "store").exists()


def test_a_name_costs_no_more_ram_than_it_may():
    """Metadata of many small objects takes all memory (Mooncake#3452): 220 bytes per known key."""
    count = 40_000

    def level(name, pool):
        room = None if pool else Room(lambda length: 0, lambda place: place, lambda: 0, lambda: 0)
        return Level(name, POLICIES.get("lru")(count), "lru", count, 1 << 16, count << 12, PAGE_BYTES, pool, room)

    gpu, host, disk = (
        level("gpu", SlotPool(16, null_slot=True)),
        level("host", SlotPool(16, null_slot=False)),
        level("lmdb", None),
    )
    names = (
        StoredBlock(store_key(0, block_key(i.to_bytes(32, "big"), 0)), i, i + 1, BLOCK_BYTES) for i in range(count)
    )
    core = Core(tiny_model(), [gpu, host, disk], NamespaceTable())
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        core.adopt(2, names)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert core.stats()["tiers"]["lmdb"]["blocks"] == count
    assert 100 < (after - before) / count <= 220  # a key alone is 73 bytes: less than 100 would mean nothing was seen


def test_a_name_costs_no_more_disk_than_its_capacity_pays_for(tmp_path):
    """The same on disk: what the index takes is part of the capacity (Mooncake#3452)."""
    config = config_for(tmp_path / "store", lmdb="2MiB")
    with kvtier.open_sync(config) as cache:
        for number in range(60):
            real_serve(cache, real_prompt(config, number, 8))
            assert cache.flush().failed == 0
        stats = cache.stats()["tiers"]["lmdb"]
        taken = sum(f.stat().st_blocks * 512 for f in (tmp_path / "store").rglob("*") if f.is_file())
        assert stats["evicted"] > 0  # it is full
        assert taken <= 2 << 20
        assert stats["blocks"] * PAGE_BYTES >= (2 << 20) // 3  # the rest: index, and room for the next batch
