"""What rots on disk is found before somebody asks for it, without anybody noticing the search."""

from pathlib import Path

import pytest

import kvtier
from kvtier.blocks.namespace import NamespaceTable
from kvtier.blocks.spec import block_specs
from kvtier.engine.build import level_of, open_tier
from kvtier.engine.executor import lane_of
from kvtier.engine.scrubbing import PASS_S
from kvtier.errors import ConfigError
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.polled import PolledEngine
from kvtier.testing.stores import StoreDriver
from kvtier.testing.tiers import key_of
from kvtier.types import Status, StoredBlock
from tests.engine_bench import BLOCK_BYTES, make_engine, prompt, serve

PROMPTS = 6
DISK = 2


def stored(rate: int = BLOCK_BYTES) -> PolledEngine:
    """Six prompts of two blocks on a disk, and an engine that has none of them in memory and checks one a second."""
    disk = DictTier()
    first = make_engine(disk=disk)
    for number in range(PROMPTS):
        serve(first, prompt(number, 2))
        first.core.submit_flush()
        first.run()
    return make_engine(disk=disk, scrub_bytes_per_s=rate)


def counted(engine: PolledEngine, *names: str) -> list[int]:
    found = engine.core.stats()["tiers"]["lmdb"]
    return [found[name] for name in names]


def test_every_block_is_checked_once_a_pass() -> None:
    """Some blocks would never be looked at, or the disk be read all day."""
    engine = stored()
    disk = engine.tiers[DISK]
    engine.run()
    assert disk.scrubbed == 2 * PROMPTS, "a piece"
    assert counted(engine, "scrubbed_blocks", "scrubbed_bytes", "scrub_passes") == [12, 12 * BLOCK_BYTES, 0]
    engine.clock.advance(12)
    engine.run()
    assert counted(engine, "scrub_passes") == [1]
    engine.clock.advance(PASS_S - 13)
    engine.run()
    assert disk.scrubbed == 12
    assert engine.core.wake_at_s(engine.clock.now()) == PASS_S
    engine.clock.advance(1)
    engine.run()
    assert (disk.scrubbed, counted(engine, "scrub_passes")) == (24, [1])
    engine.check()


def test_the_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk would be read as fast as it can, whatever the configuration says."""
    monkeypatch.setattr("kvtier.engine.scrubbing.PIECE_BYTES", 3 * BLOCK_BYTES)
    engine = stored(rate=2 * BLOCK_BYTES)
    disk = engine.tiers[DISK]
    seen = []
    for _ in range(8):
        engine.run()
        seen.append(disk.scrubbed)
        engine.clock.advance(0.75)
    assert seen == [3, 3, 6, 6, 9, 9, 12, 12]


def test_off_by_default() -> None:
    """Whoever did not ask for it would pay for it."""
    engine = stored(rate=0)
    engine.run()
    engine.clock.advance(PASS_S)
    engine.run()
    assert engine.tiers[DISK].scrubbed == 0


def test_a_bad_block_is_condemned() -> None:
    """A request would wait for bytes that are known to be wrong; or nobody would learn what was lost."""
    engine = stored()
    disk = engine.tiers[DISK]
    bad = sorted(disk.rows)[3]
    key = disk.rows[bad][0]
    disk.corrupt.add(bad)
    engine.run()
    assert counted(engine, "scrubbed_corrupt", "corrupt") == [1, 0]
    assert engine.core.peek(prompt(1, 2)).tokens == 4, "one block is left"
    serve(engine, prompt(1, 2))
    engine.core.submit_flush()
    engine.run()
    assert [note for note in disk.notes if note.startswith(b"condemned/")] == [b"condemned/" + bad.to_bytes(8, "big")]
    assert [row[0] for row in disk.rows.values()].count(key) == 1, "computed and stored anew"
    engine.check()


def test_a_disk_that_refuses_keeps_its_blocks() -> None:
    """A loose cable would cost the whole store."""
    engine = stored()
    engine.tiers[DISK].fail_read = Status.FAILED
    engine.run()
    assert counted(engine, "scrubbed_blocks", "scrubbed_corrupt", "read_failed") == [0, 0, 12]
    assert engine.core.peek(prompt(1, 2)).tokens == 8


def test_a_block_that_moved_meanwhile() -> None:
    """A sound block that took another's place would be condemned for it, or another block in its handle."""
    engine = stored()
    engine.plan()
    [batch] = engine.held
    dropped = engine.core.submit_drop()
    for drop in [held for held in engine.plan() if held.drop is not None]:
        engine.finish(drop)
    for number in range(PROMPTS):
        serve(engine, prompt(number + 10, 2))
    engine.core.submit_flush()
    while others := [held for held in engine.held if held is not batch] or [b for b in engine.plan() if b is not batch]:
        engine.finish(others[0])
    assert dropped in engine.answers
    before = len(engine.tiers[DISK].rows)
    engine.finish(batch, [kvtier.types.Outcome(Status.CORRUPT)] * len(batch.scrub))
    assert counted(engine, "scrubbed_blocks", "scrubbed_corrupt") == [0, 0]
    engine.run()
    assert len(engine.tiers[DISK].rows) == before
    engine.check()


def test_a_lost_block_is_forgotten() -> None:
    """A row that went without our doing would be found, and missed, again and again."""
    engine = stored()
    del engine.tiers[DISK].rows[sorted(engine.tiers[DISK].rows)[3]]
    engine.run()
    assert counted(engine, "scrubbed_blocks", "scrubbed_corrupt") == [12, 0]
    assert engine.core.peek(prompt(1, 2)).tokens == 4


def test_loads_and_stores_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request would wait for a check that nobody asked for."""
    monkeypatch.setattr("kvtier.engine.scrubbing.PIECE_BYTES", BLOCK_BYTES)
    engine = stored(rate=1 << 30)
    first = engine.plan()
    assert [len(batch.scrub) for batch in first] == [1]
    engine.finish(first[0])
    engine.clock.advance(1)
    engine.submit_reserve(engine.match(prompt(1, 2)), 2)
    moving = engine.plan()
    assert [batch.source for batch in moving if batch.transfers] == [DISK]
    assert not any(batch.scrub for batch in moving)
    engine.clock.advance(1)
    now_s = engine.clock.now()
    assert not any(batch.scrub for batch in engine.plan())
    assert engine.core.wake_at_s(now_s) is None or engine.core.wake_at_s(now_s) > now_s, "it turns round and round"
    checks = []
    while engine.held:
        checks += [batch for batch in engine.held if batch.scrub]
        engine.finish(engine.held[0])
        engine.plan()
    assert checks, "later"


def test_it_holds_nobody_up() -> None:
    """An engine that is closed, or a scheduler that asks if anything moves, would wait for a check."""
    engine = stored()
    [batch] = engine.plan()
    assert batch.scrub
    assert not engine.core.busy
    assert engine.core.stats()["batches_in_flight"] == 0
    assert engine.core.planner.flight.writes(DISK) == 0
    assert lane_of(engine.tiers, batch) == (DISK, "read"), "beside the thread that writes"


# ---------------------------------------------------------------- on a real disk


def test_a_store_scrubs(tmp_path: Path) -> None:
    """The tier would call rot sound, or sound blocks rotten, or blocks that are gone either."""
    for verify in (True, False):
        driver = StoreDriver(tmp_path / str(verify), verify=verify)
        driver.write(range(4), 5000)
        driver.write(range(4, 6), 16_384)
        wanted = [
            StoredBlock(key_of(number, driver.namespace), outcome.place, outcome.generation, length_bytes)
            for number, (length_bytes, outcome) in driver.kept.items()
        ]
        with (tmp_path / str(verify) / "slab").open("r+b") as slab:
            slab.seek(driver.offset_of(2))
            slab.write(b"?")
        driver.write([], evict=[4])
        statuses = [outcome.status for outcome in driver.tier.scrub(wanted)]
        rest = [Status.DONE, Status.DONE, Status.CORRUPT, Status.DONE, Status.MISSING, Status.DONE]
        assert statuses == rest
        assert driver.tier.scrub([]) == []
        driver.close()


def test_from_the_configuration_to_the_note(tmp_path: Path) -> None:
    """The key would be read, and nothing be done about it."""
    raw = {
        "model": {"name": "m", "weights_epoch": "1", "layers": 1, "kv_heads": 1, "head_dim": 64, "dtype": "float32"},
        "tiers": [
            {"type": "gpu", "capacity": "256KiB"},
            {"type": "lmdb", "path": str(tmp_path / "s"), "capacity": "8MiB", "scrub": "1MiB/s"},
        ],
    }
    config = kvtier.load_config(raw)
    assert config.settings["tiers[1].scrub"].value == "1MiB/s"
    keys = kvtier.hash_blocks(list(range(64)), config.model)
    with kvtier.open_sync(config) as cache:
        lease = cache.reserve(cache.match(keys, owner="t"), blocks_total=4)
        cache.commit(lease, list(zip(lease.slots(), keys.groups[0], strict=True)))
        cache.release(lease)
        cache.flush()
    with (tmp_path / "s" / "slab").open("r+b") as slab:
        slab.write(b"?")
    names = NamespaceTable()
    names.id_of_model(config.model)
    specs = block_specs(config.model)
    tiers = [open_tier(tier, names, specs[0].block_bytes) for tier in config.tiers]
    levels = [level_of(*pair, specs) for pair in zip(config.tiers, tiers, strict=True)]
    engine = PolledEngine(config.model, tiers, levels, names)
    assert engine.core.peek(keys).tokens == 64
    engine.run()
    found = engine.core.stats()["tiers"]["lmdb"]
    assert (found["scrubbed_blocks"], found["scrubbed_corrupt"]) == (4, 1)
    assert engine.core.peek(keys).tokens < 64
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize(
    ("text", "wanted"), [("off", 0), (False, 0), (0, 0), ("20MiB/s", 20 << 20), ("5 MB", 5_000_000)]
)
def test_the_rate_as_people_write_it(text: object, wanted: int) -> None:
    """A rate would be read as another one; YAML reads off as false."""
    raw = {
        "model": {"name": "m", "weights_epoch": "1", "layers": 1, "kv_heads": 1, "head_dim": 64, "dtype": "float32"},
        "tiers": [
            {"type": "gpu", "capacity": "1MiB"},
            {"type": "lmdb", "path": "./s", "capacity": "16MiB", "scrub": text},
        ],
    }
    tier = kvtier.load_config(raw).tiers[1]
    assert tier.scrub_bytes_per_s == wanted  # type: ignore[union-attr]
    raw["tiers"][1]["scrub"] = "often"  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"scrub: .*Write bytes a second such as 20MiB/s, or off"):
        kvtier.load_config(raw)
